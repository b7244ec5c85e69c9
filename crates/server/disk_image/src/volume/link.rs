//! What the engines of a writable disk and its metadata thread tell each other.
//!
//! ```text
//! Member::ask ─ Asked ─▶ bounded queue of the engine ─▶ Peer: the metadata thread, which `unpark` wakes
//! Member::next_answer ◀─ Answer ─ queue of the engine ◀─┘ one write to the engine, unless one is already pending
//! ```
//!
//! - Each engine has its own queues, with room for [`MOST_CHANGES`]. So no engine takes another one's room, and the thread
//!   never waits for room for an answer.
//! - The lock is taken when an engine joins, and by the thread when it looks for new engines; never for a request.
//! - An op may end before its change is answered. The token tells the engine that the answer is late.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::Duration;

use super::commit_target::CommitTarget;
use super::epochs::{Begun, Epochs, Oldest};
pub use super::job_step::{MergeStep, Progress};

/// Changes of one engine that are not answered yet.
pub const MOST_CHANGES: usize = 64;

/// A change that an op needs before it can go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The range's clusters become writable in place. What the guest reads stays the same.
    Claim(Range<u64>),
    /// The range's clusters read as zeroes.
    Zero {
        /** Whole clusters, or up to the end of the disk. */
        range: Range<u64>,
        /** Their host clusters become free. */
        unmap: bool,
    },
    /// A slice of the top layer is read.
    Load {
        /** Its number. */
        slice: u64,
    },
    /// All changes that were answered are made durable.
    Sync,
    /// A step of a job. No guest waits for it.
    Merge(MergeStep),
}

/// The answer to a change.
#[derive(Debug)]
pub struct Answer {
    /// The token of [`Member::ask`].
    pub token: u64,
    /// What has happened.
    pub result: Result<Done, ChangeError>,
}

/// A change that was made.
#[derive(Debug, PartialEq, Eq)]
pub enum Done {
    /// A claim.
    Claimed,
    /// The range reads as zeroes up to here. The rest must be asked for again.
    Zeroed {
        /** A guest's offset. */
        to: u64,
    },
    /// A slice.
    Loaded {
        /** Its number. */
        slice: u64,
        /** Its words. */
        words: Box<[u64]>,
    },
    /// A sync.
    Synced,
    /// A step of a job. An error ends the job, and is for people.
    Merged(Result<Progress, String>),
}

/// Why a change was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeError {
    /// The kernel's error.
    Errno(i32),
    /// A sync failed: changes may be lost.
    SyncFailed(i32),
    /// The image breaks the format.
    Damaged,
}

/// Why a change was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The next answer makes room.
    NoRoom,
    /// The metadata thread has ended.
    Closed,
}

/// A change in a queue.
#[derive(Debug)]
pub(crate) struct Asked {
    pub token: u64,
    pub change: Change,
}

/// What an engine and the metadata thread share.
#[derive(Debug)]
struct Shared {
    oldest: Oldest,
    /// There are answers that the engine has not looked at, or the link is closed.
    has_news: AtomicBool,
    has_left: AtomicBool,
    wake: Arc<OwnedFd>,
}

/// An engine's end of the link.
#[derive(Debug)]
pub struct Member {
    link: Arc<Link>,
    shared: Arc<Shared>,
    begun: Begun,
    changes: SyncSender<Asked>,
    answers: Receiver<Answer>,
    /// Changes without an answer.
    asked: usize,
}

/// The metadata thread's end of the link to one engine.
#[derive(Debug)]
pub(crate) struct Peer {
    shared: Arc<Shared>,
    changes: Receiver<Asked>,
    answers: SyncSender<Answer>,
}

/// What the engines of a disk and its metadata thread share.
#[derive(Debug)]
pub struct Link {
    pub(crate) epochs: Epochs,
    /// Entries were changed since the last sync of the metadata thread.
    is_dirty: AtomicBool,
    /// A sync of the metadata thread has failed, so writes of workers may be lost, too.
    has_sync_failed: AtomicBool,
    is_told_to_close: AtomicBool,
    is_closed: AtomicBool,
    thread: OnceLock<Thread>,
    engines: Mutex<Engines>,
    /// On its way between a job and the metadata thread.
    target: Mutex<Option<Box<CommitTarget>>>,
    /// How the metadata thread has ended.
    outcome: Mutex<Option<Result<(), String>>>,
    has_ended: Condvar,
}

