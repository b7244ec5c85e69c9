//! An engine over an engine, like an image format: it reads a table in the file to find a cluster's location.
//!
//! `push → [table read → entry → data op on the cluster] for each cluster → Completion`
//!
//! - The layer has op states and buffers of its own. The inner engine sees only the layer's buffers, so its ops in
//!   flight never refer to guest memory.
//! - A dependent op is pushed in `reap`. The inner engine starts it with the next `submit` or `wait`, like calls that
//!   the inner engine itself repeats.
//! - Entries are untrusted: the image checks each range that is computed from an entry.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use disk_image::{CheckedRange, Image};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, IoVecs, MemoryView, Region};
use io_engine::{
    Completion, Engine, Event, FileId, FileSpec, Op, OpError, OpKind, Stats, WatchId, WatchToken,
};
use rustix::io::Errno;

pub const CLUSTER_BYTES: u64 = 64 << 10;
/// Bytes of a table read: the block with the entry.
const BLOCK_BYTES: u64 = 4096;
/// Bytes of a slot: the data of a cluster, followed by a block of the table.
const SLOT_BYTES: u64 = CLUSTER_BYTES + BLOCK_BYTES;
const ENTRY_BYTES: u64 = 8;

/// A table that maps each cluster to a different location.
pub fn table(clusters: u64) -> Vec<u8> {
    (0..clusters).flat_map(|cluster| ((cluster * 7 + 3) % clusters).to_le_bytes()).collect()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    /// The read of the block with the cluster's entry is in flight.
    Table,
    /// The cluster's data op is in flight, for this many bytes.
    Data(u64),
    Flush,
}

struct State {
    op: Op,
    step: Step,
    /// Guest offset of the first byte that is not transferred yet.
    at_bytes: u64,
    end_bytes: u64,
    stored_bytes: u64,
    cancelled: bool,
}

pub struct Layer {
    inner: Box<dyn Engine>,
    image: Arc<Image>,
    table_bytes: u64,
    states: Vec<Option<State>>,
    buffers: MemoryView,
    finished: VecDeque<Completion>,
    events: Vec<Event>,
}

impl Layer {
    /// Makes a layer whose table is at byte `table_bytes` of the image.
    pub fn new(inner: Box<dyn Engine>, image: Arc<Image>, table_bytes: u64, depth: u32) -> Self {
        let region = Region::from_memfd(GuestAddress(0), u64::from(depth) * SLOT_BYTES).unwrap();
        let buffers = MemoryView::new(Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap()));
        let states = (0..depth).map(|_| None).collect();
        Self { inner, image, table_bytes, states, buffers, finished: VecDeque::new(), events: Vec::new() }
    }

    fn state(&mut self, slot: usize) -> &mut State {
        self.states[slot].as_mut().expect("an inner op has its state")
    }

    fn range(&self, offset_bytes: u64, len_bytes: u64) -> Result<CheckedRange, OpError> {
        self.image.check(offset_bytes / 512, len_bytes).map_err(|_| OpError::Errno(Errno::IO))
    }

    fn push_inner(&mut self, slot: usize, kind: OpKind, place: Option<GuestRange>) {
        let mut buffers = IoVecs::with_capacity(usize::from(place.is_some()));
        if let Some(place) = place {
            buffers.fill(&self.buffers, [place]).unwrap();
        }
        let file = self.state(slot).op.file;
        let pushed = self.inner.push(Op { token: slot as u64, file, kind, buffers });
        assert!(pushed.is_ok(), "the inner engine has room for one op of each of ours");
    }

    /// Reads the next cluster's entry, or completes the op.
    fn next_cluster(&mut self, slot: usize) {
        let state = self.state(slot);
        if state.at_bytes == state.end_bytes {
            return self.end(slot, Ok(()), false);
        }
        state.step = Step::Table;
        let entry = state.at_bytes / CLUSTER_BYTES * ENTRY_BYTES;
        match self.range(self.table_bytes + entry / BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES) {
            Ok(range) => {
                let addr = slot as u64 * SLOT_BYTES + CLUSTER_BYTES;
                let place = GuestRange { addr, len_bytes: BLOCK_BYTES as u32 };
                self.push_inner(slot, OpKind::Read { range }, Some(place));
            }
            Err(error) => self.end(slot, Err(error), false),
        }
    }

    /// Pushes the data op after the entry was read.
    fn on_entry(&mut self, slot: usize) {
        let base = slot as u64 * SLOT_BYTES;
        let state = self.states[slot].as_mut().expect("an inner op has its state");
        let (at, end) = (state.at_bytes, state.end_bytes);
        let len = end.min((at / CLUSTER_BYTES + 1) * CLUSTER_BYTES) - at;
        state.step = Step::Data(len);
        let mut entry = [0; 8];
        let place = base + CLUSTER_BYTES + at / CLUSTER_BYTES * ENTRY_BYTES % BLOCK_BYTES;
        self.buffers.read(place, &mut entry).unwrap();
        if matches!(state.op.kind, OpKind::Write { .. }) {
            let mut data = vec![0; len as usize];
            state.op.buffers.copy_out(&mut data);
            self.buffers.store(base, &data).unwrap();
        }
        let kind = state.op.kind;
        let offset = u64::from_le_bytes(entry).saturating_mul(CLUSTER_BYTES);
        match self.range(offset.saturating_add(at % CLUSTER_BYTES), len) {
            Ok(range) => {
                let place = GuestRange { addr: base, len_bytes: len as u32 };
                self.push_inner(slot, moved(kind, range), kind.moves_data().then_some(place));
            }
            Err(error) => self.end(slot, Err(error), false),
        }
    }

    /// Continues after a cluster's data op has ended.
    fn on_data(&mut self, slot: usize, len: u64) {
        let base = slot as u64 * SLOT_BYTES;
        let state = self.states[slot].as_mut().expect("an inner op has its state");
        if matches!(state.op.kind, OpKind::Read { .. }) {
            let mut data = vec![0; len as usize];
            self.buffers.read(base, &mut data).unwrap();
            state.op.buffers.copy_in(&data);
            state.stored_bytes += len;
        }
        if state.op.kind.moves_data() {
            state.op.buffers.advance(len);
        }
        state.at_bytes += len;
        self.next_cluster(slot);
    }

    fn on_inner(&mut self, completion: Completion) {
        let Completion { token, result, sync_failed, .. } = completion;
        let slot = token as usize;
        let state = self.state(slot);
        match (result, state.step) {
            (Err(error), _) => self.end(slot, Err(error), sync_failed),
            (Ok(()), Step::Flush) => self.end(slot, Ok(()), false),
            (Ok(()), _) if state.cancelled => self.end(slot, Err(OpError::Cancelled), false),
            (Ok(()), Step::Table) => self.on_entry(slot),
            (Ok(()), Step::Data(len)) => self.on_data(slot, len),
        }
    }

    fn end(&mut self, slot: usize, result: Result<(), OpError>, sync_failed: bool) {
        let state = self.states[slot].take().expect("an op ends once");
        let Op { token, buffers, .. } = state.op;
        let stored_bytes = state.stored_bytes;
        self.finished.push_back(Completion { token, result, sync_failed, stored_bytes, buffers });
    }

    fn cancel(&mut self, only: Option<FileId>) {
        for state in self.states.iter_mut().flatten() {
            state.cancelled |= only.is_none_or(|only| state.op.file == only);
        }
    }
}

