//! A queue behind a lock: batches, both kick policies, and waiting threads, none of which sleeps through a completion.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::collections::HashSet;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use blk_driver::{
    Completion, Doorbell, Durability, KickPolicy, PoolOptions, PushError, QueueError, Request, RequestError,
    SharedQueue, Work, alone,
};
use guest_mem::GuestRange;
use lock_api::RawMutex;
use qspinlock::{Api04, Fair, Hybrid, PvQSpinLock, QSpinLock, StdMutex, TicketLock};

use crate::device_thread;
use crate::rig::{Device, FULL, LONG, PLAIN, Rig, rig};

/// A shared queue whose device the test steps through.
struct Shared {
    queue: Arc<SharedQueue<StdMutex>>,
    device: Device,
    bell: Arc<blk_driver::EventFd>,
    data: [GuestRange; 1],
    _buffer: blk_driver::Buffer,
}

fn shared(policy: KickPolicy) -> Shared {
    share(rig(8, FULL), policy)
}

fn share(rig: Rig, policy: KickPolicy) -> Shared {
    let data = [rig.data(4096)];
    let queue = Arc::new(SharedQueue::new(rig.queue, policy));
    Shared { queue, device: rig.device, bell: rig.bell, data, _buffer: rig.buffer }
}

impl Shared {
    fn read(&self, token: u64) -> Request<'_> {
        Request::new(Work::Read { sector: 0, data: &self.data }, token)
    }

    fn submit_reads(&self, tokens: std::ops::Range<u64>) -> Result<usize, PushError> {
        self.queue.submit(&tokens.map(|token| self.read(token)).collect::<Vec<_>>())
    }

    /// A thread that waits for one completion and is already asleep.
    fn sleeper(&self) -> Waiter {
        let asleep = self.queue.stats().sleeps;
        let sleeper = self.waiter(Duration::MAX); // no limit, so that a lost wake-up is noticed
        while self.queue.stats().sleeps == asleep {
            thread::yield_now();
        }
        sleeper
    }

    fn waiter(&self, limit: Duration) -> Waiter {
        let queue = Arc::clone(&self.queue);
        thread::spawn(move || {
            let mut out = [Completion::default()];
            queue.wait(&mut out, limit).map(|taken| out[..taken].to_vec())
        })
    }

    /// Takes at most `most` completions without waiting.
    fn take(&self, most: usize) -> Vec<u64> {
        let mut out = vec![Completion::default(); most];
        let taken = self.queue.completions(&mut out).unwrap();
        out[..taken].iter().map(|completion| completion.token).collect()
    }

    /// Answers the next request, without a signal.
    fn answer_one(&mut self) {
        let seen = self.device.pop().unwrap();
        self.device.answer(&seen, 0);
    }
}

type Waiter = JoinHandle<Result<Vec<Completion>, QueueError>>;

fn woken(waiter: Waiter) -> Result<Vec<Completion>, QueueError> {
    let started = Instant::now();
    while !waiter.is_finished() {
        assert!(started.elapsed() < LONG, "slept through it");
        thread::yield_now();
    }
    waiter.join().unwrap()
}

fn tokens(waiter: Waiter) -> Vec<u64> {
    woken(waiter).unwrap().iter().map(|completion| completion.token).collect()
}

#[test]
fn batch_is_published_once_and_rung_for_once() {
    for policy in [KickPolicy::Locked, KickPolicy::Unlocked] {
        let mut shared = shared(policy);
        assert_eq!(shared.submit_reads(0..5), Ok(5));
        let stats = shared.queue.stats();
        assert_eq!((stats.pushed, stats.publications, stats.kicks), (5, 1, 1));
        let mut rung = [0; 8];
        rustix::io::read(&*shared.bell, &mut rung).unwrap();
        assert_eq!((u64::from_ne_bytes(rung), shared.device.pop_all().len()), (1, 5));
    }
}

#[test]
fn batch_that_does_not_fit_is_taken_as_far_as_it_does() {
    let mut shared = shared(KickPolicy::Unlocked);
    assert_eq!(shared.submit_reads(0..10), Ok(8));
    assert_eq!(shared.device.pop_all().len(), 8);
    assert_eq!(shared.submit_reads(8..10), Err(PushError::Full { in_flight: 8 }));
    assert_eq!(shared.queue.in_flight(), 8);
}

