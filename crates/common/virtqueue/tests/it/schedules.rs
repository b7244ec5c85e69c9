//! Both halves, with their steps in any order: our driver with our device, in both ring formats, and with the
//! `virtio-queue` crate's device (split).
//!
//! A model records what must happen: chains reach the device in the order of publication with their buffers, and come
//! back with their tokens; no side sleeps through a notification.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::collections::VecDeque;

use guest_mem::{GuestAddress, GuestRange};
use proptest::prelude::*;
use virtqueue::{Chain, DeviceQueue, DriverQueue, RingFeatures};

use crate::rig::*;

/// Readable and writable buffers.
type Buffers = (Vec<GuestRange>, Vec<GuestRange>);

/// The operations of both device implementations.
trait Device {
    fn pop(&mut self) -> Option<(u16, Buffers)>;
    fn use_chain(&mut self, tag: u16, written_bytes: u32);
    /// Makes used chains visible and returns whether the driver wants an interrupt.
    fn publish(&mut self) -> bool;
    /// Enables kicks; returns whether a chain is already available.
    fn enable_kicks(&mut self) -> bool;
    fn disable_kicks(&mut self);
}

struct Ours {
    queue: DeviceQueue,
    chain: Chain,
}

impl Device for Ours {
    fn pop(&mut self) -> Option<(u16, Buffers)> {
        let tag = self.queue.pop(&mut self.chain).unwrap()?;
        Some((tag, (self.chain.readable().to_vec(), self.chain.writable().to_vec())))
    }

    fn use_chain(&mut self, tag: u16, written_bytes: u32) {
        self.queue.push_used(tag, written_bytes);
    }

    fn publish(&mut self) -> bool {
        self.queue.publish();
        self.queue.needs_notification()
    }

    fn enable_kicks(&mut self) -> bool {
        self.queue.enable_kicks().unwrap()
    }

    fn disable_kicks(&mut self) {
        self.queue.disable_kicks();
    }
}

/// Both halves of a new ring.
fn ours(queue_size: u16, features: RingFeatures) -> World<Ours> {
    let view = view();
    let driver = DriverQueue::new(&view, layout(queue_size), features).unwrap();
    let queue = DeviceQueue::new(&view, layout(queue_size), features, driver.initial_base()).unwrap();
    let device = Ours { queue, chain: Chain::with_capacity(queue_size) };
    World::new(driver, device, features, false)
}

/// One step of one side.
#[derive(Clone, Debug)]
enum Step {
    Add {
        readable: usize,
        writable: usize,
        indirect: bool,
    },
    PublishAvail,
    Pop,
    /// Which of the popped chains to use, and how many of its bytes were written.
    Use {
        which: usize,
        written: u32,
    },
    PublishUsed,
    PopUsed,
    DeviceSleeps,
    DriverSleeps,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0_usize..4, 0_usize..4, any::<bool>())
            .prop_map(|(readable, writable, indirect)| Step::Add { readable, writable, indirect }),
        3 => Just(Step::PublishAvail),
        5 => Just(Step::Pop),
        5 => (any::<usize>(), any::<u32>()).prop_map(|(which, written)| Step::Use { which, written }),
        3 => Just(Step::PublishUsed),
        5 => Just(Step::PopUsed),
        2 => Just(Step::DeviceSleeps),
        2 => Just(Step::DriverSleeps),
    ];
    prop::collection::vec(step, 0..if cfg!(miri) { 40 } else { 200 })
}

/// A chain in the model.
#[derive(Clone, Debug)]
struct Expected {
    tag: u16,
    token: u64,
    buffers: Buffers,
    written_bytes: u32,
}

/// When a side of a packed ring must be notified; the superfluous notifications of a split ring are not
/// modelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WantedEvents {
    Every,
    None,
    /// Once, if there was nothing to do when the side enabled notifications.
    Next,
}

struct World<D> {
    driver: DriverQueue,
    device: D,
    added: VecDeque<Expected>,
    available: VecDeque<Expected>,
    popped: Vec<Expected>,
    used: VecDeque<Expected>,
    /// `used` entries that the driver can see.
    visible: usize,
    device_asleep: bool,
    device_wants: WantedEvents,
    driver_asleep: bool,
    driver_wants: WantedEvents,
    next_token: u64,
    features: RingFeatures,
    /// Whether each used chain is visible at once, as with the oracle.
    used_is_visible_at_once: bool,
}

