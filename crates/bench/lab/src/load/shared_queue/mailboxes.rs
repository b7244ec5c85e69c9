//! Passes completions of a shared queue to the jobs that own them: one word per job, no lock.
//!
//! `owner: free slot → token (job, slot) → request … reaper: token → owner's word … owner: take`
//!
//! - A job has at most [`MAX_DEPTH`] requests in flight, with one bit each. Handing over is one `fetch_or`, and taking
//!   is one `swap`; neither waits for another thread.
//! - A bit that is already set, or whose slot was never sent, is an error: each completion is handed over exactly once.
//! - Each slot records when its request was sent, so that the thread that reaps it can compute the latency.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};

/// Most requests that one job has in flight.
pub(crate) const MAX_DEPTH: u32 = 64;
const SLOT_BITS: u32 = 6;

/// A completion that its owner did not expect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HandOverError {
    #[error("completion with token {token:#x}, but there are only {jobs} jobs")]
    UnknownToken { token: u64, jobs: usize },
    #[error("job {job}: slot {slot} completed twice")]
    Twice { job: usize, slot: u32 },
    #[error("job {job}: completions of slots {slots:#x} that were not in flight")]
    NotOut { job: usize, slots: u64 },
}

/// A job's mailbox. It has two cache lines to itself, because processors fetch lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
struct Mailbox {
    /// Slots whose requests have completed, but that the owner has not taken yet.
    done: AtomicU64,
    /// When each slot was sent, on the crowd's clock.
    sent_ns: [AtomicU64; MAX_DEPTH as usize],
}

/// One mailbox per job.
#[derive(Debug)]
pub(crate) struct Mailboxes(Vec<Mailbox>);

impl Mailboxes {
    pub fn new(jobs: usize) -> Self {
        let mailbox =
            || Mailbox { done: AtomicU64::new(0), sent_ns: std::array::from_fn(|_| AtomicU64::new(0)) };
        Self((0..jobs).map(|_| mailbox()).collect())
    }

    /// Gives a completion to its owner. Returns the time at which the request was sent.
    pub fn hand_over(&self, token: u64) -> Result<u64, HandOverError> {
        let jobs = self.0.len();
        let (job, slot) = parts(token);
        let mailbox = self.0.get(job).ok_or(HandOverError::UnknownToken { token, jobs })?;
        // Relaxed: the time was stored before the request entered the queue, and the queue's lock orders both.
        let sent_ns = mailbox.sent_ns[slot as usize].load(Relaxed);
        // AcqRel: pairs with the owner's swap. Before the owner reuses the slot, its buffer is out of use and its time
        // has been read.
        let before = mailbox.done.fetch_or(1 << slot, AcqRel);
        if before & 1 << slot != 0 {
            return Err(HandOverError::Twice { job, slot });
        }
        Ok(sent_ns)
    }
}

#[allow(clippy::cast_possible_truncation)] // splits the fields
fn parts(token: u64) -> (usize, u32) {
    ((token >> SLOT_BITS) as usize, token as u32 & (MAX_DEPTH - 1))
}

/// The slots of one job.
#[derive(Debug)]
pub(crate) struct Slots<'d> {
    mailbox: &'d Mailbox,
    job: usize,
    free: u64,
    out: u64,
}

impl<'d> Slots<'d> {
    /// Makes `depth` slots (at most [`MAX_DEPTH`]) for `job`.
    pub fn new(mailboxes: &'d Mailboxes, job: usize, depth: u32) -> Self {
        let depth = depth.clamp(1, MAX_DEPTH);
        Self { mailbox: &mailboxes.0[job], job, free: u64::MAX >> (MAX_DEPTH - depth), out: 0 }
    }

    /// The next free slot, if there is one.
    pub fn next_free(&self) -> Option<u32> {
        (self.free != 0).then(|| self.free.trailing_zeros())
    }

    pub fn has_any_out(&self) -> bool {
        self.out != 0
    }

    /// Marks `slot` as sent at `now_ns`, and returns its token. Must be called before the queue sees the request.
    pub fn send(&mut self, slot: u32, now_ns: u64) -> u64 {
        // Relaxed: the queue's lock publishes the value.
        self.mailbox.sent_ns[slot as usize].store(now_ns, Relaxed);
        self.free &= !(1 << slot);
        self.out |= 1 << slot;
        (self.job as u64) << SLOT_BITS | u64::from(slot)
    }

