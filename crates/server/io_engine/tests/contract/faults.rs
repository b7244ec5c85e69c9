//! Tests the logic that all engines share when the kernel fails, transfers less than requested, or does not answer.
//!
//! Most cases run on the fake engine. The others need a real device that fails. See also: every engine's behaviour
//! without faults (`cases.rs`).

use std::sync::Arc;

use disk_image::CheckedRange;
use io_engine::{
    Durability, Event, Fault, FileId, LEAST_SHARE, Op, OpError, OpKind, Unmap, Verb, WatchToken, When,
};
use rustix::io::Errno;

use crate::bed::{Bed, FAKE, fake, fake_that_bounces, kick, kick_fd, pattern, spec, uring_4k_sectors};

fn write(range: CheckedRange) -> OpKind {
    OpKind::Write { range, durability: Durability::Cached }
}

fn calls(bed: &Bed) -> Vec<(Verb, u64, u64)> {
    let records = bed.recorder.records();
    records.iter().map(|record| (record.verb, record.offset_bytes, record.len_bytes)).collect()
}

#[test]
fn short_read_is_resumed_where_it_stopped() {
    let mut bed = fake().expect(FAKE);
    bed.write(0, &pattern(1, 16384));
    bed.recorder.clear();
    bed.handle().inject(When::Verb(Verb::Read), Fault::Short(5000), 2);
    assert_eq!(bed.read(0, 16384), pattern(1, 16384));
    let expected = [(Verb::Read, 0, 16384), (Verb::Read, 5000, 11384), (Verb::Read, 10000, 6384)];
    assert_eq!(calls(&bed), expected);
    assert_eq!(bed.engine.stats().resumed_calls, 2);
}

#[test]
fn short_write_in_the_middle_of_a_piece_is_resumed() {
    let mut bed = fake().expect(FAKE);
    bed.store(0, &pattern(1, 4096));
    bed.store(8192, &pattern(2, 4096));
    bed.handle().inject(When::Verb(Verb::Write), Fault::Short(4097), 1);
    let range = bed.range(0, 8192);
    assert_eq!(bed.run(write(range), &[(0, 4096), (8192, 4096)]).result, Ok(()));
    assert_eq!(bed.read(0, 8192), [pattern(1, 4096), pattern(2, 4096)].concat());
}

#[test]
fn short_durable_write_stays_durable() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Verb(Verb::Write), Fault::Short(512), 1);
    let range = bed.range(0, 4096);
    let durable = OpKind::Write { range, durability: Durability::Durable };
    assert_eq!(bed.run(durable, &[(0, 4096)]).result, Ok(()));
    let flags: Vec<i32> = bed.recorder.records().iter().map(|record| record.flags).collect();
    assert_eq!(flags, [libc::RWF_DSYNC; 2]);
}

#[test]
fn write_without_progress_is_an_error() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Verb(Verb::Write), Fault::Short(0), 1);
    let range = bed.range(4096, 4096);
    let stalled = OpError::WriteStalled { offset_bytes: 4096 };
    assert_eq!(bed.run(write(range), &[(0, 4096)]).result, Err(stalled));
}

#[test]
fn failed_read_gives_its_buffers_back_and_the_next_one_works() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Overlaps(Verb::Read, 4096..8192), Fault::Errno(Errno::IO), 1);
    let range = bed.range(0, 16384);
    let completion = bed.run(OpKind::Read { range }, &[(0, 16384)]);
    assert_eq!((completion.result, completion.stored_bytes), (Err(OpError::Errno(Errno::IO)), 0));
    assert_eq!(completion.buffers.capacity(), 1);
    assert_eq!(bed.run(OpKind::Read { range }, &[(0, 16384)]).result, Ok(()));
}

#[test]
fn error_after_a_short_read_reports_what_was_stored() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Call(0), Fault::Short(1024), 1);
    bed.handle().inject(When::Call(1), Fault::Errno(Errno::IO), 1);
    let range = bed.range(0, 4096);
    let completion = bed.run(OpKind::Read { range }, &[(0, 4096)]);
    assert_eq!((completion.result, completion.stored_bytes), (Err(OpError::Errno(Errno::IO)), 1024));
}

