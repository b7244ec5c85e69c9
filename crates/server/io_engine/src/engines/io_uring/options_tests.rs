//! Tests of the ring's options: whether the kernel accepts them, and whether they have their effect.
//!
//! `tests.rs` tests the ring without options, and `tests/contract` the contract of every engine.

use std::time::Instant;

use disk_image::Alignment;
use guest_mem::{GuestAddress, GuestRange, IoVecs, MemoryView, Region};
use rustix::fs::FallocateFlags;

use super::*;
use crate::backend::{Buffers, Verb};

/// A test that waits this long has failed.
const PATIENCE: Duration = Duration::from_secs(300);

const MEMORY_BYTES: u64 = 1 << 20;

fn config() -> EngineConfig {
    EngineConfig { depth: 8, ..EngineConfig::default() }
}

fn started(options: &IoUringOptions) -> Uring {
    let mut ring = Uring::make(KernelAge::Newest, options, &config()).unwrap();
    ring.start().unwrap();
    ring
}

fn sqpoll() -> IoUringOptions {
    IoUringOptions { sqpoll_idle: Some(Duration::from_millis(1)), ..IoUringOptions::default() }
}

fn pinned() -> IoUringOptions {
    IoUringOptions { pin_guest_memory: true, ..IoUringOptions::default() }
}

fn region() -> Arc<Region> {
    Arc::new(Region::from_memfd(GuestAddress(0), MEMORY_BYTES).unwrap())
}

fn memory_of(regions: &[&Arc<Region>]) -> Arc<GuestMemory> {
    Arc::new(GuestMemory::new(regions.iter().map(|&region| Arc::clone(region)).collect()).unwrap())
}

/// A file of 4 KiB of `0x5a`.
fn file_with_data() -> FileSpec {
    let file = tempfile::tempfile().unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0x5a; 4096], 0).unwrap();
    FileSpec::of_file(Arc::new(file), Alignment::BUFFERED)
}

fn buffers_of(memory: &Arc<GuestMemory>, addr: u64) -> IoVecs {
    let mut buffers = IoVecs::with_capacity(1);
    let view = MemoryView::new(Arc::clone(memory));
    buffers.fill(&view, [GuestRange { addr, len_bytes: 4096 }]).unwrap();
    buffers
}

fn call(verb: Verb, buffers: &IoVecs) -> Call {
    let base = buffers.as_raw()[0].iov_base.cast();
    let buffers = Buffers::One { base, len_bytes: 4096 };
    Call { verb, flags: 0, offset_bytes: 0, len_bytes: 4096, buffers }
}

fn result_of(ring: &mut Uring) -> i32 {
    loop {
        ring.wait(Some(Duration::from_secs(300))).unwrap();
        ring.begin_reap();
        if let Some(raw) = ring.pop() {
            return raw.result;
        }
    }
}

fn run(ring: &mut Uring, target: Target, call: &Call) -> i32 {
    // SAFETY: 1. the caller's buffers and file live until the result below.
    unsafe { ring.queue(1, target, call) }.unwrap();
    result_of(ring)
}

fn bytes_at(memory: &Arc<GuestMemory>, addr: u64) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    MemoryView::new(Arc::clone(memory)).read(addr, &mut bytes).unwrap();
    bytes
}

#[test]
fn every_combination_of_options_makes_a_ring_at_every_age() {
    let ages = [KernelAge::Newest, KernelAge::Before6_1, KernelAge::Before5_19, KernelAge::Linux5_15];
    for (age, options) in ages.into_iter().flat_map(|age| (0..8).map(move |options| (age, options))) {
        let sqpoll_idle = (options & 1 != 0).then_some(Duration::from_secs(1));
        let (iopoll, pin_guest_memory) = (options & 2 != 0, options & 4 != 0);
        let options = IoUringOptions { sqpoll_idle, iopoll, pin_guest_memory };
        let mut ring = Uring::make(age, &options, &EngineConfig::default()).unwrap();
        let features = ring.features;
        assert_eq!((features.sqpoll, features.iopoll), (sqpoll_idle.is_some(), iopoll));
        assert_eq!(features.pinned, pin_guest_memory && age < KernelAge::Before5_19);
        ring.start().unwrap();
    }
}

