//! The engines of one worker: a base engine, and one for each other `EngineSource` in use.
//!
//! `EngineSource → (starts with the first queue that names it) → Slot: engine, files, buffers → (ends with the last)`
//!
//! - Usually there is only the base engine. It watches kicks and the wakeup fd. While other engines have requests in
//!   flight, a sleeping worker also watches their descriptors.
//! - A file is attached once per engine and disk, even if several queues use it.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_engine::{Engine, Event, FileId, FileSpec, WatchId, WatchToken};
use tracing::debug;

use crate::data_path::disk::Disk;
use crate::data_path::disk::engine_source::EngineSource;
use crate::data_path::worker::buffers::BufferPool;
use crate::data_path::worker::worker_options::WorkerId;

/// The watch token of another engine is this plus the engine's index. Its event only ends the sleep.
pub(crate) const ENGINE: WatchToken = WatchToken(1 << 33);
/// The base engine's index.
pub(crate) const BASE: usize = 0;

/// An engine and the worker's state for it.
pub(crate) struct Slot {
    /// The base engine's watch of this engine's descriptor.
    descriptor: Option<WatchId>,
    source: Arc<EngineSource>,
    pub(crate) engine: Box<dyn Engine>,
    /// [`Engine::batch`]
    pub(crate) batch: usize,
    pub(crate) pool: BufferPool,
    /// Requests in flight.
    pub(crate) in_flight: usize,
    /// Number of queues that use the engine.
    queues: usize,
    /// Files by disk, with the number of queues that use them.
    files: HashMap<u64, (FileId, usize)>,
}

impl Slot {
    fn start(worker: WorkerId, source: Arc<EngineSource>) -> io::Result<Self> {
        let mut engine = source.engine(worker)?;
        debug!("engine: {}", engine.describe());
        engine.start()?;
        let pool = BufferPool::new(usize::try_from(source.depth).unwrap_or(usize::MAX));
        let batch = engine.batch();
        Ok(Self {
            descriptor: None,
            source,
            engine,
            batch,
            pool,
            in_flight: 0,
            queues: 0,
            files: HashMap::new(),
        })
    }

    fn is_unneeded(&self) -> bool {
        self.queues == 0 && !self.engine.keeps_running()
    }
}

/// The engines of one worker.
pub(crate) struct Engines {
    worker: WorkerId,
    slots: Vec<Option<Slot>>,
}

impl Engines {
    pub(crate) fn start(worker: WorkerId, base: Arc<EngineSource>) -> io::Result<Self> {
        Ok(Self { worker, slots: vec![Some(Slot::start(worker, base)?)] })
    }

    /// The base engine, which is never removed.
    #[inline]
    pub(crate) fn base(&mut self) -> &mut dyn Engine {
        match &mut self.slots[BASE] {
            Some(slot) => &mut *slot.engine,
            None => unreachable!("the base engine is never taken away"),
        }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, at: usize) -> Option<&mut Slot> {
        self.slots.get_mut(at)?.as_mut()
    }

