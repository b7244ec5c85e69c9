//! Reads a small part of each region before a run, uncounted. A server that maps its file then has the file's pages
//! mapped, as after longer use.
//!
//! - Reads one block of each 64 KiB: the kernel maps that much at once if the data is in the page cache
//!   (`fault_around_bytes`).
//! - Every thread does this, on its own queue: each worker of a server may have its own mapping.

use std::time::Duration;

use super::worker::Failure;
use crate::job::{Job, Span};
use crate::stop::Stop;
use crate::target::port::{Ask, Io, Port};

const STRIDE_BYTES: u64 = 64 << 10;

/// Reads one block of each 64 KiB of `span`. Stops early if `stop` is requested.
pub(crate) fn touch(
    port: &mut dyn Port,
    job: &Job,
    span: Span,
    patience: Duration,
    stop: &Stop,
) -> Result<(), Failure> {
    let block_bytes = u64::from(job.block_bytes).max(1);
    let stride = (STRIDE_BYTES / block_bytes).max(1);
    let mut blocks = (0..span.blocks).step_by(usize::try_from(stride).unwrap_or(usize::MAX));
    let mut free: Vec<u32> = (0..job.depth).collect();
    let mut done = Vec::with_capacity(free.len());
    let mut offset_bytes = span.offset_bytes;
    let depth = free.len();
    loop {
        while let Some(slot) = free.pop() {
            let next = if stop.is_asked() { None } else { blocks.next() };
            let Some(block) = next else {
                free.push(slot);
                break;
            };
            offset_bytes = span.offset_bytes + block * block_bytes;
            port.push(Io { slot, ask: Ask::Read, offset_bytes })?;
        }
        if free.len() == depth {
            return Ok(());
        }
        port.submit()?;
        port.reap(&mut done, Some(patience))?;
        if done.is_empty() {
            return Err(Failure::Silence { what: "read", offset_bytes, seconds: patience.as_secs_f64() });
        }
        for done in done.drain(..) {
            done.result.map_err(|why| Failure::Request { what: "read", offset_bytes, why })?;
            free.push(done.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::port::{Done, PortError};

    /// Completes pushed requests, the last first, a few at a time.
    #[derive(Default)]
    struct Fake {
        pushed: Vec<Io>,
        offsets: Vec<u64>,
        is_silent: bool,
    }

    impl Port for Fake {
        fn push(&mut self, io: Io) -> Result<(), PortError> {
            assert_eq!(io.ask, Ask::Read);
            assert!(self.pushed.iter().all(|other| other.slot != io.slot), "slot {} twice", io.slot);
            self.pushed.push(io);
            self.offsets.push(io.offset_bytes);
            Ok(())
        }

        fn submit(&mut self) -> Result<usize, PortError> {
            Ok(self.pushed.len())
        }

        fn reap(&mut self, done: &mut Vec<Done>, _: Option<Duration>) -> Result<(), PortError> {
            let count = if self.is_silent { 0 } else { self.pushed.len().min(3) };
            let ended = self.pushed.split_off(self.pushed.len() - count);
            done.extend(ended.into_iter().map(|io| Done { slot: io.slot, result: Ok(()) }));
            Ok(())
        }

        fn fill(&mut self, _: u32, _: &[u8]) -> Result<(), PortError> {
            Ok(())
        }

        fn read(&self, _: u32, _: &mut [u8]) -> Result<(), PortError> {
            Ok(())
        }
    }

    fn touched(port: &mut Fake, stop: &Stop) -> Result<(), Failure> {
        let job = Job { depth: 4, ..Job::default() };
        touch(port, &job, Span { offset_bytes: 8192, blocks: 100 }, Duration::from_secs(1), stop)
    }

    #[test]
    fn one_block_of_each_64_kib_is_read_once() {
        let mut port = Fake::default();
        touched(&mut port, &Stop::default()).unwrap();
        assert_eq!(port.offsets, [0, 1, 2, 3, 4, 5, 6].map(|part| 8192 + part * (64 << 10)));
        assert!(port.pushed.is_empty(), "{} are in flight", port.pushed.len());
    }

    #[test]
    fn target_that_does_not_answer_is_an_error() {
        let mut port = Fake { is_silent: true, ..Fake::default() };
        assert!(matches!(touched(&mut port, &Stop::default()), Err(Failure::Silence { .. })));
    }

    #[test]
    fn nothing_is_read_once_the_end_is_wanted() {
        let (mut port, stop) = (Fake::default(), Stop::default());
        stop.ask();
        touched(&mut port, &stop).unwrap();
        assert!(port.offsets.is_empty());
    }
}
