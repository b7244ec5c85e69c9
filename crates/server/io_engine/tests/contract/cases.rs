//! The contract of every engine on every kind of storage.
//!
//! Each case takes a bed; `main.rs` runs all of them on all beds. See also: faults (`faults.rs`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use disk_image::{Backing, CheckedRange};
use io_engine::{Durability, Event, OpError, OpKind, Record, Unmap, Verb, WatchToken};

use crate::bed::{Bed, DEPTH, IMAGE_BYTES, PATIENCE, is_zero, kick, kick_fd, pattern, spec};

pub use crate::chance::stream_with_cancellations_completes_and_its_data_is_right;

fn write(range: CheckedRange) -> OpKind {
    OpKind::Write { range, durability: Durability::Cached }
}

pub fn written_data_is_read_back(mut bed: Bed) {
    let data = pattern(1, 128 * 1024);
    bed.write(64 * 1024, &data);
    assert_eq!(bed.read(64 * 1024, 128 * 1024), data);
}

pub fn each_of_many_ops_completes_once_with_its_own_data(mut bed: Bed) {
    let places: Vec<u64> = (0..u64::from(DEPTH)).map(|i| i * 8192).collect();
    for (token, &at) in places.iter().enumerate() {
        bed.store(at, &pattern(token as u64, 8192));
        bed.push(token as u64, write(bed.range(at, 8192)), &[(at, 8192)]);
    }
    let written: BTreeSet<u64> = bed.finish(places.len()).iter().map(|c| c.token).collect();
    assert_eq!(written.len(), places.len());
    bed.store(0, &vec![0; places.len() * 8192]);
    for (token, &at) in places.iter().enumerate() {
        bed.push(token as u64, OpKind::Read { range: bed.range(at, 8192) }, &[(at, 8192)]);
    }
    let read: BTreeSet<u64> = bed.finish(places.len()).iter().map(|c| c.token).collect();
    assert_eq!(read, written);
    for (token, &at) in places.iter().enumerate() {
        assert_eq!(bed.load(at, 8192), pattern(token as u64, 8192), "op {token}");
    }
    assert_eq!(bed.engine.in_flight(), 0);
}

/// Writes from `count` pieces in descending order, reads into them, and compares.
fn pieces_round_trip(bed: &mut Bed, count: u64) {
    let piece = bed.block_bytes().max(512);
    let data = pattern(count, (count * piece) as usize);
    let pieces: Vec<(u64, u64)> = (0..count).rev().map(|i| (i * piece, piece)).collect();
    for (chunk, &(addr, _)) in data.chunks(piece as usize).zip(&pieces) {
        bed.store(addr, chunk);
    }
    let range = bed.range(0, count * piece);
    assert_eq!(bed.run(write(range), &pieces).result, Ok(()));
    assert_eq!(bed.read(0, count * piece), data);
    let completion = bed.run(OpKind::Read { range }, &pieces);
    assert_eq!((completion.result, completion.stored_bytes), (Ok(()), count * piece));
    for (chunk, &(addr, _)) in data.chunks(piece as usize).zip(&pieces) {
        assert_eq!(bed.load(addr, piece), chunk);
    }
}

pub fn one_two_and_1022_pieces_keep_their_order(mut bed: Bed) {
    pieces_round_trip(&mut bed, 1);
    pieces_round_trip(&mut bed, 2);
    pieces_round_trip(&mut bed, 1022);
}

pub fn more_pieces_than_the_kernel_takes_go_in_several_calls(mut bed: Bed) {
    pieces_round_trip(&mut bed, 2500);
    let writes = bed.recorder.records().iter().filter(|record| record.verb == Verb::Write).count();
    assert!(writes >= 3, "{writes} calls for 2500 pieces");
}

pub fn reading_past_the_end_of_a_truncated_file_is_an_error(mut bed: Bed) {
    bed.write(0, &pattern(1, 65536));
    std::fs::File::options().write(true).open(bed.path()).unwrap().set_len(16384 + 100).unwrap();
    bed.store(0, &[0xee; 65536]);
    let range = bed.range(0, 65536);
    let completion = bed.run(OpKind::Read { range }, &[(0, 65536)]);
    let ended = OpError::EndOfImage { offset_bytes: 16484, end_bytes: 65536 };
    assert_eq!((completion.result, completion.stored_bytes), (Err(ended), 16484));
    assert_eq!(bed.load(0, 16484), pattern(1, 16484));
    let behind = bed.range(32768, 4096);
    let completion = bed.run(OpKind::Read { range: behind }, &[(0, 4096)]);
    let ended = OpError::EndOfImage { offset_bytes: 32768, end_bytes: 36864 };
    assert_eq!((completion.result, completion.stored_bytes), (Err(ended), 0));
}