#[test]
fn first_request_refused_is_an_error_and_a_later_one_ends_the_batch() {
    let shared = shared(KickPolicy::Unlocked);
    let elsewhere = [GuestRange { addr: 0x10, len_bytes: 512 }];
    let bad = Request::new(Work::Read { sector: 0, data: &elsewhere }, 9);
    let refused = PushError::NotRegistered { addr: 0x10, len_bytes: 512 };
    assert_eq!(shared.queue.submit(&[bad, shared.read(0)]), Err(refused));
    assert_eq!(shared.queue.stats().publications, 0);
    assert_eq!(shared.queue.submit(&[shared.read(0), bad, shared.read(1)]), Ok(1));
}

#[test]
fn empty_batch_does_nothing() {
    let shared = shared(KickPolicy::Unlocked);
    assert_eq!(shared.queue.submit(&[]), Ok(0));
    assert_eq!(shared.queue.stats().kicks, 0);
}

/// A doorbell: when it is rung, another thread tries to take the queue's lock.
#[derive(Debug)]
struct LockProbe {
    queue: OnceLock<Weak<SharedQueue<StdMutex>>>,
    /// If the limit is too short, a free lock may look taken, but never the other way round.
    limit: Duration,
    was_free: Mutex<Option<bool>>,
}

impl Doorbell for LockProbe {
    fn ring(&self) {
        let queue = self.queue.get().and_then(Weak::upgrade).unwrap();
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || sender.send(queue.in_flight()));
        *self.was_free.lock().unwrap() = Some(receiver.recv_timeout(self.limit).is_ok());
    }
}

/// Whether another thread could take the lock within `limit` while the doorbell rang.
fn lock_is_free_while_ringing(policy: KickPolicy, limit: Duration) -> bool {
    let probe = Arc::new(LockProbe { queue: OnceLock::new(), limit, was_free: Mutex::new(None) });
    let options = PoolOptions { size_bytes: 1 << 20, huge_pages: false };
    let (queue, pool, _end) = alone(8, PLAIN, options, Arc::clone(&probe) as _).unwrap();
    let buffer = pool.take(4096).unwrap();
    let queue = Arc::new(SharedQueue::new(queue, policy));
    probe.queue.set(Arc::downgrade(&queue)).unwrap();
    let data = [buffer.range()];
    queue.submit(&[Request::new(Work::Read { sector: 0, data: &data }, 0)]).unwrap();
    let was_free = *probe.was_free.lock().unwrap();
    was_free.unwrap()
}

#[test]
fn unlocked_policy_rings_when_others_can_have_the_lock() {
    assert!(lock_is_free_while_ringing(KickPolicy::Unlocked, LONG));
}

#[test]
fn locked_policy_rings_while_others_wait_for_the_lock() {
    assert!(!lock_is_free_while_ringing(KickPolicy::Locked, Duration::from_millis(50)));
}

#[test]
fn kick_that_outlives_its_queue_rings_a_doorbell_that_is_open() {
    let mut rig = rig(8, FULL);
    let data = [rig.data(4096)];
    rig.push(Work::Read { sector: 0, data: &data }, 1);
    let kick = rig.queue.prepare_kick().unwrap();
    let bell = Arc::downgrade(&rig.bell);
    drop(rig);
    assert_eq!(bell.strong_count(), 1, "the kick's own");
    kick.notify();
    assert_eq!(bell.strong_count(), 0);
}

#[test]
fn kick_is_given_when_the_thread_that_has_it_unwinds() {
    let mut rig = rig(8, FULL);
    let data = [rig.data(4096)];
    rig.push(Work::Read { sector: 0, data: &data }, 1);
    let kick = rig.queue.prepare_kick();
    let panicked = thread::spawn(move || {
        let _kick = kick;
        panic!("meant to");
    });
    assert!(panicked.join().is_err());
    assert_eq!(rustix::io::read(&*rig.bell, &mut [0; 8]), Ok(8));
}

#[test]
fn sleeper_wakes_at_the_devices_signal() {
    let mut shared = shared(KickPolicy::Unlocked);
    shared.submit_reads(0..1).unwrap();
    let sleeper = shared.sleeper();
    assert_eq!(shared.device.serve(), 1);
    assert_eq!(tokens(sleeper), [0]);
}

