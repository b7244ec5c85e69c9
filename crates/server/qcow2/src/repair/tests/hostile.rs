//! Images with random changes: nothing panics, no count becomes too low, and the result is what a check says.

use proptest::prelude::*;
use xtask::sizes::Size;

use crate::check::check;
use crate::image::Image;
use crate::repair::Scope;
use crate::repair::tests::damage::Damaged;
use crate::repair::tests::rig::{assert_not_worse, run};
use crate::write::tests::disk::Content;
use crate::write::tests::images::Kind;

const CASES: Size<u32> = Size { smoke: 150, full: 20_000 };

fn place() -> impl Strategy<Value = usize> {
    let tables = (1..9_usize, 0..96_usize).prop_map(|(cluster, at)| (cluster << 12) + at);
    prop_oneof![1 => 24..112_usize, 8 => tables, 1 => 0..24_usize << 12]
}

fn value() -> impl Strategy<Value = u64> {
    let edge = (0..64_u32, -1..=1_i64).prop_map(|(bit, more)| (1_u64 << bit).wrapping_add_signed(more));
    let cluster =
        (0..32_u64, any::<bool>()).prop_map(|(cluster, copied)| cluster << 12 | u64::from(copied) << 63);
    prop_oneof![2 => edge, 4 => cluster, 1 => any::<u64>(), 1 => Just(u64::MAX), 1 => Just(0)]
}

/// Repairs, and compares with a check of the result.
fn check_repair(before: &Content, scope: Scope) {
    let outcome = run(before.clone(), scope);
    let after = &*outcome.disk.now.borrow();
    // The header is not damaged by a repair.
    let image = Image::open(after).unwrap();
    match &outcome.result {
        Ok(repaired) => {
            let report = check(&image, &mut |_| {}).unwrap();
            assert_eq!(report, repaired.after);
            let header = image.header().incompatible;
            let is_marked = header.dirty || header.corrupt;
            assert!(scope == Scope::Leaks || report.corruptions > 0 || !is_marked);
            let is_explained = report.corruptions > 0 || !outcome.notes.is_empty();
            assert!(
                is_explained || report.leaks == 0,
                "{:?} {:?} {:?} {scope:?}",
                outcome.found,
                outcome.left,
                outcome.notes
            );
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    assert_not_worse(before, after);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES.now(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_images_are_repaired_or_left(
        (version, extended) in prop::sample::select(vec![(2, false), (3, false), (3, true)]),
        refcount_order in prop::sample::select(vec![1, 4, 6]),
        changes in prop::collection::vec((place(), value(), prop::sample::select(vec![1_usize, 2, 4, 8])), 1..4),
    ) {
        let refcount_order = if version == 2 { 4 } else { refcount_order };
        let mut image = Damaged::new(Kind { version, extended, refcount_order, ..Kind::PLAIN });
        let shift = image.geometry.cluster_bits() - 12;
        for (at, value, len) in changes {
            let at = (((at >> 12) << 12 << shift) + (at & 4095)) % (image.bytes.len() - 8);
            let at = at - at % len;
            image.bytes[at..at + len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
        }
        let before = image.content();
        if Image::open(&before).is_ok() {
            check_repair(&before, Scope::Leaks);
            check_repair(&before, Scope::All);
        }
    }
}