pub fn empty_op_completes(mut bed: Bed) {
    let range = bed.range(0, 0);
    assert_eq!(bed.run(OpKind::Read { range }, &[]).result, Ok(()));
    assert_eq!(bed.run(write(range), &[]).result, Ok(()));
    let durability = Durability::Durable;
    assert_eq!(bed.run(OpKind::Discard { range, durability }, &[]).result, Ok(()));
    assert_eq!(bed.recorder.records(), []);
}

pub fn full_queue_gives_the_op_back(mut bed: Bed) {
    let range = bed.range(0, 4096);
    for token in 0..u64::from(DEPTH) {
        bed.push(token, OpKind::Read { range }, &[(token * 4096, 4096)]);
    }
    assert_eq!((bed.engine.room(), bed.engine.in_flight()), (0, DEPTH as usize));
    let refused = bed.engine.push(bed.op(99, OpKind::Read { range }, &[(0, 4096)])).unwrap_err();
    assert_eq!((refused.token, refused.buffers.remaining_bytes()), (99, 4096));
    assert_eq!(bed.finish(DEPTH as usize).len(), DEPTH as usize);
    assert!(bed.engine.push(refused).is_ok());
    assert_eq!(bed.finish(1)[0].token, 99);
}

pub fn misaligned_buffers_are_bounced_where_the_file_wants_alignment(mut bed: Bed) {
    let data = pattern(5, 4096);
    bed.store(3, &data);
    let range = bed.range(8192, 4096);
    assert_eq!(bed.run(write(range), &[(3, 1000), (1003, 3096)]).result, Ok(()));
    assert_eq!(bed.read(8192, 4096), data);
    let completion = bed.run(OpKind::Read { range }, &[(20001, 4095), (90001, 1)]);
    assert_eq!((completion.result, completion.stored_bytes), (Ok(()), 4096));
    assert_eq!([bed.load(20001, 4095), bed.load(90001, 1)].concat(), data);
    let expected = if bed.bounces() { 2 } else { 0 };
    assert_eq!(bed.engine.stats().bounced_ops, expected);
}

pub fn misaligned_request_larger_than_a_bounce_buffer_goes_in_chunks(mut bed: Bed) {
    let len = 600 * 1024_u64;
    let data = pattern(6, len as usize);
    bed.store(1, &data);
    let range = bed.range(0, len);
    assert_eq!(bed.run(write(range), &[(1, len)]).result, Ok(()));
    assert_eq!(bed.read(0, len), data);
    let completion = bed.run(OpKind::Read { range }, &[(2 << 20 | 1, len)]);
    assert_eq!((completion.result, completion.stored_bytes), (Ok(()), len));
    assert_eq!(bed.load(2 << 20 | 1, len), data);
}

pub fn more_misaligned_requests_than_bounce_buffers_all_complete(mut bed: Bed) {
    let count = u64::from(DEPTH);
    for i in 0..count {
        bed.store(i * 8192 + 1, &pattern(i, 4096));
        bed.push(i, write(bed.range(i * 4096, 4096)), &[(i * 8192 + 1, 4096)]);
    }
    assert!(bed.finish(count as usize).iter().all(|c| c.result == Ok(())));
    let read = bed.read(0, count * 4096);
    let expected: Vec<u8> = (0..count).flat_map(|i| pattern(i, 4096)).collect();
    assert!(read == expected);
}

pub fn flush_goes_to_the_kernel_after_the_writes_it_covers(mut bed: Bed) {
    bed.push(1, write(bed.range(0, 4096)), &[(0, 4096)]);
    bed.push(2, write(bed.range(8192, 4096)), &[(0, 4096)]);
    bed.finish(2);
    assert_eq!(bed.run(OpKind::Flush, &[]).result, Ok(()));
    let records = bed.recorder.records();
    let flush = records.iter().find(|record| record.verb == Verb::Sync).unwrap();
    let writes = records.iter().filter(|record| record.verb == Verb::Write);
    let written = writes.map(|record| record.completed.unwrap().0).max().unwrap();
    assert!(flush.issued > written, "{records:?}");
    assert_eq!(flush.completed.unwrap().1, 0);
}