#[test]
fn kernel_refuses_task_run_flags_together_with_sqpoll() {
    let mut builder: io_uring::Builder<squeue::Entry> = IoUring::builder();
    builder.setup_sqpoll(1).setup_coop_taskrun();
    assert_eq!(builder.build(8).map(drop).unwrap_err().raw_os_error(), Some(libc::EINVAL));
}

#[test]
fn features_name_what_is_on_and_nothing_else() {
    let on = Uring::make(KernelAge::Newest, &IoUringOptions { iopoll: true, ..sqpoll() }, &config())
        .unwrap()
        .features;
    let off = IoUringEngine::new(EngineConfig::default()).unwrap().features();
    assert!(on.to_string().contains("(SQPOLL), completions polled (IOPOLL)"), "{on}");
    assert!(!off.to_string().contains("polled") && !off.to_string().contains("pinned"), "{off}");
}

#[test]
fn refusal_keeps_its_kind_and_says_what_to_do() {
    let refused = |errno| setup::explain(&io::Error::from_raw_os_error(errno), &IoUringOptions::default());
    let forbidden = refused(libc::EPERM);
    assert_eq!(forbidden.kind(), io::ErrorKind::PermissionDenied);
    assert!(forbidden.to_string().contains("kernel.io_uring_disabled=0"), "{forbidden}");
    assert!(refused(libc::ENOSYS).to_string().contains("Linux 5.15"));
    assert!(refused(libc::ENOMEM).to_string().contains("ulimit -l"));
}

#[test]
fn refused_kernel_thread_is_told_apart_from_a_refused_ring() {
    let error = setup::explain(&io::Error::from_raw_os_error(libc::EPERM), &sqpoll());
    assert!(error.to_string().contains("SQPOLL"), "{error}");
}

#[test]
fn kernel_thread_goes_to_sleep_and_is_woken_by_the_next_call() {
    let mut ring = started(&sqpoll());
    let spec = file_with_data();
    let target = ring.register_file(0, &spec).unwrap();
    let sync = Call { verb: Verb::Sync, flags: 0, offset_bytes: 0, len_bytes: 0, buffers: Buffers::None };
    for _ in 0..3 {
        let deadline = Instant::now() + Duration::from_secs(300);
        while !ring.ring.submission().need_wakeup() {
            assert!(Instant::now() < deadline, "the thread does not sleep");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(run(&mut ring, target, &sync), 0);
    }
}

#[test]
fn more_watches_than_the_ring_of_a_kernel_thread_has_room_for_all_fire() {
    let mut ring = started(&sqpoll());
    let fd = Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap());
    for token in 0..100 {
        ring.watch(Arc::clone(&fd), WatchToken(token)).unwrap();
    }
    rustix::io::write(&fd, &1_u64.to_ne_bytes()).unwrap();
    let mut tokens = std::collections::HashSet::new();
    while tokens.len() < 100 {
        ring.wait(Some(Duration::from_secs(300))).unwrap();
        ring.begin_reap();
        assert!(ring.pop().is_none());
        let mut events = Vec::new();
        ring.take_ready(&mut events);
        tokens.extend(events.iter().map(|event| format!("{event:?}")));
    }
}

