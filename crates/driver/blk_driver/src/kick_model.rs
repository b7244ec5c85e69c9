//! Checks the two-step notification in all interleavings with reset, reconnect and unplug (loom).
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p blk_driver --lib --target-dir target/loom`
//!
//! - The code under test is `kick.rs` itself, compiled again with loom's `Arc`.
//! - The kernel is a table of descriptors: the number of a closed descriptor is free, or reused for another file. The
//!   queue is what a `SharedQueue` protects: a doorbell and the requests in flight. A device serves all published
//!   requests once it is rung.
//! - Two tests use deliberately wrong code, to show that the model detects such errors.

use loom::model::Builder;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::sync::{Arc, Mutex, MutexGuard};
use loom::thread;

#[path = "kick.rs"]
#[allow(dead_code, unreachable_pub, reason = "eventfds are not modelled")]
mod kick;

use kick::{Doorbell, Kick};

type SessionId = u32;

/// A process's open files: number → the session that listens.
#[derive(Debug, Default)]
struct Kernel {
    files: Mutex<Vec<Option<SessionId>>>,
}

impl Kernel {
    fn files(&self) -> MutexGuard<'_, Vec<Option<SessionId>>> {
        self.files.lock().expect("loom does not poison")
    }

    /// Returns the lowest free number, as POSIX requires.
    fn open(&self, session: SessionId) -> usize {
        let mut files = self.files();
        let fd = files.iter().position(Option::is_none).unwrap_or(files.len());
        let len = files.len().max(fd + 1);
        files.resize(len, None);
        files[fd] = Some(session);
        fd
    }

    fn close(&self, fd: usize) {
        assert!(self.files()[fd].take().is_some(), "descriptor {fd} is closed twice");
    }

    fn assert_belongs(&self, fd: usize, session: SessionId) {
        assert_eq!(self.files()[fd], Some(session), "rang a descriptor that is closed or another's");
    }

    fn open_files(&self) -> usize {
        self.files().iter().flatten().count()
    }
}

/// One connection, as its device sees it.
#[derive(Debug, Default)]
struct Session {
    id: SessionId,
    published: AtomicU32,
    rung: AtomicBool,
}

impl Session {
    /// How many requests the device has served once it is idle.
    fn served(&self) -> u32 {
        // Acquire pairs with the release in `ring`: a device that was rung sees what was published before.
        if self.rung.load(Ordering::Acquire) { self.published.load(Ordering::Relaxed) } else { 0 }
    }
}

/// A doorbell that closes its descriptor when its last owner drops it, as `EventFd` does.
#[derive(Debug)]
struct Bell {
    kernel: Arc<Kernel>,
    fd: usize,
    session: Arc<Session>,
}

impl Bell {
    fn new(kernel: &Arc<Kernel>, session: &Arc<Session>) -> Self {
        Self { kernel: Arc::clone(kernel), fd: kernel.open(session.id), session: Arc::clone(session) }
    }
}

impl Doorbell for Bell {
    fn ring(&self) {
        self.kernel.assert_belongs(self.fd, self.session.id);
        self.session.rung.store(true, Ordering::Release); // pairs with the acquire in `served`
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        // After a failure, loom's mutexes are poisoned.
        if !std::thread::panicking() {
            self.kernel.close(self.fd);
        }
    }
}

/// The state that the lock of a `SharedQueue` protects. Nothing ever completes: every pushed request stays in
/// flight.
#[derive(Debug)]
struct Queue {
    kernel: Arc<Kernel>,
    session: Arc<Session>,
    bell: Arc<dyn Doorbell>,
    fd: usize,
    in_flight: u32,
}

impl Queue {
    fn new(kernel: &Arc<Kernel>, id: SessionId) -> Self {
        let session = Arc::new(Session { id, ..Session::default() });
        let bell = Bell::new(kernel, &session);
        let fd = bell.fd;
        let bell: std::sync::Arc<dyn Doorbell> = std::sync::Arc::new(bell);
        Self { kernel: Arc::clone(kernel), session, bell: Arc::from_std(bell), fd, in_flight: 0 }
    }

    fn push(&mut self) {
        self.in_flight += 1;
    }

    fn publish(&self) {
        self.session.published.store(self.in_flight, Ordering::Relaxed); // visible to the device that is rung
    }

    /// A device that always wants to be notified.
    fn prepare_kick(&self) -> Kick {
        self.publish();
        Kick::new(Arc::clone(&self.bell))
    }

    /// A new session: its doorbell replaces the old one, and requests in flight are sent again.
    fn reconnect(&mut self) {
        let fresh = Self::new(&self.kernel, self.session.id + 1);
        let in_flight = self.in_flight;
        *self = Self { in_flight, ..fresh };
    }
}

type Shared = Arc<Mutex<Option<Queue>>>;

fn shared(kernel: &Arc<Kernel>) -> Shared {
    Arc::new(Mutex::new(Some(Queue::new(kernel, 0))))
}

/// Runs `step` under the lock, unless the queue was unplugged.
fn locked<T>(shared: &Shared, step: impl FnOnce(&mut Queue) -> T) -> Option<T> {
    shared.lock().expect("loom does not poison").as_mut().map(step)
}

/// `SharedQueue::submit` with the policy `Unlocked`: publish under the lock, ring without it.
fn submit(shared: &Shared) {
    let kick = locked(shared, |queue| {
        queue.push();
        queue.prepare_kick()
    });
    kick.into_iter().for_each(Kick::notify);
}

/// The actions of the session's thread when the back-end has reconnected.
fn reconnect(shared: &Shared) {
    let kick = locked(shared, |queue| {
        queue.reconnect();
        queue.prepare_kick()
    });
    kick.into_iter().for_each(Kick::notify);
}

/// The last session serves everything in flight, and no descriptor is leaked.
fn assert_served(shared: &Shared, kernel: &Kernel, expected: u32) {
    let served = locked(shared, |queue| queue.session.served());
    assert_eq!(served, Some(expected), "published, and the device sleeps");
    assert_eq!(kernel.open_files(), 1, "only the last session's doorbell is open");
}

fn run_beside(shared: &Shared, step: fn(&Shared)) -> thread::JoinHandle<()> {
    let shared = Arc::clone(shared);
    thread::spawn(move || step(&shared))
}

fn join(thread: thread::JoinHandle<()>) {
    thread.join().expect("the thread does not panic");
}

#[test]
fn submit_beside_a_reconnect_rings_an_open_descriptor_and_is_served() {
    loom::model(|| {
        let kernel = Arc::new(Kernel::default());
        let shared = shared(&kernel);
        let other = run_beside(&shared, reconnect);
        submit(&shared);
        join(other);
        assert_served(&shared, &kernel, 1);
    });
}

#[test]
fn two_submitters_beside_a_reconnect_are_both_served_with_up_to_three_preemptions() {
    let mut model = Builder::new();
    model.preemption_bound = Some(3); // without this bound, the test takes two minutes
    model.check(|| {
        let kernel = Arc::new(Kernel::default());
        let shared = shared(&kernel);
        let (submitter, session) = (run_beside(&shared, submit), run_beside(&shared, reconnect));
        submit(&shared);
        join(submitter);
        join(session);
        assert_served(&shared, &kernel, 2);
    });
}

#[test]
fn submit_beside_two_reconnects_is_served_by_the_last_session() {
    loom::model(|| {
        let kernel = Arc::new(Kernel::default());
        let shared = shared(&kernel);
        let other = run_beside(&shared, |shared| {
            reconnect(shared);
            reconnect(shared);
        });
        submit(&shared);
        join(other);
        assert_served(&shared, &kernel, 1);
    });
}

#[test]
fn unplug_between_the_two_steps_leaves_the_doorbell_open_until_it_was_rung() {
    loom::model(|| {
        let kernel = Arc::new(Kernel::default());
        let shared = shared(&kernel);
        let other = run_beside(&shared, |shared| {
            let _ = shared.lock().expect("loom does not poison").take();
        });
        submit(&shared);
        join(other);
        assert_eq!(kernel.open_files(), 0);
    });
}

#[test]
fn kick_that_nobody_gives_is_given_when_it_is_dropped() {
    loom::model(|| {
        let kernel = Arc::new(Kernel::default());
        let shared = shared(&kernel);
        let other = run_beside(&shared, reconnect);
        drop(locked(&shared, |queue| {
            queue.push();
            queue.prepare_kick()
        }));
        join(other);
        assert_served(&shared, &kernel, 1);
    });
}

#[test]
#[should_panic(expected = "rang a descriptor that is closed or another's")]
fn wrong_on_purpose_a_descriptor_copied_out_of_the_lock_is_rung_after_its_close() {
    fn submit_by_number(shared: &Shared) {
        let copied = locked(shared, |queue| {
            queue.push();
            queue.publish();
            (Arc::clone(&queue.kernel), queue.fd, queue.session.id)
        });
        let (kernel, fd, session) = copied.expect("no unplug has closed it");
        kernel.assert_belongs(fd, session);
    }
    loom::model(|| {
        let kernel = Arc::new(Kernel::default());
        let shared = shared(&kernel);
        let other = run_beside(&shared, reconnect);
        submit_by_number(&shared);
        join(other);
    });
}

#[test]
#[should_panic(expected = "published, and the device sleeps")]
fn wrong_on_purpose_a_reconnect_that_rings_for_nothing_in_flight_loses_a_wake_up() {
    loom::model(|| {
        let kernel = Arc::new(Kernel::default());
        let shared = shared(&kernel);
        let other = run_beside(&shared, |shared| {
            locked(shared, |queue| {
                queue.reconnect();
                queue.publish(); // wrong: relies on the pushing thread's ring, which uses the old doorbell
            });
        });
        submit(&shared);
        join(other);
        assert_served(&shared, &kernel, 1);
    });
}