/// Whether every write is durable: by its own flag, or by a sync that was issued after the write had completed.
fn is_durable(records: &[Record]) -> bool {
    let synced = |written: u64| {
        let mut syncs = records.iter().filter(|record| record.verb == Verb::Sync);
        syncs.any(|sync| sync.issued > written && sync.completed.is_some_and(|(_, result)| result == 0))
    };
    records.iter().filter(|record| record.verb == Verb::Write).all(|write| {
        write.flags == libc::RWF_DSYNC || write.completed.is_some_and(|(written, _)| synced(written))
    })
}

pub fn durable_write_carries_dsync_or_is_synced_and_a_cached_one_does_neither(mut bed: Bed) {
    let range = bed.range(0, 4096);
    let durable = OpKind::Write { range, durability: Durability::Durable };
    assert_eq!(bed.run(durable, &[(0, 4096)]).result, Ok(()));
    assert!(is_durable(&bed.recorder.records()), "{:?}", bed.recorder.records());
    bed.recorder.clear();
    assert_eq!(bed.run(write(range), &[(0, 4096)]).result, Ok(()));
    let calls = bed.recorder.records();
    let calls: Vec<(Verb, i32)> = calls.iter().map(|record| (record.verb, record.flags)).collect();
    assert_eq!(calls, [(Verb::Write, 0)]);
}

pub fn bounced_durable_write_is_durable_in_every_chunk(mut bed: Bed) {
    let range = bed.range(0, 600 * 1024);
    let durable = OpKind::Write { range, durability: Durability::Durable };
    assert_eq!(bed.run(durable, &[(1, 600 * 1024)]).result, Ok(()));
    let records = bed.recorder.records();
    assert!(is_durable(&records), "{records:?}");
    // The calls use bounce buffers of 256 KiB, or move 512 KiB through the page cache.
    let writes = records.iter().filter(|record| record.verb == Verb::Write).count();
    assert_eq!(writes, if bed.bounces() { 3 } else { 2 });
}

pub fn durable_discard_is_followed_by_a_flush(mut bed: Bed) {
    let range = bed.range(0, 65536);
    let discard = OpKind::Discard { range, durability: Durability::Durable };
    assert_eq!(bed.run(discard, &[]).result, Ok(()));
    let verbs: Vec<Verb> = bed.recorder.records().iter().map(|record| record.verb).collect();
    assert_eq!(verbs, [Verb::Allocate, Verb::Sync]);
}

pub fn discarded_blocks_are_freed_and_read_as_zeroes(mut bed: Bed) {
    bed.write(0, &pattern(1, 4 << 20));
    assert_eq!(bed.run(OpKind::Flush, &[]).result, Ok(()));
    let before = bed.blocks();
    let range = bed.range(1 << 20, 2 << 20);
    let discard = OpKind::Discard { range, durability: Durability::Cached };
    assert_eq!(bed.run(discard, &[]).result, Ok(()));
    // Checks the holes before it reads them, because reading through `mmap` fills the holes.
    if bed.is_file() {
        let freed = before - bed.blocks();
        assert!(freed >= (2 << 20) / 512, "{freed} sectors freed");
    }
    assert!(is_zero(&bed.read(1 << 20, 2 << 20)));
    assert_eq!(bed.read(0, 4096), pattern(1, 4096));
}

pub fn zeroes_with_unmap_read_as_zeroes(mut bed: Bed) {
    bed.write(0, &pattern(1, 3 << 20));
    let range = bed.range(4096, 2 << 20);
    let zero = OpKind::WriteZeroes { range, unmap: Unmap::Allowed, durability: Durability::Cached };
    assert_eq!(bed.run(zero, &[]).result, Ok(()));
    assert!(is_zero(&bed.read(4096, 2 << 20)));
    assert_eq!(bed.read(0, 4096), pattern(1, 4096));
    assert_eq!(bed.read(4096 + (2 << 20), 4096), pattern(1, 3 << 20)[4096 + (2 << 20)..][..4096]);
}

