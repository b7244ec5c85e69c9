//! QEMU's tools read what the writer left.

use crate::tests::rig::bed;
use crate::write::tests::disk::SECTOR;
use crate::write::tests::images::{Kind, below, make, sector};
use crate::write::tests::world::World;

#[test]
fn qemu_finds_no_errors_and_reads_the_same() {
    let Some(bed) = bed() else { return };
    let kinds = [
        Kind::PLAIN,
        Kind { version: 2, ..Kind::PLAIN },
        Kind { extended: true, ..Kind::PLAIN },
        Kind { backing: false, refcount_order: 6, ..Kind::PLAIN },
        Kind { refcount_order: 0, snapshot: false, ..Kind::PLAIN },
    ];
    for (seed, kind) in (0..).zip(kinds) {
        let made = make(kind);
        let mut world = World::new(&made, seed);
        let raw: Vec<u8> =
            (0..made.header.size_bytes / SECTOR).flat_map(|at| sector(below(kind, at))).collect();
        std::fs::write(bed.path("below.raw"), raw).unwrap();
        for is_closed in [false, true] {
            (0..30).for_each(|_| world.step().unwrap());
            if is_closed {
                world.close().unwrap();
            }
            std::fs::write(bed.path("disk.qcow2"), world.disk.now().bytes()).unwrap();
            let checked = bed.img(&["check", "-f", "qcow2", "disk.qcow2"]);
            // 3: leaks, and no errors.
            let allowed: &[i32] = if is_closed { &[0] } else { &[0, 3] };
            assert!(allowed.contains(&checked.status.code().unwrap()), "{kind:?}: {checked:?}");
            let content = bed.content("disk.qcow2");
            let sectors = (made.header.geometry.cluster_bytes() / SECTOR) as usize;
            let numbers = |cell: &u64| -> Vec<u64> {
                let all = content.as_chunks::<512>().0.iter().skip(*cell as usize * sectors).take(sectors);
                all.map(|sector| u64::from_be_bytes(sector[..8].try_into().unwrap())).collect()
            };
            let read: Vec<Vec<u64>> = made.cells.iter().map(numbers).collect();
            world.model.borrow().assert_read(&read);
        }
    }
}
