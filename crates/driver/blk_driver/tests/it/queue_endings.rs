//! Requests that end before the device has finished them: deadlines, cancellation, and when the buffers are returned.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::time::{Duration, Instant};

use blk_driver::{BlockingError, Completion, Durability, PushError, Request, RequestError, Work};
use virtio_blk::kind;

use crate::rig::{FULL, LONG, PLAIN, Rig, rig};

fn push_until(rig: &mut Rig, token: u64, deadline: Instant) {
    let data = [rig.data(512)];
    let work = Work::Read { sector: 0, data: &data };
    rig.queue.push(&Request { work, token, deadline: Some(deadline) }).unwrap();
    rig.queue.submit();
}

#[test]
fn deadline_that_passed_ends_the_request_and_a_late_answer_returns_the_buffers_once() {
    let mut rig = rig(8, FULL);
    push_until(&mut rig, 1, Instant::now());
    assert_eq!(rig.results(), [(1, Err(RequestError::DeadlinePassed))]);
    assert_eq!((rig.results(), rig.queue.in_flight()), (vec![], 1));
    assert_eq!(rig.device.serve(), 1);
    assert_eq!(rig.results(), [(1, Err(RequestError::Returned))]);
    assert_eq!((rig.results(), rig.queue.in_flight()), (vec![], 0));
}

#[test]
fn answer_that_is_there_when_the_deadline_is_looked_at_counts() {
    let mut rig = rig(8, FULL);
    push_until(&mut rig, 1, Instant::now());
    rig.device.serve();
    assert_eq!(rig.results(), [(1, Ok(()))]);
    assert_eq!(rig.results(), []);
}

#[test]
fn deadline_still_to_come_ends_nothing() {
    let mut rig = rig(8, FULL);
    push_until(&mut rig, 1, Instant::now() + LONG);
    push_until(&mut rig, 2, Instant::now());
    assert_eq!(rig.results(), [(2, Err(RequestError::DeadlinePassed))]);
    assert!(rig.queue.next_deadline().is_some_and(|at| at > Instant::now()));
    rig.device.serve();
    assert_eq!(rig.results(), [(1, Ok(())), (2, Err(RequestError::Returned))]);
}

#[test]
fn deadlines_of_many_requests_are_told_as_far_as_there_is_room() {
    let mut rig = rig(8, FULL);
    (0..5).for_each(|token| push_until(&mut rig, token, Instant::now()));
    let mut out = [Completion::default(); 2];
    let counts: Vec<_> = (0..4).map(|_| rig.queue.completions(&mut out).unwrap()).collect();
    assert_eq!(counts, [2, 2, 1, 0]);
    assert_eq!(rig.queue.in_flight(), 5);
}

#[test]
fn stream_of_answers_into_little_room_does_not_keep_a_deadline_from_being_told() {
    let mut rig = rig(8, FULL);
    push_until(&mut rig, 9, Instant::now());
    let hung = rig.device.pop().unwrap();
    let mut out = [Completion::default()];
    let ended_at = (0..5).position(|token| {
        rig.submit_read(0, token);
        rig.device.serve();
        rig.queue.completions(&mut out).unwrap();
        out[0].token == 9
    });
    assert_eq!((ended_at, out[0].result), (Some(1), Err(RequestError::DeadlinePassed)));
    rig.device.answer(&hung, 0);
}

#[test]
fn cancelled_request_ends_at_once_and_its_buffers_come_back_later() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    rig.submit_read(0, 2);
    assert!(rig.queue.cancel(1));
    assert!(!rig.queue.cancel(1));
    assert_eq!(rig.results(), [(1, Err(RequestError::Cancelled))]);
    rig.device.serve();
    assert_eq!(rig.results(), [(1, Err(RequestError::Returned)), (2, Ok(()))]);
}

#[test]
fn cancelled_and_answered_before_anybody_looked_is_told_in_that_order() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    assert!(rig.queue.cancel(1));
    rig.device.serve();
    let told = [(1, Err(RequestError::Cancelled)), (1, Err(RequestError::Returned))];
    assert_eq!(rig.results(), told);
    assert_eq!(rig.queue.in_flight(), 0);
}

#[test]
fn cancel_of_a_token_that_nobody_has_finds_none() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    assert!(!rig.queue.cancel(2));
    rig.device.serve();
    assert_eq!(rig.results(), [(1, Ok(()))]);
}