pub fn zeroes_without_unmap_keep_the_blocks(mut bed: Bed) {
    bed.write(0, &pattern(1, 3 << 20));
    assert_eq!(bed.run(OpKind::Flush, &[]).result, Ok(()));
    let before = bed.blocks();
    let range = bed.range(4096, 2 << 20);
    let zero = OpKind::WriteZeroes { range, unmap: Unmap::Forbidden, durability: Durability::Durable };
    assert_eq!(bed.run(zero, &[]).result, Ok(()));
    assert!(is_zero(&bed.read(4096, 2 << 20)));
    assert_eq!(bed.read(0, 4096), pattern(1, 4096));
    assert!(bed.blocks() >= before);
    let last = bed.recorder.records().into_iter().rev().find(|r| r.verb != Verb::Read).unwrap();
    assert_eq!(last.verb, Verb::Sync);
}

pub fn buffers_come_back_and_dropping_them_releases_the_memory(mut bed: Bed) {
    let memory = Arc::clone(bed.view.memory());
    let range = bed.range(0, 8192);
    let completion = bed.run(OpKind::Read { range }, &[(0, 4096), (8192, 4096)]);
    assert_eq!((completion.buffers.capacity(), completion.buffers.remaining_bytes()), (2, 0));
    assert!(completion.buffers.holds(&memory));
    drop(completion);
    assert_eq!(Arc::strong_count(&memory), 2, "the view and this test");
}

pub fn dropping_the_engine_with_ops_in_flight_releases_the_memory(mut bed: Bed) {
    let memory = Arc::clone(bed.view.memory());
    for token in 0..u64::from(DEPTH) {
        bed.push(token, write(bed.range(token * 65536, 65536)), &[(token * 65536, 65536)]);
    }
    bed.engine.submit().unwrap();
    drop(bed);
    assert_eq!(Arc::strong_count(&memory), 1);
}

pub fn cancelled_ops_all_complete(mut bed: Bed) {
    for token in 0..u64::from(DEPTH) {
        bed.push(token, OpKind::Read { range: bed.range(token * 65536, 65536) }, &[(token * 65536, 65536)]);
    }
    bed.engine.submit().unwrap();
    bed.engine.cancel_all();
    let done = bed.finish(DEPTH as usize);
    assert!(done.iter().all(|c| matches!(c.result, Ok(()) | Err(OpError::Cancelled))), "{done:?}");
    assert_eq!(bed.engine.in_flight(), 0);
}

pub fn second_file_is_independent_and_its_place_is_used_again(mut bed: Bed) {
    let first = bed.file;
    bed.write(0, &pattern(1, 4096));
    let second = bed.engine.attach_file(spec(&bed.image)).unwrap();
    assert_ne!(first, second);
    bed.file = second;
    assert_eq!(bed.read(0, 4096), pattern(1, 4096));
    bed.engine.detach_file(second);
    assert_eq!(bed.engine.attach_file(spec(&bed.image)).unwrap(), second);
    bed.file = first;
    assert_eq!(bed.read(0, 4096), pattern(1, 4096));
}

pub fn detached_file_is_let_go(mut bed: Bed) {
    let users = |bed: &Bed| match bed.image.backing() {
        Backing::File(file) => Arc::strong_count(file),
        Backing::Nbd(export) => Arc::strong_count(export),
        Backing::Rbd(image) => Arc::strong_count(image),
        Backing::Mapped(volume) => Arc::strong_count(volume),
    };
    let before = users(&bed);
    let second = bed.engine.attach_file(spec(&bed.image)).unwrap();
    assert!(users(&bed) > before);
    bed.engine.detach_file(second);
    // A thread that connects to another machine lets go a moment later.
    let end = Instant::now() + PATIENCE;
    while users(&bed) != before && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(users(&bed), before);
}

pub fn kick_wakes_a_sleeping_worker(mut bed: Bed) {
    let fd = kick_fd();
    bed.engine.watch(Arc::clone(&fd), WatchToken(42)).unwrap();
    let kicker = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        kick(&fd);
    });
    assert!(matches!(bed.next_event(), Event::Readable(WatchToken(42))));
    kicker.join().unwrap();
}

pub fn every_later_kick_is_seen_although_the_fd_is_never_read(mut bed: Bed) {
    let fd = kick_fd();
    bed.engine.watch(Arc::clone(&fd), WatchToken(1)).unwrap();
    for _ in 0..5 {
        kick(&fd);
        assert!(matches!(bed.next_event(), Event::Readable(WatchToken(1))));
        assert!(bed.settle().is_empty());
    }
}

