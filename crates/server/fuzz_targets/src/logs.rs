//! `logs`: arbitrary bytes as in-flight log and ring, and the devices that start on them.
//!
//! `input → features, sizes, log, ring → start, die, start, pop, die, start, pop, use all, start`
//!
//! - A device starts or reports why it cannot. It redoes as many requests as it announced: each is a tag of the ring,
//!   and none occurs twice.
//! - A device that dies before it has used anything leaves the same requests to the next one, in the same order.
//! - After all requests are used, there is nothing to redo.
//! - A device writes only to its parts of the ring and to its queue's log.

use std::sync::Arc;

use guest_mem::{GuestAddress, GuestMemory, GuestRange};
use virtqueue::{Chain, DeviceQueue, DriverQueue, LogArea, PopError, RingFault, RingFeatures, RingLayout};

use crate::guest::Guest;
use crate::input::{Input, Seed};
use crate::scribbler::{Scribbled, beside_a_scribbler};

const SIZES: [u16; 4] = [2, 4, 8, 16];
/// Extra entries of a log that is longer than its ring.
const MORE_ENTRIES: u16 = 3;
/// The memory has logs for this many queues.
const QUEUES: u16 = 2;
const DESCRIPTORS: u64 = 0;
const AVAIL_RING: u64 = 0x200;
const USED_RING: u64 = 0x400;
/// The buffers of the seeds' chains.
const BUFFERS: u64 = 0x800;
const GUEST_BYTES: u64 = 0x1000;
const LOG_BYTES: u64 = 0x1000;

/// How often a device starts in one run beside a second thread.
const RACED_STARTS: usize = 4;

/// The shape of a run, from the first byte of its input.
#[derive(Clone, Copy)]
struct Shape {
    features: RingFeatures,
    size: u16,
    entries: u16,
    /// The queue that the log belongs to.
    queue: u16,
}

impl Shape {
    fn of(choices: u8) -> Self {
        let features = RingFeatures {
            packed: choices & 1 != 0,
            event_idx: choices & 2 != 0,
            indirect: choices & 4 != 0,
        };
        let size = SIZES[usize::from(choices >> 5 & 3)];
        let more = if choices & 0x10 != 0 { MORE_ENTRIES } else { 0 };
        Self { features, size, entries: size + more, queue: u16::from(choices >> 3 & 1) }
    }

    fn layout(self) -> RingLayout {
        RingLayout {
            queue_size: self.size,
            descriptors: GuestAddress(DESCRIPTORS),
            avail: GuestAddress(AVAIL_RING),
            used: GuestAddress(USED_RING),
        }
    }

    /// The range of the queue's log in the memory for logs.
    fn log(self) -> std::ops::Range<usize> {
        let end = |queues| bytes(LogArea::bytes(queues, self.entries, self.features.packed));
        end(self.queue)..end(self.queue + 1)
    }

    /// The parts of the ring: address and length.
    fn parts(self) -> [(u64, usize); 3] {
        let size = usize::from(self.size);
        [(DESCRIPTORS, 16 * size), (AVAIL_RING, 6 + 2 * size), (USED_RING, 6 + 8 * size)]
    }
}

fn bytes(len: u64) -> usize {
    usize::try_from(len).expect("small")
}

/// The memory of a ring and of its log.
struct Bed {
    shape: Shape,
    guest: Guest,
    log: Guest,
}

impl Bed {
    fn new(shape: Shape) -> Self {
        assert!(LogArea::bytes(QUEUES, shape.entries, shape.features.packed) <= LOG_BYTES);
        Self { shape, guest: Guest::new(&[GUEST_BYTES]), log: Guest::new(&[LOG_BYTES]) }
    }

    fn start(&self, base: u32) -> Result<DeviceQueue, RingFault> {
        let Shape { features, entries, queue, .. } = self.shape;
        let memory: &Arc<GuestMemory> = self.log.view.memory();
        let area = LogArea::new(Arc::clone(memory), queue, entries);
        let device = DeviceQueue::with_log(&self.guest.view, self.shape.layout(), features, base, &area)?;
        let (redo, said) = (device.to_redo(), device.recovery());
        assert!(redo <= self.shape.size && redo == said.redone, "{redo} to do again, {said:?}");
        assert!(
            redo == 0 || !said.was_foreign,
            "the log is of another ring, but {redo} requests are to be redone"
        );
        Ok(device)
    }

    /// Starts a device at the last device's position. A log that was accepted once must be accepted again.
    fn start_again(&self, before: &DeviceQueue) -> DeviceQueue {
        let again = self.start(before.position());
        again.unwrap_or_else(|fault| {
            panic!("a log that the previous device accepted is refused: {fault:?}, {before:?}")
        })
    }

    /// The tags of all requests to redo.
    fn redo(&self, device: &mut DeviceQueue) -> Vec<u16> {
        let mut tags = Vec::new();
        while device.to_redo() > 0 {
            let tag = self.pop(device).expect("a request to redo");
            assert!(tag < self.shape.size && !tags.contains(&tag), "tag {tag} after {tags:?}");
            tags.push(tag);
        }
        tags
    }

    /// Starts a device that takes and uses all requests, in memory that changes meanwhile.
    fn start_and_use_all(&self, base: u32, fresh: usize) {
        let Ok(mut device) = self.start(base) else { return };
        let mut tags = Vec::new();
        for _ in 0..usize::from(device.to_redo()) + fresh {
            match self.pop(&mut device) {
                Some(tag) if !tags.contains(&tag) => tags.push(tag),
                // Like the owner of the queue, stops at a tag that is in flight.
                _ => break,
            }
        }
        let size = self.shape.size;
        assert!(tags.iter().all(|&tag| tag < size || self.shape.features.packed), "{tags:?} of {size}");
        tags.iter().for_each(|&tag| device.push_used(tag, 0));
        device.publish();
    }