/// The disk is about to be used, or is not used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Before a guest's requests begin: the thread reads the tables, unless it has them.
    Begins,
    /// After a guest's last request: everything in the file is durable, nothing is leaked, and others may use it.
    Ends,
    /// Only the answer matters: all earlier orders have been carried out.
    Continues,
    /// Before another process, or another volume, uses the image: closes the tables, which a thread that has just started has
    /// although no guest uses them. An error if the disk is in use.
    Closes,
    /// Undoes the [`Use::Begins`] with this number, if it has succeeded: its caller has not waited for the answer.
    Undoes(u64),
    /// [`Use::Ends`] of a job that has ended early: what it copied to is closed.
    Abandons,
}

/// A [`Use`] that the metadata thread must answer.
#[derive(Debug)]
pub(crate) struct Order {
    pub what: Use,
    pub number: u64,
    done: SyncSender<Result<(), String>>,
}

impl Order {
    pub fn answer(self, outcome: Result<(), String>) {
        // It fails if the caller of `order` waits no longer.
        let _ = self.done.send(outcome);
    }
}

#[derive(Debug, Default)]
struct Engines {
    /// Those that the metadata thread does not know yet.
    new: Vec<Peer>,
    all: Vec<Arc<Shared>>,
    orders: VecDeque<Order>,
    /// How many orders there have been.
    ordered: u64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    pub(crate) fn new() -> Self {
        Self {
            epochs: Epochs::new(),
            // An earlier server may have been killed before it made its changes durable.
            is_dirty: AtomicBool::new(true),
            has_sync_failed: AtomicBool::new(false),
            is_told_to_close: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            thread: OnceLock::new(),
            engines: Mutex::default(),
            target: Mutex::default(),
            outcome: Mutex::new(None),
            has_ended: Condvar::new(),
        }
    }

    /// Adds an engine. `wake`: eight bytes written to it wake the engine.
    pub(crate) fn join(self: &Arc<Self>, wake: Arc<OwnedFd>) -> Member {
        let (ask, changes) = sync_channel(MOST_CHANGES);
        let (answer, answers) = sync_channel(MOST_CHANGES);
        let shared = Arc::new(Shared {
            oldest: Oldest::new(),
            has_news: AtomicBool::new(false),
            has_left: AtomicBool::new(false),
            wake,
        });
        let peer = Peer { shared: Arc::clone(&shared), changes, answers: answer };
        let mut engines = lock(&self.engines);
        engines.all.push(Arc::clone(&shared));
        engines.new.push(peer);
        drop(engines);
        Member { link: Arc::clone(self), shared, begun: Begun::default(), changes: ask, answers, asked: 0 }
    }

