//! The `virtio-driver` crate as the guest: an independent implementation of rings, messages and requests.
//!
//! Memory is a memfd that only the server maps. The crate uses a buffer's own address as the guest address. Therefore a
//! plain vector of the same length provides the addresses, and the test accesses the data through the memfd.
//!
//! With packed rings the crate sends SET_VRING_BASE 0, though both wrap counters of a new ring are 1 (virtio 1.3
//! §2.8.1), that is `0x8000_8000`. The server starts an unused ring at its beginning whatever the base.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

#[cfg(target_arch = "x86_64")] // the guest tests need x86-64
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkConfig, VirtioBlkQueue, VirtioBlkReqBuf, VirtioBlkTransport,
};

use crate::rig;
use crate::rig::format::{Format, on_both_formats};
use crate::rig::{MIB, Options, PATIENCE, Rig, feature};

on_both_formats! {
    blocks_written_on_one_queue_come_back,
    blocks_written_on_four_queues_come_back,
    blocks_come_back_without_event_idx,
    hundreds_of_requests_wrap_the_ring,
    flush_discard_and_zeroes_do_what_they_say,
    next_client_connects_after_the_last_one_left,
}

/// Without vhost-user's own feature bit, which the crate adds.
fn features(ring: Format) -> u64 {
    ring.usual() & !feature::PROTOCOL
}

const MEMORY_BYTES: usize = 4 << 20;
const BLOCK: usize = 4096;

struct Queue {
    blk: VirtioBlkQueue<'static, usize>,
    kick: Box<dyn QueueNotifier>,
    call: Arc<EventFd>,
}

struct Client {
    queues: Vec<Queue>,
    addresses: Vec<u8>,
    memory: File,
    transport: Box<VirtioBlkTransport>,
}

impl Client {
    fn connect(rig: &Rig, queues: usize, features: u64) -> Self {
        let path = rig.socket.to_str().unwrap();
        let transport = VhostUser::<VirtioBlkConfig, VirtioBlkReqBuf>::new(path, features).unwrap();
        let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
        let blks = VirtioBlkQueue::setup_queues(&mut *transport, queues, 64).unwrap();
        let addresses = vec![0; MEMORY_BYTES];
        let memory = File::from(memfd_create("data", MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(MEMORY_BYTES as u64).unwrap();
        let base = addresses.as_ptr().addr();
        transport.map_mem_region(base, MEMORY_BYTES, memory.as_raw_fd(), 0).unwrap();
        let queue = |(index, mut blk): (_, VirtioBlkQueue<'static, usize>)| {
            blk.set_used_notif_enabled(true);
            let kick = transport.get_submission_notifier(index);
            Queue { blk, kick, call: transport.get_completion_fd(index) }
        };
        let queues = blks.into_iter().enumerate().map(queue).collect();
        Self { queues, addresses, memory, transport }
    }

    fn store(&self, block: usize, byte: u8) {
        self.memory.write_all_at(&[byte; BLOCK], (block * BLOCK) as u64).unwrap();
    }

    fn load(&self, block: usize) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK];
        self.memory.read_exact_at(&mut bytes, (block * BLOCK) as u64).unwrap();
        bytes
    }

    /// Queues a write of memory block `block` to `offset`.
    fn write(&mut self, queue: usize, block: usize, offset: u64) {
        let data = &self.addresses[block * BLOCK..][..BLOCK];
        self.queues[queue].blk.write(offset, data, block).unwrap();
    }

    fn read(&mut self, queue: usize, block: usize, offset: u64) {
        let data = &mut self.addresses[block * BLOCK..][..BLOCK];
        self.queues[queue].blk.read(offset, data, block).unwrap();
    }

    /// Results of the next `count` requests of a queue, by context.
    fn finish(&mut self, queue: usize, count: usize) -> Vec<(usize, i32)> {
        let deadline = Instant::now() + PATIENCE;
        let queue = &mut self.queues[queue];
        if queue.blk.avail_notif_needed() {
            queue.kick.notify().unwrap();
        }
        let mut results = vec![];
        while results.len() < count {
            results.extend(queue.blk.completions().map(|done| (done.context, done.ret)));
            if results.len() < count && !queue.blk.completions().has_next() {
                assert!(readable(&queue.call, deadline), "a request never completes");
                queue.call.read().unwrap();
            }
        }
        results
    }

    fn one(&mut self, act: impl FnOnce(&mut VirtioBlkQueue<'static, usize>)) -> i32 {
        act(&mut self.queues[0].blk);
        self.finish(0, 1)[0].1
    }
}

fn readable(call: &EventFd, deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now()).as_secs();
    let fd: OwnedFd = std::os::fd::AsFd::as_fd(call).try_clone_to_owned().unwrap();
    let timeout = Timespec { tv_sec: left as i64, tv_nsec: 0 };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() == 1
}

