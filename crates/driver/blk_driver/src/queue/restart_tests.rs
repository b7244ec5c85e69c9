//! A queue whose back-end disconnected: the requests that the next back-end gets, and the results that the owner gets.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::alone::{DeviceEnd, alone_with};
use crate::error::{PushError, QueueError};
use crate::kick::EventFd;
use crate::memory::PoolOptions;
use crate::queue::area::{Area, AreaLayout};
use crate::queue::fill::{Limits, SegmentLimits};
use crate::queue::link::{QueueLink, RestartOutcome};
use crate::request::{Completion, Durability, Request, RequestError, Work};
use crate::rig::{self, Device, FULL, IOERR, LONG, PLAIN, Rig};
use guest_mem::{GuestAddress, GuestMemory, Region};
use virtio_blk::kind;
use virtqueue::RingFeatures;

/// Does what the session does after a reconnect: offers a ring and starts the device on it.
pub(crate) fn restart(rig: &mut Rig) -> (Device, Arc<EventFd>) {
    let bell = Arc::new(EventFd::new().unwrap());
    let place = rig.queue.link().offer_restart(Arc::clone(&bell) as _).unwrap();
    let end = &rig.device.end;
    let end = DeviceEnd {
        memory: Arc::clone(&end.memory),
        layout: place.layout,
        features: end.features,
        base: place.base,
        call: Arc::clone(&end.call),
    };
    (Device::new(end), bell)
}