    fn pop(&self, device: &mut DeviceQueue) -> Option<u16> {
        match device.pop(&mut Chain::with_capacity(self.shape.size)) {
            Ok(tag) => tag,
            Err(PopError::Chain { tag, .. }) => Some(tag),
            Err(PopError::Ring(_)) => None,
        }
    }

    fn check_memory(&self) {
        let size = usize::from(self.shape.size);
        let (ring, used) = (bytes(DESCRIPTORS), bytes(USED_RING));
        let its = if self.shape.features.packed {
            [ring..ring + 16 * size, used..used + 4]
        } else {
            [used..used + 6 + 8 * size, 0..0]
        };
        self.guest.check_untouched_but(&its);
        self.log.check_untouched_but(&[self.shape.log()]);
    }
}

/// Fills ring and log from the input. Also returns the ring's position, and how many more requests to take.
fn laid_out(bytes: &[u8]) -> (Bed, u32, usize) {
    let mut input = Input::new(bytes);
    let shape = Shape::of(input.u8());
    let mut bed = Bed::new(shape);
    let (base, fresh) = (input.u32(), input.below(usize::from(shape.size) + 1));
    let log = shape.log();
    bed.log.store(log.start as u64, input.take(log.len()));
    for (at, len) in shape.parts() {
        bed.guest.store(at, input.take(len));
    }
    (bed, base, fresh)
}

/// Runs the target once.
pub(crate) fn run(bytes: &[u8]) {
    let (bed, base, fresh) = laid_out(bytes);
    if let Ok(first) = bed.start(base) {
        go_on(&bed, &first, fresh);
    }
    bed.check_memory();
}

/// Runs with a second thread that writes to ring and log while devices start on them. A device may read anything at any
/// time, but must not access memory outside the ring.
pub(crate) fn run_with_second_thread(bytes: &[u8]) {
    let (bed, base, fresh) = laid_out(bytes);
    let shape = bed.shape;
    let is_logs = bytes.last().is_some_and(|last| last & 1 == 0);
    let log = shape.log();
    let (view, spans): (_, Vec<_>) = if is_logs {
        (bed.log.view.clone(), std::iter::once(log.start as u64..log.end as u64).collect())
    } else {
        (bed.guest.view.clone(), shape.parts().map(|(at, len)| at..at + len as u64).to_vec())
    };
    beside_a_scribbler(Scribbled::Mapped(view), &spans, bytes, || {
        for _ in 0..RACED_STARTS {
            bed.start_and_use_all(base, fresh);
        }
    });
}

fn go_on(bed: &Bed, first: &DeviceQueue, fresh: usize) {
    let mut second = bed.start_again(first);
    let mut tags = bed.redo(&mut second);
    assert_eq!(tags.len(), usize::from(first.to_redo()), "a device that did nothing has lost requests");
    let mut third = bed.start_again(first);
    assert_eq!(bed.redo(&mut third), tags, "not what the previous device had to redo");
    for _ in 0..fresh {
        match bed.pop(&mut third) {
            Some(tag) if !tags.contains(&tag) => tags.push(tag),
            // No more chains, a broken ring, or a head that is no longer valid.
            _ => break,
        }
    }
    tags.iter().for_each(|&tag| third.push_used(tag, 0));
    assert_eq!(third.publish(), !tags.is_empty());
    // After a driver that broke the rules, the ring may look like a different one.
    let Ok(last) = bed.start(third.position()) else { return };
    assert_eq!(last.to_redo(), 0, "requests to redo although all were used: {tags:?}");
}

/// The memory that a device leaves behind when it dies: at several points, in both formats.
pub(crate) fn seeds() -> Vec<(String, Vec<u8>)> {
    let mut seeds = Vec::new();
    for choices in [0x20, 0x21, 0x42, 0x43, 0x4c, 0x4d, 0x50, 0x51, 0x7e, 0x7f] {
        for dies_at in 0..6 {
            seeds.push((format!("log-{choices:02x}-{dies_at}"), left_behind(choices, dies_at)));
        }
    }
    seeds
}

fn left_behind(choices: u8, dies_at: u8) -> Vec<u8> {
    let shape = Shape::of(choices);
    let bed = Bed::new(shape);
    let mut driver = DriverQueue::new(&bed.guest.view, shape.layout(), shape.features).expect("a ring");
    let buffer = |at| [GuestRange { addr: BUFFERS + 64 * at, len_bytes: 64 }];
    for at in 0..u64::from(shape.size / 2) {
        driver.add(&buffer(2 * at), &buffer(2 * at + 1), at).expect("room in the ring");
    }
    driver.publish();
    let base = if shape.features.packed { virtqueue::packed::FRESH_BASE } else { 0 };
    let mut device = bed.start(base).expect("a new log");
    let mut tags = Vec::new();
    for _ in 0..dies_at {
        tags.extend(bed.pop(&mut device));
    }
    if dies_at > 2 && !tags.is_empty() {
        device.push_used(tags.remove(tags.len() / 2), 64);
    }
    if dies_at > 3 {
        device.publish();
    }
    if dies_at > 4 {
        tags.drain(..).for_each(|tag| device.push_used(tag, 64));
    }
    let mut seed = Seed::new(&[choices]).and(&base.to_le_bytes()).and(&[2]);
    seed = seed.and(&bed.log.now()[shape.log()]);
    let ring = bed.guest.now();
    for (at, len) in shape.parts() {
        seed = seed.and(&ring[bytes(at)..][..len]);
    }
    seed.bytes()
}
