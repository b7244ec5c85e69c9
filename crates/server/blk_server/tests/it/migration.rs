//! A live migration under load, done by a test front-end: it copies memory page by page while requests complete, and
//! copies each page in the dirty log again. At the end the copy must equal the memory, and the guest continues in the
//! copy.
//!
//! A VMM learns of the driver's own stores in a different way. Therefore pages that the driver writes are copied in
//! every pass, and all other pages only if they are in the log.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blk_server::{EngineFactory, EngineSource, Placement, WorkerId};
use guest_mem::{GuestRange, LOG_PAGE_BYTES};
use io_engine::{Engine, EngineConfig, IoUringEngine, LinuxAioEngine};

use crate::rig::dirty::{Log, MEMORY_BYTES, begin, changed, contents, copy_page, end, page_of};
use crate::rig::format::{Format, on_both_formats};
use crate::rig::passed::serves;
use crate::rig::{
    FrontEnd, Guest, MIB, Options, PATIENCE, Rig, code, eventually, header_bytes, kind, vring_state,
};

const QUEUE_SIZE: u16 = 128;
const DEPTH: usize = 16;
const PASSES: usize = 30;

on_both_formats! {
    copy_with_what_the_log_says_is_the_memory,
    copy_is_the_memory_where_queues_share_an_engine_or_hand_over,
    copy_is_the_memory_while_queues_move_and_logging_goes_on_and_off,
}

/// A queue's share of memory: the first addresses of headers (the driver's), status bytes and data (the device's).
struct Share {
    headers: u64,
    status: u64,
    data: u64,
}

const DATA_BYTES: u64 = MIB;

impl Share {
    fn of(queue: u16) -> Self {
        let queue = u64::from(queue);
        let (headers, status) = (4 * MIB + queue * 0x1_0000, 5 * MIB + queue * 0x1_0000);
        Self { headers, status, data: 8 * MIB + queue * DATA_BYTES }
    }

    /// Pages that the driver of a queue writes.
    fn drivers_pages(guest: &Guest) -> BTreeSet<u64> {
        let Self { headers, .. } = Self::of(guest.index);
        let mut pages: BTreeSet<_> = [headers, guest.layout.avail.0, guest.layout.descriptors.0].into();
        // Descriptors of a split ring, or the packed ring.
        pages.insert(guest.layout.descriptors.0 + u64::from(QUEUE_SIZE) * 16 - 1);
        pages.into_iter().map(page_of).collect()
    }
}

/// The requests that a load has in flight.
#[derive(Default)]
struct Slots {
    tokens: [Option<u64>; DEPTH],
}

impl Slots {
    fn free(&self) -> Option<usize> {
        self.tokens.iter().position(Option::is_none)
    }

    fn in_flight(&self) -> usize {
        self.tokens.iter().flatten().count()
    }

    fn finish(&mut self, used: virtqueue::Used) {
        assert!(used.written_bytes > 0);
        let slot = self.tokens.iter_mut().find(|token| **token == Some(used.token));
        *slot.expect("a request that is on its way") = None;
    }
}

/// Reads of random sizes into random places of the queue's data, until told to stop. Does not wait for requests in
/// flight.
fn load(guest: &mut Guest, stop: &AtomicBool, done: &AtomicU64) -> Slots {
    let mut random = fastrand::Rng::with_seed(u64::from(guest.index) + 1);
    let mut slots = Slots::default();
    let share = Share::of(guest.index);
    while !stop.load(Ordering::Relaxed) {
        while let Some(slot) = slots.free() {
            let header = share.headers + slot as u64 * 64;
            let most = if random.u8(..8) == 0 { 128 } else { 16 };
            let sectors = 1 + random.u64(..most);
            let sector = random.u64(..16 * MIB / 512 - sectors);
            guest.view.store(header, &header_bytes(kind::IN, sector)).unwrap();
            let len_bytes = (sectors * 512) as u32;
            let addr = share.data + random.u64(..DATA_BYTES - sectors * 512);
            let room = [
                GuestRange { addr, len_bytes },
                GuestRange { addr: share.status + slot as u64 * 0x1000 + 5, len_bytes: 1 },
            ];
            slots.tokens[slot] = Some(guest.add(&[GuestRange { addr: header, len_bytes: 16 }], &room));
        }
        guest.submit();
        slots.finish(guest.next_used().expect("an answer"));
        done.fetch_add(1, Ordering::Relaxed);
        while let Some(used) = guest.ring.pop_used().unwrap() {
            slots.finish(used);
            done.fetch_add(1, Ordering::Relaxed);
        }
        if slots.in_flight() == 0 && random.u8(..4) == 0 {
            std::thread::yield_now();
        }
    }
    // Publishes the requests that the device has not seen yet.
    guest.submit();
    slots
}

