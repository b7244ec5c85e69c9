//! A queue and its device half on the same thread, so that each test controls when the device does what.
//!
//! See also: a device on its own thread (`queue_waiting.rs`).
#![allow(dead_code)] // each test binary uses only a part

use std::sync::Arc;
use std::time::Duration;

use blk_driver::{
    Buffer, Completion, DeviceEnd, Doorbell, EventFd, Pool, PoolOptions, Queue, Request, Work, alone,
};
use guest_mem::{GuestMemory, GuestRange, MemoryView};
use virtqueue::split::RawRing;
use virtqueue::{Chain, DeviceQueue, RingFeatures};

pub const PLAIN: RingFeatures = RingFeatures { event_idx: false, indirect: false, packed: false };
pub const FULL: RingFeatures = RingFeatures { event_idx: true, indirect: true, packed: false };

/// Long enough for any machine; a test that waits this long has failed.
pub const LONG: Duration = Duration::from_secs(300);

pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;

/// One request as the device sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub tag: u16,
    pub kind: u32,
    pub sector: u64,
    pub readable: Vec<GuestRange>,
    pub writable: Vec<GuestRange>,
}

impl Seen {
    /// Bytes that the device has to store for a read, without the status.
    pub fn room_bytes(&self) -> u32 {
        self.writable.iter().map(|range| range.len_bytes).sum::<u32>() - 1
    }

    /// The device-readable data, without the header.
    pub fn data(&self) -> &[GuestRange] {
        &self.readable[1..]
    }
}

/// The device half, under the test's control.
pub struct Device {
    pub view: MemoryView,
    pub ring: DeviceQueue,
    pub end: DeviceEnd,
    chain: Chain,
}

impl Device {
    pub fn new(end: DeviceEnd) -> Self {
        let view = MemoryView::new(Arc::clone(&end.memory));
        let ring = end.device().unwrap();
        Self { view, ring, end, chain: Chain::with_capacity(1024) }
    }

    /// Takes the next request, if there is one.
    pub fn pop(&mut self) -> Option<Seen> {
        let tag = self.ring.pop(&mut self.chain).unwrap()?;
        let (readable, writable) = (self.chain.readable().to_vec(), self.chain.writable().to_vec());
        let mut header = [0; 16];
        self.view.read(readable[0].addr, &mut header).unwrap();
        let kind = u32::from_le_bytes(header[..4].try_into().unwrap());
        let sector = u64::from_le_bytes(header[8..].try_into().unwrap());
        Some(Seen { tag, kind, sector, readable, writable })
    }

    pub fn pop_all(&mut self) -> Vec<Seen> {
        std::iter::from_fn(|| self.pop()).collect()
    }

    /// Answers with `status` and the matching used length.
    pub fn answer(&mut self, seen: &Seen, status: u8) {
        let written_bytes = if status == 0 { seen.room_bytes() + 1 } else { 1 };
        self.answer_with(seen, status, written_bytes);
    }

    pub fn answer_with(&mut self, seen: &Seen, status: u8, written_bytes: u32) {
        let status_at = seen.writable.last().unwrap();
        assert_eq!(status_at.len_bytes, 1);
        self.view.store(status_at.addr, &[status]).unwrap();
        self.ring.push_used(seen.tag, written_bytes);
        self.ring.publish();
    }

    /// Answers all available requests, and signals if the driver wants a signal. Returns the number of requests.
    pub fn serve(&mut self) -> usize {
        let all = self.pop_all();
        all.iter().for_each(|seen| self.answer(seen, 0));
        self.signal();
        all.len()
    }

    pub fn signal(&mut self) -> bool {
        let wanted = self.ring.needs_notification();
        if wanted {
            self.end.call.ring();
        }
        wanted
    }

    /// Raw access to the ring, for a device that breaks the rules (split rings only).
    pub fn raw(&self) -> RawRing {
        RawRing::new(&self.view, self.end.layout).unwrap()
    }

    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.end.memory
    }
}

/// A queue, its device, and a buffer of 64 KiB.
pub struct Rig {
    pub queue: Queue,
    pub device: Device,
    pub pool: Pool,
    pub buffer: Buffer,
    pub bell: Arc<EventFd>,
}

pub fn rig(queue_size: u16, features: RingFeatures) -> Rig {
    let bell = Arc::new(EventFd::new().unwrap());
    let options = PoolOptions { size_bytes: 4 << 20, huge_pages: false };
    let (queue, pool, end) = alone(queue_size, features, options, Arc::clone(&bell) as _).unwrap();
    let buffer = pool.take(64 << 10).unwrap();
    Rig { queue, device: Device::new(end), pool, buffer, bell }
}

impl Rig {
    /// The first `len_bytes` of the buffer.
    pub fn data(&self, len_bytes: u32) -> GuestRange {
        GuestRange { len_bytes, ..self.buffer.range() }
    }

    pub fn push(&mut self, work: Work<'_>, token: u64) {
        self.queue.push(&Request::new(work, token)).unwrap();
    }

    /// Pushes a read of 4 KiB at `sector` and makes it visible.
    pub fn submit_read(&mut self, sector: u64, token: u64) {
        let data = [self.data(4096)];
        self.push(Work::Read { sector, data: &data }, token);
        self.queue.submit();
    }

    /// Takes the completions of all requests that have ended.
    pub fn completions(&mut self) -> Vec<Completion> {
        let mut out = [Completion::default(); 2048];
        let taken = self.queue.completions(&mut out).unwrap();
        out[..taken].to_vec()
    }

    /// Takes the completions of all requests that have ended; returns their tokens and results.
    pub fn results(&mut self) -> Vec<(u64, Result<(), blk_driver::RequestError>)> {
        self.completions().into_iter().map(|c| (c.token, c.result)).collect()
    }
}