fn rings(bell: &EventFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(bell, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

fn outcome(rig: &Rig) -> Option<RestartOutcome> {
    rig.queue.link().outcome()
}

fn sectors(device: &mut Device) -> Vec<u64> {
    device.pop_all().iter().map(|seen| seen.sector).collect()
}

#[test]
fn what_was_not_acknowledged_is_sent_again_in_order_and_the_new_bell_rung() {
    let mut rig = rig::rig(8, FULL);
    (1..=4).for_each(|sector| rig.submit_read(sector, sector));
    let seen = rig.device.pop_all();
    rig.device.answer(&seen[1], 0);
    rig.device.answer(&seen[2], IOERR);
    let (mut device, bell) = restart(&mut rig);
    assert_eq!(rig.results(), [(2, Ok(())), (3, Err(RequestError::IoErr))]);
    assert_eq!(outcome(&rig), Some(RestartOutcome { completed: 2, resubmitted: 2 }));
    assert_eq!(rings(&bell), 1);
    assert_eq!(sectors(&mut device), [1, 4]);
}

#[test]
fn answers_of_the_old_back_end_after_the_restart_reach_nobody() {
    let mut rig = rig::rig(8, FULL);
    rig.submit_read(1, 1);
    let old = rig.device.pop().unwrap();
    let (mut device, _) = restart(&mut rig);
    assert_eq!(rig.results(), []);
    rig.device.answer(&old, IOERR);
    assert_eq!(rig.results(), []);
    let new = device.pop().unwrap();
    device.answer(&new, 0);
    rig.device.view.store(old.writable.last().unwrap().addr, &[IOERR]).unwrap();
    assert_eq!(rig.results(), [(1, Ok(()))]);
}

#[test]
fn requests_pushed_while_the_back_end_is_away_go_to_the_next_one() {
    let mut rig = rig::rig(8, FULL);
    rig.submit_read(1, 1);
    rig.submit_read(2, 2);
    let (mut device, bell) = restart(&mut rig);
    rig.submit_read(3, 3);
    assert_eq!(rings(&bell), 1);
    assert_eq!(sectors(&mut device), [1, 2, 3]);
}

#[test]
fn cancelled_request_is_not_done_again_and_its_buffers_come_back() {
    let mut rig = rig::rig(8, FULL);
    (1..=3).for_each(|sector| rig.submit_read(sector, sector));
    rig.queue.cancel(1);
    assert_eq!(rig.results(), [(1, Err(RequestError::Cancelled))]);
    rig.queue.cancel(2);
    let (mut device, _) = restart(&mut rig);
    let told = [
        (1, Err(RequestError::Returned)),
        (2, Err(RequestError::Cancelled)),
        (2, Err(RequestError::Returned)),
    ];
    assert_eq!(rig.results(), told);
    assert_eq!(sectors(&mut device), [3]);
}

#[test]
fn durable_write_without_its_flush_starts_again_with_the_write() {
    let mut rig = rig::rig(8, FULL);
    let data = [rig.data(512)];
    for token in [1, 2] {
        rig.push(Work::Write { sector: token, data: &data, durability: Durability::Durable }, token);
    }
    rig.queue.submit();
    let writes = rig.device.pop_all();
    rig.device.answer(&writes[0], 0);
    assert_eq!(rig.results(), []);
    rig.device.answer(&writes[1], 0);
    let (mut device, _) = restart(&mut rig);
    assert_eq!(rig.results(), []);
    assert_eq!(outcome(&rig), Some(RestartOutcome { completed: 0, resubmitted: 2 }));
    let again = device.pop_all();
    assert_eq!(
        again.iter().map(|seen| (seen.kind, seen.sector)).collect::<Vec<_>>(),
        [(kind::OUT, 1), (kind::OUT, 2)]
    );
    again.iter().for_each(|seen| device.answer(seen, 0));
    assert_eq!(rig.results(), []);
    device.serve();
    assert_eq!(rig.results(), [(1, Ok(())), (2, Ok(()))]);
}

#[test]
fn writes_that_no_longer_fit_beside_each_other_wait_for_room() {
    let mut rig = rig::rig(8, PLAIN);
    let data = [rig.data(512); 3];
    let write = Work::Write { sector: 1, data: &data, durability: Durability::Durable };
    // Each write has five descriptors, and its flush two; two writes fit while both flush.
    (1..=2).for_each(|token| {
        rig.push(write, token);
        rig.queue.submit();
        let seen = rig.device.pop_all();
        rig.device.answer(seen.last().unwrap(), 0);
        assert_eq!(rig.results(), []);
    });
    let (mut device, _) = restart(&mut rig);
    assert_eq!(rig.results(), []);
    assert_eq!(outcome(&rig), Some(RestartOutcome { completed: 0, resubmitted: 1 }));
    // There is room for the flush's two descriptors, but the write was pushed first.
    let flush = Request::new(Work::Flush, 9);
    assert_eq!(rig.queue.push(&flush), Err(PushError::Full { in_flight: 2 }));
    let mut ended = Vec::new();
    (0..8).for_each(|_| {
        device.serve();
        ended.extend(rig.results());
    });
    assert_eq!(ended, [(1, Ok(())), (2, Ok(()))]);
}

#[test]
fn segments_are_sent_again_as_they_were_given() {
    let mut rig = rig::rig(8, FULL);
    let segments = [virtio_blk::Segment { sector: 5, sectors: 6, unmap: true }];
    rig.push(Work::WriteZeroes { segments: &segments }, 1);
    rig.queue.submit();
    let old = rig.device.pop().unwrap();
    rig.device.view.store(old.data()[0].addr, &[0xee; 16]).unwrap();
    let (mut device, _) = restart(&mut rig);
    rig.results();
    let mut bytes = [0; 16];
    let seen = device.pop().unwrap();
    device.view.read(seen.data()[0].addr, &mut bytes).unwrap();
    assert_eq!(bytes[..], virtio_blk::encode_segments(&segments)[..]);
}

#[test]
fn old_ring_that_makes_no_sense_is_left_without_a_fault() {
    let mut rig = rig::rig(8, FULL);
    rig.submit_read(1, 1);
    rig.device.raw().set_used_idx(500);
    let (mut device, _) = restart(&mut rig);
    assert_eq!(rig.results(), []);
    assert_eq!(sectors(&mut device), [1]);
}

#[test]
fn second_offer_before_the_owner_looked_replaces_the_first() {
    let mut rig = rig::rig(8, FULL);
    rig.submit_read(1, 1);
    let (mut first, first_bell) = restart(&mut rig);
    let (mut second, second_bell) = restart(&mut rig);
    assert_eq!(rig.results(), []);
    assert_eq!((rings(&first_bell), rings(&second_bell)), (0, 1));
    assert_eq!(first.end.layout, second.end.layout);
    assert_eq!(sectors(&mut second), [1]);
    // In this test, both devices have the same ring; in reality, the first device no longer exists.
    first.pop_all();
}

#[test]
fn ring_that_the_owner_is_still_leaving_is_not_offered_before_it_has_left() {
    let rig = rig::rig(8, FULL);
    let link = Arc::clone(rig.queue.link());
    link.offer_restart(Arc::new(EventFd::new().unwrap())).unwrap();
    let taken = link.take_mail(); // from here on the owner reads the old ring to its end
    let (offered, is_offered) = std::sync::mpsc::channel();
    let theirs = Arc::clone(&link);
    let session = std::thread::spawn(move || {
        let place = theirs.offer_restart(Arc::new(EventFd::new().unwrap())).unwrap();
        offered.send(place).unwrap();
    });

    assert!(is_offered.recv_timeout(Duration::from_millis(50)).is_err());
    link.report(RestartOutcome::default());

    assert_eq!(is_offered.recv_timeout(LONG).unwrap(), link.place());
    assert!(taken.is_some() && link.outcome().is_none(), "the outcome is not that of the second offer");
    session.join().unwrap();
}

#[test]
fn each_restart_uses_the_ring_that_the_last_back_end_did_not_know() {
    let mut rig = rig::rig(8, FULL);
    let first = rig.device.end.layout;
    let (second, _) = restart(&mut rig);
    assert_eq!(rig.results(), []);
    let (third, _) = restart(&mut rig);
    assert_ne!(second.end.layout, first);
    assert_eq!(third.end.layout, first);
}

#[test]
fn packed_queue_goes_on_after_a_restart_in_the_middle_of_its_ring() {
    let mut rig = rig::rig(4, RingFeatures { packed: true, ..FULL });
    (0..3).for_each(|token| rig.submit_read(token, token));
    rig.device.serve();
    assert_eq!(rig.results().len(), 3);
    (3..6).for_each(|token| rig.submit_read(token, token));
    let (mut device, _) = restart(&mut rig);
    assert_eq!(rig.results(), []);
    assert_eq!(device.serve(), 3);
    assert_eq!(rig.results(), [(3, Ok(())), (4, Ok(())), (5, Ok(()))]);
}

#[test]
fn sleeping_owner_wakes_for_a_restart_and_gets_the_new_answer() {
    let mut rig = rig::rig(8, FULL);
    rig.submit_read(1, 1);
    let link = Arc::clone(rig.queue.link());
    let mut out = [Completion::default()];
    let end = &rig.device.end;
    let (memory, features, call) = (Arc::clone(&end.memory), end.features, Arc::clone(&end.call));
    std::thread::scope(|threads| {
        threads.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            let bell = Arc::new(EventFd::new().unwrap());
            let place = link.offer_restart(bell).unwrap();
            let (layout, base) = (place.layout, place.base);
            let mut device = Device::new(DeviceEnd { memory, layout, features, base, call });
            assert!(link.wait_outcome(LONG).is_some());
            assert_eq!(device.serve(), 1);
        });
        assert_eq!(rig.queue.wait(&mut out, LONG), Ok(1));
    });
    assert_eq!((out[0].token, out[0].result), (1, Ok(())));
}

