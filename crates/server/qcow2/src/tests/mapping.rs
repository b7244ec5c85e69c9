//! The mapping of entries that tests write by hand: errors, merging, and a source that lacks entries.

use crate::{
    BadEntry, EntryProblem, Geometry, Header, L2Source, RawL2Entry, Run, RunKind, Table, next_run,
    run_in_table,
};

use crate::tests::headers::Fields;

const CLUSTER: u64 = 65_536;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

fn geometry(incompatible: u64) -> Geometry {
    Header::parse(&Fields { incompatible, ..Fields::default() }.bytes()).unwrap().geometry
}

fn plain(cluster: u64) -> RawL2Entry {
    RawL2Entry { cluster, subclusters: 0 }
}

/// A table's entries; those past the end are missing.
struct Entries(Vec<RawL2Entry>);

#[derive(Debug, PartialEq, Eq)]
enum Failure {
    Missing(u32),
    Bad(BadEntry),
}

impl From<BadEntry> for Failure {
    fn from(bad: BadEntry) -> Self {
        Self::Bad(bad)
    }
}

impl L2Source for Entries {
    type Error = Failure;

    fn entry(&mut self, _table: u64, index: u32) -> Result<RawL2Entry, Failure> {
        self.0.get(index as usize).copied().ok_or(Failure::Missing(index))
    }
}

fn run(entries: &[RawL2Entry], offset: u64, len_bytes: u64) -> Result<Run, Failure> {
    let geometry = geometry(0);
    run_in_table(&geometry, offset, len_bytes, |index| Entries(entries.to_vec()).entry(0, index))
}

#[test]
fn adjacent_clusters_are_one_run_and_a_gap_ends_it() {
    let at = |index: u64| plain(COPIED | ((16 + index) * CLUSTER));
    let entries =
        [at(0), at(1), at(2), at(4), plain(0), plain(0), plain(1), plain(COPIED | CLUSTER | 1), plain(1)];
    let data = |host_offset, len_bytes| Ok(Run { len_bytes, kind: RunKind::Data { host_offset } });
    assert_eq!(run(&entries, 512, 9 * CLUSTER), data(16 * CLUSTER + 512, 3 * CLUSTER - 512));
    assert_eq!(run(&entries, 512, 1024), data(16 * CLUSTER + 512, 1024));
    assert_eq!(run(&entries, 3 * CLUSTER, CLUSTER * 2), data(20 * CLUSTER, CLUSTER));
    let unallocated = Run { len_bytes: 2 * CLUSTER, kind: RunKind::Unallocated };
    assert_eq!(run(&entries, 4 * CLUSTER, 5 * CLUSTER), Ok(unallocated));
    let zero = Run { len_bytes: 3 * CLUSTER, kind: RunKind::Zero };
    assert_eq!(run(&entries, 6 * CLUSTER, 5 * CLUSTER), Ok(zero));
}

#[test]
fn missing_entry_ends_a_run_and_is_an_error_only_at_its_start() {
    let entries = [plain(0), plain(0)];
    assert_eq!(run(&entries, 0, 9 * CLUSTER).map(|run| run.len_bytes), Ok(2 * CLUSTER));
    assert_eq!(run(&entries, 2 * CLUSTER, CLUSTER), Err(Failure::Missing(2)));
}

#[track_caller]
fn refused(geometry: &Geometry, raw: RawL2Entry, problem: EntryProblem) {
    let run = run_in_table(geometry, 0, CLUSTER, |_| Ok::<_, BadEntry>(raw));
    assert_eq!(run, Err(BadEntry { table: Table::L2, index: 0, value: raw.cluster, problem }));
    // The same entry ends a run that begins before it.
    let entry = |index| Ok::<_, BadEntry>(if index == 0 { plain(0) } else { raw });
    let before = run_in_table(geometry, 0, 2 * CLUSTER, entry).unwrap();
    assert_eq!(before, Run { len_bytes: CLUSTER, kind: RunKind::Unallocated });
}