#[test]
fn file_beyond_the_table_is_held_while_a_kernel_thread_may_look_its_number_up() {
    let config = EngineConfig { registered_files: 1, ..config() };
    let mut ring = Uring::make(KernelAge::Newest, &sqpoll(), &config).unwrap();
    ring.start().unwrap();
    let spec = file_with_data();
    let target = ring.register_file(5, &spec).unwrap();
    assert_eq!(
        (target, Arc::strong_count(spec.file().unwrap())),
        (Target::Fd(spec.file().unwrap().as_raw_fd()), 2)
    );
    ring.unregister_file(5, target);
    assert_eq!(Arc::strong_count(spec.file().unwrap()), 1);
}

/// A starting server needs the image's lock, which a stopping server holds until the kernel closes the file.
#[test]
fn file_that_was_detached_is_closed_by_the_kernel_thread_too() {
    for _ in 0..200 {
        let mut ring = started(&sqpoll());
        let (mut reader, writer) = std::io::pipe().unwrap();
        let spec = FileSpec::of_file(Arc::new(File::from(OwnedFd::from(writer))), Alignment::BUFFERED);
        let target = ring.register_file(0, &spec).unwrap();
        let memory = memory_of(&[&region()]);
        let buffers = buffers_of(&memory, 0);
        assert_eq!(run(&mut ring, target, &call(Verb::Write, &buffers)), 4096);
        ring.unregister_file(0, target);
        drop(spec);
        rustix::io::ioctl_fionbio(&reader, true).unwrap();
        let mut written = [0; 4096];
        std::io::Read::read_exact(&mut reader, &mut written).unwrap();
        // If another test forks at this moment, its child holds all descriptors until it calls exec.
        let deadline = Instant::now() + PATIENCE;
        while std::io::Read::read(&mut reader, &mut written).map_err(|error| error.kind()) != Ok(0) {
            assert!(Instant::now() < deadline, "somebody still holds the other end");
        }
    }
}

#[test]
fn call_that_the_polled_ring_refuses_is_repeated_on_the_first() {
    let mut ring = started(&IoUringOptions { iopoll: true, ..IoUringOptions::default() });
    let spec = file_with_data(); // buffered: the kernel refuses to poll for it
    let target = ring.register_file(0, &spec).unwrap();
    let polled = ring.polled.as_mut().unwrap();
    assert!(!polled.takes(target, Verb::Read), "the probe found out");
    polled.add_file(0, &spec).unwrap();
    assert!(polled.takes(target, Verb::Read) && !polled.takes(target, Verb::Sync));
    let memory = memory_of(&[&region()]);
    let buffers = buffers_of(&memory, 0);
    let read = call(Verb::Read, &buffers);
    assert_eq!(run(&mut ring, target, &read), -libc::EAGAIN);
    assert_eq!(run(&mut ring, target, &read), 4096);
}

#[test]
fn kick_ends_a_wait_while_polled_calls_are_out() {
    let options = IoUringOptions { iopoll: true, ..IoUringOptions::default() };
    let mut ring = Uring::make_polled(&options, &config()).unwrap();
    ring.start().unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    let spec = FileSpec::of_file(Arc::new(File::from(OwnedFd::from(reader))), Alignment::BUFFERED);
    let target = ring.register_file(0, &spec).unwrap();
    let memory = memory_of(&[&region()]);
    let buffers = buffers_of(&memory, 0);
    let kick = Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap());
    ring.watch(Arc::clone(&kick), WatchToken(4)).unwrap();
    // SAFETY: 1. file and buffers live until the read's result at the end of this function.
    unsafe { ring.queue(1, target, &call(Verb::Read, &buffers)) }.unwrap();
    ring.wait(Some(Duration::from_millis(1))).unwrap();
    rustix::io::write(&kick, &1_u64.to_ne_bytes()).unwrap();
    let mut events = Vec::new();
    while events.is_empty() {
        ring.wait(None).unwrap();
        ring.begin_reap();
        assert!(ring.pop().is_none(), "nothing was written to the pipe");
        ring.take_ready(&mut events);
    }
    assert!(matches!(events[..], [Event::Readable(WatchToken(4))]), "{events:?}");
    drop(writer); // the read ends with 0 bytes
    assert_eq!(result_of(&mut ring), 0);
}