#[test]
fn full_disk_fails_the_write_and_reads_go_on() {
    let mut bed = fake().expect(FAKE);
    bed.handle().set_space_left(Some(6000));
    let range = bed.range(0, 8192);
    assert_eq!(bed.run(write(range), &[(0, 8192)]).result, Err(OpError::Errno(Errno::NOSPC)));
    assert_eq!(bed.run(OpKind::Read { range }, &[(0, 8192)]).result, Ok(()));
    bed.handle().set_space_left(None);
    assert_eq!(bed.run(write(range), &[(0, 8192)]).result, Ok(()));
}

#[test]
fn interrupted_calls_are_repeated() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Always, Fault::Errno(Errno::INTR), 3);
    bed.handle().inject(When::Always, Fault::Errno(Errno::AGAIN), 3);
    let range = bed.range(0, 4096);
    assert_eq!(bed.run(OpKind::Read { range }, &[(0, 4096)]).result, Ok(()));
    assert_eq!(bed.engine.stats().retried_calls, 6);
}

#[test]
fn endless_eagain_becomes_an_error() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Always, Fault::Errno(Errno::AGAIN), u64::MAX);
    let range = bed.range(0, 4096);
    let completion = bed.run(OpKind::Read { range }, &[(0, 4096)]);
    assert_eq!(completion.result, Err(OpError::Errno(Errno::AGAIN)));
    assert_eq!(bed.handle().calls(), 1001);
}

#[test]
fn shuffled_results_reach_their_own_ops() {
    let mut bed = fake().expect(FAKE);
    let expected: Vec<u8> = (0..32).flat_map(|i| pattern(i, 4096)).collect();
    bed.write(0, &expected);
    bed.handle().shuffle(12345);
    for i in 0..32 {
        bed.push(i, OpKind::Read { range: bed.range(i * 4096, 4096) }, &[((1 << 20) + i * 4096, 4096)]);
    }
    let order: Vec<u64> = bed.finish(32).iter().map(|c| c.token).collect();
    assert!(!order.is_sorted(), "{order:?}");
    assert!(bed.load(1 << 20, 32 * 4096) == expected);
}

#[test]
fn released_call_wakes_the_sleeping_worker() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Always, Fault::Hang, 1);
    bed.push(1, OpKind::Read { range: bed.range(0, 4096) }, &[(0, 4096)]);
    bed.engine.submit().unwrap();
    assert_eq!((bed.handle().hanging(), bed.engine.in_flight()), (1, 1));
    let handle = bed.handle();
    let releaser = std::thread::spawn(move || handle.release().unwrap());
    while bed.events.is_empty() {
        bed.engine.wait(None).unwrap();
        bed.engine.reap(&mut bed.events);
    }
    releaser.join().unwrap();
    assert!(matches!(&bed.events[..], [Event::Completed(c)] if c.result == Ok(())));
}

#[test]
fn release_is_not_reported_and_every_token_is_the_callers() {
    let mut bed = fake().expect(FAKE);
    let fd = kick_fd();
    bed.engine.watch(Arc::clone(&fd), WatchToken(u64::MAX)).unwrap();
    bed.handle().release().unwrap();
    assert_eq!(bed.settle().len(), 0);
    kick(&fd);
    assert!(matches!(bed.next_event(), Event::Readable(WatchToken(u64::MAX))));
}

#[test]
fn cancelled_call_completes_as_cancelled() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Always, Fault::Hang, 1);
    bed.push(1, OpKind::Read { range: bed.range(0, 4096) }, &[(0, 4096)]);
    bed.engine.submit().unwrap();
    bed.engine.cancel_all();
    assert_eq!(bed.finish(1)[0].result, Err(OpError::Cancelled));
}

