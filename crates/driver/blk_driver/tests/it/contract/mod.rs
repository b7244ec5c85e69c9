//! The contract that every back-end must fulfil for the driver: one test suite for all back-ends.
#![allow(dead_code, missing_debug_implementations, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::os::fd::OwnedFd;
use std::time::Instant;

use blk_driver::{
    Buffer, Completion, Device, Durability, Options, Queue, Request, RequestError, UserMemory, Work,
};
use guest_mem::GuestRange;
use rustix::fs::{MemfdFlags, memfd_create};
use virtio_blk::Segment;

use crate::peers::{DISK_BYTES, MIB, PATIENCE, SECTOR};

/// A device's settings: those that the cases vary.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub packed: bool,
    pub queues: u16,
    pub queue_size: u16,
    pub indirect: bool,
    pub event_idx: bool,
}

pub const USUAL: Setting =
    Setting { packed: false, queues: 1, queue_size: 128, indirect: true, event_idx: true };

impl Setting {
    pub fn connect(self, options: Options) -> (Device, Vec<Queue>) {
        let Self { queues, queue_size, indirect, event_idx, packed } = self;
        let options = Options { queues, queue_size, indirect, event_idx, packed: Some(packed), ..options };
        let (device, queues) = Device::connect(&options).unwrap();
        assert_eq!(queues.len(), usize::from(self.queues));
        assert_eq!(queues[0].queue_size(), self.queue_size);
        (device, queues)
    }
}

/// A pattern that depends on the position and on `seed`.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = vec![0; len];
    for byte in &mut bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *byte = (state >> 32) as u8;
    }
    bytes
}

/// Pushes one request, waits for its completion, and returns it.
pub fn one(queue: &mut Queue, work: Work<'_>) -> Completion {
    queue.push(&Request::new(work, 77)).unwrap();
    queue.submit();
    let mut out = [Completion::default(); 4];
    let count = queue.wait(&mut out, PATIENCE).unwrap();
    assert_eq!((count, out[0].token), (1, 77), "one request, one completion");
    out[0]
}

pub fn write(queue: &mut Queue, buffer: &Buffer, sector: u64, data: &[u8], durability: Durability) {
    buffer.write(0, data);
    let range = part(buffer.range(), 0, data.len());
    assert_eq!(one(queue, Work::Write { sector, data: &[range], durability }).result, Ok(()));
}

pub fn read(queue: &mut Queue, buffer: &Buffer, sector: u64, len: usize) -> Vec<u8> {
    buffer.write(0, &vec![0xee; len]);
    let range = part(buffer.range(), 0, len);
    assert_eq!(one(queue, Work::Read { sector, data: &[range] }).result, Ok(()));
    let mut bytes = vec![0; len];
    buffer.read(0, &mut bytes);
    bytes
}

pub fn part(range: GuestRange, offset_bytes: usize, len: usize) -> GuestRange {
    GuestRange { addr: range.addr + offset_bytes as u64, len_bytes: u32::try_from(len).unwrap() }
}

/// Sends all kinds of requests to the first MiB of `queue`'s own part of the disk.
pub fn every_kind_reads_back(device: &Device, queue: &mut Queue) {
    let info = device.info();
    let start = u64::from(queue.index()) * (MIB / 2) / SECTOR;
    let buffer = device.pool().take(64 << 10).unwrap();
    let first = pattern(start, 64 << 10);
    write(queue, &buffer, start, &first, Durability::Cached);
    assert_eq!(read(queue, &buffer, start, 64 << 10), first);
    let second = pattern(start + 1, 4096);
    write(queue, &buffer, start + 8, &second, Durability::Durable);
    assert_eq!(read(queue, &buffer, start + 8, 4096), second);
    assert_eq!(one(queue, Work::Flush).result, Ok(()));
    let id = one(queue, Work::GetId { data: part(buffer.range(), 0, 20) });
    assert_eq!(id.result, Ok(()));
    if info.max_write_zeroes_segments > 0 {
        let segment = Segment { sector: start + 8, sectors: 8, unmap: false };
        assert_eq!(one(queue, Work::WriteZeroes { segments: &[segment] }).result, Ok(()));
        assert_eq!(read(queue, &buffer, start + 8, 4096), vec![0; 4096]);
    }
    if info.max_discard_segments > 0 {
        let segment = Segment { sector: start + 16, sectors: 8, unmap: false };
        assert_eq!(one(queue, Work::Discard { segments: &[segment] }).result, Ok(()));
    }
    assert_eq!(read(queue, &buffer, start, 4096), first[..4096], "what was not touched is as it was");
}

