//! Tests of descriptors, cancelling and dropping, which differ from other engines.
//!
//! A read from an empty pipe is a request that ends only when the test writes to the pipe. `tests/contract` tests the
//! contract of every engine, `requests.rs` the pieces.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, RawFd};

use disk_image::Alignment;

use super::*;
use crate::backend::Buffers;
use crate::engine::Engine;

const LEN_BYTES: u32 = 8;

/// A backend with one pipe, and memory that outlives the backend.
struct Rig {
    kernel: PosixAio,
    target: Target,
    writer: io::PipeWriter,
    reader_fd: RawFd,
    memory: *mut u8,
}

impl Rig {
    fn new(fd_pool: u32) -> Self {
        let mut kernel = PosixAio::new(
            &PosixAioOptions { fd_pool },
            &EngineConfig { depth: 16, ..EngineConfig::default() },
        )
        .unwrap();
        let (reader, writer) = io::pipe().unwrap();
        let file = Arc::new(File::from(OwnedFd::from(reader)));
        let reader_fd = file.as_raw_fd();
        let spec = FileSpec::of_file(file, Alignment::BUFFERED);
        let target = kernel.register_file(0, &spec).unwrap();
        let memory = Box::leak(Box::new([0_u8; 1024])).as_mut_ptr();
        Self { kernel, target, writer, reader_fd, memory }
    }

    /// Starts reads with these names. Each has eight bytes of its own.
    fn read(&mut self, names: std::ops::Range<u32>) {
        for name in names {
            let base = self.memory.wrapping_add((name * LEN_BYTES) as usize);
            let buffers = Buffers::One { base, len_bytes: LEN_BYTES };
            let len_bytes = LEN_BYTES.into();
            let call = Call { verb: Verb::Read, flags: 0, offset_bytes: 0, len_bytes, buffers };
            // SAFETY: 1. the memory is never freed; 2. the kernel holds the file.
            unsafe { self.kernel.queue(name.into(), self.target, &call) }.unwrap();
        }
        self.kernel.submit().unwrap();
    }

    /// Lets `count` reads end.
    fn feed(&mut self, count: usize) {
        (0..count).for_each(|_| self.writer.write_all(&[7; LEN_BYTES as usize]).unwrap());
    }

    /// Sleeps until `count` results are available.
    fn results(&mut self, count: usize) -> Vec<(u64, i32)> {
        let mut results = Vec::new();
        while results.len() < count {
            self.kernel.wait(Some(Duration::from_secs(300))).unwrap();
            self.kernel.begin_reap();
            let before = results.len();
            while let Some(raw) = self.kernel.pop() {
                results.push((raw.user_data, raw.result));
            }
            assert!(results.len() > before || self.kernel.started > 0, "only {results:?}");
        }
        results.sort_unstable();
        results
    }

    /// Sleeps until the pool of threads has completed its only call.
    fn pool_result(&mut self) -> (u64, i32) {
        loop {
            self.kernel.wait(Some(Duration::from_secs(300))).unwrap();
            self.kernel.begin_reap();
            if let Some(raw) = self.kernel.pop() {
                return (raw.user_data, raw.result);
            }
            assert_eq!(self.kernel.pool_calls, 1);
        }
    }

    fn descriptors(&self) -> usize {
        self.kernel.files[0].as_ref().unwrap().descriptors()
    }

    /// This process's descriptors of the pipe's reading end. Other tests, which run at the same time, use other pipes.
    fn open_readers(&self) -> usize {
        readers_of(&self.pipe())
    }

    fn pipe(&self) -> std::path::PathBuf {
        std::fs::read_link(format!("/proc/self/fd/{}", self.reader_fd)).unwrap()
    }

    fn outstanding_by_descriptor(&self) -> Vec<usize> {
        let file = self.kernel.files[0].as_ref().unwrap();
        file.outstanding_by_descriptor()
    }
}

fn readers_of(pipe: &std::path::Path) -> usize {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
    // One of these descriptors is the pipe's writing end.
    fds.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|target| target == pipe)).count() - 1
}