#[test]
fn cancelling_one_file_leaves_the_ops_of_another_alone() {
    let mut bed = fake().expect(FAKE);
    let other = bed.engine.attach_file(spec(&bed.image)).unwrap();
    bed.handle().inject(When::Always, Fault::Hang, 4);
    bed.push(1, OpKind::Flush, &[]);
    bed.push(2, OpKind::Flush, &[]);
    bed.push(3, OpKind::Read { range: bed.range(0, 4096) }, &[(0, 4096)]);
    let first = std::mem::replace(&mut bed.file, other);
    bed.push(4, OpKind::Flush, &[]);
    bed.push(5, OpKind::Read { range: bed.range(0, 4096) }, &[(8192, 4096)]);
    bed.engine.submit().unwrap();
    bed.engine.cancel_file(first);
    let done = bed.finish(3);
    assert!(done.iter().all(|c| c.token <= 3 && c.result == Err(OpError::Cancelled)), "{done:?}");
    bed.handle().release().unwrap();
    let done = bed.finish(2);
    assert!(done.iter().all(|c| c.token > 3 && c.result == Ok(())), "{done:?}");
}

#[test]
fn cancelled_op_is_not_resumed() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Always, Fault::Stick, 1);
    bed.push(1, OpKind::Discard { range: bed.range(0, 4096), durability: Durability::Durable }, &[]);
    bed.engine.submit().unwrap();
    bed.engine.cancel_all();
    bed.handle().release().unwrap();
    assert_eq!(bed.finish(1)[0].result, Err(OpError::Cancelled));
    assert_eq!(bed.handle().calls(), 1, "no flush followed");
}

#[test]
fn op_waiting_for_a_bounce_buffer_is_cancelled_at_once() {
    let Some(mut bed) = fake_that_bounces() else { return };
    bed.handle().inject(When::Always, Fault::Hang, u64::MAX);
    for i in 0..12 {
        bed.push(i, OpKind::Read { range: bed.range(0, 4096) }, &[(i * 8192 + 1, 4096)]);
    }
    bed.engine.submit().unwrap();
    assert_eq!(bed.handle().hanging(), 8, "one per bounce buffer");
    bed.engine.cancel_all();
    let done = bed.finish(12);
    assert!(done.iter().all(|c| c.result == Err(OpError::Cancelled)));
    assert_eq!(bed.handle().calls(), 8);
}

#[test]
fn memory_of_a_call_that_never_ends_is_leaked_not_freed() {
    let mut bed = fake().expect(FAKE);
    let memory = Arc::clone(bed.view.memory());
    bed.handle().inject(When::Always, Fault::Stick, 1);
    bed.push(1, OpKind::Read { range: bed.range(0, 4096) }, &[(0, 4096)]);
    bed.engine.submit().unwrap();
    drop(bed);
    assert_eq!(Arc::strong_count(&memory), 2, "this test and the leaked op");
}

#[test]
fn detaching_a_file_in_use_panics() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Always, Fault::Hang, 1);
    bed.push(1, OpKind::Read { range: bed.range(0, 4096) }, &[(0, 4096)]);
    let file = bed.file;
    let detached = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| bed.engine.detach_file(file)));
    assert!(detached.is_err());
}

#[test]
fn zeroes_are_written_out_where_fallocate_cannot() {
    let mut bed = fake().expect(FAKE);
    bed.write(0, &pattern(1, 4 << 20));
    bed.recorder.clear();
    bed.handle().inject(When::Verb(Verb::Allocate), Fault::Errno(Errno::OPNOTSUPP), 2);
    let range = bed.range(4096, 1 << 20);
    let zero = OpKind::WriteZeroes { range, unmap: Unmap::Allowed, durability: Durability::Durable };
    assert_eq!(bed.run(zero, &[]).result, Ok(()));
    let (half, at) = (512 << 10, 4096);
    let expected = [
        (Verb::Allocate, at, 2 * half),
        (Verb::Allocate, at, 2 * half),
        (Verb::Write, at, half),
        (Verb::Write, at + half, half),
        (Verb::Sync, 0, 0),
    ];
    assert_eq!(calls(&bed), expected);
    assert!(bed.read(4096, 1 << 20).iter().all(|&byte| byte == 0));
    assert_eq!(bed.read(0, 4096), pattern(1, 4096));
}

#[test]
fn file_that_cannot_punch_or_zero_is_not_asked_twice() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Verb(Verb::Allocate), Fault::Errno(Errno::OPNOTSUPP), u64::MAX);
    let range = bed.range(0, 4096);
    let zero = OpKind::WriteZeroes { range, unmap: Unmap::Allowed, durability: Durability::Cached };
    assert_eq!(bed.run(zero, &[]).result, Ok(()));
    bed.recorder.clear();
    assert_eq!(bed.run(zero, &[]).result, Ok(()));
    assert_eq!(calls(&bed), [(Verb::Write, 0, 4096)]);
}

