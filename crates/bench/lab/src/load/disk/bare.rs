//! Bare metal without fio: a loop that sends the load's requests to one io_uring engine.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use disk_image::Image;
use guest_mem::{GuestAddress, GuestMemory, GuestRange, IoVecs, MemoryView, Region};
use io_engine::{Durability, Engine, EngineConfig, Event, FileId, FileSpec, IoUringEngine, Op, OpKind};

use crate::experiment::SampleError;
use crate::load::{Job, Measured, Sectors, WARM_UP, cpu, mean_us, nanos};
use crate::stop::Stop;

struct Loop {
    engine: IoUringEngine,
    file: FileId,
    image: Image,
    view: MemoryView,
    job: Job,
    sectors: Sectors,
    sent: Vec<Instant>,
    free: Vec<(u64, IoVecs)>,
    events: Vec<Event>,
    done: u64,
    latency_ns: u64,
    submitted: u64,
    submitting_ns: u64,
}

/// Runs the job on `image`, which is open with O_DIRECT.
pub(crate) fn run(image: Image, job: Job, stop: &Stop) -> Result<Measured, SampleError> {
    let broken = |error: io::Error| SampleError::because("the loop over io_uring", &error);
    let mut state = Loop::new(image, job).map_err(broken)?;
    let warm = Instant::now() + Duration::from_secs_f64(job.seconds * WARM_UP);
    state.keep_busy(warm, stop).map_err(broken)?;
    let (start, cpu_ns) = (Instant::now(), cpu::process_ns());
    (state.done, state.latency_ns, state.submitted, state.submitting_ns) = (0, 0, 0, 0);
    state.keep_busy(start + Duration::from_secs_f64(job.seconds), stop).map_err(broken)?;
    let measured = Measured {
        requests: state.done,
        seconds: start.elapsed().as_secs_f64(),
        submit_us: mean_us(state.submitting_ns, state.submitted),
        client_submit_us: None,
        complete_ms: mean_us(state.latency_ns, state.done).map(|us| us / 1000.0),
        cpu_us_per_io: mean_us(cpu::process_ns() - cpu_ns, state.done),
    };
    state.drain().map_err(broken)?;
    if stop.is_asked() { Err(SampleError::Interrupted) } else { Ok(measured) }
}

impl Loop {
    fn new(image: Image, job: Job) -> io::Result<Self> {
        let mut engine = IoUringEngine::new(EngineConfig::default())?;
        engine.start()?;
        let spec = FileSpec::of(&image);
        let file = engine.attach_file(spec)?;
        let depth = u64::from(job.depth);
        let region = Region::from_memfd(GuestAddress(0), depth * u64::from(job.block_bytes));
        let region = Arc::new(region.map_err(io::Error::other)?);
        let memory = Arc::new(GuestMemory::new(vec![region]).map_err(io::Error::other)?);
        Ok(Self {
            engine,
            file,
            image,
            view: MemoryView::new(memory),
            job,
            sectors: Sectors::of(&job),
            sent: vec![Instant::now(); usize::from(job.depth)],
            free: (0..depth).map(|slot| (slot, IoVecs::with_capacity(1))).collect(),
            events: Vec::with_capacity(usize::from(job.depth)),
            done: 0,
            latency_ns: 0,
            submitted: 0,
            submitting_ns: 0,
        })
    }

    fn keep_busy(&mut self, end: Instant, stop: &Stop) -> io::Result<()> {
        let mut now = Instant::now();
        while now < end && !stop.is_asked() {
            self.submit(now)?;
            self.reap()?;
            now = Instant::now();
        }
        Ok(())
    }

    fn drain(&mut self) -> io::Result<()> {
        while self.engine.in_flight() > 0 {
            self.engine.submit()?;
            self.reap()?;
        }
        Ok(())
    }

    fn submit(&mut self, now: Instant) -> io::Result<()> {
        self.submitted += self.free.len() as u64;
        while let Some((slot, mut buffers)) = self.free.pop() {
            let len_bytes = self.job.block_bytes;
            let addr = slot * u64::from(len_bytes);
            buffers.fill(&self.view, [GuestRange { addr, len_bytes }]).map_err(io::Error::other)?;
            let range = self.image.check(self.sectors.next(), u64::from(len_bytes));
            let range = range.map_err(io::Error::other)?;
            let kind = OpKind::Write { range, durability: Durability::Cached };
            let op = Op { token: slot, file: self.file, kind, buffers };
            self.engine
                .push(op)
                .map_err(|_| io::Error::other("the engine accepts fewer requests than the depth"))?;
            #[allow(clippy::cast_possible_truncation)] // below `depth`
            let place = slot as usize;
            self.sent[place] = now;
        }
        self.engine.submit()?;
        self.submitting_ns += nanos(now.elapsed());
        Ok(())
    }

    fn reap(&mut self) -> io::Result<()> {
        self.engine.reap(&mut self.events);
        if self.events.is_empty() {
            self.engine.wait(None)?;
            self.engine.reap(&mut self.events);
        }
        let now = Instant::now();
        for event in self.events.drain(..) {
            let Event::Completed(completion) = event else { continue };
            completion.result.map_err(io::Error::other)?;
            #[allow(clippy::cast_possible_truncation)] // below `depth`
            let place = completion.token as usize;
            self.done += 1;
            self.latency_ns += nanos(now.saturating_duration_since(self.sent[place]));
            self.free.push((completion.token, completion.buffers));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use disk_image::{CacheMode, HostOpener, ImageOptions};

    use super::*;
    use crate::load::Pattern;

    #[test]
    fn own_loop_gives_every_figure_but_the_clients() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let options = ImageOptions { cache: CacheMode::Writeback, ..ImageOptions::new(file.path()) };
        let image = Image::open(&HostOpener, &options).unwrap();
        let (pattern, block_bytes, file_bytes) = (Pattern::Random, 16 << 10, 1 << 20);
        let job = Job { pattern, block_bytes, depth: 8, file_bytes, seconds: 0.02, seed: 1 };
        let measured = run(image, job, &Stop::default()).unwrap();
        assert!(measured.requests > 0 && measured.seconds >= job.seconds, "{measured:?}");
        assert!(measured.submit_us.is_some() && measured.client_submit_us.is_none(), "{measured:?}");
        assert!(measured.complete_ms.is_some() && measured.cpu_us_per_io.is_some(), "{measured:?}");
    }
}
