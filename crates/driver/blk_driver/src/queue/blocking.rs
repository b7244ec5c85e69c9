//! Blocking calls, one request at a time, for users that want a disk instead of a queue.
//!
//! `slice → buffer of the pool → request with the limit as its deadline → wait → slice`
//!
//! - They work only on a queue without other users: a blocking call would lose the completion of another request.
//! - A call that times out leaves its buffer with the queue until the device releases it.

use std::time::{Duration, Instant};

use virtio_blk::{DEVICE_ID_BYTES, SECTOR_BYTES, Segment};

use super::Queue;
use crate::error::BlockingError;
use crate::memory::Buffer;
use crate::request::{Completion, Durability, Request, RequestError, Work};

/// Longest request. A longer slice is split, so that a small pool suffices.
const CHUNK_BYTES: usize = 256 << 10;

impl Queue {
    /// Reads `out.len()` bytes (a multiple of 512) from `sector` on, copied through the pool; sleeps until the read has
    /// ended. The queue must have no other requests in flight.
    ///
    /// # Errors
    /// [`BlockingError`]; `out` may be partly filled.
    pub fn read_blocking(
        &mut self,
        sector: u64,
        out: &mut [u8],
        limit: Duration,
    ) -> Result<(), BlockingError> {
        let end = Instant::now().checked_add(limit);
        for (sector, chunk) in sectors_from(sector).zip(out.chunks_mut(CHUNK_BYTES)) {
            self.with_buffer(chunk.len(), |queue, buffer| {
                queue.finish(Work::Read { sector, data: &[buffer.range()] }, end)?;
                buffer.read(0, chunk);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Writes `data` (a multiple of 512 bytes) from `sector` on, copied through the pool.
    ///
    /// # Errors
    /// [`BlockingError`]; a part may have been written.
    pub fn write_blocking(
        &mut self,
        sector: u64,
        data: &[u8],
        durability: Durability,
        limit: Duration,
    ) -> Result<(), BlockingError> {
        let end = Instant::now().checked_add(limit);
        let count = data.len().div_ceil(CHUNK_BYTES);
        for (at, (sector, chunk)) in sectors_from(sector).zip(data.chunks(CHUNK_BYTES)).enumerate() {
            // One flush, after the last chunk, makes all chunks durable.
            let durability = if at + 1 == count { durability } else { Durability::Cached };
            self.with_buffer(chunk.len(), |queue, buffer| {
                buffer.write(0, chunk);
                queue.finish(Work::Write { sector, data: &[buffer.range()], durability }, end)
            })?;
        }
        Ok(())
    }

    /// Makes all previously completed writes durable.
    ///
    /// # Errors
    /// [`BlockingError`].
    pub fn flush_blocking(&mut self, limit: Duration) -> Result<(), BlockingError> {
        self.without_buffer(Work::Flush, limit)
    }

    /// Declares the contents of `segments` as no longer needed.
    ///
    /// # Errors
    /// [`BlockingError`].
    pub fn discard_blocking(&mut self, segments: &[Segment], limit: Duration) -> Result<(), BlockingError> {
        self.without_buffer(Work::Discard { segments }, limit)
    }

    /// Makes `segments` read as zeroes.
    ///
    /// # Errors
    /// [`BlockingError`].
    pub fn write_zeroes_blocking(
        &mut self,
        segments: &[Segment],
        limit: Duration,
    ) -> Result<(), BlockingError> {
        self.without_buffer(Work::WriteZeroes { segments }, limit)
    }

    /// The device's serial, padded with zeroes.
    ///
    /// # Errors
    /// [`BlockingError`].
    pub fn get_id_blocking(&mut self, limit: Duration) -> Result<[u8; DEVICE_ID_BYTES], BlockingError> {
        let end = Instant::now().checked_add(limit);
        let mut id = [0; DEVICE_ID_BYTES];
        self.with_buffer(DEVICE_ID_BYTES, |queue, buffer| {
            buffer.write(0, &id); // a device may store less
            queue.finish(Work::GetId { data: buffer.range() }, end)?;
            buffer.read(0, &mut id);
            Ok(())
        })?;
        Ok(id)
    }

    fn without_buffer(&mut self, work: Work<'_>, limit: Duration) -> Result<(), BlockingError> {
        let finished = self.finish(work, Instant::now().checked_add(limit));
        self.slots.strand(None);
        finished
    }

    /// Lends `call` a buffer of the pool. If the device still uses it afterwards, the queue keeps it.
    fn with_buffer(
        &mut self,
        len_bytes: usize,
        call: impl FnOnce(&mut Self, &Buffer) -> Result<(), BlockingError>,
    ) -> Result<(), BlockingError> {
        let len_bytes = u32::try_from(len_bytes).unwrap_or(u32::MAX); // at most CHUNK_BYTES
        let buffer = self.pool.take(len_bytes)?;
        let called = call(self, &buffer);
        match &called {
            Err(BlockingError::Request(error)) if error.is_with_device() => self.slots.strand(Some(buffer)),
            // The device may write to the buffer at any later time.
            Err(BlockingError::Request(RequestError::Lost) | BlockingError::Queue(_)) => buffer.abandon(),
            _ => {}
        }
        called
    }

    /// Runs one request until it ends, or until `end`.
    fn finish(&mut self, work: Work<'_>, end: Option<Instant>) -> Result<(), BlockingError> {
        let in_flight = self.slots.used() - self.slots.own_zombies();
        if in_flight > 0 {
            return Err(BlockingError::Busy { in_flight });
        }
        self.push_as(&Request { work, token: 0, deadline: end }, true)?;
        self.submit();
        let mut out = [Completion::default()];
        loop {
            match self.wait(&mut out, Duration::MAX) {
                Ok(0) => {}
                Ok(_) => return Ok(out[0].result?),
                Err(error) => {
                    self.slots.forget_own();
                    return Err(error.into());
                }
            }
        }
    }
}

/// The first sector of each chunk.
fn sectors_from(first: u64) -> impl Iterator<Item = u64> {
    (0..).map(move |chunk: u64| first.saturating_add(chunk * (CHUNK_BYTES as u64 / SECTOR_BYTES)))
}