/// Writes 32 blocks on each queue at once, then reads them back on all queues at once.
fn blocks_come_back(queues: usize, features: u64) {
    let rig = Rig::start(Options::default());
    let mut client = Client::connect(&rig, queues, features);
    let blocks = || (0..queues).flat_map(|queue| (0..16).map(move |i| (queue, queue * 16 + i)));
    for (queue, block) in blocks() {
        client.store(block, block as u8 + 1);
        client.write(queue, block, (block * BLOCK) as u64);
    }
    let written: Vec<_> = (0..queues).flat_map(|queue| client.finish(queue, 16)).collect();
    for (queue, block) in blocks() {
        client.read(queue, block + 512, (block * BLOCK) as u64);
    }
    let read: Vec<_> = (0..queues).flat_map(|queue| client.finish(queue, 16)).collect();
    assert!(written.iter().chain(&read).all(|(_, ret)| *ret == 0));
    for (_, block) in blocks() {
        assert_eq!(client.load(block + 512), vec![block as u8 + 1; BLOCK]);
        assert_eq!(rig.image_bytes((block * BLOCK) as u64, BLOCK), vec![block as u8 + 1; BLOCK]);
    }
}

fn blocks_written_on_one_queue_come_back(ring: Format) {
    blocks_come_back(1, features(ring));
}

fn blocks_written_on_four_queues_come_back(ring: Format) {
    blocks_come_back(4, features(ring));
}

fn blocks_come_back_without_event_idx(ring: Format) {
    blocks_come_back(4, features(ring) & !feature::EVENT_IDX);
}

fn hundreds_of_requests_wrap_the_ring(ring: Format) {
    let rig = Rig::start(Options::default());
    let mut client = Client::connect(&rig, 1, features(ring));
    for round in 0..100 {
        for block in 0..8 {
            client.store(block, round as u8 ^ block as u8);
            client.write(0, block, ((round * 8 + block) * BLOCK) as u64);
        }
        assert!(client.finish(0, 8).iter().all(|(_, ret)| *ret == 0));
    }
    let expected = |n: usize| vec![(n / 8) as u8 ^ (n % 8) as u8; BLOCK];
    assert!((0..800).all(|n| rig.image_bytes((n * BLOCK) as u64, BLOCK) == expected(n)));
}

#[test]
fn configuration_is_the_disks() {
    let rig = Rig::start(Options::default());
    let client = Client::connect(&rig, 1, features(Format::Split));
    let config = client.transport.get_config().unwrap();
    let (capacity, queues, writeback) = (config.capacity, config.num_queues, config.writeback);
    assert_eq!((capacity.to_native(), queues.to_native(), writeback), (16 * MIB / 512, 4, 1));
    assert_eq!(client.transport.max_queues(), Some(4));
}

fn flush_discard_and_zeroes_do_what_they_say(ring: Format) {
    let mut rig = Rig::start(Options { image_bytes: MIB, ..Options::default() });
    assert!(rig.stop().is_clean());
    rig::fill_file(&rig.image, 0xaa, MIB as usize);
    rig.start_server(Options::default());
    let mut client = Client::connect(&rig, 1, features(ring));
    let allocated = || std::fs::metadata(&rig.image).unwrap().blocks();
    let before = allocated();
    assert_eq!(client.one(|queue| queue.flush(0).unwrap()), 0);
    assert_eq!(client.one(|queue| queue.discard(0, 65_536, 0).unwrap()), 0);
    assert_eq!(before - allocated(), 128);
    assert_eq!(client.one(|queue| queue.write_zeroes(65_536, 65_536, true, 0).unwrap()), 0);
    assert_eq!(before - allocated(), 256);
    assert_eq!(client.one(|queue| queue.write_zeroes(131_072, 65_536, false, 0).unwrap()), 0);
    assert_eq!(before - allocated(), 256);
    assert_eq!(rig.image_bytes(0, 196_608), vec![0; 196_608]);
    assert_eq!(rig.image_bytes(196_608, 512), vec![0xaa; 512]);
}

/// Only with split rings: the crate panics if a packed ring's used length is less than the buffer, as after a failed
/// read.
#[test]
fn request_past_the_end_is_an_error_and_the_next_one_works() {
    let rig = Rig::start(Options::default());
    let mut client = Client::connect(&rig, 1, features(Format::Split));
    client.read(0, 0, 16 * MIB);
    let past_the_end = client.finish(0, 1);
    client.read(0, 0, 0);
    assert_eq!((past_the_end, client.finish(0, 1)), (vec![(0, -5)], vec![(0, 0)]));
}

fn next_client_connects_after_the_last_one_left(ring: Format) {
    let rig = Rig::start(Options::default());
    for round in 1..=3 {
        let mut client = Client::connect(&rig, 4, features(ring));
        client.store(0, round);
        client.write(3, 0, 0);
        assert_eq!(client.finish(3, 1), [(0, 0)]);
        assert_eq!(rig.image_bytes(0, BLOCK), vec![round; BLOCK]);
    }
}