/// Tells loads to end, even if the test fails.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

struct Copied {
    copy: Vec<u8>,
    pages: usize,
}

/// Copies everything in the first pass, then what is in the log. Calls `meanwhile` between passes.
fn copy_passes(view: &guest_mem::MemoryView, log: &Log, mut meanwhile: impl FnMut(usize)) -> Copied {
    let mut copied = Copied { copy: vec![0; MEMORY_BYTES as usize], pages: 0 };
    (0..MEMORY_BYTES)
        .step_by(LOG_PAGE_BYTES as usize)
        .for_each(|addr| copy_page(view, addr, &mut copied.copy));
    for pass in 0..PASSES {
        meanwhile(pass);
        copied.again(view, log.take());
    }
    copied
}

impl Copied {
    fn again(&mut self, view: &guest_mem::MemoryView, pages: BTreeSet<u64>) {
        self.pages += pages.len();
        pages.into_iter().for_each(|addr| copy_page(view, addr, &mut self.copy));
    }
}

fn fill_image(path: &std::path::Path) {
    let mut random = fastrand::Rng::with_seed(4);
    let content: Vec<u8> = (0..16 * MIB).map(|_| random.u8(..)).collect();
    let image = std::fs::File::options().write(true).open(path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&image, &content, 0).unwrap();
}

fn start(rig: &Rig, disk: usize, format: Format, queues: u16) -> (FrontEnd, Vec<Guest>) {
    let mut front_end = rig.connect_to(disk);
    front_end.negotiate(format.usual());
    front_end.share_memory(MEMORY_BYTES);
    let guests = (0..queues).map(|index| front_end.start_queue(index, QUEUE_SIZE, format.usual())).collect();
    (front_end, guests)
}

/// Opens another session of the disk, whose guest continues in the middle of its work.
fn arrive(
    rig: &Rig,
    disk: usize,
    format: Format,
    source: &FrontEnd,
    guests: &[Guest],
    bases: &[u32],
) -> FrontEnd {
    let mut front_end = rig.connect_to(disk);
    front_end.negotiate(format.usual());
    front_end.share(Arc::clone(&source.memory));
    for (guest, &base) in guests.iter().zip(bases) {
        front_end.announce_queue(guest);
        front_end.ok(code::SET_VRING_BASE, &vring_state(guest.index, base), &[]);
        front_end.ok(code::SET_VRING_KICK, &u64::from(guest.index).to_ne_bytes(), &[guest.kick.as_fd()]);
        front_end.ok(code::SET_VRING_ENABLE, &vring_state(guest.index, 1), &[]);
    }
    front_end
}

