//! A stress test with real threads: four threads submit, and kick without holding the lock, while the queue is
//! restarted.
//!
//! - Each restart stops a device in the middle of its work, with some requests taken and not answered, and
//!   starts another device on the other ring, with another doorbell.
//! - Each round ends without restarts: everything in flight must end by kicks and signals alone, so that no restart can
//!   hide a lost one.
//! - With `BAREBLK_LONG=1`, the test runs for minutes instead of seconds.

use std::collections::HashSet;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use guest_mem::{GuestMemory, GuestRange, MemoryView};
use qspinlock::StdMutex;
use rustix::event::{PollFd, PollFlags, poll};
use virtqueue::{Chain, DeviceQueue, RingFeatures};
use xtask::sizes;

use crate::alone::alone;
use crate::kick::{Doorbell, EventFd};
use crate::memory::{Buffer, PoolOptions};
use crate::queue::link::{QueueLink, RingPlace};
use crate::request::{Completion, Request, Work};
use crate::shared::{KickPolicy, SharedQueue};

const SUBMITTERS: u64 = 4;
const BATCH: u64 = 3;
const QUEUE_SIZE: u16 = 32;
const ROUND: Duration = Duration::from_millis(50);
/// Long enough for any machine; a test that waits this long has failed.
const LONG: Duration = Duration::from_secs(30);
/// Allowed growth in descriptors since the first round; if each restart leaked its descriptors, the test would exceed
/// this within a second.
const FDS_MORE: usize = 100;

/// A slow doorbell, so that a ring is often still in progress when the queue already has another doorbell.
#[derive(Debug)]
struct LateBell(Arc<EventFd>);

impl Doorbell for LateBell {
    fn ring(&self) {
        thread::yield_now();
        self.0.ring();
    }
}

/// A request that a device has taken and not answered.
struct Taken {
    tag: u16,
    status_addr: u64,
    written_bytes: u32,
}

/// A device that answers out of order, and leaves requests unanswered when it stops.
struct Device {
    ring: DeviceQueue,
    view: MemoryView,
    chain: Chain,
    taken: Vec<Taken>,
    bell: Arc<EventFd>,
    call: Arc<EventFd>,
}

impl Device {
    fn run(mut self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            self.take_all();
            if !self.taken.is_empty() {
                self.answer_some();
            } else if !self.ring.enable_kicks().unwrap() {
                poll(&mut [PollFd::new(&*self.bell, PollFlags::IN)], None).unwrap();
                self.bell.clear();
            }
        }
    }

    fn take_all(&mut self) {
        while let Some(tag) = self.ring.pop(&mut self.chain).unwrap() {
            let writable = self.chain.writable();
            let written_bytes = writable.iter().map(|range| range.len_bytes).sum();
            let status_addr = writable.last().unwrap().addr;
            self.taken.push(Taken { tag, status_addr, written_bytes });
        }
    }

    /// Answers half of the requests, the last one first.
    fn answer_some(&mut self) {
        for taken in self.taken.split_off(self.taken.len() / 2) {
            self.view.store(taken.status_addr, &[0]).unwrap();
            self.ring.push_used(taken.tag, taken.written_bytes);
        }
        self.ring.publish();
        if self.ring.needs_notification() {
            self.call.ring();
        }
    }
}

/// A device on its own thread.
struct Session {
    bell: Arc<EventFd>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Session {
    fn start(rig: &Rig, place: RingPlace, bell: Arc<EventFd>) -> Self {
        let view = MemoryView::new(Arc::clone(&rig.memory));
        let ring = DeviceQueue::new(&view, place.layout, rig.features, place.base).unwrap();
        let device = Device {
            ring,
            view,
            chain: Chain::with_capacity(QUEUE_SIZE),
            taken: Vec::new(),
            bell: Arc::clone(&bell),
            call: Arc::clone(rig.link.call()),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&stop);
        Self { bell, stop, thread: thread::spawn(move || device.run(&theirs)) }
    }

    /// Stops the device in the middle of its work.
    fn end(self) {
        self.stop.store(true, Ordering::Relaxed); // the doorbell's write orders this store
        self.bell.ring();
        self.thread.join().unwrap();
    }
}

struct Rig {
    queue: SharedQueue<StdMutex>,
    link: Arc<QueueLink>,
    memory: Arc<GuestMemory>,
    features: RingFeatures,
    data: [GuestRange; 1],
    _buffer: Buffer,
    next_token: AtomicU64,
    in_flight: Mutex<HashSet<u64>>,
    restarts: AtomicU64,
    sent_again: AtomicU64,
}

impl Rig {
    fn new(features: RingFeatures) -> (Self, Session) {
        let bell = Arc::new(EventFd::new().unwrap());
        let pool = PoolOptions { size_bytes: 1 << 20, huge_pages: false };
        let late = Arc::new(LateBell(Arc::clone(&bell)));
        let (queue, pool, end) = alone(QUEUE_SIZE, features, pool, late).unwrap();
        let buffer = pool.take(4096).unwrap();
        let rig = Self {
            link: Arc::clone(queue.link()),
            queue: SharedQueue::new(queue, KickPolicy::Unlocked),
            memory: end.memory,
            features,
            data: [buffer.range()],
            _buffer: buffer,
            next_token: AtomicU64::new(0),
            in_flight: Mutex::default(),
            restarts: AtomicU64::new(0),
            sent_again: AtomicU64::new(0),
        };
        let session = Session::start(&rig, rig.link.place(), bell);
        (rig, session)
    }

