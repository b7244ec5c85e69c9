//! One value that is both ends of an engine, as the two handles that a worker has.
//!
//! - The handles are of one thread, and none calls the other: the value is never borrowed twice.
//!
//! Not here: what either end does (`core/handles.rs`, `placed/member.rs`, `placed/shared/member.rs`).

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use guest_mem::GuestMemory;

use crate::engine::{Event, FileId, FileSpec, Handles, Op, Reap, Stats, Submit, WatchId, WatchToken};

/// Shares `both` between the two handles; it is dropped with the last one.
pub(crate) fn handles<E: Submit + Reap + 'static>(both: E) -> Handles {
    let both = Rc::new(RefCell::new(both));
    Handles { submit: Box::new(SubmitHalf(Rc::clone(&both))), reap: Box::new(ReapHalf(both)) }
}

struct SubmitHalf<E>(Rc<RefCell<E>>);

impl<E: Submit> Submit for SubmitHalf<E> {
    fn room(&self) -> usize {
        self.0.borrow().room()
    }

    fn room_of(&self, file: FileId) -> usize {
        self.0.borrow().room_of(file)
    }

    fn push(&mut self, op: Op) -> Result<(), Op> {
        self.0.borrow_mut().push(op)
    }

    fn submit(&mut self) -> io::Result<()> {
        self.0.borrow_mut().submit()
    }

    fn in_flight(&self) -> usize {
        self.0.borrow().in_flight()
    }

    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId> {
        self.0.borrow_mut().attach_file(spec)
    }

    fn detach_file(&mut self, file: FileId) {
        self.0.borrow_mut().detach_file(file);
    }

    fn serve_one_disk(&mut self) {
        self.0.borrow_mut().serve_one_disk();
    }

    fn use_memory(&mut self, memory: &Arc<GuestMemory>) {
        self.0.borrow_mut().use_memory(memory);
    }

    fn forget_memory(&mut self, memory: &Arc<GuestMemory>) {
        self.0.borrow_mut().forget_memory(memory);
    }

    fn stats(&self) -> Stats {
        self.0.borrow().stats()
    }
}

struct ReapHalf<E>(Rc<RefCell<E>>);

impl<E: Reap> Reap for ReapHalf<E> {
    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.0.borrow_mut().watch(fd, token)
    }

    fn watch_own(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.0.borrow_mut().watch_own(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.0.borrow_mut().unwatch(id);
    }

    fn reap(&mut self, events: &mut Vec<Event>) {
        self.0.borrow_mut().reap(events);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.borrow_mut().wait(timeout)
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.0.borrow_mut().arm()
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.0.borrow_mut().disarm()
    }

    fn descriptor(&mut self) -> io::Result<OwnedFd> {
        self.0.borrow_mut().descriptor()
    }

    fn cancel_all(&mut self) {
        self.0.borrow_mut().cancel_all();
    }

    fn cancel_file(&mut self, file: FileId) {
        self.0.borrow_mut().cancel_file(file);
    }

    fn serves_others(&self) -> bool {
        self.0.borrow().serves_others()
    }

    fn take_unseen_work(&mut self) -> usize {
        self.0.borrow_mut().take_unseen_work()
    }
}
