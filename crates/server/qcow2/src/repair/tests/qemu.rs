//! `qemu-img check` judges what a repair left.

use crate::repair::Scope;
use crate::repair::tests::damage::{COUNTS, Damaged, LEAKS, STRUCTURES};
use crate::repair::tests::rig::run;
use crate::tests::rig::bed;
use crate::write::tests::images::Kind;

#[test]
fn qemu_finds_nothing_and_reads_the_same() {
    let Some(bed) = bed() else { return };
    let kind = Kind { backing: false, ..Kind::PLAIN };
    let sound = Damaged::new(kind);
    std::fs::write(bed.path("disk.qcow2"), &sound.bytes).unwrap();
    let expected = bed.content("disk.qcow2");
    let everything = COUNTS.into_iter().chain(STRUCTURES).map(|(what, damage)| (what, damage, Scope::All));
    let leaks = LEAKS.into_iter().map(|(what, damage)| (what, damage, Scope::Leaks));
    for (what, damage, scope) in leaks.chain(everything) {
        let mut image = Damaged::new(kind);
        damage(&mut image);
        let outcome = run(image.content(), scope);
        std::fs::write(bed.path("disk.qcow2"), outcome.bytes()).unwrap();
        let checked = bed.img(&["check", "-f", "qcow2", "disk.qcow2"]);
        assert_eq!(checked.status.code(), Some(0), "{what}: {checked:?}");
        assert!(bed.content("disk.qcow2") == expected, "{what}");
    }
}