/// Connects with `setting` and runs every test on every queue.
pub fn setting_works(options: Options, setting: Setting) {
    let (device, mut queues) = setting.connect(options);
    assert_eq!(device.info().capacity_sectors, DISK_BYTES / SECTOR);
    assert!(!device.info().read_only);
    queues.iter_mut().for_each(|queue| every_kind_reads_back(&device, queue));
    queues.iter_mut().for_each(|queue| batch_reads_back(&device, queue));
}

/// Writes and reads back as many requests as fit, several times, and compares with a model.
pub fn batch_reads_back(device: &Device, queue: &mut Queue) {
    let depth = queue.room(1).min(PLACES);
    let buffers: Vec<Buffer> = (0..depth).map(|_| device.pool().take(4096).unwrap()).collect();
    let ranges: Vec<[GuestRange; 1]> = buffers.iter().map(|buffer| [buffer.range()]).collect();
    let start = u64::from(queue.index()) * (MIB / 2) / SECTOR;
    let sector = |at: usize| start + (at * 13 % PLACES) as u64 * 8;
    for round in 0..3 {
        let content = |at: usize| pattern(round * 1000 + at as u64, 4096);
        (0..depth).for_each(|at| buffers[at].write(0, &content(at)));
        let durability = Durability::Cached;
        all_end_well(queue, depth, |at| Work::Write { sector: sector(at), data: &ranges[at], durability });
        buffers.iter().for_each(|buffer| buffer.write(0, &[0xee; 4096]));
        all_end_well(queue, depth, |at| Work::Read { sector: sector(at), data: &ranges[at] });
        for (at, buffer) in buffers.iter().enumerate() {
            let mut bytes = vec![0; 4096];
            buffer.read(0, &mut bytes);
            assert!(bytes == content(at), "request {at} of round {round}");
        }
    }
}

/// Number of places on the disk that a batch uses, all different.
const PLACES: usize = 64;

/// Pushes `depth` requests with one token each, and waits until each request has ended once.
fn all_end_well<'w>(queue: &mut Queue, depth: usize, work: impl Fn(usize) -> Work<'w>) {
    for at in 0..depth {
        queue.push(&Request::new(work(at), at as u64)).unwrap();
    }
    queue.submit();
    let mut ended = vec![0; depth];
    let mut out = [Completion::default(); 16];
    let deadline = Instant::now() + PATIENCE;
    while ended.iter().sum::<u32>() < u32::try_from(depth).unwrap() {
        let count = queue.wait(&mut out, PATIENCE).unwrap();
        for completion in &out[..count] {
            assert_eq!(completion.result, Ok(()));
            ended[usize::try_from(completion.token).unwrap()] += 1;
        }
        assert!(Instant::now() < deadline, "{ended:?}");
    }
    assert!(ended.iter().all(|&times| times == 1), "{ended:?}");
    assert_eq!(queue.in_flight(), 0);
}