    fn submit_until(&self, end: Instant) {
        while Instant::now() < end {
            let first = self.next_token.fetch_add(BATCH, Ordering::Relaxed);
            let tokens: Vec<_> = (first..first + BATCH).collect();
            self.in_flight.lock().unwrap().extend(&tokens);
            let read = |&token: &u64| Request::new(Work::Read { sector: 0, data: &self.data }, token);
            let taken = self.queue.submit(&tokens.iter().map(read).collect::<Vec<_>>()).unwrap_or(0);
            tokens[taken..].iter().for_each(|token| self.ended(*token));
            self.wait(Duration::from_millis(1));
        }
    }

    fn ended(&self, token: u64) {
        assert!(self.in_flight.lock().unwrap().remove(&token), "request {token} ended twice");
    }

    fn wait(&self, limit: Duration) -> usize {
        let mut out = [Completion::default(); 8];
        let taken = self.queue.wait(&mut out, limit).unwrap();
        for completion in &out[..taken] {
            assert_eq!(completion.result, Ok(()));
            self.ended(completion.token);
        }
        taken
    }

    fn restart_until(&self, end: Instant, mut session: Session) -> Session {
        while Instant::now() < end {
            thread::sleep(Duration::from_micros(300));
            session = self.restart(session);
        }
        session
    }

    fn restart(&self, session: Session) -> Session {
        session.end();
        let bell = Arc::new(EventFd::new().unwrap());
        let late = Arc::new(LateBell(Arc::clone(&bell)));
        let place = self.link.offer_restart(late).unwrap();
        let session = Session::start(self, place, bell);
        let outcome = loop {
            match self.link.wait_outcome(Duration::from_millis(1)) {
                Some(outcome) => break outcome,
                None => drop(self.wait(Duration::ZERO)), // the submitters may have finished
            }
        };
        self.restarts.fetch_add(1, Ordering::Relaxed);
        self.sent_again.fetch_add(outcome.resubmitted, Ordering::Relaxed);
        session
    }

    /// Waits until everything in flight has ended, by kicks and signals alone.
    fn drain(&self) {
        while self.queue.in_flight() > 0 {
            let taken = self.wait(LONG);
            assert!(taken > 0, "{} requests never end", self.queue.in_flight());
        }
        assert_eq!(*self.in_flight.lock().unwrap(), HashSet::new());
    }

    fn round(&self, session: Session) -> Session {
        let end = Instant::now() + ROUND;
        let session = thread::scope(|scope| {
            (0..SUBMITTERS).for_each(|_| drop(scope.spawn(|| self.submit_until(end))));
            self.restart_until(end, session)
        });
        self.drain();
        session
    }
}

fn open_fds() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

fn rounds(features: RingFeatures) {
    let (rig, mut session) = Rig::new(features);
    let end = Instant::now() + sizes::RESTART_STRESS.now();
    let fds_at_first = open_fds();
    while Instant::now() < end {
        session = rig.round(session);
        let fds = open_fds();
        assert!(fds <= fds_at_first + FDS_MORE, "{fds} descriptors, {fds_at_first} at first");
    }
    session.end();
    let [restarts, sent_again] = [&rig.restarts, &rig.sent_again].map(|count| count.load(Ordering::Relaxed));
    let submitted = rig.next_token.load(Ordering::Relaxed);
    println!("{restarts} restarts, {sent_again} of {submitted} requests sent again");
    assert!(restarts > 0 && sent_again > 0);
}

#[test]
fn requests_of_four_threads_end_once_while_a_split_queue_is_restarted() {
    rounds(RingFeatures { event_idx: true, indirect: true, packed: false });
}

#[test]
fn requests_of_four_threads_end_once_while_a_packed_queue_is_restarted() {
    rounds(RingFeatures { event_idx: true, indirect: false, packed: true });
}