#[test]
fn transfer_inside_pinned_memory_is_a_fixed_one() {
    let buffers = Buffers::One { base: std::ptr::null_mut(), len_bytes: 4096 };
    let opcode_of = |verb, piece| {
        let call = Call { verb, flags: 0, offset_bytes: 0, len_bytes: 4096, buffers };
        entry(Target::Registered(0), &call, piece).get_opcode()
    };
    let fixed = [opcode_of(Verb::Read, Some(3)), opcode_of(Verb::Write, Some(3))];
    let plain = [opcode_of(Verb::Read, None), opcode_of(Verb::Write, None)];
    assert_eq!(fixed, [opcode::ReadFixed::CODE, opcode::WriteFixed::CODE].map(u32::from));
    assert_eq!(plain, [opcode::Read::CODE, opcode::Write::CODE].map(u32::from));
}

#[test]
fn flags_of_a_fixed_write_reach_the_kernel() {
    let mut ring = started(&pinned());
    let (spec, memory) = (file_with_data(), memory_of(&[&region()]));
    let target = ring.register_file(0, &spec).unwrap();
    ring.use_memory(&memory);
    let buffers = buffers_of(&memory, 0);
    let unknown_flag = 1 << 30;
    let write = Call { flags: unknown_flag, ..call(Verb::Write, &buffers) };
    assert_eq!(run(&mut ring, target, &write), -libc::EOPNOTSUPP);
    assert_eq!(run(&mut ring, target, &call(Verb::Write, &buffers)), 4096);
}

/// Punches a hole into guest memory, as a balloon does, then reads into that page. Returns the data that the guest
/// sees.
fn read_after_a_hole_was_punched(options: &IoUringOptions) -> (i32, u8) {
    let mut ring = started(options);
    let (spec, region) = (file_with_data(), region());
    let target = ring.register_file(0, &spec).unwrap();
    let memory = memory_of(&[&region]);
    MemoryView::new(Arc::clone(&memory)).store(8192, &[0x11; 4096]).unwrap();
    ring.use_memory(&memory);
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(region.fd(), hole, 8192, 4096).unwrap();
    let buffers = buffers_of(&memory, 8192);
    let result = run(&mut ring, target, &call(Verb::Read, &buffers));
    (result, bytes_at(&memory, 8192)[0])
}

#[test]
fn read_into_a_punched_hole_reaches_a_guest_that_is_not_pinned() {
    assert_eq!(read_after_a_hole_was_punched(&IoUringOptions::default()), (4096, 0x5a));
}

/// Shows the damage that `pin_guest_memory` does under a balloon: the read succeeds, and the guest finds zeroes. If
/// this test fails one day, the kernel has learned to follow holes, and the warnings in `pinned.rs` can be removed.
#[test]
fn read_into_a_punched_hole_is_lost_on_a_guest_that_is_pinned() {
    assert_eq!(read_after_a_hole_was_punched(&pinned()), (4096, 0));
}

fn pieces(ring: &Uring) -> usize {
    ring.pinned.as_ref().unwrap().pieces()
}

#[test]
fn region_that_stays_is_not_registered_again_and_one_that_goes_is_let_go() {
    let mut ring = started(&pinned());
    let (stays, goes) = (region(), Arc::new(Region::from_memfd(GuestAddress(1 << 30), 4096).unwrap()));
    let (both, one) = (memory_of(&[&stays, &goes]), memory_of(&[&stays]));
    ring.use_memory(&both);
    let at_first = pieces(&ring);
    ring.use_memory(&one);
    ring.forget_memory(&both);
    drop(both);
    assert_eq!((at_first, pieces(&ring), Arc::strong_count(&goes)), (2, 1, 1));
    ring.forget_memory(&one);
    drop(one);
    assert_eq!((pieces(&ring), Arc::strong_count(&stays)), (0, 1));
}

