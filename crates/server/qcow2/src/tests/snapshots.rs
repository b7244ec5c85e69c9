//! Internal snapshots: the table is read as `qemu-img snapshot` wrote it.

use crate::{Image, Snapshot};

use crate::tests::rig::bed;

#[test]
fn names_sizes_and_tables_of_snapshots_are_read() {
    let Some(bed) = bed() else { return };
    for options in ["cluster_size=4k", "compat=0.10"] {
        bed.create("disk.qcow2", options, 3 << 20);
        for (index, name) in ["first", "a name with spaces", "dritter ✓"].iter().enumerate() {
            bed.io("disk.qcow2", &[format!("write -P {} 0 1M", index + 1)]);
            bed.img_ok(&["snapshot", "-c", name, "disk.qcow2"]);
        }
        let image = Image::open(std::fs::File::open(bed.path("disk.qcow2")).unwrap()).unwrap();
        let snapshots: Vec<Snapshot> = image.snapshots().collect::<Result<_, _>>().unwrap();
        let names: Vec<_> = snapshots.iter().map(|one| (one.id.as_str(), one.name.as_str())).collect();
        assert_eq!(names, [("1", "first"), ("2", "a name with spaces"), ("3", "dritter ✓")]);
        assert!(snapshots.iter().all(|one| one.size_bytes == Some(3 << 20) && one.vm_state_bytes == 0));
        assert!(
            snapshots
                .iter()
                .all(|one| one.taken_s > 1_700_000_000 && one.l1.count == image.header().l1.count)
        );
    }
}