#[test]
fn durable_write_cancelled_before_its_flush_is_not_flushed() {
    let mut rig = rig(8, FULL);
    let data = [rig.data(512)];
    rig.push(Work::Write { sector: 1, data: &data, durability: Durability::Durable }, 5);
    rig.queue.submit();
    assert!(rig.queue.cancel(5));
    assert_eq!(rig.device.serve(), 1);
    assert_eq!(rig.results(), [(5, Err(RequestError::Cancelled)), (5, Err(RequestError::Returned))]);
    assert_eq!(rig.device.pop(), None);
}

#[test]
fn ended_requests_that_the_device_holds_keep_the_queue_full() {
    let mut rig = rig(2, FULL);
    push_until(&mut rig, 1, Instant::now());
    push_until(&mut rig, 2, Instant::now());
    assert_eq!(rig.results().len(), 2);
    let refused = rig.queue.push(&Request::new(Work::Flush, 3));
    assert_eq!(refused, Err(PushError::Full { in_flight: 2 }));
}

#[test]
fn statistics_count_ends_and_not_returns() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    rig.submit_read(0, 2);
    rig.queue.cancel(1);
    rig.device.serve();
    assert_eq!(rig.results().len(), 3);
    assert_eq!((rig.queue.stats().pushed, rig.queue.stats().completed), (2, 2));
}

#[test]
fn blocking_read_that_is_not_answered_ends_at_its_limit_and_keeps_its_buffer() {
    let mut rig = rig(8, FULL);
    let free_before = rig.pool.free_bytes();
    let mut out = [0; 512];
    let ended = rig.queue.read_blocking(0, &mut out, Duration::from_millis(5));
    assert!(matches!(ended, Err(BlockingError::Request(RequestError::DeadlinePassed))));
    assert_eq!(rig.pool.free_bytes(), free_before - 4096);
    rig.device.serve();
    assert_eq!(rig.results(), []);
    assert_eq!((rig.pool.free_bytes(), rig.queue.in_flight()), (free_before, 0));
}

#[test]
fn blocking_calls_go_on_after_one_that_timed_out() {
    let mut rig = rig(8, PLAIN);
    let timed_out = rig.queue.flush_blocking(Duration::from_millis(1));
    assert!(matches!(timed_out, Err(BlockingError::Request(RequestError::DeadlinePassed))));
    let again = rig.queue.flush_blocking(Duration::from_millis(1));
    assert!(matches!(again, Err(BlockingError::Request(RequestError::DeadlinePassed))));
    assert_eq!(rig.device.pop_all().iter().map(|seen| seen.kind).collect::<Vec<_>>(), [kind::FLUSH; 2]);
}

#[test]
fn buffer_of_a_blocking_read_stays_out_of_the_pool_when_an_earlier_flush_comes_back() {
    let mut rig = rig(8, FULL);
    let free_before = rig.pool.free_bytes();
    assert!(rig.queue.flush_blocking(Duration::from_millis(1)).is_err());
    assert!(rig.queue.read_blocking(0, &mut [0; 512], Duration::from_millis(1)).is_err());
    let seen = rig.device.pop_all();
    assert_eq!(seen.iter().map(|seen| seen.kind).collect::<Vec<_>>(), [kind::FLUSH, kind::IN]);

    rig.device.answer(&seen[0], 0);
    assert_eq!(rig.results(), []);
    assert_eq!(rig.pool.free_bytes(), free_before - 4096, "the device still has the read");

    rig.device.answer(&seen[1], 0);
    assert_eq!(rig.results(), []);
    assert_eq!((rig.pool.free_bytes(), rig.queue.in_flight()), (free_before, 0));
}

#[test]
fn blocking_call_on_a_queue_with_requests_is_refused() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    let refused = rig.queue.flush_blocking(LONG);
    assert!(matches!(refused, Err(BlockingError::Busy { in_flight: 1 })));
}

#[test]
fn dropped_queue_keeps_the_buffer_of_a_blocking_call_out_of_the_pool() {
    let mut rig = rig(8, FULL);
    let free_before = rig.pool.free_bytes();
    let timed_out = rig.queue.read_blocking(0, &mut [0; 512], Duration::from_millis(1));
    assert!(timed_out.is_err());
    drop(rig.queue);
    assert_eq!(rig.pool.free_bytes(), free_before - 4096);
}