#[test]
fn entries_that_break_the_format_are_refused() {
    let reserved = |bits| EntryProblem::Reserved { bits };
    let (usual, extended, external) = (geometry(0), geometry(1 << 4), geometry(1 << 2));
    let v2 = Header::parse(&Fields { version: 2, ..Fields::default() }.bytes()).unwrap().geometry;
    refused(&usual, plain(0x1fe), reserved(0x1fe));
    refused(&usual, plain(0x3f << 56), reserved(0x3f << 56));
    refused(&usual, plain(512), EntryProblem::Unaligned { offset: 512, cluster_bytes: CLUSTER });
    refused(&usual, plain(COPIED), EntryProblem::CopiedNothing);
    refused(&usual, plain(COMPRESSED | COPIED), reserved(COPIED));
    refused(&v2, plain(1), reserved(1));
    refused(&extended, plain(1), reserved(1));
    let halves = RawL2Entry { cluster: CLUSTER, subclusters: 0x3_0000_0002 };
    refused(&extended, halves, EntryProblem::AllocatedAndZero { both: 2 });
    let nowhere = RawL2Entry { cluster: 0, subclusters: 5 };
    refused(&extended, nowhere, EntryProblem::AllocatedNowhere { allocated: 5 });
    refused(&extended, RawL2Entry { cluster: COMPRESSED, subclusters: 4 }, reserved(4));
    refused(&external, plain(COMPRESSED), EntryProblem::CompressedOutside);
    let elsewhere = EntryProblem::NotIdentity { offset: 5 * CLUSTER, guest_offset: 0 };
    let run = run_in_table(&external, 0, CLUSTER, |_| Ok::<_, BadEntry>(plain(COPIED | (5 * CLUSTER))));
    assert_eq!(run.map_err(|bad| bad.problem), Err(elsewhere));
}

#[test]
fn data_of_an_external_file_may_be_at_offset_0() {
    let raw = |index: u32| plain(COPIED | (u64::from(index) * CLUSTER));
    let run = run_in_table(&geometry(1 << 2), 0, 4 * CLUSTER, |index| Ok::<_, BadEntry>(raw(index)));
    assert_eq!(run, Ok(Run { len_bytes: 4 * CLUSTER, kind: RunKind::Data { host_offset: 0 } }));
}

#[test]
fn subclusters_are_runs_of_their_own() {
    // The cluster's subclusters have 2 KiB: two with data, one of zeroes, then nothing; the next cluster begins so, too.
    let entries = [
        RawL2Entry { cluster: COPIED | (9 * CLUSTER), subclusters: (1 << 34) | 3 },
        RawL2Entry { cluster: 0, subclusters: 1 << 33 },
    ];
    let geometry = geometry(1 << 4);
    let at = |offset: u64| {
        run_in_table(&geometry, offset, 2 * CLUSTER - offset, |index| {
            Entries(entries.to_vec()).entry(0, index)
        })
    };
    let is = |len_bytes, kind| Ok(Run { len_bytes, kind });
    assert_eq!(at(512), is(4096 - 512, RunKind::Data { host_offset: 9 * CLUSTER + 512 }));
    assert_eq!(at(4096), is(2048, RunKind::Zero));
    assert_eq!(at(6144), is(CLUSTER - 6144 + 2048, RunKind::Unallocated));
    assert_eq!(at(CLUSTER + 2048), is(2048, RunKind::Zero));
}

#[test]
fn compressed_cluster_is_where_its_descriptor_says() {
    // With clusters of 64 KiB, bits 54 to 61 count further sectors.
    let entries = [plain(COMPRESSED | (3 << 54) | 0x1_2345), plain(COMPRESSED | 0x9999)];
    let Ok(Run { len_bytes, kind: RunKind::Compressed(cluster) }) = run(&entries, 512, CLUSTER) else {
        panic!()
    };
    assert_eq!(len_bytes, CLUSTER - 512);
    assert_eq!((cluster.host_offset, cluster.sectors), (0x1_2345, 4));
    assert_eq!(cluster.len_bytes(), 4 * 512 - 0x145);
}

#[test]
fn runs_continue_over_l2_tables_and_end_with_the_l1_table() {
    let (geometry, coverage) = (geometry(0), geometry(0).l2_coverage_bytes());
    let l1 = [0, COPIED | CLUSTER, 0, 0x1ff];
    let mut source = Entries(vec![plain(0); geometry.l2_entries() as usize]);
    let run = next_run(&geometry, &l1, &mut source, 512, 3 * coverage - 512);
    assert_eq!(run, Ok(Run { len_bytes: 3 * coverage - 512, kind: RunKind::Unallocated }));
    let run = next_run(&geometry, &l1, &mut source, 0, 4 * coverage);
    assert_eq!(run.map(|run| run.len_bytes), Ok(3 * coverage));
    let problem = EntryProblem::Reserved { bits: 0x1ff };
    let bad = BadEntry { table: Table::L1, index: 3, value: 0x1ff, problem };
    assert_eq!(next_run(&geometry, &l1, &mut source, 3 * coverage, 512), Err(Failure::Bad(bad)));
    assert_eq!(bad.to_string(), "L1 entry 3 is 0x00000000000001ff: reserved bits 0x1ff are set");
}
