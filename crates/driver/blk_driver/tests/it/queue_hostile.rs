//! A device that breaks the rules: each violation is an error value, and everything in flight ends.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use blk_driver::{BlockingError, Completion, PushError, QueueError, Request, RequestError, Work};
use virtqueue::packed::{RawDescriptor, RawPacked};
use virtqueue::{DriverFault, RingFeatures};

use crate::rig::{FULL, LONG, PLAIN, Rig, rig};

const LOST: Result<(), RequestError> = Err(RequestError::Lost);

/// The queue's error after everything in flight has ended; the next call returns it again.
fn end_of(rig: &mut Rig) -> QueueError {
    let mut out = [Completion::default(); 8];
    let error = rig.queue.completions(&mut out).unwrap_err();
    assert_eq!(rig.queue.completions(&mut out), Err(error.clone()));
    assert_eq!(rig.queue.wait(&mut out, LONG), Err(error.clone()));
    let refused = rig.queue.push(&Request::new(Work::Flush, 1));
    assert_eq!(refused, Err(PushError::Dead(error.clone())));
    assert!(rig.queue.prepare_kick().is_none());
    assert_eq!((rig.queue.room(1), rig.queue.in_flight()), (0, 0));
    error
}

fn fault(fault: DriverFault) -> QueueError {
    QueueError::Device { queue: 0, fault }
}

#[test]
fn descriptor_completed_twice_breaks_the_queue_and_the_rest_is_lost() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    rig.submit_read(0, 2);
    let raw = rig.device.raw();
    raw.set_used_entry(0, 0, 1);
    raw.set_used_entry(1, 0, 1);
    raw.set_used_idx(2);
    // The device wrote no status, so the first request's answer is not trusted either.
    assert_eq!(rig.results(), [(1, Err(RequestError::BadStatus { status: 0xff })), (2, LOST)]);
    assert_eq!(end_of(&mut rig), fault(DriverFault::NotInFlight { id: 0 }));
}

#[test]
fn id_that_was_never_given_breaks_the_queue() {
    let mut rig = rig(8, PLAIN);
    rig.submit_read(0, 1);
    let raw = rig.device.raw();
    raw.set_used_entry(0, 8, 1);
    raw.set_used_idx(1);
    assert_eq!(rig.results(), [(1, LOST)]);
    assert_eq!(end_of(&mut rig), fault(DriverFault::IdOutOfRange { id: 8, queue_size: 8 }));
}

#[test]
fn used_length_larger_than_the_buffers_breaks_the_queue() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    let seen = rig.device.pop().unwrap();
    rig.device.answer_with(&seen, 0, 4098);
    assert_eq!(rig.results(), [(1, LOST)]);
    let too_much = DriverFault::WrittenTooMuch { written_bytes: 4098, writable_bytes: 4097 };
    assert_eq!(end_of(&mut rig), fault(too_much));
}

#[test]
fn index_that_jumps_breaks_the_queue_even_when_it_is_only_armed() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    rig.device.raw().set_used_idx(2);
    assert_eq!(rig.queue.arm(), Ok(true));
    assert_eq!(rig.results(), [(1, LOST)]);
    let jump = DriverFault::UsedIndexJump { used_idx: 2, next_used: 0, in_flight: 1 };
    assert_eq!(end_of(&mut rig), fault(jump));
}

#[test]
fn request_that_was_not_yet_published_cannot_be_completed() {
    let mut rig = rig(8, FULL);
    rig.push(Work::Flush, 1);
    rig.device.raw().set_used_idx(1);
    assert_eq!(rig.results(), [(1, LOST)]);
    end_of(&mut rig);
}

#[test]
fn status_without_a_meaning_ends_its_request_only() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    rig.submit_read(0, 2);
    let seen = rig.device.pop_all();
    rig.device.answer(&seen[0], 3);
    rig.device.answer(&seen[1], 0);
    assert_eq!(rig.results(), [(1, Err(RequestError::BadStatus { status: 3 })), (2, Ok(()))]);
    rig.submit_read(0, 3);
    rig.device.serve();
    assert_eq!(rig.results(), [(3, Ok(()))]);
}

#[test]
fn answer_without_a_status_byte_is_no_success() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    rig.device.serve();
    assert_eq!(rig.results(), [(1, Ok(()))]);
    rig.submit_read(0, 2);
    let seen = rig.device.pop().unwrap();
    rig.device.ring.push_used(seen.tag, 4097);
    rig.device.ring.publish();
    assert_eq!(rig.results(), [(2, Err(RequestError::BadStatus { status: 0xff }))]);
}

#[test]
fn cancelled_request_of_a_broken_queue_is_returned_and_not_lost() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    rig.submit_read(0, 2);
    rig.queue.cancel(1);
    assert_eq!(rig.results(), [(1, Err(RequestError::Cancelled))]);
    rig.device.raw().set_used_idx(9);
    assert_eq!(rig.results(), [(1, Err(RequestError::Returned)), (2, LOST)]);
}

#[test]
fn cancelled_and_broken_before_anybody_looked_is_cancelled_and_then_returned() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    rig.queue.cancel(1);
    rig.device.raw().set_used_idx(9);
    let told = [(1, Err(RequestError::Cancelled)), (1, Err(RequestError::Returned))];
    assert_eq!(rig.results(), told);
    end_of(&mut rig);
}

#[test]
fn what_is_lost_is_told_bit_by_bit_where_there_is_little_room() {
    let mut rig = rig(8, FULL);
    (0..3).for_each(|token| rig.submit_read(0, token));
    rig.device.raw().set_used_idx(100);
    let mut out = [Completion::default()];
    let told: Vec<_> = (0..4).map(|_| rig.queue.completions(&mut out).map(|_| out[0].token)).collect();
    assert_eq!(told[..3], [Ok(0), Ok(1), Ok(2)]);
    assert!(told[3].is_err());
}

#[test]
fn packed_ring_with_an_id_never_given_breaks_the_queue() {
    let mut rig = rig(8, RingFeatures { packed: true, ..FULL });
    rig.submit_read(0, 1);
    let raw = RawPacked::new(&rig.device.view, rig.device.end.layout).unwrap();
    let used =
        RawDescriptor { id: 5, flags: RawDescriptor::AVAIL | RawDescriptor::USED, ..raw.descriptor(0) };
    raw.set_descriptor(0, used);
    assert_eq!(rig.results(), [(1, LOST)]);
    assert_eq!(end_of(&mut rig), fault(DriverFault::NotInFlight { id: 5 }));
}

#[test]
fn blocking_call_on_a_device_that_breaks_the_ring_says_that_it_is_lost() {
    let mut rig = rig(8, FULL);
    let free_before = rig.pool.free_bytes();
    rig.device.raw().set_used_idx(77);
    let ended = rig.queue.read_blocking(0, &mut [0; 512], LONG);
    assert!(matches!(ended, Err(BlockingError::Request(RequestError::Lost))));
    assert_eq!(rig.pool.free_bytes(), free_before - 4096);
    let again = rig.queue.flush_blocking(LONG);
    assert!(matches!(again, Err(BlockingError::Push(PushError::Dead(_)))));
}