    fn wake_thread(&self) {
        // Pairs with the fence in `register`: the thread sees what was done before, or its handle is there.
        fence(Ordering::SeqCst);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Tells the metadata thread to end.
    pub(crate) fn tell_to_close(&self) {
        self.is_told_to_close.store(true, Ordering::Release);
        self.wake_thread();
    }

    pub(crate) fn is_told_to_close(&self) -> bool {
        self.is_told_to_close.load(Ordering::Acquire)
    }

    /// Whether entries may have been changed that are not durable.
    #[inline]
    pub(crate) fn is_dirty(&self) -> bool {
        // Acquire and release: an engine that sees a changed entry sees that it is not durable.
        self.is_dirty.load(Ordering::Acquire)
    }

    pub(crate) fn has_sync_failed(&self) -> bool {
        self.has_sync_failed.load(Ordering::Acquire)
    }

    pub(crate) fn note_failed_sync(&self) {
        self.has_sync_failed.store(true, Ordering::Release);
    }

    pub(crate) fn set_dirty(&self, is_dirty: bool) {
        self.is_dirty.store(is_dirty, Ordering::Release);
    }

    /// Makes the calling thread the one that changes wake.
    pub(crate) fn register(&self) {
        let _ = self.thread.set(std::thread::current());
        fence(Ordering::SeqCst);
    }

    /// Adds the engines that have joined, and removes those that have gone.
    pub(crate) fn update(&self, peers: &mut Vec<Peer>) {
        let mut engines = lock(&self.engines);
        peers.append(&mut engines.new);
        engines.all.retain(|shared| !shared.has_left.load(Ordering::Acquire));
        drop(engines);
        peers.retain(|peer| !peer.shared.has_left.load(Ordering::Acquire));
    }

    /// Adds the engines that have joined, behind those that the thread knows.
    pub(crate) fn add_new(&self, peers: &mut Vec<Peer>) {
        peers.append(&mut lock(&self.engines).new);
    }

    /// Gives the metadata thread an order. Returns where its answer arrives; nothing arrives if it has ended.
    pub(crate) fn order(&self, what: Use) -> Receiver<Result<(), String>> {
        self.numbered_order(what).1
    }

    /// [`Use::Begins`], with its number.
    pub(crate) fn begin(&self) -> (u64, Receiver<Result<(), String>>) {
        self.numbered_order(Use::Begins)
    }

    fn numbered_order(&self, what: Use) -> (u64, Receiver<Result<(), String>>) {
        let (done, answer) = sync_channel(1);
        let mut engines = lock(&self.engines);
        engines.ordered += 1;
        let number = engines.ordered;
        // If it is closed later, `refuse` takes the lock afterwards, and drops the order.
        match self.is_closed.load(Ordering::SeqCst) {
            true => drop(done),
            false => engines.orders.push_back(Order { what, number, done }),
        }
        drop(engines);
        self.wake_thread();
        (number, answer)
    }

    /// Gives the metadata thread the image into which it is to copy the top.
    pub(crate) fn give_target(&self, target: Box<CommitTarget>) {
        *lock(&self.target) = Some(target);
    }

    /// What [`Link::give_target`] gave.
    pub(crate) fn take_target(&self) -> Option<Box<CommitTarget>> {
        lock(&self.target).take()
    }

    /// The next order for the metadata thread.
    pub(crate) fn next_order(&self) -> Option<Order> {
        lock(&self.engines).orders.pop_front()
    }

    /// Refuses all changes and orders from now on; those that are not answered have failed.
    pub(crate) fn refuse(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        let mut engines = lock(&self.engines);
        engines.orders.clear();
        engines.all.iter().for_each(|shared| shared.tell());
    }

    /// Says how the metadata thread has ended.
    pub(crate) fn close(&self, outcome: Result<(), String>) {
        self.refuse();
        *lock(&self.outcome) = Some(outcome);
        self.has_ended.notify_all();
    }

    /// Waits until the metadata thread has ended. `None`: it has not within `timeout`.
    pub(crate) fn wait_for_end(&self, timeout: Duration) -> Option<Result<(), String>> {
        let outcome = lock(&self.outcome);
        let waited = self.has_ended.wait_timeout_while(outcome, timeout, |outcome| outcome.is_none());
        let (outcome, _) = waited.unwrap_or_else(PoisonError::into_inner);
        outcome.clone()
    }
}

impl Shared {
    /// Tells the engine that there is news, unless it has been told.
    fn tell(&self) {
        // Release: pairs with the acquire in `Member::take_news`.
        if !self.has_news.swap(true, Ordering::AcqRel) {
            // It fails only if there is no room, and then the engine has not read what is there.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }
}

impl Peer {
    /// The next change of the engine.
    pub fn next(&self) -> Option<Asked> {
        self.changes.try_recv().ok()
    }

    /// Answers a change.
    pub fn answer(&self, token: u64, result: Result<Done, ChangeError>) {
        // There is room for an answer to each change. An engine that has gone needs none.
        if self.answers.try_send(Answer { token, result }).is_ok() {
            self.shared.tell();
        }
    }

    /// Whether all the engine's ops began in `epoch` or later.
    pub fn is_since(&self, epoch: u64) -> bool {
        self.shared.oldest.is_since(epoch)
    }
}

impl Member {
    /// Counts an op, before its first lookup. Returns what [`Member::end`] takes.
    #[inline]
    pub fn begin(&mut self) -> u8 {
        self.begun.begin(&self.link.epochs, &self.shared.oldest)
    }

    /// Ends an op.
    #[inline]
    pub fn end(&mut self, group: u8) {
        self.begun.end(group, &self.shared.oldest);
    }

    /// Asks the metadata thread for a change. Never waits.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn ask(&mut self, token: u64, change: Change) -> Result<(), Refused> {
        if self.is_closed() {
            return Err(Refused::Closed);
        }
        if self.asked == MOST_CHANGES || self.changes.try_send(Asked { token, change }).is_err() {
            return Err(Refused::NoRoom);
        }
        self.asked += 1;
        self.link.wake_thread();
        // If the thread ends after this look, it tells the engine.
        if self.is_closed() { Err(Refused::Closed) } else { Ok(()) }
    }

    /// Whether there may be answers, or the link was closed.
    #[inline]
    #[must_use]
    pub fn has_news(&self) -> bool {
        // Relaxed: a look; `take_news` orders what was told.
        self.shared.has_news.load(Ordering::Relaxed)
    }

    /// To be called before the answers are taken: later answers set the flag again.
    pub fn take_news(&mut self) {
        self.shared.has_news.swap(false, Ordering::AcqRel);
    }

    /// The next answer.
    pub fn next_answer(&mut self) -> Option<Answer> {
        let answer = self.answers.try_recv().ok()?;
        self.asked -= 1;
        Some(answer)
    }

    /// Whether the metadata thread has ended: changes without an answer have failed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.link.is_closed.load(Ordering::SeqCst)
    }