pub fn kick_before_the_watch_is_reported(mut bed: Bed) {
    let fd = kick_fd();
    kick(&fd);
    bed.engine.watch(fd, WatchToken(1)).unwrap();
    assert!(matches!(bed.next_event(), Event::Readable(WatchToken(1))));
}

pub fn thousands_of_kicks_merge(mut bed: Bed) {
    let fd = kick_fd();
    bed.engine.watch(Arc::clone(&fd), WatchToken(1)).unwrap();
    bed.engine.submit().unwrap();
    for _ in 0..5000 {
        kick(&fd);
    }
    bed.engine.wait(None).unwrap();
    let mut events = Vec::new();
    bed.engine.reap(&mut events);
    assert_eq!(events.len(), 1);
    bed.settle();
    kick(&fd);
    assert!(matches!(bed.next_event(), Event::Readable(WatchToken(1))));
}

pub fn unwatched_fd_is_silent_and_its_neighbour_is_not(mut bed: Bed) {
    let (gone, stays) = (kick_fd(), kick_fd());
    let id = bed.engine.watch(Arc::clone(&gone), WatchToken(1)).unwrap();
    bed.engine.watch(Arc::clone(&stays), WatchToken(2)).unwrap();
    kick(&gone);
    assert!(matches!(bed.next_event(), Event::Readable(WatchToken(1))));
    bed.engine.unwatch(id);
    kick(&gone);
    kick(&stays);
    let event = bed.next_event();
    assert!(matches!(event, Event::Readable(WatchToken(2))), "{event:?}");
    // An engine with a kernel thread lets the descriptor go when that thread has run.
    let deadline = Instant::now() + PATIENCE;
    while Arc::strong_count(&gone) > 1 {
        assert!(Instant::now() < deadline, "the engine still holds the fd");
        assert!(bed.settle().is_empty());
    }
    assert!(bed.settle().is_empty());
}

pub fn fd_that_cannot_be_watched_is_reported(mut bed: Bed) {
    let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
    match bed.engine.watch(Arc::new(file.into()), WatchToken(3)) {
        Err(_) => {}
        Ok(id) => {
            let failed = |event: &Event| matches!(event, Event::WatchFailed(WatchToken(3), _));
            // The engine gives up a descriptor only after it has been readable many times without an event.
            while !failed(&bed.next_event()) {}
            bed.engine.unwatch(id);
        }
    }
}

pub fn wait_with_a_timeout_ends(mut bed: Bed) {
    bed.engine.wait(Some(Duration::from_millis(10))).unwrap();
    bed.engine.wait(Some(Duration::ZERO)).unwrap();
}

pub fn finished_op_keeps_wait_from_sleeping(mut bed: Bed) {
    let range = bed.range(0, 0);
    bed.push(7, OpKind::Read { range }, &[]);
    bed.engine.wait(None).unwrap();
    bed.engine.reap(&mut bed.events);
    assert!(matches!(&bed.events[..], [Event::Completed(c)] if c.token == 7));
}

pub fn wait_starts_what_was_pushed(mut bed: Bed) {
    let range = bed.range(0, 4096);
    bed.push(7, OpKind::Read { range }, &[(0, 4096)]);
    while bed.events.is_empty() {
        bed.engine.wait(None).unwrap();
        bed.engine.reap(&mut bed.events);
    }
    assert!(matches!(&bed.events[..], [Event::Completed(c)] if c.token == 7));
}

fn voluntary_switches(thread: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

pub fn idle_worker_does_not_wake_up(mut bed: Bed) {
    let fd = kick_fd();
    bed.write(0, &pattern(1, 4096));
    bed.engine.watch(Arc::clone(&fd), WatchToken(1)).unwrap();
    bed.settle();
    let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
    let observer = std::thread::spawn(move || {
        // On a busy machine the thread may sleep late.
        let sleeps_on = (0..100).any(|_| {
            let before = voluntary_switches(&thread);
            std::thread::sleep(Duration::from_millis(700));
            voluntary_switches(&thread) == before
        });
        kick(&fd);
        sleeps_on
    });
    bed.engine.wait(None).unwrap();
    assert!(observer.join().unwrap(), "it wakes up again and again");
}

pub fn last_block_is_written_and_read(mut bed: Bed) {
    let last = IMAGE_BYTES - 4096;
    bed.write(last, &pattern(3, 4096));
    assert_eq!(bed.read(last, 4096), pattern(3, 4096));
}
