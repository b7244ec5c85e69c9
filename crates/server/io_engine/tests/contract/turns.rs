//! Tests how much of a submission one file's ops may use. The fake engine makes its calls in `submit`, where engines
//! also copy cached data.
//!
//! See also: what a call costs (`src/core/turn.rs`), what a call means (`faults.rs`).

use io_engine::{Completion, Event, Fault, FileId, OpError, OpKind, Verb, When};

use crate::bed::{Bed, FAKE, fake, spec};

const TURN_BYTES: u64 = 512 << 10;

fn push_read(bed: &mut Bed, token: u64, len_bytes: u64) {
    let range = bed.range(0, len_bytes);
    bed.push(token, OpKind::Read { range }, &[(0, len_bytes)]);
}

/// Number of calls so far.
fn calls(bed: &Bed) -> usize {
    bed.recorder.records().len()
}

/// Bytes that calls on `file` moved, except for the first `calls` calls.
fn bytes_since(bed: &Bed, calls: usize, file: FileId) -> u64 {
    let records = bed.recorder.records();
    records.iter().skip(calls).filter(|record| record.file == file).map(|record| record.len_bytes).sum()
}

/// Runs the part of a worker's pass after it has taken requests. Returns the completions.
fn pass(bed: &mut Bed) -> Vec<Completion> {
    let mut events = Vec::new();
    bed.engine.submit().unwrap();
    bed.engine.reap(&mut events);
    events.into_iter().filter_map(completion).collect()
}

fn completion(event: Event) -> Option<Completion> {
    match event {
        Event::Completed(completion) => Some(completion),
        _ => None,
    }
}

#[test]
fn read_beside_many_large_ones_in_flight_waits_for_one_turn_of_theirs() {
    let mut bed = fake().expect(FAKE);
    let neighbour = bed.engine.attach_file(spec(&bed.image)).unwrap();
    (0..40).for_each(|token| push_read(&mut bed, token, 4 << 20));
    assert!(pass(&mut bed).is_empty());
    bed.engine.submit().unwrap();
    let before = calls(&bed);
    bed.engine.reap(&mut Vec::new()); // ops that stopped short are to be resumed
    let range = bed.range(0, 4096);
    let op = bed.op(99, OpKind::Read { range }, &[(0, 4096)]);
    bed.engine.push(io_engine::Op { file: neighbour, ..op }).unwrap();
    let done = pass(&mut bed);
    let file = bed.file;
    // `pass` has also resumed ops, whose calls belong to the next submission.
    assert!((1..=2 * TURN_BYTES).contains(&bytes_since(&bed, before, file)));
    assert_eq!(done.iter().map(|done| done.token).collect::<Vec<_>>(), [99]);
    assert!(bed.finish(40).iter().all(|done| done.result.is_ok()));
}

#[test]
fn first_calls_and_resumed_ones_share_a_turn() {
    let mut bed = fake().expect(FAKE);
    let (file, before) = (bed.file, calls(&bed));
    (0..8).for_each(|token| push_read(&mut bed, token, 1 << 20));
    let after_each: Vec<u64> = (0..16)
        .map(|_| {
            pass(&mut bed);
            bytes_since(&bed, before, file) / TURN_BYTES
        })
        .collect();
    // Each pass makes one call. The core makes the next call as soon as it has the last call's result.
    assert_eq!(after_each, (1..=16).collect::<Vec<u64>>());
}

#[test]
fn ops_of_one_file_are_continued_in_turns() {
    let mut bed = fake().expect(FAKE);
    (0..3).for_each(|token| push_read(&mut bed, token, 1 << 20));
    bed.finish(3);
    let tokens: Vec<u64> = bed.recorder.records().iter().map(|record| record.token).collect();
    assert_eq!(tokens, [0, 1, 2, 0, 1, 2]);
}

#[test]
fn call_that_goes_on_with_an_op_is_work_without_an_event() {
    let mut bed = fake().expect(FAKE);
    push_read(&mut bed, 0, 2 * TURN_BYTES);
    assert_eq!((pass(&mut bed).len(), bed.engine.take_unseen_work()), (0, 1), "the first half is there");
    assert_eq!((pass(&mut bed).len(), bed.engine.take_unseen_work()), (1, 0));
}

#[test]
fn worker_does_not_sleep_while_an_op_waits_for_its_turn() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Verb(Verb::Read), Fault::Stick, 2);
    (0..2).for_each(|token| push_read(&mut bed, token, TURN_BYTES));
    assert!(!bed.engine.arm().unwrap(), "the second read was not given to the kernel");
    bed.engine.disarm().unwrap();
    assert!(bed.engine.arm().unwrap(), "both reads are with the kernel");
    bed.engine.disarm().unwrap();
    bed.handle().release().unwrap();
    assert_eq!(bed.finish(2).len(), 2);
}

#[test]
fn op_that_waits_for_its_turn_is_cancelled_at_once_and_its_file_goes_on() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Verb(Verb::Read), Fault::Stick, 1);
    (0..3).for_each(|token| push_read(&mut bed, token, TURN_BYTES));
    bed.engine.submit().unwrap();
    let file = bed.file;
    bed.engine.cancel_file(file);
    let mut events = Vec::new();
    bed.engine.reap(&mut events);
    let done: Vec<_> =
        events.into_iter().filter_map(completion).map(|done| (done.token, done.result)).collect();
    assert_eq!(done, [(1, Err(OpError::Cancelled)), (2, Err(OpError::Cancelled))]);
    bed.handle().release().unwrap();
    assert_eq!(bed.finish(1).len(), 1);
    push_read(&mut bed, 3, TURN_BYTES);
    assert_eq!(bed.finish(1).remove(0).result, Ok(()));
}