    /// Frees a slot whose request the queue did not take.
    pub fn take_back(&mut self, slot: u32) {
        self.free |= 1 << slot;
        self.out &= !(1 << slot);
    }

    /// Takes the slots that were handed over. Returns their number.
    pub fn take(&mut self) -> Result<u32, HandOverError> {
        // Relaxed: this look only keeps the cache line shared while the mailbox is empty.
        if self.mailbox.done.load(Relaxed) == 0 {
            return Ok(0);
        }
        // AcqRel: pairs with `hand_over`.
        let done = self.mailbox.done.swap(0, AcqRel);
        if done & !self.out != 0 {
            return Err(HandOverError::NotOut { job: self.job, slots: done & !self.out });
        }
        self.out &= !done;
        self.free |= done;
        Ok(done.count_ones())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[test]
    fn completion_reaches_only_the_job_that_asked() {
        let mailboxes = Mailboxes::new(2);
        let (mut first, mut second) = (Slots::new(&mailboxes, 0, 4), Slots::new(&mailboxes, 1, 4));
        first.send(0, 100);
        let token = second.send(0, 200);
        assert_eq!(mailboxes.hand_over(token), Ok(200));
        assert_eq!((first.take(), second.take()), (Ok(0), Ok(1)));
        assert!(first.has_any_out() && !second.has_any_out());
    }

    #[test]
    fn completion_that_comes_twice_is_refused() {
        let mailboxes = Mailboxes::new(1);
        let token = Slots::new(&mailboxes, 0, 64).send(63, 0);
        assert_eq!(mailboxes.hand_over(token), Ok(0));
        assert_eq!(mailboxes.hand_over(token), Err(HandOverError::Twice { job: 0, slot: 63 }));
    }

    #[test]
    fn completion_that_comes_again_after_it_was_taken_is_refused() {
        let mailboxes = Mailboxes::new(1);
        let mut slots = Slots::new(&mailboxes, 0, 8);
        let token = slots.send(3, 0);
        mailboxes.hand_over(token).unwrap();
        slots.take().unwrap();
        mailboxes.hand_over(token).unwrap();
        assert_eq!(slots.take(), Err(HandOverError::NotOut { job: 0, slots: 8 }));
    }

    #[test]
    fn token_of_a_job_that_is_not_there_is_refused() {
        let asked = Mailboxes::new(3).hand_over(3 << 6);
        assert_eq!(asked, Err(HandOverError::UnknownToken { token: 192, jobs: 3 }));
    }

    #[test]
    fn slot_that_was_not_taken_by_the_queue_is_free_again() {
        let mailboxes = Mailboxes::new(1);
        let mut slots = Slots::new(&mailboxes, 0, 1);
        slots.send(0, 0);
        assert_eq!(slots.next_free(), None);
        slots.take_back(0);
        assert_eq!((slots.next_free(), slots.has_any_out()), (Some(0), false));
    }

    /// Three threads send, and each hands over every completion it finds. None is lost, and none arrives twice.
    #[test]
    fn completions_handed_over_by_any_thread_arrive_once_each() {
        const EACH: u32 = 20_000;
        let mailboxes = Mailboxes::new(3);
        let (queue, reap) = sync_channel::<u64>(1024);
        let reap = std::sync::Mutex::new(reap);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (mailboxes, queue, reap) = (&mailboxes, queue.clone(), &reap);
                scope.spawn(move || {
                    let mut slots = Slots::new(mailboxes, thread, 16);
                    let (mut sent, mut back) = (0, 0);
                    while back < EACH {
                        while let Some(slot) = slots.next_free().filter(|_| sent < EACH) {
                            queue.send(slots.send(slot, u64::from(slot))).unwrap();
                            sent += 1;
                        }
                        let found = reap.lock().unwrap().try_recv();
                        if let Ok(token) = found {
                            assert_eq!(mailboxes.hand_over(token), Ok(token & 63));
                        }
                        back += slots.take().unwrap();
                    }
                    assert!(!slots.has_any_out());
                });
            }
        });
    }
}