#[test]
fn queue_whose_back_end_does_not_come_back_loses_what_is_in_flight() {
    let mut rig = rig::rig(8, FULL);
    (1..=3).for_each(|token| rig.submit_read(token, token));
    let seen = rig.device.pop_all();
    rig.device.answer(&seen[0], 0);
    rig.queue.cancel(2);
    rig.queue.link().gone();
    let told = [
        (1, Ok(())),
        (2, Err(RequestError::Cancelled)),
        (2, Err(RequestError::Returned)),
        (3, Err(RequestError::Lost)),
    ];
    assert_eq!(rig.results(), told);
    let gone = Err(QueueError::Disconnected { queue: 0 });
    assert_eq!(rig.queue.wait(&mut [Completion::default()], LONG), gone);
}

#[test]
fn sleeping_owner_wakes_when_the_back_end_is_given_up() {
    let mut rig = rig::rig(8, FULL);
    rig.submit_read(1, 1);
    let link = Arc::clone(rig.queue.link());
    let mut out = [Completion::default()];
    std::thread::scope(|threads| {
        threads.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            link.gone();
        });
        assert_eq!(rig.queue.wait(&mut out, LONG), Ok(1));
    });
    assert_eq!(out[0].result, Err(RequestError::Lost));
}

#[test]
fn deadline_holds_while_the_back_end_is_away() {
    let mut rig = rig::rig(8, FULL);
    let deadline = Some(Instant::now() + Duration::from_millis(10));
    rig.queue.push(&Request { work: Work::Flush, token: 1, deadline }).unwrap();
    let mut out = [Completion::default()];
    assert_eq!(rig.queue.wait(&mut out, LONG), Ok(1));
    let (mut device, _) = restart(&mut rig);
    assert_eq!(rig.results(), [(1, Err(RequestError::Returned))]);
    assert_eq!(device.pop(), None);
}

