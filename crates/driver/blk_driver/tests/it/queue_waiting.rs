//! Sleeping for completions: with a device that answers, a device that never answers, and a device that only signals.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use blk_driver::{Completion, Doorbell, Durability, EventFd, Request, RequestError, Work};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtqueue::RingFeatures;

use crate::rig::{Device, FULL, LONG, PLAIN, Rig, rig};

const SHORT: Duration = Duration::from_millis(20);

/// A device on its own thread, which sleeps on the doorbell and follows the rules of notification.
struct Served {
    stop: Arc<AtomicBool>,
    bell: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.bell.ring();
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A disk of zeroes that stores nothing; the id is "served".
fn serve(mut device: Device, bell: Arc<EventFd>) -> Served {
    let stop = Arc::new(AtomicBool::new(false));
    let (device_stop, device_bell) = (Arc::clone(&stop), Arc::clone(&bell));
    let thread = thread::spawn(move || {
        while !device_stop.load(Ordering::Relaxed) {
            for seen in device.pop_all() {
                if seen.kind == virtio_blk::kind::GET_ID {
                    device.view.store(seen.writable[0].addr, b"served").unwrap();
                }
                device.answer(&seen, 0);
            }
            device.signal();
            if !device.ring.enable_kicks().unwrap() {
                let mut fds = [PollFd::new(&*device_bell, PollFlags::IN)];
                poll(&mut fds, Some(&Timespec { tv_sec: 1, tv_nsec: 0 })).unwrap();
                let _ = rustix::io::read(&*device_bell, &mut [0; 8]);
            }
        }
    });
    Served { stop, bell, thread: Some(thread) }
}

fn round_trips(features: RingFeatures, depth: u64) {
    let Rig { mut queue, device, buffer, bell, .. } = rig(64, features);
    let _served = serve(device, bell);
    let data = [buffer.range()];
    let mut out = [Completion::default(); 16];
    let (mut pushed, mut completed) = (0, 0);
    while completed < 20_000 {
        while pushed - completed < depth {
            queue.push(&Request::new(Work::Read { sector: 0, data: &data }, pushed)).unwrap();
            pushed += 1;
        }
        queue.submit();
        let taken = queue.wait(&mut out, LONG).unwrap();
        assert!(taken > 0, "nothing for {LONG:?} with {depth} in flight");
        assert!(out[..taken].iter().all(|c| c.result == Ok(())));
        completed += taken as u64;
    }
}

#[test]
fn device_thread_answers_every_request_of_a_sleeping_owner_with_event_index() {
    round_trips(FULL, 1);
    round_trips(FULL, 16);
}

#[test]
fn device_thread_answers_every_request_of_a_sleeping_owner_with_flags() {
    round_trips(PLAIN, 1);
    round_trips(PLAIN, 16);
}

#[test]
fn device_thread_answers_every_request_of_a_sleeping_owner_on_a_packed_ring() {
    round_trips(RingFeatures { packed: true, ..FULL }, 1);
    round_trips(RingFeatures { packed: true, ..PLAIN }, 16);
}

#[test]
fn blocking_calls_of_every_kind_are_answered_by_a_device_thread() {
    let Rig { mut queue, device, bell, pool, .. } = rig(8, FULL);
    let _served = serve(device, bell);
    let free_before = pool.free_bytes();
    let mut out = vec![1; 1 << 20];
    queue.read_blocking(0, &mut out, LONG).unwrap();
    queue.write_blocking(8, &out, Durability::Durable, LONG).unwrap();
    queue.write_blocking(8, &[7; 512], Durability::Cached, LONG).unwrap();
    queue.flush_blocking(LONG).unwrap();
    let segments = [virtio_blk::Segment { sector: 0, sectors: 8, unmap: true }];
    queue.discard_blocking(&segments, LONG).unwrap();
    queue.write_zeroes_blocking(&segments, LONG).unwrap();
    assert_eq!(queue.get_id_blocking(LONG).unwrap(), *b"served\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(pool.free_bytes(), free_before);
}

#[test]
fn wait_for_a_device_that_never_answers_ends_at_the_limit() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    let start = Instant::now();
    assert_eq!(rig.queue.wait(&mut [Completion::default()], SHORT), Ok(0));
    assert!(start.elapsed() >= SHORT);
    assert!(rig.queue.stats().sleeps > 0);
}

#[test]
fn wait_ends_with_the_earliest_deadline_and_not_at_the_limit() {
    let mut rig = rig(8, FULL);
    let work = Work::Flush;
    let deadline = Some(Instant::now() + SHORT);
    rig.queue.push(&Request { work, token: 4, deadline }).unwrap();
    let mut out = [Completion::default()];
    assert_eq!(rig.queue.wait(&mut out, LONG), Ok(1));
    assert_eq!((out[0].token, out[0].result), (4, Err(RequestError::DeadlinePassed)));
}

#[test]
fn wait_for_a_device_that_only_signals_ends_at_the_limit() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    let (stop, call) = (Arc::new(AtomicBool::new(false)), Arc::clone(&rig.device.end.call));
    let stopped = Arc::clone(&stop);
    let noise = thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            call.ring();
        }
    });
    let start = Instant::now();
    let waited = rig.queue.wait(&mut [Completion::default()], SHORT);
    stop.store(true, Ordering::Relaxed);
    noise.join().unwrap();
    assert_eq!(waited, Ok(0));
    assert!(start.elapsed() < LONG);
}

#[test]
fn wait_without_room_for_a_completion_returns_at_once() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    assert_eq!(rig.queue.wait(&mut [], Duration::MAX), Ok(0));
}

#[test]
fn armed_queue_makes_the_device_signal_its_descriptor_once() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    assert_eq!(rig.queue.arm(), Ok(false));
    rig.device.serve();
    let readable = |rig: &Rig| {
        let fd = rig.queue.completion_fd();
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    };
    assert!(readable(&rig));
    rig.queue.clear_signal();
    assert!(!readable(&rig));
    assert_eq!(rig.results(), [(1, Ok(()))]);
}

#[test]
fn arming_tells_of_an_answer_that_came_before() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 1);
    rig.device.serve();
    assert_eq!(rig.queue.arm(), Ok(true));
}

#[test]
fn queue_that_polls_is_not_signalled_without_event_index() {
    let mut rig = rig(8, PLAIN);
    rig.submit_read(0, 1);
    let seen = rig.device.pop().unwrap();
    rig.device.answer(&seen, 0);
    assert!(!rig.device.signal());
}

#[test]
fn signal_that_the_device_made_blocking_is_taken_off_without_waiting_for_it() {
    let mut rig = rig(8, FULL);
    // The back-end shares the eventfd, and file status flags belong to the eventfd, not to a descriptor.
    rustix::fs::fcntl_setfl(&*rig.device.end.call, rustix::fs::OFlags::empty()).unwrap();
    let (cleared, is_cleared) = std::sync::mpsc::channel();
    thread::spawn(move || {
        rig.device.end.call.ring();
        (0..2).for_each(|_| rig.queue.clear_signal());
        let nothing = rig.queue.wait(&mut [Completion::default()], SHORT);
        cleared.send(nothing).unwrap();
    });
    assert_eq!(is_cleared.recv_timeout(LONG), Ok(Ok(0)));
}
