//! Tests how many of one file's calls the kernel may have at once. The fake engine holds its calls until they are
//! released.
//!
//! See also: how much a submission starts (`turns.rs`), what a call costs (`src/core/window.rs`).

use io_engine::{Completion, Event, Fault, FileId, Op, OpKind, Verb, When};

use crate::bed::{Bed, FAKE, fake, spec};

const SHORT_BYTES: u64 = 128 << 10;
const LARGE_BYTES: u64 = 1 << 20;
/// A window of 1 MiB holds 32 calls of this size, because each costs 32 KiB.
const MIDDLE_BYTES: u64 = 28 << 10;

/// A bed with a disk, and a second disk on the same engine.
fn two_disks() -> (Bed, FileId) {
    let mut bed = fake().expect(FAKE);
    let neighbour = bed.engine.attach_file(spec(&bed.image)).unwrap();
    (bed, neighbour)
}

fn push_reads(bed: &mut Bed, file: FileId, count: u64, len_bytes: u64) {
    let range = bed.range(0, len_bytes);
    for token in 0..count {
        let op = bed.op(token, OpKind::Read { range }, &[(0, len_bytes)]);
        bed.engine.push(Op { file, ..op }).unwrap();
    }
}

fn stick(bed: &Bed, count: u64) {
    bed.handle().inject(When::Verb(Verb::Read), Fault::Stick, count);
}

/// Lengths of the calls on `file` so far.
fn calls(bed: &Bed, file: FileId) -> Vec<u64> {
    let records = bed.recorder.records();
    records.iter().filter(|record| record.file == file).map(|record| record.len_bytes).collect()
}

/// Runs the part of a worker's pass after it has taken requests. Returns the completions.
fn pass(bed: &mut Bed) -> Vec<Completion> {
    let mut events = Vec::new();
    bed.engine.submit().unwrap();
    bed.engine.reap(&mut events);
    let completed = |event| if let Event::Completed(completion) = event { Some(completion) } else { None };
    events.into_iter().filter_map(completed).collect()
}

fn passes(bed: &mut Bed, count: usize) {
    (0..count).for_each(|_| drop(pass(bed)));
}

#[test]
fn disks_that_have_calls_share_1_mib_and_each_has_what_an_ordinary_busy_guest_needs() {
    for (busy, most) in [(1, 32), (2, 16), (3, 10), (4, 8), (5, 8)] {
        let (mut bed, _) = two_disks();
        let others: Vec<FileId> =
            (1..busy).map(|_| bed.engine.attach_file(spec(&bed.image)).unwrap()).collect();
        let file = bed.file;
        bed.handle().inject(When::Verb(Verb::Read), Fault::Stick, u64::MAX);
        others.iter().for_each(|&other| push_reads(&mut bed, other, 1, 4096));
        push_reads(&mut bed, file, 40, MIDDLE_BYTES);
        passes(&mut bed, 8);
        assert_eq!(calls(&bed, file).len(), most, "{busy} disks have calls");
        bed.handle().clear();
        bed.handle().release().unwrap();
        assert!(bed.finish(40 + busy - 1).iter().all(|done| done.result.is_ok()));
    }
}

#[test]
fn window_of_a_neighbour_is_its_own() {
    let (mut bed, neighbour) = two_disks();
    stick(&bed, 60);
    let file = bed.file;
    push_reads(&mut bed, file, 60, 4096);
    passes(&mut bed, 4);
    push_reads(&mut bed, neighbour, 1, 4096);
    assert_eq!(pass(&mut bed).len(), 1, "the neighbour has a window of its own");
    bed.handle().release().unwrap();
    assert!(bed.finish(60).iter().all(|done| done.result.is_ok()));
    assert_eq!(calls(&bed, file), [4096; 60]);
}

#[test]
fn large_reads_of_a_disk_beside_another_are_seven_short_calls_at_a_time() {
    let (mut bed, _) = two_disks();
    stick(&bed, 7);
    let file = bed.file;
    push_reads(&mut bed, file, 8, LARGE_BYTES);
    passes(&mut bed, 4);
    assert_eq!(calls(&bed, file), [SHORT_BYTES; 7]);
    bed.handle().release().unwrap();
    assert!(bed.finish(8).iter().all(|done| done.result.is_ok()));
}

#[test]
fn disk_without_another_has_no_window() {
    let mut bed = fake().expect(FAKE);
    stick(&bed, 60);
    let file = bed.file;
    push_reads(&mut bed, file, 60, 4096);
    passes(&mut bed, 2);
    assert_eq!(calls(&bed, file).len(), 60);
    bed.handle().release().unwrap();
    assert_eq!(bed.finish(60).len(), 60);
}

#[test]
fn disk_whose_neighbour_asks_for_nothing_has_long_calls_until_the_neighbour_asks() {
    let (mut bed, neighbour) = two_disks();
    let file = bed.file;
    assert_eq!(calls_of_a_large_read(&mut bed, file), [SHORT_BYTES; 8]);
    push_reads(&mut bed, file, 16, LARGE_BYTES);
    bed.finish(16);
    assert_eq!(calls_of_a_large_read(&mut bed, file), [4 * SHORT_BYTES; 2]);
    push_reads(&mut bed, neighbour, 1, 4096);
    bed.finish(1);
    assert_eq!(calls_of_a_large_read(&mut bed, file), [SHORT_BYTES; 8]);
}

fn calls_of_a_large_read(bed: &mut Bed, file: FileId) -> Vec<u64> {
    let before = calls(bed, file).len();
    push_reads(bed, file, 1, LARGE_BYTES);
    bed.finish(1);
    calls(bed, file).split_off(before)
}

#[test]
fn worker_sleeps_while_ops_wait_for_their_files_window_and_a_result_goes_on_with_them() {
    let (mut bed, _) = two_disks();
    stick(&bed, 32);
    let file = bed.file;
    push_reads(&mut bed, file, 40, MIDDLE_BYTES);
    passes(&mut bed, 2);
    assert_eq!(calls(&bed, file).len(), 32);
    assert!(bed.engine.arm().unwrap(), "nothing can be done before a call ends");
    bed.engine.disarm().unwrap();
    bed.handle().release().unwrap();
    assert_eq!(bed.finish(40).len(), 40);
}

#[test]
fn ops_that_wait_for_their_files_window_are_cancelled_at_once_and_the_file_goes_on() {
    let (mut bed, _) = two_disks();
    stick(&bed, 32);
    let file = bed.file;
    push_reads(&mut bed, file, 40, MIDDLE_BYTES);
    passes(&mut bed, 2);
    bed.engine.cancel_file(file);
    let mut events = Vec::new();
    bed.engine.reap(&mut events);
    assert_eq!(events.len(), 8);
    bed.handle().release().unwrap();
    bed.finish(32);
    push_reads(&mut bed, file, 40, 4096);
    assert!(bed.finish(40).iter().all(|done| done.result.is_ok()));
}

#[test]
fn disk_that_gets_the_number_of_one_that_was_alone_is_not_alone_before_it_has_started_as_much() {
    let (mut bed, file) = two_disks();
    push_reads(&mut bed, file, 17, LARGE_BYTES);
    bed.finish(17);
    bed.engine.detach_file(file);
    let next = bed.engine.attach_file(spec(&bed.image)).unwrap();
    assert_eq!(next, file);
    assert_eq!(calls_of_a_large_read(&mut bed, next), [SHORT_BYTES; 8]);
}