#[test]
fn zeroes_in_a_range_that_fallocate_refuses_are_written_and_the_next_range_is_tried_again() {
    let mut bed = fake().expect(FAKE);
    bed.write(0, &pattern(1, 4096));
    bed.recorder.clear();
    bed.handle().inject(When::Verb(Verb::Allocate), Fault::Errno(Errno::INVAL), 1);
    let range = bed.range(512, 512);
    let zero = OpKind::WriteZeroes { range, unmap: Unmap::Allowed, durability: Durability::Cached };
    assert_eq!(bed.run(zero, &[]).result, Ok(()));
    assert_eq!(bed.run(zero, &[]).result, Ok(()));
    let expected = [(Verb::Allocate, 512, 512), (Verb::Write, 512, 512), (Verb::Allocate, 512, 512)];
    assert_eq!(calls(&bed), expected);
    assert_eq!(bed.read(512, 512), [0; 512]);
}

#[test]
fn discard_of_a_range_that_fallocate_refuses_is_an_error() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Verb(Verb::Allocate), Fault::Errno(Errno::INVAL), 1);
    let discard = OpKind::Discard { range: bed.range(0, 4096), durability: Durability::Cached };
    assert_eq!(bed.run(discard, &[]).result, Err(OpError::Errno(Errno::INVAL)));
}

#[test]
fn zeroes_in_512_byte_blocks_work_on_a_device_with_4k_sectors() {
    let Some(mut bed) = uring_4k_sectors() else { return };
    bed.write(0, &pattern(1, 16384));
    for unmap in [Unmap::Allowed, Unmap::Forbidden] {
        let range = bed.range(512, 4096);
        let zero = OpKind::WriteZeroes { range, unmap, durability: Durability::Durable };
        assert_eq!(bed.run(zero, &[]).result, Ok(()));
    }
    let expected = [&pattern(1, 16384)[..512], &[0; 4096], &pattern(1, 16384)[4608..]].concat();
    assert!(bed.read(0, 16384) == expected);
}

#[test]
fn short_write_of_zeroes_is_resumed_and_keeps_the_blocks() {
    let mut bed = fake().expect(FAKE);
    bed.write(0, &pattern(1, 1 << 20));
    let before = bed.blocks();
    bed.handle().inject(When::Verb(Verb::Allocate), Fault::Errno(Errno::OPNOTSUPP), 1);
    bed.handle().inject(When::Verb(Verb::Write), Fault::Short(1000), 1);
    let range = bed.range(0, 1 << 20);
    let zero = OpKind::WriteZeroes { range, unmap: Unmap::Forbidden, durability: Durability::Cached };
    assert_eq!(bed.run(zero, &[]).result, Ok(()));
    assert!(bed.read(0, 1 << 20).iter().all(|&byte| byte == 0));
    assert!(bed.blocks() >= before);
}

#[test]
fn discard_that_the_file_system_cannot_do_is_an_error_each_time() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Verb(Verb::Allocate), Fault::Errno(Errno::OPNOTSUPP), 2);
    let range = bed.range(0, 4096);
    let discard = OpKind::Discard { range, durability: Durability::Cached };
    assert_eq!(bed.run(discard, &[]).result, Err(OpError::Errno(Errno::OPNOTSUPP)));
    assert_eq!(bed.run(discard, &[]).result, Err(OpError::Errno(Errno::OPNOTSUPP)));
    assert_eq!(bed.run(discard, &[]).result, Ok(()));
}

#[test]
fn flush_that_fails_is_reported() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Verb(Verb::Sync), Fault::Errno(Errno::IO), 1);
    assert_eq!(bed.run(OpKind::Flush, &[]).result, Err(OpError::Errno(Errno::IO)));
}

#[test]
fn flushes_during_a_sync_share_the_next_one() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Verb(Verb::Sync), Fault::Hang, 1);
    (0..5).for_each(|token| bed.push(token, OpKind::Flush, &[]));
    bed.engine.submit().unwrap();
    assert_eq!((bed.handle().hanging(), bed.handle().calls()), (1, 1));
    bed.handle().release().unwrap();
    assert!(bed.finish(5).iter().all(|completion| completion.result == Ok(())));
    assert_eq!(bed.handle().calls(), 2);
}