#[test]
fn without_a_pool_all_requests_go_to_the_files_own_descriptor() {
    let mut rig = Rig::new(1);
    rig.read(0..6);
    assert_eq!((rig.outstanding_by_descriptor(), rig.open_readers()), (vec![6], 1));
    rig.feed(6);
    assert_eq!(rig.results(6), (0..6).map(|name| (name, 8)).collect::<Vec<_>>());
}

#[test]
fn requests_spread_over_as_many_descriptors_as_the_pool_has() {
    let mut rig = Rig::new(4);
    rig.read(0..1);
    assert_eq!(rig.open_readers(), 1);
    rig.read(1..10);
    assert_eq!((rig.outstanding_by_descriptor(), rig.open_readers()), (vec![3, 3, 2, 2], 4));
    rig.feed(10);
    assert_eq!(rig.results(10), (0..10).map(|name| (name, 8)).collect::<Vec<_>>());
}

#[test]
fn duplicates_are_closed_when_the_worker_sleeps_with_nothing_in_flight() {
    let mut rig = Rig::new(4);
    rig.read(0..4);
    rig.feed(4);
    rig.results(4);
    assert_eq!(rig.open_readers(), 4);
    rig.kernel.wait(Some(Duration::from_millis(1))).unwrap();
    assert_eq!((rig.open_readers(), rig.descriptors()), (1, 1));
}

#[test]
fn detached_file_is_closed_with_its_duplicates() {
    let mut rig = Rig::new(4);
    rig.read(0..4);
    rig.feed(4);
    rig.results(4);
    let (pipe, target) = (rig.pipe(), rig.target);
    rig.kernel.unregister_file(0, target);
    assert_eq!(readers_of(&pipe), 0);
}

#[test]
fn request_that_waits_is_cancelled_and_the_one_in_a_thread_is_not() {
    let mut rig = Rig::new(1);
    rig.read(0..1);
    while !is_being_read(&rig) {
        std::thread::yield_now();
    }
    rig.read(1..3);
    (0..2).for_each(|name| rig.kernel.cancel(name));
    assert_eq!(rig.results(1), [(1, -libc::ECANCELED)]);
    rig.feed(2);
    assert_eq!(rig.results(2), [(0, 8), (2, 8)]);
}

/// Whether a thread already reads for the first request. The C library then refuses to cancel the request.
fn is_being_read(rig: &Rig) -> bool {
    let slot = rig.kernel.files[0].as_ref().unwrap().outstanding().next().unwrap();
    let reader = format!("0 {:#x} {:#x}", rig.reader_fd, rig.memory.addr());
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
    let mut calls = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("syscall")).ok());
    rig.kernel.requests.blocks().is_pending(slot) && calls.any(|call| call.starts_with(&reader))
}

#[test]
fn file_that_is_open_for_reading_only_is_synced_by_the_pool_of_threads() {
    let mut rig = Rig::new(4);
    let path = tempfile::NamedTempFile::new().unwrap();
    let file = Arc::new(File::open(path.path()).unwrap());
    let target = rig.kernel.register_file(1, &FileSpec::of_file(file, Alignment::BUFFERED)).unwrap();
    let buffers = Buffers::None;
    let sync = Call { verb: Verb::Sync, flags: 0, offset_bytes: 0, len_bytes: 0, buffers };
    // SAFETY: 1. no buffers; 2. the kernel holds the file.
    unsafe { rig.kernel.queue(3, target, &sync) }.unwrap();
    rig.kernel.submit().unwrap();
    assert_eq!((rig.kernel.pool_calls, rig.kernel.started), (1, 0));
    assert_eq!(rig.pool_result(), (3, 0));
}

