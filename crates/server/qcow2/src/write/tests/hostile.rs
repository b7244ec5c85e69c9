//! Images that lie: nothing panics, and no table is overwritten.

use proptest::prelude::*;
use xtask::sizes::Size;

use crate::error::Limit;
use crate::tables::RawL2Entry;
use crate::tables::refcounts::store_refcount;
use crate::write::error::WriteError;
use crate::write::tests::images::{Kind, Made, make};
use crate::write::tests::plain::Plain;
use crate::write::tests::world::{Seen, Under};
use crate::write::writer::Writer;

pub fn open(bytes: Vec<u8>) -> Result<Writer<Plain>, WriteError> {
    let plain = Plain { bytes: bytes.into(), ..Plain::default() };
    Writer::open(plain)
}

/// Uses all cells in all ways.
fn use_it(made: &Made, bytes: Vec<u8>) -> Result<(), WriteError> {
    let mut writer = open(bytes)?;
    let (mut seen, mut under) = (Seen::default(), Under(made.kind));
    let cluster_bytes = writer.header().geometry.cluster_bytes();
    let mut first = Ok(());
    for round in 0..2 {
        for cell in &made.cells {
            let range = cell * cluster_bytes..(cell + 1) * cluster_bytes;
            let zero = (cell + round) % 3 == 0;
            let done = if zero {
                writer.zero(range, round == 0, &mut under, &mut seen).map(drop)
            } else {
                writer.claim(&[range], &mut under, &mut seen)
            };
            let released = writer.take_unlinked().map_or(Ok(()), |unlinked| writer.release(unlinked));
            first = first.and(done).and(released);
        }
    }
    let closed = writer.close();
    first.and(closed)
}

/// Places of tables in the images that `make` makes, in clusters of 4 KiB.
const BLOCK: usize = 2 << 12;
const L1: usize = 3 << 12;
const L2: usize = 6 << 12;

fn changed(change: impl FnOnce(&mut Vec<u8>)) -> Result<(), WriteError> {
    let made = make(Kind::PLAIN);
    let mut bytes = made.bytes.clone();
    change(&mut bytes);
    use_it(&made, bytes)
}

pub fn word(bytes: &mut [u8], at: usize, word: u64) {
    bytes[at..at + 8].copy_from_slice(&word.to_be_bytes());
}

pub fn count(bytes: &mut [u8], cluster: usize, count: u64) {
    let geometry = make(Kind::PLAIN).header.geometry;
    store_refcount(&mut bytes[BLOCK..], cluster, &geometry, count);
}

fn is_damaged(result: &Result<(), WriteError>, expected: &str) -> bool {
    matches!(result, Err(WriteError::Damaged { field, .. }) if field.contains(expected))
}

#[test]
fn unchanged_image_is_written() {
    changed(|_| {}).unwrap();
}

#[test]
fn entry_that_leads_into_a_table_ends_all_changes() {
    for table in 0..9_u64 {
        let result = changed(|bytes| word(bytes, L2 + 8, table << 12 | 1 << 63));
        // Cluster 0 cannot be named: that is an entry without an offset.
        let is_refused = if table == 0 { result.is_err() } else { is_damaged(&result, "L2 entry") };
        assert!(is_refused, "{table}: {result:?}");
    }
}

#[test]
fn entry_past_the_end_of_the_file_ends_all_changes() {
    let result = changed(|bytes| word(bytes, L2 + 8, 1 << 30 | 1 << 63));
    assert!(is_damaged(&result, "L2 entry"), "{result:?}");
}

#[test]
fn view_gets_refused_entries_for_those() {
    let made = make(Kind::PLAIN);
    let mut bytes = made.bytes.clone();
    word(&mut bytes, L2, (3 << 12) | 1 << 63);
    word(&mut bytes, L2 + 8, 1 << 62 | 3 << 12);
    let mut writer = open(bytes).unwrap();
    let mut entries = [RawL2Entry::default(); 3];
    writer.slice(0, &mut entries, &mut Seen::default()).unwrap();
    let geometry = made.header.geometry;
    assert!(entries[..2].iter().all(|entry| crate::L2Entry::decode(*entry, &geometry).is_err()));
    assert!(crate::L2Entry::decode(entries[2], &geometry).is_ok());
}