/// A request of many buffers of different lengths, in both directions.
pub fn vectored_requests_read_back(options: Options) {
    let (device, mut queues) = USUAL.connect(options);
    let (queue, buffer) = (&mut queues[0], device.pool().take(1 << 20).unwrap());
    let whole = buffer.range();
    let data = pattern(5, 32 << 10);
    buffer.write(0, &data);
    // 16 parts, most of them not whole sectors; the reads use the parts in reverse memory order.
    let lens: Vec<usize> = (0..16).map(|at| if at % 2 == 0 { 2048 - 100 } else { 2048 + 100 }).collect();
    let offsets = lens.iter().scan(0, |at, len| Some(std::mem::replace(at, *at + len)));
    let out: Vec<GuestRange> = offsets.zip(&lens).map(|(at, &len)| part(whole, at, len)).collect();
    assert_eq!(
        one(queue, Work::Write { sector: 100, data: &out, durability: Durability::Cached }).result,
        Ok(())
    );
    let back: Vec<GuestRange> = (0..16).map(|at| part(whole, (512 << 10) - at * 8192, 2048)).collect();
    assert_eq!(one(queue, Work::Read { sector: 100, data: &back }).result, Ok(()));
    for (at, range) in back.iter().enumerate() {
        let mut bytes = vec![0; 2048];
        buffer.read(u32::try_from(range.addr - whole.addr).unwrap(), &mut bytes);
        assert!(bytes == data[at * 2048..][..2048], "part {at}");
    }
}

pub fn request_past_the_end_fails_and_the_next_one_works(options: Options) {
    let (device, mut queues) = USUAL.connect(options);
    let (queue, buffer) = (&mut queues[0], device.pool().take(8192).unwrap());
    let end = device.info().capacity_sectors;
    let data = [buffer.range()];
    assert_eq!(one(queue, Work::Read { sector: end - 8, data: &data }).result, Err(RequestError::IoErr));
    assert_eq!(one(queue, Work::Read { sector: end, data: &data }).result, Err(RequestError::IoErr));
    let durability = Durability::Cached;
    let outside = Work::Write { sector: end - 1, data: &data, durability };
    assert_eq!(one(queue, outside).result, Err(RequestError::IoErr));
    let bytes = pattern(9, 8192);
    write(queue, &buffer, end - 16, &bytes, durability);
    assert_eq!(read(queue, &buffer, end - 16, 8192), bytes);
}

pub fn more_queues_than_there_are_is_an_error_that_names_both(options: Options, available: u16) {
    let wanted = available + 1;
    let error = Device::connect(&Options { queues: wanted, ..options }).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{wanted} queues were requested, but the device has only {available}")
    );
}

/// The user's own memory: registered while a queue runs, used for data, and withdrawn.
pub fn memory_registered_at_run_time_is_used_and_taken_back(options: Options) {
    let (device, mut queues) = USUAL.connect(options);
    let queue = &mut queues[0];
    let pool_buffer = device.pool().take(8192).unwrap();
    let user = User::new();
    device.register(user.memory()).unwrap();
    let bytes = pattern(11, 8192);
    user.write(4096, &bytes);
    let range = GuestRange { addr: user.addr + 4096, len_bytes: 8192 };
    let to_disk = Work::Write { sector: 64, data: &[range], durability: Durability::Cached };
    assert_eq!(one(queue, to_disk).result, Ok(()));
    assert_eq!(read(queue, &pool_buffer, 64, 8192), bytes);
    let back = GuestRange { addr: user.addr + 16384, len_bytes: 8192 };
    assert_eq!(one(queue, Work::Read { sector: 64, data: &[back] }).result, Ok(()));
    assert_eq!(user.read(16384, 8192), bytes);
    device.unregister(user.addr).unwrap();
    let refused = queue.push(&Request::new(Work::Read { sector: 64, data: &[back] }, 1)).unwrap_err();
    assert!(refused.to_string().contains("not in registered memory"), "{refused}");
    assert!(device.unregister(user.addr).is_err(), "it is gone already");
    assert_eq!(read(queue, &pool_buffer, 64, 8192), bytes, "the queue goes on");
}