#[test]
fn flush_that_fails_takes_all_that_shared_it_along() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Call(0), Fault::Hang, 1);
    bed.handle().inject(When::Call(1), Fault::Errno(Errno::IO), 1);
    (0..4).for_each(|token| bed.push(token, OpKind::Flush, &[]));
    bed.engine.submit().unwrap();
    bed.handle().release().unwrap();
    let mut failed: Vec<_> = bed.finish(4).iter().filter(|c| c.result.is_err()).map(|c| c.token).collect();
    failed.sort_unstable();
    assert_eq!(failed, [1, 2, 3]);
    assert_eq!(bed.run(OpKind::Flush, &[]).result, Ok(()));
}

#[test]
fn flushes_that_wait_for_a_sync_are_cancelled_with_it() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Verb(Verb::Sync), Fault::Hang, 1);
    (0..3).for_each(|token| bed.push(token, OpKind::Flush, &[]));
    bed.engine.submit().unwrap();
    bed.engine.cancel_all();
    assert!(bed.finish(3).iter().all(|completion| completion.result == Err(OpError::Cancelled)));
    assert_eq!(bed.run(OpKind::Flush, &[]).result, Ok(()));
}

#[test]
fn durable_discard_whose_flush_fails_is_not_done() {
    let mut bed = fake().expect(FAKE);
    bed.handle().inject(When::Verb(Verb::Sync), Fault::Errno(Errno::IO), 1);
    let discard = OpKind::Discard { range: bed.range(0, 4096), durability: Durability::Durable };
    assert_eq!(bed.run(discard, &[]).result, Err(OpError::Errno(Errno::IO)));
}

/// Makes an op on a file other than the bed's own.
fn on(file: FileId, bed: &Bed, token: u64, kind: OpKind, pieces: &[(u64, u64)]) -> Op {
    Op { file, ..bed.op(token, kind, pieces) }
}

#[test]
fn file_whose_calls_hang_has_its_share_of_ops_and_another_one_its_own() {
    let mut bed = fake().expect(FAKE);
    let other = bed.engine.attach_file(spec(&bed.image)).unwrap();
    bed.handle().inject(When::Verb(Verb::Write), Fault::Hang, u64::MAX);
    let range = bed.range(0, 512);
    let mut hangs = |token| {
        let op = bed.op(token, write(range), &[(0, 512)]);
        bed.engine.push(op).is_ok()
    };
    let hung = (0..1000).take_while(|&token| hangs(token)).count();
    assert_eq!((bed.engine.room_of(bed.file), bed.engine.room_of(other)), (0, LEAST_SHARE));
    for token in 0..LEAST_SHARE as u64 {
        let read = on(other, &bed, 2000 + token, OpKind::Read { range }, &[(4096, 512)]);
        assert!(bed.engine.push(read).is_ok());
    }
    assert!(bed.finish(LEAST_SHARE).iter().all(|completion| completion.token >= 2000));
    bed.handle().clear();
    bed.handle().release().unwrap();
    assert_eq!(bed.finish(hung).len(), hung);
}

#[test]
fn hung_misaligned_writes_leave_bounce_buffers_to_another_file() {
    let Some(mut bed) = fake_that_bounces() else { return };
    let other = bed.engine.attach_file(spec(&bed.image)).unwrap();
    bed.handle().inject(When::Verb(Verb::Write), Fault::Hang, u64::MAX);
    let range = bed.range(0, 4096);
    (0..20).for_each(|token| bed.push(token, write(range), &[(1, 4096)]));
    bed.engine.submit().unwrap();
    for token in 100..110 {
        let read = on(other, &bed, token, OpKind::Read { range }, &[(8193, 4096)]);
        assert!(bed.engine.push(read).is_ok());
    }
    assert!(bed.finish(10).iter().all(|completion| completion.token >= 100));
    bed.handle().clear();
    bed.handle().release().unwrap();
    assert_eq!(bed.finish(20).len(), 20);
}
