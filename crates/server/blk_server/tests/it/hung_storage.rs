//! One disk's storage hangs: other disks on the same worker and engine continue normally.
//!
//! `guest of disk 0: requests that hang … guest of disk 1: immediate answers … storage resumes: all complete`
//!
//! - The hanging storage is a frozen real file system, if the test may mount one, and io_engine's fake on every host.
//! - `io_engine` (`shares.rs`) tests how many requests each disk may have.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::fs::File;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blk_server::EngineFactory;
use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, IoVecs, MemoryView, Region};
use io_engine::{
    Durability, Engine, EngineConfig, Event, Fault, FileSpec, IoUringEngine, Op, OpKind, PosixAioEngine,
    ThreadsEngine, Verb, When,
};
use xtask::skip::{Reason, skip};

use crate::rig::raw_guest::{faulty, range};
use crate::rig::small_fs::{Kind, SmallFs};
use crate::rig::{FrontEnd, Guest, MIB, Options, Rig, eventually, feature, header_bytes, kind};

/// Size of each queue.
const QUEUE_SIZE: u16 = 1024;
const QUEUES: u16 = 4;
const PAGE: u32 = 4096;
/// Time limit of a wait, longer than any event takes on a busy machine.
const LONG: Duration = Duration::from_secs(300);

/// A file system whose writes wait. It resumes when this value is dropped, when the test's process ends, and in any
/// case after ten minutes: a killed process cannot exit while io_uring calls hang. The shell that does this has its own
/// process group, so that a signal to the test's group does not kill it.
struct Frozen {
    child: Child,
    /// Closing this pipe resumes the file system.
    hold: Option<ChildStdin>,
}

impl Frozen {
    fn new(folder: &Path) -> Option<Self> {
        let script = r#"fsfreeze -f "$0" || exit 1; echo frozen; timeout 600 cat; exec fsfreeze -u "$0""#;
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).arg(folder).process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = shell.spawn().unwrap();
        let hold = child.stdin.take();
        let said = child.stdout.as_mut().unwrap().read(&mut [0; 6]).unwrap();
        if said == 0 {
            skip(Reason::NoProgram("fsfreeze".into()), "");
            child.wait().unwrap();
            return None;
        }
        Some(Self { child, hold })
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        drop(self.hold.take());
        let _ = self.child.wait();
    }
}

/// A guest of disk `number`, with all its queues.
fn guests(rig: &Rig, number: usize) -> (FrontEnd, Vec<Guest>) {
    let mut front_end = rig.connect_to(number);
    front_end.negotiate(feature::USUAL);
    front_end.share_memory(16 * MIB);
    let guests = (0..QUEUES).map(|index| front_end.start_queue(index, QUEUE_SIZE, feature::USUAL)).collect();
    (front_end, guests)
}

/// Adds a write of `pieces` pages; `number` identifies it within its queue.
fn add_write(guest: &mut Guest, number: u64, pieces: u64) {
    let (header, status) = (guest.area() + number * 32, guest.area() + number * 32 + 16);
    let sector = (u64::from(guest.index) * 256 + number) * pieces * 8;
    guest.view.store(header, &header_bytes(kind::OUT, sector)).unwrap();
    guest.view.store(status, &[0xff]).unwrap();
    let data = (0..pieces).map(|piece| range(8 * MIB + piece * 8192, PAGE));
    let readable: Vec<GuestRange> = [range(header, 16)].into_iter().chain(data).collect();
    guest.add(&readable, &[range(status, 1)]);
}

/// 1,024 writes of one page each, in four queues.
fn thousand_writes(guests: &mut [Guest]) -> usize {
    for guest in &mut *guests {
        (0..256).for_each(|number| add_write(guest, number, 1));
        guest.submit();
    }
    guests.len() * 256
}

/// 40 writes of nine pieces each, in one queue.
fn forty_large_writes(guests: &mut [Guest]) -> usize {
    (0..40).for_each(|number| add_write(&mut guests[0], number, 9));
    guests[0].submit();
    40
}

/// Number of requests of disk 0 that the server has taken but not completed.
fn in_flight(rig: &Rig) -> u64 {
    rig.report_of(0).queues.iter().map(|queue| queue.counters.in_flight).sum()
}

/// Waits until the server takes no more requests of disk 0.
fn wait_until_all_is_taken(rig: &Rig) {
    let mut before = 0;
    let settled = eventually(|| {
        std::thread::sleep(Duration::from_millis(100));
        let now = in_flight(rig);
        now > 0 && std::mem::replace(&mut before, now) == now
    });
    assert!(settled, "{before} in flight");
}

