//! A file as a target: one engine per thread, as in the server's workers.

use std::sync::Arc;
use std::time::Duration;

use disk_image::{Image, SECTOR_BYTES};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, IoVecs, MemoryView, Region};
use io_engine::{Durability, Engine, EngineConfig, EngineKind, Event, FileId, FileSpec, Op, OpKind, make};

use super::port::{Ask, Done, Io, Port, PortError};

pub(crate) struct FilePort {
    engine: Box<dyn Engine>,
    file: FileId,
    image: Arc<Image>,
    view: MemoryView,
    block_bytes: u32,
    synchronous: bool,
    /// One buffer per slot; `None` while the slot's request is in flight.
    buffers: Vec<Option<IoVecs>>,
    events: Vec<Event>,
    pushed: usize,
}

impl FilePort {
    /// Opens a port for up to `depth` requests of `block_bytes`. Must run on the thread that will use it.
    pub fn open(
        image: Arc<Image>,
        kind: EngineKind,
        block_bytes: u32,
        depth: u32,
    ) -> Result<Self, PortError> {
        let broken = |what: &'static str| {
            move |error: std::io::Error| PortError::because(&format!("engine {kind}: {what}"), &error)
        };
        let engine = make(kind, &EngineConfig { depth: depth.max(2), ..EngineConfig::default() });
        let mut engine = engine.map_err(broken("cannot be created"))?;
        engine.start().map_err(broken("cannot be created"))?;
        let spec = FileSpec::of(&image);
        let file = engine.attach_file(spec).map_err(broken("refuses the file"))?;
        let view = memory(u64::from(depth) * u64::from(block_bytes))?;
        engine.use_memory(view.memory());
        let buffers = (0..depth).map(|_| Some(IoVecs::with_capacity(1))).collect();
        let synchronous = kind == EngineKind::Sync;
        let events = Vec::with_capacity(depth as usize);
        Ok(Self { engine, file, image, view, block_bytes, synchronous, buffers, events, pushed: 0 })
    }

    fn range(&self, slot: u32) -> GuestRange {
        let len_bytes = self.block_bytes;
        GuestRange { addr: u64::from(slot) * u64::from(len_bytes), len_bytes }
    }

    fn kind(&self, io: &Io) -> Result<OpKind, PortError> {
        if io.ask == Ask::Flush {
            return Ok(OpKind::Flush);
        }
        let checked = self.image.check(io.offset_bytes / SECTOR_BYTES, self.block_bytes.into());
        let range = checked.map_err(|error| PortError::because("the request is out of range", &error))?;
        let durability = Durability::Cached;
        Ok(if io.ask == Ask::Read { OpKind::Read { range } } else { OpKind::Write { range, durability } })
    }
}

fn memory(size_bytes: u64) -> Result<MemoryView, PortError> {
    let region = Region::from_memfd(GuestAddress(0), size_bytes)
        .map_err(|error| PortError::because("cannot allocate buffers", &error))?;
    let memory = GuestMemory::new(vec![Arc::new(region)])
        .map_err(|error| PortError::because("cannot allocate buffers", &error))?;
    Ok(MemoryView::new(Arc::new(memory)))
}

impl Port for FilePort {
    fn push(&mut self, io: Io) -> Result<(), PortError> {
        let kind = self.kind(&io)?;
        let range = self.range(io.slot);
        let place = self.buffers.get_mut(io.slot as usize).and_then(Option::take);
        let mut buffers = place.ok_or_else(|| PortError(format!("slot {} is in flight", io.slot)))?;
        buffers.clear();
        if kind.moves_data() {
            let filled = buffers.fill(&self.view, [range]);
            filled.map_err(|error| PortError::because("cannot access the buffers", &error))?;
        }
        let op = Op { token: io.slot.into(), file: self.file, kind, buffers };
        self.engine.push(op).map_err(|_| PortError("the engine has no room for the request".to_owned()))?;
        self.pushed += 1;
        Ok(())
    }

    fn submit(&mut self) -> Result<usize, PortError> {
        let submitted = self.engine.submit();
        submitted.map_err(|error| PortError::because("the engine failed", &error))?;
        Ok(std::mem::take(&mut self.pushed))
    }

    fn reap(&mut self, done: &mut Vec<Done>, limit: Option<Duration>) -> Result<(), PortError> {
        self.engine.reap(&mut self.events);
        if self.events.is_empty() {
            match limit {
                Some(limit) => self.engine.wait(Some(limit)),
                // An empty submission still submits requests that the engine must repeat or resume.
                None => self.engine.submit(),
            }
            .map_err(|error| PortError::because("the engine failed", &error))?;
            self.engine.reap(&mut self.events);
        }
        for event in self.events.drain(..) {
            let Event::Completed(completion) = event else { continue };
            #[allow(clippy::cast_possible_truncation)] // the slot given to `push`
            let slot = completion.token as u32;
            if let Some(place) = self.buffers.get_mut(slot as usize) {
                *place = Some(completion.buffers);
            }
            done.push(Done { slot, result: completion.result.map_err(|error| error.to_string()) });
        }
        Ok(())
    }

    fn is_synchronous(&self) -> bool {
        self.synchronous
    }

    fn fill(&mut self, slot: u32, block: &[u8]) -> Result<(), PortError> {
        let stored = self.view.store(self.range(slot).addr, block);
        stored.map_err(|error| PortError::because("cannot access the buffers", &error))
    }

    fn read(&self, slot: u32, block: &mut [u8]) -> Result<(), PortError> {
        let read = self.view.read(self.range(slot).addr, block);
        read.map_err(|error| PortError::because("cannot access the buffers", &error))
    }
}