impl<D: Device> World<D> {
    fn new(driver: DriverQueue, device: D, features: RingFeatures, used_is_visible_at_once: bool) -> Self {
        Self {
            driver,
            device,
            added: VecDeque::new(),
            available: VecDeque::new(),
            popped: Vec::new(),
            used: VecDeque::new(),
            visible: 0,
            device_asleep: false,
            device_wants: WantedEvents::Every,
            driver_asleep: false,
            driver_wants: WantedEvents::Every,
            next_token: 1000,
            features,
            used_is_visible_at_once,
        }
    }

    fn take(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match *step {
            Step::Add { readable, writable, indirect } => self.add(readable, writable, indirect),
            Step::PublishAvail => self.publish_avail(),
            Step::Pop => self.pop(),
            Step::Use { which, written } => self.use_one(which, written),
            Step::PublishUsed => self.publish_used(),
            Step::PopUsed => self.pop_used(),
            Step::DeviceSleeps => self.device_sleeps(),
            Step::DriverSleeps => self.driver_sleeps(),
        }
    }

    fn add(&mut self, readable: usize, writable: usize, indirect: bool) -> Result<(), TestCaseError> {
        let token = self.next_token;
        let ranges = |first: u64, count: usize| -> Vec<_> {
            (0..count as u64).map(|i| range(token * 64 + first + i, 100 + i as u32)).collect()
        };
        let (readable, writable) = (ranges(0, readable), ranges(32, writable));
        // Each table that can be in flight has its own address.
        let table = GuestAddress(TABLE + token % 64 * 256);
        let added = if indirect && self.features.indirect {
            self.driver.add_indirect(&readable, &writable, table, token)
        } else {
            self.driver.add(&readable, &writable, token)
        };
        if let Ok(tag) = added {
            self.next_token += 1;
            self.added.push_back(Expected { tag, token, buffers: (readable, writable), written_bytes: 0 });
        }
        Ok(())
    }

    fn publish_avail(&mut self) -> Result<(), TestCaseError> {
        let published = self.driver.publish();
        prop_assert_eq!(published, !self.added.is_empty());
        self.available.append(&mut self.added);
        let kick = self.driver.kick_needed();
        prop_assert!(published || !kick, "kick for nothing");
        prop_assert!(kick || !(published && self.device_asleep), "device sleeps through a chain");
        if self.features.packed {
            prop_assert_eq!(kick, published && notified(self.device_wants, self.device_asleep));
        }
        self.device_asleep &= !kick;
        Ok(())
    }

    fn pop(&mut self) -> Result<(), TestCaseError> {
        self.device.disable_kicks();
        (self.device_asleep, self.device_wants) = (false, WantedEvents::None);
        let popped = self.device.pop();
        let expected = self.available.pop_front();
        prop_assert_eq!(popped, expected.as_ref().map(|chain| (chain.tag, chain.buffers.clone())));
        self.popped.extend(expected);
        Ok(())
    }

    fn use_one(&mut self, which: usize, written: u32) -> Result<(), TestCaseError> {
        if self.popped.is_empty() {
            return Ok(());
        }
        let mut chain = self.popped.swap_remove(which % self.popped.len());
        let room_bytes: u32 = chain.buffers.1.iter().map(|range| range.len_bytes).sum();
        chain.written_bytes = written % (room_bytes + 1);
        self.device.use_chain(chain.tag, chain.written_bytes);
        self.used.push_back(chain);
        if self.used_is_visible_at_once {
            self.visible = self.used.len();
        }
        Ok(())
    }

    fn publish_used(&mut self) -> Result<(), TestCaseError> {
        let interrupt = self.device.publish();
        let published = self.visible != self.used.len();
        self.visible = self.used.len();
        if self.device_wants != WantedEvents::None {
            self.device_wants = self.events_wanted_when_idle();
        }
        prop_assert!(interrupt || !(self.driver_asleep && self.visible > 0), "driver sleeps through a chain");
        if self.features.packed {
            prop_assert_eq!(interrupt, published && notified(self.driver_wants, self.driver_asleep));
        }
        self.driver_asleep &= !interrupt;
        Ok(())
    }