#[test]
fn staged_request_and_waiting_job_are_cancelled_before_they_start() {
    let mut rig = Rig::new(1);
    let buffers = Buffers::None;
    let sync = Call { verb: Verb::Sync, flags: 0, offset_bytes: 0, len_bytes: 0, buffers };
    let read = Call {
        verb: Verb::Read,
        len_bytes: 8,
        buffers: Buffers::One { base: rig.memory, len_bytes: 8 },
        ..sync
    };
    // SAFETY: 1. the memory is never freed; 2. the kernel holds the file.
    unsafe { rig.kernel.queue(1, rig.target, &read) }.unwrap();
    // SAFETY: as above; the file is open for reading only, so this goes to the pool of threads.
    unsafe { rig.kernel.queue(2, rig.target, &sync) }.unwrap();
    (1..3).for_each(|name| rig.kernel.cancel(name));
    assert_eq!(rig.results(2), [(1, -libc::ECANCELED), (2, -libc::ECANCELED)]);
    assert_eq!(rig.kernel.files[0].as_ref().unwrap().in_flight(), 0);
}

#[test]
fn dropping_with_requests_outstanding_leaves_them_their_blocks_and_descriptors() {
    let mut rig = Rig::new(2);
    rig.read(0..4);
    let blocks = Arc::downgrade(rig.kernel.requests.blocks());
    let slots = 0..u32::try_from(rig.kernel.requests.capacity()).unwrap();
    let pipe = rig.pipe();
    let Rig { kernel, mut writer, memory, .. } = rig;
    drop(kernel);
    assert_eq!(readers_of(&pipe), 2);
    let blocks = blocks.upgrade().unwrap();
    let pending = slots.clone().filter(|&slot| blocks.is_pending(slot)).count();
    writer.write_all(&[7; 4 * LEN_BYTES as usize]).unwrap();
    while slots.clone().any(|slot| blocks.is_pending(slot)) {
        std::thread::yield_now();
    }
    // SAFETY: 1. 1024 bytes that are never freed; 2. the only requests that write to them have ended.
    let memory = unsafe { std::slice::from_raw_parts(memory, 4 * LEN_BYTES as usize) };
    assert_eq!((pending, memory), (4, &[7; 4 * LEN_BYTES as usize][..]));
}

#[test]
fn dropping_with_nothing_outstanding_frees_all() {
    let mut rig = Rig::new(4);
    rig.read(0..4);
    rig.feed(4);
    rig.results(4);
    let (blocks, pipe) = (Arc::downgrade(rig.kernel.requests.blocks()), rig.pipe());
    let Rig { kernel, writer: _writer, .. } = rig;
    drop(kernel);
    assert_eq!(readers_of(&pipe), 0);
    // A waiter that has just returned may not have ended yet.
    while blocks.strong_count() > 0 {
        std::thread::yield_now();
    }
}

#[test]
fn oldest_request_that_hangs_does_not_keep_another_descriptors_from_waking_the_worker() {
    let mut rig = Rig::new(1);
    rig.read(0..1);
    rig.kernel.wait(Some(Duration::from_millis(1))).unwrap(); // a waiter waits for it
    let (reader, mut writer) = io::pipe().unwrap();
    let file = Arc::new(File::from(OwnedFd::from(reader)));
    let first = rig.target;
    rig.target = rig.kernel.register_file(1, &FileSpec::of_file(file, Alignment::BUFFERED)).unwrap();
    rig.read(1..2);
    let feeder = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        writer.write_all(&[7; LEN_BYTES as usize]).unwrap();
        writer
    });
    assert_eq!(rig.results(1), [(1, 8)]);
    feeder.join().unwrap();
    rig.target = first;
    rig.feed(1);
    assert_eq!(rig.results(1), [(0, 8)]);
}

#[test]
fn pool_of_no_or_too_many_descriptors_is_refused() {
    let of = |fd_pool| PosixAioEngine::with(&PosixAioOptions { fd_pool }, &EngineConfig::default());
    assert_eq!(of(0).unwrap_err().to_string(), "posix-aio: fd-pool is 0, but must be from 1 to 64");
    assert_eq!(of(MAX_FD_POOL + 1).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    assert_eq!(of(1).unwrap().describe(), "posix-aio: 1 descriptor per file");
    assert_eq!(of(4).unwrap().describe(), "posix-aio: up to 4 descriptors per file");
}