#[test]
fn count_of_a_table_that_is_0_ends_all_changes() {
    // The header's count does not matter: no search begins before cluster 1.
    for cluster in 1..9 {
        let result = changed(|bytes| count(bytes, cluster, 0));
        assert!(matches!(result, Err(WriteError::Damaged { .. })), "{cluster}: {result:?}");
    }
}

/// The host cluster of a cell of the first table.
pub fn host(bytes: &[u8], cell: usize) -> usize {
    let entry = u64::from_be_bytes(bytes[L2 + cell * 8..][..8].try_into().unwrap());
    let is_compressed = entry & 1 << 62 != 0;
    let offset = entry & if is_compressed { (1 << 58) - 1 } else { !(1 << 63) };
    (offset >> 12) as usize
}

/// The entries of all cells of the first table, as the view gets them.
fn view(bytes: Vec<u8>) -> Vec<RawL2Entry> {
    let mut entries = vec![RawL2Entry::default(); 8];
    open(bytes).unwrap().slice(0, &mut entries, &mut Seen::default()).unwrap();
    entries
}

#[test]
fn cluster_with_data_and_no_count_is_not_used() {
    let made = make(Kind::PLAIN);
    // In place, a snapshot's, too, and compressed.
    for cell in [1, 2, 5] {
        let mut bytes = made.bytes.clone();
        let cluster = host(&bytes, cell);
        count(&mut bytes, cluster, 0);
        let entry = view(bytes.clone())[cell];
        assert!(crate::L2Entry::decode(entry, &made.header.geometry).is_err(), "{cell}: {entry:x?}");
        let mut writer = open(bytes).unwrap();
        let (start, seen) = (cell as u64 * 4096, &mut Seen::default());
        let result = writer.claim(std::slice::from_ref(&(start..start + 1)), &mut Under(made.kind), seen);
        assert!(is_damaged(&result, "L2 entry"), "{cell}: {result:?}");
    }
}

#[test]
fn cluster_that_others_have_is_not_written_in_place() {
    let made = make(Kind::PLAIN);
    let mut bytes = made.bytes.clone();
    let cluster = host(&bytes, 1);
    assert!(view(bytes.clone())[1].is_in_place(&made.header.geometry));
    count(&mut bytes, cluster, 2);
    assert!(!view(bytes.clone())[1].is_in_place(&made.header.geometry));
    let mut writer = open(bytes.clone()).unwrap();
    let (mut seen, mut under) = (Seen::default(), Under(made.kind));
    writer.claim(std::slice::from_ref(&(4096..8192)), &mut under, &mut seen).unwrap();
    let entry = seen.entries[&1];
    assert!(entry.is_in_place(&made.header.geometry));
    assert!(entry != RawL2Entry::data((cluster as u64) << 12, &made.header.geometry));
}

#[test]
fn count_that_would_fall_below_0_ends_all_changes() {
    let made = make(Kind::PLAIN);
    let mut bytes = made.bytes.clone();
    // Compressed data of two cells.
    let cluster = host(&bytes, 5);
    assert_eq!(cluster, host(&bytes, 6));
    count(&mut bytes, cluster, 1);
    let mut writer = open(bytes).unwrap();
    let (mut seen, mut under) = (Seen::default(), Under(made.kind));
    writer.zero(5 * 4096..7 * 4096, true, &mut under, &mut seen).unwrap();
    let unlinked = writer.take_unlinked().unwrap();
    let error = writer.release(unlinked).unwrap_err();
    let expected = Limit::AtLeast(2);
    assert!(
        matches!(error, WriteError::Damaged { field: "refcount", value: 1, limit, .. } if limit == expected)
    );
    let error = writer.claim(std::slice::from_ref(&(0..1)), &mut under, &mut seen).unwrap_err();
    assert!(matches!(error, WriteError::Stopped { .. }), "{error:?}");
    // What the guest wrote in place can still be made durable.
    writer.sync().unwrap();
    writer.file().is_away.set(true);
    assert!(matches!(writer.sync(), Err(WriteError::Sync(_))));
    writer.file().is_away.set(false);
    assert!(matches!(writer.sync(), Err(WriteError::Stopped { .. })));
}