    fn pop_used(&mut self) -> Result<(), TestCaseError> {
        self.driver.disable_interrupts();
        (self.driver_asleep, self.driver_wants) = (false, WantedEvents::None);
        let used = self.driver.pop_used().unwrap();
        let expected = if self.visible > 0 { self.used.pop_front() } else { None };
        self.visible = self.visible.saturating_sub(1);
        prop_assert_eq!(
            used.map(|used| (used.tag, used.token, used.written_bytes)),
            expected.map(|chain| (chain.tag, chain.token, chain.written_bytes))
        );
        Ok(())
    }

    fn device_sleeps(&mut self) -> Result<(), TestCaseError> {
        let more = self.device.enable_kicks();
        prop_assert_eq!(more, !self.available.is_empty());
        self.device_asleep = !more;
        self.device_wants = self.events_wanted_when_idle();
        Ok(())
    }

    /// With nothing in flight, the device of a packed ring stores its position in a field that drivers ignore.
    fn events_wanted_when_idle(&self) -> WantedEvents {
        let is_drained = self.popped.is_empty() && self.visible == self.used.len();
        if self.features.event_idx && !is_drained { WantedEvents::Next } else { WantedEvents::Every }
    }

    fn driver_sleeps(&mut self) -> Result<(), TestCaseError> {
        // For some visible chains, the device has not decided yet whether to notify. It decides next.
        let more = self.driver.arm_interrupts().unwrap();
        prop_assert_eq!(more, self.visible > 0);
        self.driver_asleep = !more;
        self.driver_wants = if self.features.event_idx { WantedEvents::Next } else { WantedEvents::Every };
        Ok(())
    }

    /// Checks that everything in flight comes back, and that every descriptor is free again.
    fn drain(&mut self, queue_size: u16) -> Result<(), TestCaseError> {
        self.publish_avail()?;
        while !self.available.is_empty() {
            self.pop()?;
        }
        while !self.popped.is_empty() {
            self.use_one(0, 0)?;
        }
        self.publish_used()?;
        while !self.used.is_empty() {
            self.pop_used()?;
        }
        prop_assert_eq!((self.driver.free_descriptors(), self.driver.in_flight()), (queue_size, 0));
        Ok(())
    }
}

fn notified(wanted: WantedEvents, asleep: bool) -> bool {
    match wanted {
        WantedEvents::Every => true,
        WantedEvents::None => false,
        WantedEvents::Next => asleep,
    }
}

fn run<D: Device>(mut world: World<D>, steps: &[Step], queue_size: u16) -> Result<(), TestCaseError> {
    steps.iter().try_for_each(|step| world.take(step))?;
    world.drain(queue_size)
}

fn sizes() -> impl Strategy<Value = u16> {
    if cfg!(miri) {
        return prop_oneof![Just(2_u16), Just(4), Just(8)].boxed();
    }
    prop_oneof![Just(2_u16), Just(4), Just(8), Just(32), Just(1024)].boxed()
}

fn features() -> impl Strategy<Value = RingFeatures> {
    (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(event_idx, indirect, packed)| RingFeatures {
        event_idx,
        indirect,
        packed,
    })
}