#[test]
fn sleeper_hears_of_the_next_completion_after_another_thread_took_the_one_before() {
    for features in [PLAIN, FULL] {
        let mut shared = share(rig(8, features), KickPolicy::Unlocked);
        shared.submit_reads(0..2).unwrap();
        let sleeper = shared.sleeper();
        shared.answer_one();
        // The take happens after the device's publication and before its check of whether to signal.
        assert_eq!(shared.take(8), [0]);
        shared.answer_one();
        assert!(shared.device.signal(), "the request for a signal stands");
        assert_eq!(tokens(sleeper), [1]);
    }
}

#[test]
fn sleeper_is_woken_without_a_signal_for_what_another_thread_left_behind() {
    let mut shared = shared(KickPolicy::Unlocked);
    shared.submit_reads(0..2).unwrap();
    let sleeper = shared.sleeper();
    shared.answer_one();
    shared.answer_one();
    assert_eq!(shared.take(1), [0]);
    assert_eq!(tokens(sleeper), [1]);
}

#[test]
fn sleeper_sleeps_on_when_another_thread_took_what_it_was_signalled_for() {
    let mut shared = shared(KickPolicy::Unlocked);
    shared.submit_reads(0..2).unwrap();
    let sleeper = shared.sleeper();
    shared.answer_one();
    assert!(shared.device.ring.needs_notification());
    assert_eq!(shared.take(8), [0]);
    shared.device.end.call.ring();
    while shared.queue.stats().sleeps < 2 {
        thread::yield_now();
    }
    thread::sleep(Duration::from_millis(5)); // gives a sleeper that does not clear the signal time to show that
    shared.answer_one();
    shared.device.signal();
    assert_eq!((tokens(sleeper), shared.queue.stats().sleeps), (vec![1], 2));
}

#[test]
fn sleeper_is_told_of_a_cancelled_request() {
    let shared = shared(KickPolicy::Unlocked);
    shared.submit_reads(0..1).unwrap();
    let sleeper = shared.sleeper();
    assert!(shared.queue.cancel(0) && !shared.queue.cancel(7));
    assert_eq!(woken(sleeper).unwrap()[0].result, Err(RequestError::Cancelled));
}

#[test]
fn sleeper_ends_a_request_submitted_later_with_a_deadline_before_its_own_time() {
    let shared = shared(KickPolicy::Unlocked);
    let sleeper = shared.sleeper();
    let deadline = Some(Instant::now() + Duration::from_millis(20));
    shared.queue.submit(&[Request { deadline, ..shared.read(3) }]).unwrap();
    assert_eq!(woken(sleeper).unwrap()[0].result, Err(RequestError::DeadlinePassed));
}

#[test]
fn durable_write_is_flushed_by_a_thread_that_sleeps() {
    let mut shared = share(rig(8, PLAIN), KickPolicy::Unlocked);
    let work = Work::Write { sector: 0, data: &shared.data, durability: Durability::Durable };
    shared.queue.submit(&[Request::new(work, 5)]).unwrap();
    let sleeper = shared.sleeper();
    assert_eq!(shared.device.serve(), 1);
    while shared.device.serve() == 0 {
        thread::yield_now();
    }
    assert_eq!(tokens(sleeper), [5]);
    assert_eq!(shared.queue.stats().kicks, 2);
}

#[test]
fn those_behind_the_sleeper_get_one_completion_each() {
    let mut shared = shared(KickPolicy::Unlocked);
    shared.submit_reads(0..4).unwrap();
    let waiters: Vec<_> = [(); 4].map(|()| shared.waiter(Duration::MAX)).into();
    (0..4).for_each(|_| {
        shared.answer_one();
        shared.device.signal();
    });
    let mut taken: Vec<_> = waiters.into_iter().flat_map(tokens).collect();
    taken.sort_unstable();
    assert_eq!(taken, [0, 1, 2, 3]);
}

#[test]
fn time_is_up_for_the_sleeper_and_for_those_behind_it() {
    let shared = shared(KickPolicy::Unlocked);
    let waiters = [5, 10, 5, 0].map(|ms| shared.waiter(Duration::from_millis(ms)));
    for waiter in waiters {
        assert!(tokens(waiter).is_empty());
    }
}

#[test]
fn one_behind_goes_on_when_the_sleepers_time_is_up() {
    let mut shared = shared(KickPolicy::Unlocked);
    shared.submit_reads(0..1).unwrap();
    let first = shared.waiter(Duration::from_millis(20));
    while shared.queue.stats().sleeps == 0 {
        thread::yield_now();
    }
    let second = shared.waiter(Duration::MAX);
    assert!(tokens(first).is_empty());
    shared.device.serve();
    assert_eq!(tokens(second), [0]);
}