fn answers(guest: &mut Guest, count: usize) {
    let deadline = Instant::now() + LONG;
    for number in 0..count {
        while guest.next_used().is_none() {
            assert!(Instant::now() < deadline, "answer {number} of {count} does not come");
        }
    }
}

/// Sends one request for sector 0, which must succeed.
fn succeeds(guest: &mut Guest, verb: u32, pieces: &[GuestRange]) {
    let head = guest.area();
    guest.scattered(verb, 0, head, pieces).unwrap();
    guest.submit();
    answers(guest, 1);
    assert_eq!(guest.bytes(head + 0x800, 1), [0]);
}

/// The requests that the other disk's guest sends while the first disk's storage hangs.
#[derive(Clone, Copy, PartialEq)]
enum Beside {
    /// For buffered writes of io_uring. The kernel sorts them into 64 lines by a hash of the file, and a write in the
    /// line of a hanging one waits (docs/decisions/0043).
    ReadsAndFlushes,
    Everything,
}

/// Sends requests one at a time, and several at once.
fn disk_works(guest: &mut Guest, what: Beside) {
    let nine: Vec<_> = (0..9).map(|piece| range(8 * MIB + piece * 8192, PAGE)).collect();
    succeeds(guest, kind::IN, &nine[..1]);
    succeeds(guest, kind::IN, &nine);
    succeeds(guest, kind::FLUSH, &[]);
    if what == Beside::ReadsAndFlushes {
        return;
    }
    succeeds(guest, kind::OUT, &nine[..1]);
    (0..2).for_each(|number| add_write(guest, number, 9));
    (2..64).for_each(|number| add_write(guest, number, 1));
    guest.submit();
    answers(guest, 64);
}

/// Disks 0 and 1 of a server, with guests of both.
struct Bed {
    hung: Vec<Guest>,
    others: Vec<Guest>,
    _front_ends: [FrontEnd; 2],
    rig: Rig,
}

fn bed(options: Options) -> Bed {
    let rig = Rig::start(Options { disks: 2, queues: QUEUES, queue_size: QUEUE_SIZE, ..options });
    let ((front_end, hung), (other, others)) = (guests(&rig, 0), guests(&rig, 1));
    Bed { hung, others, _front_ends: [front_end, other], rig }
}

fn fake_hangs(add: fn(&mut [Guest]) -> usize) {
    let (options, fake) = faulty(Options::buffered());
    let mut bed = bed(options);
    // The other disk only reads and flushes, and these do not hang.
    fake.inject(When::Verb(Verb::Write), Fault::Stick, u64::MAX);
    add(&mut bed.hung);
    wait_until_all_is_taken(&bed.rig);
    let nine: Vec<_> = (0..9).map(|piece| range(8 * MIB + piece * 8192, PAGE)).collect();
    succeeds(&mut bed.others[0], kind::IN, &nine[..1]);
    succeeds(&mut bed.others[1], kind::FLUSH, &[]);
    succeeds(&mut bed.others[2], kind::IN, &nine);
    fake.clear();
    fake.release().unwrap();
}

#[test]
fn neighbour_is_served_beside_a_thousand_hung_writes() {
    fake_hangs(thousand_writes);
}

#[test]
fn neighbour_is_served_beside_forty_hung_writes_of_nine_pieces() {
    fake_hangs(forty_large_writes);
}

/// A file system that can be frozen, and a folder elsewhere.
fn file_systems() -> Option<(SmallFs, tempfile::TempDir)> {
    Some((SmallFs::mount(Kind::Ext4, 64)?, tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()))
}

/// Serves one image on a file system that is frozen, and one on a different file system.
fn file_system_hangs(
    cache: CacheMode,
    engine: EngineFactory,
    add: fn(&mut [Guest]) -> usize,
    beside: Beside,
) {
    let Some((fs, elsewhere)) = file_systems() else { return };
    let image = fs.path().join("disk.raw");
    // Written in advance, so that the file system does not have to allocate blocks.
    std::fs::write(&image, vec![0; 16 << 20]).unwrap();
    std::os::unix::fs::symlink(elsewhere.path().join("other.raw"), image.with_extension("1")).unwrap();
    let mut bed = bed(Options { existing: Some(image), engine: Some(engine), ..Options::cached(cache) });
    let Some(frozen) = Frozen::new(fs.path()) else { return };
    let count = add(&mut bed.hung);
    wait_until_all_is_taken(&bed.rig);
    disk_works(&mut bed.others[0], beside);
    disk_works(&mut bed.others[1], beside);
    drop(frozen);
    let mut busy: Vec<_> = bed.hung.iter_mut().filter(|guest| guest.next_token > 0).collect();
    let share = count / busy.len();
    busy.iter_mut().for_each(|guest| answers(guest, share));
}

