//! The completion ring that the kernel maps into user memory: results without a system call.
//!
//! `kernel: event at tail, then tail moves → acquire of tail → event at head → head moves → kernel: room again`
//!
//! | offset in bytes | field | written by |
//! |---|---|---|
//! | 0 | number of the context | – |
//! | 4 | events that fit | – |
//! | 8 | head: next event to be taken | us, `io_getevents` |
//! | 12 | tail: next event to be put | the kernel |
//! | 16 | magic: `0xa10a10a1` | – |
//! | 20 | compatible features | – |
//! | 24 | incompatible features: 0 | – |
//! | 28 | bytes before the first event: 32 | – |
//!
//! - The ring starts at the context's address. Head and tail count from 0 to the number of events that fit, not to a
//!   power of two, and are equal when the ring is empty. The ring always has space for the calls in flight.
//! - The kernel reads the head to learn how many events were consumed, so moving the head needs no `io_getevents`. That
//!   call also moves the head, so the engine must read the head again after each such call.
//!
//! The layout is that of `struct aio_ring` in Linux's fs/aio.c (2.6 to 6.18). If magic or features differ, the engine
//! does not use the ring.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use super::context::{Context, IoEvent};

const MAGIC: u32 = 0xa10a_10a1;
/// Number of events that would fit in the header's space.
const HEADER_EVENTS: usize = 1;
const _: () = assert!(size_of::<Header>() == HEADER_EVENTS * size_of::<IoEvent>());

#[derive(Debug)]
#[repr(C)]
struct Header {
    context: u32,
    event_count: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compatible_features: u32,
    incompatible_features: u32,
    header_bytes: u32,
}

/// The consumer's side of the ring. Must not be used after its [`Context`] is dropped.
#[derive(Debug)]
pub(super) struct UserRing {
    header: NonNull<Header>,
    event_count: u32,
    /// The next event to take.
    head: u32,
    /// The head as last published to the kernel.
    published_head: u32,
    /// The tail at the last `look`.
    tail: u32,
}

// SAFETY: 1. the ring belongs to the process, not to a thread, and one owner at a time consumes from it.
unsafe impl Send for UserRing {}

impl UserRing {
    /// Returns `None` if the layout is unknown.
    pub fn of(context: &Context) -> Option<Self> {
        let header = NonNull::new(std::ptr::with_exposed_provenance_mut::<Header>(context.address()))?;
        // SAFETY: 1. the kernel maps at least a page there while the context exists; 2. the fields that it changes are
        // atomics.
        let found = unsafe { header.as_ref() };
        let known = found.magic == MAGIC
            && found.incompatible_features == 0
            && found.header_bytes as usize == size_of::<Header>()
            && found.event_count > 0;
        let (event_count, head) = (found.event_count, found.head.load(Ordering::Relaxed));
        known.then_some(Self { header, event_count, head, published_head: head, tail: head })
    }

    #[cfg(test)]
    pub fn event_count(&self) -> u32 {
        self.event_count
    }

    #[inline]
    fn header(&self) -> &Header {
        // SAFETY: as in `of`; and the context exists as long as `self` is used.
        unsafe { self.header.as_ref() }
    }

    /// Reads the tail. Returns whether there are events.
    #[inline]
    pub fn look(&mut self) -> bool {
        // Pairs with the kernel's barrier between event and tail.
        self.tail = self.header().tail.load(Ordering::Acquire);
        debug_assert!(self.tail < self.event_count);
        self.head != self.tail
    }

    /// The next event that the last `look` found.
    #[inline]
    pub fn next(&mut self) -> Option<IoEvent> {
        if self.head == self.tail {
            self.publish();
            return None;
        }
        // SAFETY: 1. in bounds: heads are below the number of events, and those follow the header.
        let event = unsafe { self.header.cast::<IoEvent>().add(HEADER_EVENTS + self.head as usize) };
        // SAFETY: 1. written before the tail that `look` acquired; the kernel does not change it until the head has
        // passed it.
        let event = unsafe { event.read() };
        self.head = if self.head + 1 == self.event_count { 0 } else { self.head + 1 };
        Some(event)
    }

    /// Publishes the head once per pass, so that the kernel can reuse the consumed entries.
    #[inline]
    fn publish(&mut self) {
        if self.published_head != self.head {
            // Release: our reads of the events complete before the kernel may overwrite them.
            self.header().head.store(self.head, Ordering::Release);
            self.published_head = self.head;
        }
    }

    /// Call this before `io_getevents`, which reads the head.
    pub fn before_take(&mut self) {
        self.publish();
    }

    /// Call this after `io_getevents`, which moved the head.
    pub fn after_take(&mut self) {
        self.head = self.header().head.load(Ordering::Relaxed);
        self.published_head = self.head;
        self.look();
    }
}