    /// Whether a sync of the metadata thread has failed. The kernel may have reported lost writes of workers to it alone.
    #[inline]
    #[must_use]
    pub fn has_sync_failed(&self) -> bool {
        self.link.has_sync_failed()
    }

    /// Whether changes that were answered may not be durable.
    #[inline]
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        self.link.is_dirty()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.shared.oldest.leave();
        self.shared.has_left.store(true, Ordering::Release);
        let mut engines = lock(&self.link.engines);
        engines.all.retain(|shared| !Arc::ptr_eq(shared, &self.shared));
        engines.new.retain(|peer| !Arc::ptr_eq(&peer.shared, &self.shared));
        drop(engines);
        // So that it drops its `Peer`.
        self.link.wake_thread();
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn joined() -> (Arc<Link>, Member, Vec<Peer>) {
        let link = Arc::new(Link::new());
        let member = link.join(Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()));
        let mut peers = Vec::new();
        link.update(&mut peers);
        (link, member, peers)
    }

    fn writes(member: &Member) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(&member.shared.wake, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
    }

    #[test]
    fn several_answers_are_one_write_until_the_engine_has_looked() {
        let (_link, mut member, peers) = joined();
        (0..3).for_each(|token| member.ask(token, Change::Sync).unwrap());
        while let Some(asked) = peers[0].next() {
            peers[0].answer(asked.token, Ok(Done::Synced));
        }
        assert_eq!((member.has_news(), writes(&member)), (true, 1));
        member.take_news();
        let tokens: Vec<u64> =
            std::iter::from_fn(|| member.next_answer()).map(|answer| answer.token).collect();
        assert_eq!((tokens, member.has_news()), (vec![0, 1, 2], false));
        peers[0].answer(3, Err(ChangeError::Damaged));
        assert_eq!((member.has_news(), writes(&member)), (true, 1));
    }

    #[test]
    fn full_queue_refuses_until_an_answer_was_taken() {
        let (_link, mut member, peers) = joined();
        (0..MOST_CHANGES as u64).for_each(|token| member.ask(token, Change::Sync).unwrap());
        assert_eq!(member.ask(99, Change::Sync), Err(Refused::NoRoom));
        let asked = peers[0].next().unwrap();
        assert_eq!(
            member.ask(99, Change::Sync),
            Err(Refused::NoRoom),
            "there would be no room for its answer"
        );
        peers[0].answer(asked.token, Ok(Done::Synced));
        assert!(member.next_answer().is_some());
        assert_eq!(member.ask(99, Change::Sync), Ok(()));
    }

    #[test]
    fn closed_link_tells_all_engines_and_refuses_changes() {
        let (link, mut member, mut peers) = joined();
        let mut late = link.join(Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap()));
        link.close(Err("a reason".to_owned()));
        assert_eq!((writes(&member), writes(&late)), (1, 1));
        assert_eq!(
            (member.ask(1, Change::Sync), late.ask(1, Change::Sync)),
            (Err(Refused::Closed), Err(Refused::Closed))
        );
        assert_eq!(link.wait_for_end(Duration::ZERO), Some(Err("a reason".to_owned())));
        drop(late);
        link.update(&mut peers);
        assert_eq!(peers.len(), 1);
    }

    #[test]
    fn order_is_answered_unless_the_thread_ends() {
        let (link, _member, _) = joined();
        let answer = link.order(Use::Begins);
        let order = link.next_order().unwrap();
        assert_eq!((order.what, answer.try_recv().is_err()), (Use::Begins, true));
        order.answer(Err("no".to_owned()));
        assert_eq!(answer.recv(), Ok(Err("no".to_owned())));
        let answer = link.order(Use::Ends);
        link.close(Ok(()));
        assert!(answer.recv().is_err() && link.next_order().is_none());
        assert!(link.order(Use::Begins).recv().is_err() && link.next_order().is_none());
    }

    #[test]
    fn engine_that_has_gone_needs_no_answer() {
        let (link, mut member, mut peers) = joined();
        member.begin();
        member.ask(7, Change::Load { slice: 1 }).unwrap();
        assert!(!peers[0].is_since(link.epochs.begin_next()));
        drop(member);
        peers[0].answer(7, Ok(Done::Synced));
        assert!(peers[0].is_since(link.epochs.begin_next()));
        link.update(&mut peers);
        assert!(peers.is_empty());
    }
}