/// Few cases under Miri, which takes a second for a millisecond of processor time.
fn config() -> ProptestConfig {
    if cfg!(miri) {
        ProptestConfig { cases: 4, failure_persistence: None, ..ProptestConfig::default() }
    } else {
        ProptestConfig::with_cases(512)
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_schedule_with_our_device_keeps_order_tokens_and_wake_ups(
        queue_size in sizes(), features in features(), steps in steps(),
    ) {
        run(ours(queue_size, features), &steps, queue_size)?;
    }
}

/// More requests than a 16-bit index counts, with two in flight at any time, used out of order.
fn seventy_thousand_requests<D: Device>(mut world: World<D>, queue_size: u16) {
    for round in 0..35_000_usize {
        world.add(1, 1, round % 3 == 0).unwrap();
        world.add(0, 1, round % 2 == 0).unwrap();
        world.publish_avail().unwrap();
        world.pop().unwrap();
        world.pop().unwrap();
        world.device_sleeps().unwrap();
        world.use_one(1, 50).unwrap();
        world.use_one(0, 60).unwrap();
        world.publish_used().unwrap();
        world.pop_used().unwrap();
        world.pop_used().unwrap();
        world.driver_sleeps().unwrap();
    }
    assert_eq!(world.next_token, 71_000);
    world.drain(queue_size).unwrap();
}

const BOTH_FEATURES: RingFeatures = RingFeatures { event_idx: true, indirect: true, packed: false };

#[test]
#[cfg_attr(miri, ignore = "too long for the interpreter")]
fn indices_wrap_with_our_device_and_event_idx() {
    seventy_thousand_requests(ours(4, BOTH_FEATURES), 4);
}

#[test]
#[cfg_attr(miri, ignore = "too long for the interpreter")]
fn indices_wrap_with_our_device_and_flags() {
    seventy_thousand_requests(ours(4, PLAIN), 4);
}

#[test]
#[cfg_attr(miri, ignore = "too long for the interpreter")]
fn packed_positions_wrap_with_event_idx() {
    seventy_thousand_requests(ours(4, RingFeatures { packed: true, ..BOTH_FEATURES }), 4);
}

#[test]
#[cfg_attr(miri, ignore = "too long for the interpreter")]
fn packed_positions_wrap_with_flags() {
    seventy_thousand_requests(ours(8, PACKED), 8);
}

/// The `virtio-queue` crate's device, which maps the same files.
#[cfg(not(miri))]
mod oracle {
    use std::fs::File;

    use virtio_queue::{Queue, QueueOwnedT, QueueT};
    use vm_memory::{FileOffset, GuestMemoryMmap};

    use super::*;

    struct Theirs {
        queue: Queue,
        memory: GuestMemoryMmap<()>,
    }

    impl Device for Theirs {
        fn pop(&mut self) -> Option<(u16, Buffers)> {
            let chain = self.queue.iter(&self.memory).unwrap().next()?;
            let part = |writable| {
                let all = chain.clone().filter(move |d| (d.flags() & WRITE != 0) == writable);
                all.map(|d| range(d.addr().0, d.len())).collect()
            };
            Some((chain.head_index(), (part(false), part(true))))
        }

        fn use_chain(&mut self, tag: u16, written_bytes: u32) {
            self.queue.add_used(&self.memory, tag, written_bytes).unwrap();
        }

        fn publish(&mut self) -> bool {
            self.queue.needs_notification(&self.memory).unwrap()
        }

        fn enable_kicks(&mut self) -> bool {
            self.queue.enable_notification(&self.memory).unwrap()
        }

        fn disable_kicks(&mut self) {
            self.queue.disable_notification(&self.memory).unwrap();
        }
    }

    fn theirs(view: &guest_mem::MemoryView, queue_size: u16, features: RingFeatures) -> Theirs {
        let regions = view.memory().regions().iter().map(|region| {
            let file = File::from(region.fd().try_clone().unwrap());
            let spec = region.spec();
            (
                vm_memory::GuestAddress(spec.guest_addr.0),
                spec.size_bytes as usize,
                Some(FileOffset::new(file, 0)),
            )
        });
        let memory = GuestMemoryMmap::from_ranges_with_files(regions.collect::<Vec<_>>()).unwrap();
        let at = layout(queue_size);
        let mut queue = Queue::new(queue_size).unwrap();
        queue.try_set_desc_table_address(vm_memory::GuestAddress(at.descriptors.0)).unwrap();
        queue.try_set_avail_ring_address(vm_memory::GuestAddress(at.avail.0)).unwrap();
        queue.try_set_used_ring_address(vm_memory::GuestAddress(at.used.0)).unwrap();
        queue.set_event_idx(features.event_idx);
        queue.set_ready(true);
        Theirs { queue, memory }
    }

    fn with_driver(queue_size: u16, features: RingFeatures) -> World<Theirs> {
        let view = view();
        let driver = DriverQueue::new(&view, layout(queue_size), features).unwrap();
        World::new(driver, theirs(&view, queue_size, features), features, true)
    }

    proptest! {
        #[test]
        fn any_schedule_with_the_oracles_device_keeps_order_tokens_and_wake_ups(
            queue_size in sizes(), event_idx in any::<bool>(), indirect in any::<bool>(), steps in steps(),
        ) {
            let features = RingFeatures { event_idx, indirect, packed: false };
            run(with_driver(queue_size, features), &steps, queue_size)?;
        }
    }

    #[test]
    fn indices_wrap_with_the_oracles_device() {
        seventy_thousand_requests(with_driver(4, BOTH_FEATURES), 4);
    }
}