fn io_uring() -> EngineFactory {
    Box::new(|| Ok(Box::new(IoUringEngine::new(EngineConfig::default())?) as Box<dyn Engine>))
}

fn threads() -> EngineFactory {
    Box::new(|| Ok(Box::new(ThreadsEngine::new(EngineConfig::default())?) as Box<dyn Engine>))
}

fn posix_aio() -> EngineFactory {
    Box::new(|| Ok(Box::new(PosixAioEngine::new(EngineConfig::default())?) as Box<dyn Engine>))
}

#[test]
fn frozen_file_system_behind_io_uring_and_the_page_cache_stops_its_own_disk_only() {
    file_system_hangs(CacheMode::Writeback, io_uring(), thousand_writes, Beside::ReadsAndFlushes);
}

/// In this case the kernel starts a thread for each write that hangs.
#[test]
fn frozen_file_system_behind_io_uring_and_o_direct_stops_its_own_disk_only() {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse().unwrap_or(0_u32));
    if (numbers.next(), numbers.next()) < (Some(6), Some(12)) {
        return skip(Reason::KernelBefore(6, 12), "it waits in io_uring_enter for such a write");
    }
    file_system_hangs(CacheMode::None, io_uring(), thousand_writes, Beside::Everything);
}

#[test]
fn large_writes_to_a_frozen_file_system_stop_their_own_disk_only() {
    file_system_hangs(CacheMode::Writeback, io_uring(), forty_large_writes, Beside::ReadsAndFlushes);
}

#[test]
fn frozen_file_system_behind_threads_stops_its_own_disk_only() {
    file_system_hangs(CacheMode::Writeback, threads(), thousand_writes, Beside::Everything);
}

#[test]
fn frozen_file_system_behind_posix_aio_stops_its_own_disk_only() {
    file_system_hangs(CacheMode::Writeback, posix_aio(), thousand_writes, Beside::Everything);
}

/// The kernel allows four such threads per CPU. With 16 CPUs or more the test proves nothing: buffered writes have 64
/// lines.
#[test]
fn one_hung_write_on_each_of_many_disks_does_not_stop_another_ones_flush() {
    let Some((fs, elsewhere)) = file_systems() else { return };
    let count = (4 * std::thread::available_parallelism().unwrap().get() + 24).min(200);
    let region = Arc::new(Region::from_memfd(GuestAddress(0), MIB).unwrap());
    let view = MemoryView::new(Arc::new(GuestMemory::new(vec![region]).unwrap()));
    let mut engine = IoUringEngine::new(EngineConfig::default()).unwrap();
    engine.start().unwrap();
    let mut attach = |path: &Path| {
        File::create(path).unwrap().set_len(MIB).unwrap();
        let options = ImageOptions { cache: CacheMode::Writeback, ..ImageOptions::new(path) };
        let image = Image::open(&HostOpener, &options).unwrap();
        let file = Arc::new(File::options().write(true).open(path).unwrap());
        (engine.attach_file(FileSpec::of_file(file, image.alignment())).unwrap(), image)
    };
    let hung: Vec<_> = (0..count).map(|number| attach(&fs.path().join(number.to_string()))).collect();
    let (healthy, _image) = attach(&elsewhere.path().join("healthy.raw"));
    let Some(frozen) = Frozen::new(fs.path()) else { return };
    for (token, (file, image)) in (1..).zip(&hung) {
        let (range, durability) = (image.check(0, u64::from(PAGE)).unwrap(), Durability::Cached);
        let mut buffers = IoVecs::with_capacity(1);
        buffers.fill(&view, [GuestRange { addr: 0, len_bytes: PAGE }]).unwrap();
        let kind = OpKind::Write { range, durability };
        assert!(engine.push(Op { token, file: *file, kind, buffers }).is_ok());
    }
    let next = |engine: &mut IoUringEngine| {
        let (mut events, deadline) = (Vec::new(), Instant::now() + LONG);
        while events.is_empty() {
            assert!(Instant::now() < deadline, "no call ends");
            engine.wait(Some(Duration::from_secs(1))).unwrap();
            engine.reap(&mut events);
        }
        events
    };
    engine.submit().unwrap();
    let (kind, buffers) = (OpKind::Flush, IoVecs::with_capacity(0));
    assert!(engine.push(Op { token: 0, file: healthy, kind, buffers }).is_ok());
    engine.submit().unwrap();
    let events = next(&mut engine);
    let first = events.iter().map(|event| match event {
        Event::Completed(completion) => (completion.token, completion.result),
        _ => unreachable!("nothing is watched"),
    });
    assert_eq!(first.collect::<Vec<_>>(), [(0, Ok(()))]);
    drop(frozen);
    let mut ended = 0;
    while ended < count {
        ended += next(&mut engine).len();
    }
}