#[test]
fn session_learns_of_a_broken_ring_and_of_an_owner_that_left() {
    let mut rig = rig::rig(8, FULL);
    let link: Arc<QueueLink> = Arc::clone(rig.queue.link());
    rig.device.raw().set_used_idx(3);
    assert!(rig.queue.completions(&mut [Completion::default()]).is_err());
    assert_eq!((link.is_broken(), link.is_dropped()), (true, false));
    drop(rig.queue);
    assert!(link.is_dropped());
    assert_eq!(link.wait_outcome(LONG), None);
}

#[test]
fn broken_queue_does_not_follow_an_offer_and_says_so() {
    let mut rig = rig::rig(8, FULL);
    rig.submit_read(1, 1);
    rig.device.raw().set_used_idx(3);
    assert_eq!(rig.results(), [(1, Err(RequestError::Lost))]);
    let (mut device, _) = restart(&mut rig);
    assert!(rig.queue.completions(&mut [Completion::default()]).is_err());
    assert_eq!(outcome(&rig), Some(RestartOutcome::default()));
    assert_eq!(device.pop(), None);
}

fn with_limits(limits: Limits) -> Rig {
    let bell = Arc::new(EventFd::new().unwrap());
    let options = PoolOptions { size_bytes: 1 << 20, huge_pages: false };
    let (queue, pool, end) = alone_with(8, FULL, limits, options, Arc::clone(&bell) as _).unwrap();
    let buffer = pool.take(4096).unwrap();
    Rig { queue, device: Device::new(end), pool, buffer, bell }
}

#[test]
fn device_without_a_cache_is_sent_no_flush_and_durable_writes_as_they_are() {
    let mut rig = with_limits(Limits { flush: false, ..Limits::all() });
    let data = [rig.data(512)];
    rig.push(Work::Flush, 1);
    rig.push(Work::Write { sector: 1, data: &data, durability: Durability::Durable }, 2);
    rig.queue.submit();
    assert_eq!(rig.device.serve(), 1);
    assert_eq!(rig.results(), [(1, Ok(())), (2, Ok(()))]);
    assert_eq!(rig.device.pop(), None);
}

#[test]
fn flush_of_a_device_without_a_cache_wakes_its_owner_at_once() {
    let mut rig = with_limits(Limits { flush: false, ..Limits::all() });
    rig.push(Work::Flush, 1);
    assert_eq!(rig.queue.arm(), Ok(true));
    assert_eq!(rig.queue.wait(&mut [Completion::default()], LONG), Ok(1));
    assert_eq!(rig.queue.in_flight(), 0);
}

#[test]
fn device_that_does_not_offer_a_request_is_not_sent_it() {
    let none = SegmentLimits::default();
    let mut rig = with_limits(Limits { discard: none, read_only: true, ..Limits::all() });
    let segments = [virtio_blk::Segment::default()];
    let data = [rig.data(512)];
    let mut refused = |work| rig.queue.push(&Request::new(work, 1)).unwrap_err();
    let write = Work::Write { sector: 1, data: &data, durability: Durability::Cached };
    assert_eq!(refused(write), PushError::ReadOnly);
    assert_eq!(refused(Work::Discard { segments: &segments }), PushError::ReadOnly);
    let mut rig = with_limits(Limits { discard: none, ..Limits::all() });
    let refused = rig.queue.push(&Request::new(Work::Discard { segments: &segments }, 1)).unwrap_err();
    assert_eq!(refused, PushError::NotOffered { what: "discard" });
}

#[test]
fn segment_longer_than_the_device_takes_is_refused() {
    let limits = SegmentLimits { segments: 1, sectors: 100 };
    let mut rig = with_limits(Limits { write_zeroes: limits, ..Limits::all() });
    let segments = [virtio_blk::Segment { sector: 0, sectors: 101, unmap: false }];
    let refused = rig.queue.push(&Request::new(Work::WriteZeroes { segments: &segments }, 1)).unwrap_err();
    assert_eq!(refused, PushError::SegmentLength { what: "write zeroes", sectors: 101, max: 100 });
}

#[test]
fn area_too_small_for_its_queue_is_refused() {
    let region = Arc::new(Region::from_memfd(GuestAddress(0), 4096).unwrap());
    let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
    assert!(Area::map(AreaLayout::new(GuestAddress(0), 64, 128), memory).is_err());
}