/// Performs a whole migration. Calls `meanwhile` between passes.
fn migrate(
    rig: &Rig,
    disk: usize,
    format: Format,
    queues: u16,
    meanwhile: impl Fn(usize, &FrontEnd, &Log, &dyn Fn(bool)),
) {
    let (source, mut guests) = start(rig, disk, format, queues);
    let (stop, done, log) = (AtomicBool::new(false), AtomicU64::new(0), Log::new());
    let view = guest_mem::MemoryView::new(Arc::clone(&source.memory));
    let rings: Vec<_> = guests.iter().map(|guest| (guest.index, guest.layout)).collect();
    let (mut copied, slots) = std::thread::scope(|scope| {
        let (stop, done) = (&stop, &done);
        let loads: Vec<_> =
            guests.iter_mut().map(|guest| scope.spawn(move || load(guest, stop, done))).collect();
        let _ends = Ends(stop);
        let enough = |count: u64| {
            let before = done.load(Ordering::Relaxed);
            assert!(eventually(|| done.load(Ordering::Relaxed) > before + count), "the load hangs");
        };
        enough(100);
        begin(&source, &rings, format.usual(), &log);
        let copied = copy_passes(&view, &log, |pass| {
            enough(10);
            let switch = |on: bool| {
                if on {
                    begin(&source, &rings, format.usual(), &log)
                } else {
                    end(&source, &rings, format.usual())
                }
            };
            meanwhile(pass, &source, &log, &switch);
        });
        stop.store(true, Ordering::Relaxed);
        (copied, loads.into_iter().map(|load| load.join().unwrap()).collect::<Vec<_>>())
    });

    let bases: Vec<_> = (0..queues).map(|queue| source.stop_queue(queue)).collect();
    let stopped = contents(&view);
    copied.again(&view, log.take());
    let drivers: BTreeSet<_> = guests.iter().flat_map(Share::drivers_pages).collect();
    let differs: Vec<_> = changed(&copied.copy, &stopped).difference(&drivers).copied().collect();
    assert!(differs.is_empty(), "{format:?}: not copied again: {differs:x?}");
    assert!(copied.pages > PASSES, "only {} pages were copied again", copied.pages);

    // Nothing is in flight: the device has completed every request that it took; the others wait in the ring.
    let destination = arrive(rig, disk, format, &source, &guests, &bases);
    for (guest, mut slots) in guests.iter_mut().zip(slots) {
        while slots.in_flight() > 0 {
            slots.finish(guest.next_used().expect("an answer"));
        }
        assert!(guest.ring.pop_used().unwrap().is_none());
        assert!(serves(guest));
    }
    drop(destination);
}

fn copy_with_what_the_log_says_is_the_memory(format: Format) {
    let rig = Rig::start(Options { workers: 2, ..Options::default() });
    fill_image(&rig.image);
    migrate(&rig, 0, format, 2, |_, _, _, _| ());
}

fn uring(several_threads: bool) -> EngineFactory {
    let config = EngineConfig { pollable: true, several_threads, ..EngineConfig::default() };
    Box::new(move || Ok(Box::new(IoUringEngine::new(config.clone())?) as Box<dyn Engine>))
}

fn aio() -> EngineFactory {
    let config = EngineConfig { pollable: true, ..EngineConfig::default() };
    Box::new(move || Ok(Box::new(LinuxAioEngine::new(config.clone())?) as Box<dyn Engine>))
}

fn copy_is_the_memory_where_queues_share_an_engine_or_hand_over(format: Format) {
    let shared = Placement::Shared { reap_on_submit: true, completion_worker: None };
    let hand_over = "adaptive".parse().unwrap();
    let completion = Placement::Completion { hand_over, completion_worker: Some(WorkerId(1)) };
    for (make, placement) in [(uring(true), shared), (uring(false), completion), (aio(), shared)] {
        let source = EngineSource::placed("placed", EngineConfig::default().depth, make, placement);
        let rig =
            Rig::start(Options { disks: 2, other_engine: Some(source), workers: 2, ..Options::default() });
        fill_image(&rig.image_of(1));
        migrate(&rig, 1, format, 2, |_, _, _, _| ());
    }
}

/// Logging stops and starts again, as when a migration is cancelled and restarted. Then everything is copied again.
fn copy_is_the_memory_while_queues_move_and_logging_goes_on_and_off(format: Format) {
    let rig = Rig::start(Options { workers: 3, ..Options::default() });
    fill_image(&rig.image);
    migrate(&rig, 0, format, 2, |pass, _, log, switch| {
        let worker = WorkerId(pass as u32 % 3);
        rig.running().attach("test0", (pass % 2) as u16, worker, PATIENCE).unwrap();
        if pass == PASSES / 3 {
            switch(false);
            log.take();
            switch(true);
            // Marks every page as changed.
            log.fill();
        }
    });
}
