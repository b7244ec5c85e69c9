//! The core as both ends of an engine: for the two handles of one thread, or for several threads in turn.
//!
//! Not here: the handles (`halves.rs`), the lock of several threads (`placed/shared.rs`), which engines can be used like
//! that (`Engine::start_shared`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use guest_mem::GuestMemory;

use super::Core;
use crate::backend::Kernel;
use crate::engine::{Event, FileId, FileSpec, Op, Reap, SharedHandles, Stats, Submit, WatchId, WatchToken};

impl<K: Kernel> Submit for Core<K> {
    fn room(&self) -> usize {
        self.shares.room_for_any()
    }

    fn room_of(&self, file: FileId) -> usize {
        self.shares.room(file)
    }

    fn push(&mut self, mut op: Op) -> Result<(), Op> {
        if Core::push(self, &mut op) { Ok(()) } else { Err(op) }
    }

    fn submit(&mut self) -> io::Result<()> {
        Core::submit(self)
    }

    fn in_flight(&self) -> usize {
        self.memory.ops.len()
    }

    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId> {
        Core::attach_file(self, spec)
    }

    fn detach_file(&mut self, file: FileId) {
        Core::detach_file(self, file);
    }

    fn serve_one_disk(&mut self) {
        self.shares.do_not_split();
        self.memory.bounce.shares.do_not_split();
        self.kernel.serve_one_disk();
    }

    fn use_memory(&mut self, memory: &Arc<GuestMemory>) {
        self.kernel.use_memory(memory);
    }

    fn forget_memory(&mut self, memory: &Arc<GuestMemory>) {
        self.kernel.forget_memory(memory);
    }

    fn stats(&self) -> Stats {
        self.stats
    }
}

impl<K: Kernel> Reap for Core<K> {
    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.kernel.watch(fd, token)
    }

    fn watch_own(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.kernel.watch_own(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.kernel.unwatch(id);
    }

    fn reap(&mut self, events: &mut Vec<Event>) {
        Core::reap(self, events);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        Core::wait(self, timeout)
    }

    fn arm(&mut self) -> io::Result<bool> {
        Core::arm(self)
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.kernel.disarm()
    }

    fn descriptor(&mut self) -> io::Result<OwnedFd> {
        self.kernel.descriptor()?.try_clone_to_owned()
    }

    fn cancel_all(&mut self) {
        Core::cancel(self, None);
    }

    fn cancel_file(&mut self, file: FileId) {
        Core::cancel(self, Some(file));
    }

    fn take_unseen_work(&mut self) -> usize {
        std::mem::take(&mut self.continued)
    }
}

impl<K: Kernel> SharedHandles for Core<K> {}