#[test]
fn copied_table_that_a_snapshot_has_too_is_not_changed() {
    let made = make(Kind::PLAIN);
    let mut bytes = made.bytes.clone();
    let l1 = u64::from_be_bytes(bytes[L1 + 8..][..8].try_into().unwrap());
    word(&mut bytes, L1 + 8, l1 | 1 << 63);
    let result = use_it(&made, bytes.clone());
    assert!(is_damaged(&result, "refcount of the L2 table"), "{result:?}");
    count(&mut bytes, (l1 >> 12) as usize, 1);
    let result = use_it(&made, bytes);
    assert!(is_damaged(&result, "number of L1 entries"), "{result:?}");
}

#[test]
fn tables_that_overlap_are_refused() {
    let l1_as_l2 = changed(|bytes| word(bytes, L1, 3 << 12 | 1 << 63));
    let header_as_block = changed(|bytes| word(bytes, 1 << 12, 3 << 12));
    for result in [l1_as_l2, header_as_block] {
        assert!(is_damaged(&result, "number of tables"), "{result:?}");
    }
}

#[test]
fn features_with_which_images_are_only_read() {
    let refused = |change: fn(&mut Vec<u8>)| matches!(changed(change), Err(WriteError::Unsupported { .. }));
    assert!(refused(|bytes| bytes[79] |= 1));
    assert!(refused(|bytes| bytes[79] |= 2));
}

const CASES: Size<u32> = Size { smoke: 300, full: 20_000 };

pub fn place() -> impl Strategy<Value = usize> {
    let tables = (1..9_usize, 0..96_usize).prop_map(|(cluster, at)| (cluster << 12) + at);
    prop_oneof![1 => 0..112_usize, 8 => tables, 1 => 0..24_usize << 12]
}

pub fn value() -> impl Strategy<Value = u64> {
    let edge = (0..64_u32, -1..=1_i64).prop_map(|(bit, more)| (1_u64 << bit).wrapping_add_signed(more));
    let cluster =
        (0..32_u64, any::<bool>()).prop_map(|(cluster, copied)| cluster << 12 | u64::from(copied) << 63);
    prop_oneof![2 => edge, 4 => cluster, 1 => any::<u64>(), 1 => Just(u64::MAX), 1 => Just(0)]
}

/// Puts values at places of an image.
pub fn apply(bytes: &mut [u8], extended: bool, changes: Vec<(usize, u64, usize)>) {
    let shift = Kind { extended, ..Kind::PLAIN }.cluster_bits() - 12;
    for (at, value, len) in changes {
        let at = (((at >> 12) << 12 << shift) + (at & 4095)) % (bytes.len() - 8);
        let at = at - at % len;
        bytes[at..at + len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES.now(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_images_are_written_or_refused(
        (version, extended) in prop::sample::select(vec![(2, false), (3, false), (3, true)]),
        refcount_order in prop::sample::select(vec![1, 4, 6]),
        changes in prop::collection::vec((place(), value(), prop::sample::select(vec![1_usize, 2, 4, 8])), 1..4),
    ) {
        let refcount_order = if version == 2 { 4 } else { refcount_order };
        let made = make(Kind { version, extended, refcount_order, ..Kind::PLAIN });
        let mut bytes = made.bytes.clone();
        apply(&mut bytes, extended, changes);
        let _ = use_it(&made, bytes);
    }
}