/// A page-aligned part of a memfd, as users have: not at the file's start, and mapped at any address.
pub struct User {
    pub fd: OwnedFd,
    /// Stands for the address of the user's mapping.
    pub addr: u64,
}

const USER_OFFSET_BYTES: u64 = 8192;
const USER_BYTES: u64 = 1 << 20;

impl User {
    pub fn new() -> Self {
        let fd = memfd_create("user", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, USER_OFFSET_BYTES + USER_BYTES).unwrap();
        Self { fd, addr: 0x5555_0000_0000 }
    }

    pub fn memory(&self) -> UserMemory {
        let fd = self.fd.try_clone().unwrap();
        UserMemory { fd, offset_bytes: USER_OFFSET_BYTES, len_bytes: USER_BYTES, addr: self.addr }
    }

    pub fn write(&self, offset_bytes: u64, bytes: &[u8]) {
        assert_eq!(rustix::io::pwrite(&self.fd, bytes, USER_OFFSET_BYTES + offset_bytes), Ok(bytes.len()));
    }

    pub fn read(&self, offset_bytes: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert_eq!(rustix::io::pread(&self.fd, &mut bytes, USER_OFFSET_BYTES + offset_bytes), Ok(len));
        bytes
    }
}

pub fn two_threads_with_a_queue_each_do_not_disturb_each_other(options: Options) {
    let (device, queues) = Setting { queues: 2, ..USUAL }.connect(options);
    std::thread::scope(|scope| {
        for mut queue in queues {
            let device = &device;
            scope.spawn(move || {
                (0..10).for_each(|_| {
                    every_kind_reads_back(device, &mut queue);
                    batch_reads_back(device, &mut queue);
                });
            });
        }
    });
}

/// Returns the disk's id, which is text padded with zeroes.
pub fn id(options: Options) -> String {
    let (device, mut queues) = USUAL.connect(options);
    let buffer = device.pool().take(20).unwrap();
    assert_eq!(one(&mut queues[0], Work::GetId { data: buffer.range() }).result, Ok(()));
    let mut bytes = [0; 20];
    buffer.read(0, &mut bytes);
    let len = bytes.iter().position(|&byte| byte == 0).unwrap_or(20);
    String::from_utf8(bytes[..len].to_vec()).unwrap()
}

/// Two descriptors are enough for header and status, so this queue can only flush.
pub fn smallest_queue_with_direct_descriptors_flushes(options: Options) {
    let (_device, mut queues) = Setting { queue_size: 2, indirect: false, ..USUAL }.connect(options);
    assert_eq!(queues[0].room(1), 0);
    assert_eq!(one(&mut queues[0], Work::Flush).result, Ok(()));
    assert_eq!(one(&mut queues[0], Work::Flush).result, Ok(()));
}

/// After a device is dropped, its queues end and another connection works.
pub fn device_dropped_with_requests_in_flight_ends_them_and_another_connects(options: &Options) {
    let (device, mut queues) = USUAL.connect(options.clone());
    let buffers: Vec<Buffer> = (0..16).map(|_| device.pool().take(65536).unwrap()).collect();
    for (token, buffer) in (0..).zip(&buffers) {
        let data = [buffer.range()];
        queues[0].push(&Request::new(Work::Read { sector: 0, data: &data }, token)).unwrap();
    }
    queues[0].submit();
    drop(device);
    let mut ended = Vec::new();
    let mut out = [Completion::default(); 5];
    let error = loop {
        match queues[0].wait(&mut out, PATIENCE) {
            Ok(0) => panic!("neither completions nor an error"),
            Ok(count) => ended.extend(out[..count].iter().copied()),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("back-end has disconnected"), "{error}");
    let mut tokens: Vec<u64> = ended.iter().map(|completion| completion.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..16).collect::<Vec<u64>>(), "each ends once");
    assert!(ended.iter().all(|end| matches!(end.result, Ok(()) | Err(RequestError::Lost))), "{ended:?}");
    setting_works(options.clone(), USUAL);
}