    #[inline]
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.slots.iter_mut().flatten()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.slots.iter().flatten().map(|slot| slot.in_flight).sum()
    }

    /// Step 5's system call: one per engine with new calls, so usually one.
    #[inline]
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        self.iter_mut().try_for_each(|slot| slot.engine.submit())
    }

    #[inline]
    pub(crate) fn reap(&mut self, events: &mut Vec<Event>) {
        self.iter_mut().for_each(|slot| slot.engine.reap(events));
    }

    /// Returns the amount of work that the engines did since the last call without reporting an event: work for other
    /// workers, and for requests that continue.
    #[inline]
    pub(crate) fn take_unseen_work(&mut self) -> usize {
        self.iter_mut().map(|slot| slot.engine.take_unseen_work()).sum()
    }

    /// Sleeps until an engine has something to reap.
    pub(crate) fn wait(&mut self, limit: Option<Duration>) -> io::Result<()> {
        if self.slots.len() > 1 {
            self.end_unneeded();
        }
        let is_quiet = |slot: &Slot| slot.in_flight == 0 && !slot.engine.wakes_when_idle();
        if self.slots.iter().skip(1).flatten().all(is_quiet) {
            return self.base().wait(limit);
        }
        self.wait_for_all(limit)
    }

    /// Ends engines that no queue uses, unless they must keep running.
    fn end_unneeded(&mut self) {
        for at in 1..self.slots.len() {
            if self.get_mut(at).is_some_and(|slot| slot.is_unneeded()) {
                self.end(at);
            }
        }
    }

    fn end(&mut self, at: usize) {
        let Some(mut slot) = self.slots.get_mut(at).and_then(Option::take) else { return };
        let watch = slot.descriptor.take();
        drop(slot);
        if let Some(watch) = watch {
            self.base().unwatch(watch);
        }
    }

    /// Starts the source's engine if this worker has none. The engine may end again while no queue uses it.
    pub(crate) fn start_unused(&mut self, source: &Arc<EngineSource>) -> io::Result<()> {
        if !self.slots.iter().flatten().any(|slot| Arc::ptr_eq(&slot.source, source)) {
            self.put(Slot::start(self.worker, Arc::clone(source))?)?;
        }
        Ok(())
    }

    /// Sleeps in the base engine, which watches the descriptors of the others.
    fn wait_for_all(&mut self, limit: Option<Duration>) -> io::Result<()> {
        let (base, others) = self.base_and_others();
        let (mut may_sleep, mut due) = (true, None);
        for slot in others {
            may_sleep &= slot.engine.arm()?;
            due = due.into_iter().chain(slot.engine.due()).min();
        }
        let due = due.map(|due: Instant| due.saturating_duration_since(Instant::now()));
        let limit = limit.into_iter().chain(due).min();
        base.wait(if may_sleep { limit } else { Some(Duration::ZERO) })?;
        let (_, mut others) = self.base_and_others();
        others.try_for_each(|slot| slot.engine.disarm())
    }

    fn base_and_others(&mut self) -> (&mut dyn Engine, impl Iterator<Item = &mut Slot>) {
        match self.slots.split_first_mut() {
            Some((Some(base), others)) => (&mut *base.engine, others.iter_mut().flatten()),
            _ => unreachable!("the base engine is never taken away"),
        }
    }

    /// Returns the index of a disk's engine for another queue. Starts the engine if necessary.
    pub(crate) fn enter(&mut self, source: Option<&Arc<EngineSource>>) -> io::Result<usize> {
        let known = |slot: &Slot| source.is_none_or(|source| Arc::ptr_eq(&slot.source, source));
        let at = self.slots.iter().position(|slot| slot.as_ref().is_some_and(known));
        let at = match (at, source) {
            (Some(at), _) => at,
            (None, Some(source)) => self.put(Slot::start(self.worker, Arc::clone(source))?)?,
            (None, None) => BASE,
        };
        if let Some(slot) = self.get_mut(at) {
            slot.queues += 1;
        }
        Ok(at)
    }

    /// Adds an engine. From now on the base engine watches the new engine.
    fn put(&mut self, mut slot: Slot) -> io::Result<usize> {
        let at = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        let descriptor = Arc::new(slot.engine.descriptor()?);
        let token = WatchToken(ENGINE.0 + at as u64);
        slot.descriptor = Some(self.base().watch_own(descriptor, token)?);
        if at == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[at] = Some(slot);
        Ok(at)
    }

    /// Removes a queue from an engine. An engine without queues ends, except for the base engine.
    pub(crate) fn leave(&mut self, at: usize) {
        let Some(slot) = self.get_mut(at) else { return };
        slot.queues -= 1;
        if at != BASE && slot.is_unneeded() {
            self.end(at);
        }
    }

    pub(crate) fn attach(&mut self, at: usize, disk: &Disk) -> io::Result<FileId> {
        let worker = self.worker;
        let Some(slot) = self.get_mut(at) else { return Err(io::ErrorKind::NotFound.into()) };
        if let Some((file, users)) = slot.files.get_mut(&disk.id()) {
            *users += 1;
            return Ok(*file);
        }
        let spec = FileSpec { backing: disk.backing_for(worker), alignment: disk.image().alignment() };
        let file = slot.engine.attach_file(spec).inspect_err(|_| disk.file_not_used(worker))?;
        slot.pool.attach(file);
        slot.files.insert(disk.id(), (file, 1));
        Ok(file)
    }

    pub(crate) fn detach(&mut self, at: usize, disk: &Disk) {
        let worker = self.worker;
        let Some(slot) = self.get_mut(at) else { return };
        let Some((file, users)) = slot.files.get_mut(&disk.id()) else { return };
        *users -= 1;
        if *users == 0 {
            slot.engine.detach_file(*file);
            slot.pool.detach(*file);
            slot.files.remove(&disk.id());
            disk.file_not_used(worker);
        }
    }

    /// Cancels the cancellable requests of one disk, or of all disks.
    pub(crate) fn cancel(&mut self, disk: Option<u64>) {
        for slot in self.slots.iter_mut().flatten() {
            match disk {
                None => slot.engine.cancel_all(),
                Some(disk) => {
                    if let Some((file, _)) = slot.files.get(&disk) {
                        slot.engine.cancel_file(*file);
                    }
                }
            }
        }
    }
}
