//! A loop that copies random blocks between a mapped file and buffers: an upper bound for any server.
//!
//! `file → mapped → random block → copied to the next buffer`
//!
//! - As simple as possible: one thread, no ring, no prefetch, and one buffer per request in flight.

use std::fs::File;
use std::hint::black_box;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_mem::{GuestAddress, GuestMemory, GuestRange, IoVecs, MemoryView, Region, RegionSpec};

use crate::experiment::SampleError;
use crate::load::{BlockJob, Figures, cpu};
use crate::runner::Xorshift;
use crate::stop::Stop;

/// Blocks between two readings of the clock.
const BATCH: u64 = 64;

/// Runs the loop on the file `path`, after one pass over the whole file.
pub(crate) fn measure(path: &Path, job: &BlockJob, stop: &Stop) -> Result<Figures, SampleError> {
    let broken = |error: io::Error| SampleError::because("the copy loop", &error);
    let mut copies = Copies::of(path, job).map_err(broken)?;
    (0..copies.blocks).try_for_each(|block| copies.copy(block, false)).map_err(broken)?;
    let mut random = Xorshift::new(job.seed);
    let (start, cpu_ns) = (Instant::now(), cpu::thread_ns());
    let (end, mut done) = (start + Duration::from_secs_f64(job.seconds), 0_u64);
    while Instant::now() < end && !stop.is_asked() {
        for _ in 0..BATCH {
            let block = random.below(copies.blocks);
            copies.copy(block, job.writes).map_err(broken)?;
        }
        done += BATCH;
    }
    let (seconds, cpu_ns) = (start.elapsed().as_secs_f64(), cpu::thread_ns() - cpu_ns);
    if stop.is_asked() {
        return Err(SampleError::Interrupted);
    }
    #[allow(clippy::cast_precision_loss)] // of one sample
    let (done, cpu_us) = (done as f64, cpu_ns as f64 / 1000.0);
    Ok(Figures::from([("iops", done / seconds), ("cpu", cpu_us / done), ("latency", seconds * 1e6 / done)]))
}

struct Copies {
    /// The mapped file.
    view: MemoryView,
    place: IoVecs,
    buffers: Vec<u8>,
    next: usize,
    blocks: u64,
    block_bytes: u32,
}

impl Copies {
    fn of(path: &Path, job: &BlockJob) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        let size_bytes = job.file_bytes;
        let spec = RegionSpec { guest_addr: GuestAddress(0), size_bytes, user_addr: 0, file_offset_bytes: 0 };
        let region = Region::map(spec, Arc::new(file.into())).map_err(io::Error::other)?;
        let memory = GuestMemory::new(vec![Arc::new(region)]).map_err(io::Error::other)?;
        Ok(Self {
            view: MemoryView::new(Arc::new(memory)),
            place: IoVecs::with_capacity(1),
            buffers: vec![1; job.depth as usize * job.block_bytes as usize],
            next: 0,
            blocks: size_bytes / u64::from(job.block_bytes),
            block_bytes: job.block_bytes,
        })
    }

    #[inline]
    fn copy(&mut self, block: u64, writes: bool) -> io::Result<()> {
        let len_bytes = self.block_bytes;
        let range = GuestRange { addr: block * u64::from(len_bytes), len_bytes };
        self.place.fill(&self.view, [range]).map_err(io::Error::other)?;
        let buffer = &mut self.buffers[self.next..][..len_bytes as usize];
        if writes {
            self.place.copy_in(buffer)
        } else {
            self.place.copy_out(buffer)
        };
        black_box(&buffer[0]);
        self.next = (self.next + len_bytes as usize) % self.buffers.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(writes: bool) -> BlockJob {
        BlockJob { writes, block_bytes: 4096, depth: 4, jobs: 1, file_bytes: 1 << 20, seconds: 0.01, seed: 3 }
    }

    fn file() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![7; 1 << 20]).unwrap();
        file
    }

    #[test]
    fn copying_goes_the_way_that_was_asked_for() {
        let file = file();
        let mut copies = Copies::of(file.path(), &job(false)).unwrap();
        copies.copy(3, false).unwrap();
        copies.copy(0, true).unwrap();
        assert_eq!((copies.buffers[0], copies.buffers[4095], copies.buffers[4096]), (7, 7, 1));
        let found = std::fs::read(file.path()).unwrap();
        assert_eq!((found[0], found[4095], found[4096]), (1, 1, 7));
    }

    #[test]
    fn loop_counts_what_it_copied() {
        let figures = measure(file().path(), &job(false), &Stop::default()).unwrap();
        assert!(figures["iops"] > 0.0 && figures["cpu"] > 0.0, "{figures:?}");
    }
}