#[test]
fn broken_ring_wakes_everybody_with_what_was_lost_or_an_error() {
    let mut shared = share(rig(8, PLAIN), KickPolicy::Unlocked);
    shared.submit_reads(0..2).unwrap();
    let ends: Vec<_> = [(); 4].map(|()| shared.waiter(Duration::MAX)).into();
    while shared.queue.stats().sleeps == 0 {
        thread::yield_now();
    }
    shared.device.ring.push_used(7, 1); // an id that was never used
    shared.device.ring.publish();
    shared.device.end.call.ring();
    let ends: Vec<_> = ends.into_iter().map(woken).collect();
    let lost = ends.iter().flatten().flatten().filter(|end| end.result == Err(RequestError::Lost)).count();
    assert_eq!((lost, ends.iter().filter(|end| end.is_err()).count()), (2, 2));
}

#[test]
fn queue_comes_back_when_nobody_shares_it() {
    let mut shared = shared(KickPolicy::Unlocked);
    shared.submit_reads(0..1).unwrap();
    let mut queue = Arc::into_inner(shared.queue).unwrap().into_inner();
    shared.device.serve();
    assert_eq!(queue.completions(&mut [Completion::default()]), Ok(1));
}

/// Threads submit in batches and wait, with the device on its own thread; every request ends exactly once.
fn every_request_of_many_threads_ends_once<L: RawMutex + Send + Sync + 'static>(
    policy: KickPolicy,
    threads: u64,
    batches: u64,
) {
    const BATCH: u64 = 3;
    let rig = rig(32, FULL);
    let data = [rig.data(4096)];
    let _device = device_thread::start(rig.device, &rig.bell);
    let queue = Arc::new(SharedQueue::<L>::new(rig.queue, policy));
    let ended = Mutex::new(HashSet::new());
    let wait = || {
        let mut out = [Completion::default(); 8];
        let taken = queue.wait(&mut out, Duration::from_millis(1)).unwrap();
        for completion in &out[..taken] {
            assert_eq!(completion.result, Ok(()));
            assert!(ended.lock().unwrap().insert(completion.token), "{completion:?} ended twice");
        }
    };
    thread::scope(|scope| {
        for thread in 0..threads {
            let (queue, wait) = (&queue, &wait);
            scope.spawn(move || {
                for batch in 0..batches {
                    let first = (thread * batches + batch) * BATCH;
                    let read = |token| Request::new(Work::Read { sector: 0, data: &data }, token);
                    let batch: Vec<_> = (first..first + BATCH).map(read).collect();
                    let mut rest = &batch[..];
                    while !rest.is_empty() {
                        let taken = queue.submit(rest).unwrap_or(0);
                        rest = &rest[taken..];
                        wait();
                    }
                }
            });
        }
    });
    let started = Instant::now();
    while queue.in_flight() > 0 {
        wait();
        assert!(started.elapsed() < LONG, "{} requests do not end", queue.in_flight());
    }
    assert_eq!(ended.into_inner().unwrap().len() as u64, threads * batches * BATCH);
}

macro_rules! every_request_of_many_threads_ends_once {
    ($($name:ident: $lock:ty, $threads:literal threads, $batches:literal batches;)*) => {$(
        #[test]
        fn $name() {
            every_request_of_many_threads_ends_once::<$lock>(KickPolicy::Unlocked, $threads, $batches);
            every_request_of_many_threads_ends_once::<$lock>(KickPolicy::Locked, $threads, $batches);
        }
    )*};
}

every_request_of_many_threads_ends_once! {
    every_request_ends_once_behind_a_ticket_lock: TicketLock, 2 threads, 40 batches; // spins while its holder is preempted
    every_request_ends_once_behind_a_native_queued_lock: QSpinLock, 2 threads, 40 batches; // spins as well
    every_request_ends_once_behind_a_fair_queued_lock: PvQSpinLock<Fair>, 4 threads, 300 batches;
    every_request_ends_once_behind_a_hybrid_queued_lock: PvQSpinLock<Hybrid>, 4 threads, 300 batches;
    every_request_ends_once_behind_stds_mutex: StdMutex, 4 threads, 300 batches;
    every_request_ends_once_behind_parking_lot: parking_lot::RawMutex, 4 threads, 300 batches;
    every_request_ends_once_behind_parking_lot_of_lock_api_04: Api04<parking_lot_012::RawMutex>, 4 threads, 300 batches;
}