/// The op on a different range.
fn moved(kind: OpKind, range: CheckedRange) -> OpKind {
    match kind {
        OpKind::Read { .. } => OpKind::Read { range },
        OpKind::Write { durability, .. } => OpKind::Write { range, durability },
        OpKind::Flush => OpKind::Flush,
        OpKind::Discard { durability, .. } => OpKind::Discard { range, durability },
        OpKind::WriteZeroes { unmap, durability, .. } => OpKind::WriteZeroes { range, unmap, durability },
    }
}

impl Engine for Layer {
    fn describe(&self) -> String {
        format!("a layer over {}", self.inner.describe())
    }

    fn start(&mut self) -> io::Result<()> {
        self.inner.start()
    }

    fn room(&self) -> usize {
        self.states.iter().filter(|state| state.is_none()).count().min(self.inner.room())
    }

    fn in_flight(&self) -> usize {
        self.states.iter().flatten().count() + self.finished.len()
    }

    fn push(&mut self, op: Op) -> Result<(), Op> {
        let Some(slot) = self.states.iter().position(Option::is_none) else { return Err(op) };
        let (at_bytes, end_bytes) =
            op.kind.range().map_or((0, 0), |range| (range.offset_bytes(), range.end_bytes()));
        let (kind, step) = (op.kind, Step::Flush);
        let state = State { op, step, at_bytes, end_bytes, stored_bytes: 0, cancelled: false };
        self.states[slot] = Some(state);
        match kind {
            OpKind::Flush => self.push_inner(slot, kind, None),
            _ => self.next_cluster(slot),
        }
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.inner.submit()
    }

    fn reap(&mut self, events: &mut Vec<Event>) {
        let mut inner_events = std::mem::take(&mut self.events);
        self.inner.reap(&mut inner_events);
        for event in inner_events.drain(..) {
            match event {
                Event::Completed(completion) => self.on_inner(completion),
                other => events.push(other),
            }
        }
        self.events = inner_events;
        events.extend(self.finished.drain(..).map(Event::Completed));
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.inner.wait(if self.finished.is_empty() { timeout } else { Some(Duration::ZERO) })
    }

    fn arm(&mut self) -> io::Result<bool> {
        Ok(self.inner.arm()? && self.finished.is_empty())
    }

    fn disarm(&mut self) -> io::Result<()> {
        self.inner.disarm()
    }

    fn descriptor(&mut self) -> io::Result<OwnedFd> {
        self.inner.descriptor()
    }

    fn watch(&mut self, fd: Arc<OwnedFd>, token: WatchToken) -> io::Result<WatchId> {
        self.inner.watch(fd, token)
    }

    fn unwatch(&mut self, id: WatchId) {
        self.inner.unwatch(id);
    }

    fn cancel_all(&mut self) {
        self.cancel(None);
        self.inner.cancel_all();
    }

    fn cancel_file(&mut self, file: FileId) {
        self.cancel(Some(file));
        self.inner.cancel_file(file);
    }

    fn attach_file(&mut self, spec: FileSpec) -> io::Result<FileId> {
        self.inner.attach_file(spec)
    }

    fn detach_file(&mut self, file: FileId) {
        self.inner.detach_file(file);
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }

    fn take_unseen_work(&mut self) -> usize {
        self.inner.take_unseen_work()
    }
}