#[test]
fn memory_announced_by_two_queues_is_pinned_until_both_forgot_it() {
    let mut ring = started(&pinned());
    let (spec, memory) = (file_with_data(), memory_of(&[&region()]));
    let target = ring.register_file(0, &spec).unwrap();
    ring.use_memory(&memory);
    ring.use_memory(&memory);
    ring.forget_memory(&memory);
    assert_eq!(pieces(&ring), 1);
    ring.forget_memory(&memory);
    assert_eq!(pieces(&ring), 0);
    assert_eq!(run(&mut ring, target, &call(Verb::Read, &buffers_of(&memory, 0))), 4096);
}

#[test]
fn place_of_a_region_that_went_is_used_again_with_the_new_one() {
    let mut ring = started(&pinned());
    let spec = file_with_data();
    let target = ring.register_file(0, &spec).unwrap();
    for _ in 0..3 {
        let memory = memory_of(&[&region()]);
        ring.use_memory(&memory);
        assert_eq!(run(&mut ring, target, &call(Verb::Read, &buffers_of(&memory, 4096))), 4096);
        assert_eq!(bytes_at(&memory, 4096), [0x5a; 4096]);
        ring.forget_memory(&memory);
    }
}

#[test]
fn memory_forgotten_under_a_call_in_flight_stays_pinned_until_it_ends() {
    let mut ring = started(&pinned());
    let (reader, writer) = std::io::pipe().unwrap();
    let spec = FileSpec::of_file(Arc::new(File::from(OwnedFd::from(reader))), Alignment::BUFFERED);
    let target = ring.register_file(0, &spec).unwrap();
    let (old, new) = (memory_of(&[&region()]), memory_of(&[&region()]));
    ring.use_memory(&old);
    let buffers = buffers_of(&old, 0);
    // SAFETY: 1. `buffers` and `spec` live until the result below.
    unsafe { ring.queue(1, target, &call(Verb::Read, &buffers)) }.unwrap();
    ring.submit().unwrap();
    ring.forget_memory(&old);
    ring.use_memory(&new);
    rustix::io::write(&writer, &[0x77; 4096]).unwrap();
    assert_eq!(result_of(&mut ring), 4096);
    assert_eq!((bytes_at(&old, 0), bytes_at(&new, 0)), (vec![0x77; 4096], vec![0; 4096]));
}

#[test]
fn memory_that_the_kernel_does_not_pin_is_used_without() {
    let mut ring = started(&pinned());
    let spec = file_with_data();
    let target = ring.register_file(0, &spec).unwrap();
    let region = region();
    rustix::fs::ftruncate(region.fd(), 0).unwrap(); // there are no pages to pin
    let memory = memory_of(&[&region]);
    ring.use_memory(&memory);
    rustix::fs::ftruncate(region.fd(), MEMORY_BYTES).unwrap();
    assert_eq!(pieces(&ring), 0);
    assert_eq!(run(&mut ring, target, &call(Verb::Read, &buffers_of(&memory, 0))), 4096);
    ring.forget_memory(&memory);
}

#[test]
fn pinned_memory_is_known_to_both_rings() {
    let options = IoUringOptions { iopoll: true, ..pinned() };
    let mut ring = Uring::make_polled(&options, &config()).unwrap();
    ring.start().unwrap();
    let (spec, memory) = (file_with_data(), memory_of(&[&region()]));
    let target = ring.register_file(0, &spec).unwrap();
    ring.use_memory(&memory);
    let buffers = buffers_of(&memory, 0);
    let on_the_second = run(&mut ring, target, &call(Verb::Read, &buffers));
    ring.polled.as_mut().unwrap().unregister_file(0);
    let on_the_first = run(&mut ring, target, &call(Verb::Read, &buffers));
    assert_eq!((on_the_first, on_the_second), (4096, 4096));
}
