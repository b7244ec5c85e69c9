//! Packed devices that die at any step: the next device resumes exactly where the last device's used descriptors end,
//! or refuses the ring.
//!
//! Both sides are real halves, in any schedule. A device dies by being dropped, even between two stores of one call.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use guest_mem::MemoryView;
use proptest::prelude::*;
use virtqueue::packed::{FRESH_BASE, RawDescriptor, RawPacked};
use virtqueue::{Chain, DeviceQueue, DriverQueue, RingFault, RingFeatures, RingLayout};

use crate::rig::{layout, range, view};

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The driver adds a chain of this many descriptors, if that many are free.
    Add(u16),
    /// The driver makes all added chains visible.
    DriverPublish,
    DriverReap,
    /// The device takes a chain, if there is one.
    Pop,
    Unpop,
    /// The device completes any one of the chains in flight.
    Push(usize),
    Publish,
    Enable,
    Disable,
    /// The device takes, completes and publishes all available chains.
    Serve,
    /// The device dies, the driver continues for a while, and then a new device opens the ring.
    Die {
        base: Base,
        torn: bool,
        added: u16,
    },
    /// The driver resets the queue, makes a new ring in the same memory, and adds some chains before a device opens it.
    Reset {
        base: Base,
        keeps_event: bool,
        added: u16,
    },
}

/// The base that the front-end sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Base {
    New,
    Zero,
    /// The base that the front-end sent at the last start.
    Same,
    Exact,
}

struct Bed {
    view: MemoryView,
    layout: RingLayout,
    features: RingFeatures,
    raw: RawPacked,
    driver: DriverQueue,
    device: Option<DeviceQueue>,
    /// How often each chain's token came back, in the order in which the driver added the chains since the ring was
    /// made.
    came_back: Vec<u32>,
    /// Tags and lengths of the chains that are popped, and of those that are pushed but not published.
    popped: Vec<(u16, u16)>,
    pushed: u32,
    /// Length of each chain, by tag.
    lengths: Vec<u16>,
    /// Descriptors used and visible since the ring was made.
    used: u32,
    /// The base that the front-end sent last.
    sent: u32,
    /// The device event before the last call of the device.
    event_before: u32,
    last_was_pop: bool,
}

impl Bed {
    fn new(queue_size: u16, features: RingFeatures) -> Self {
        let (view, layout) = (view(), layout(queue_size));
        let raw = RawPacked::new(&view, layout).unwrap();
        let driver = DriverQueue::new(&view, layout, features).unwrap();
        let device = Some(DeviceQueue::new(&view, layout, features, FRESH_BASE).unwrap());
        let lengths = vec![0; usize::from(queue_size)];
        Self {
            view,
            layout,
            features,
            raw,
            driver,
            device,
            came_back: vec![],
            popped: vec![],
            pushed: 0,
            lengths,
            used: 0,
            sent: FRESH_BASE,
            event_before: 0,
            last_was_pop: false,
        }
    }

    fn event(&self) -> u32 {
        let (position, flags) = self.raw.device_event();
        u32::from(position) | u32::from(flags) << 16
    }

    fn set_event(&self, event: u32) {
        self.raw.set_device_event(event as u16, (event >> 16) as u16);
    }

    /// The base of the position where the used descriptors end.
    fn exact(&self) -> u32 {
        let queue_size = u32::from(self.layout.queue_size);
        let wrap = if self.used & queue_size == 0 { 0x8000 } else { 0 };
        (self.used & (queue_size - 1) | wrap) * 0x1_0001
    }

    /// Whether the ring shows no use and every descriptor is available. It is then either a full new ring, or a ring
    /// whose last used chain began in the last slot. The two look the same, so the device may refuse the ring
    /// (`resume.rs`).
    fn looks_full_and_new(&self) -> bool {
        const BOTH: u16 = RawDescriptor::AVAIL | RawDescriptor::USED;
        let flags = |slot| self.raw.descriptor(slot).flags;
        (0..self.layout.queue_size).all(|slot| flags(slot) & BOTH == RawDescriptor::AVAIL)
    }

    fn add(&mut self, descriptors: u16) {
        let buffers: Vec<_> = (0..u64::from(descriptors)).map(|i| range(0x4_0000 + i * 16, 16)).collect();
        let token = self.came_back.len() as u64;
        if let Ok(tag) = self.driver.add(&buffers, &[], token) {
            self.lengths[usize::from(tag)] = descriptors;
            self.came_back.push(0);
        }
    }

    fn reap(&mut self) {
        while let Some(used) = self.driver.pop_used().expect("the device keeps to the rules") {
            self.came_back[used.token as usize] += 1;
        }
    }

    fn pop(&mut self) -> bool {
        let Some(device) = &mut self.device else { return false };
        let Some(tag) = device.pop(&mut Chain::with_capacity(64)).unwrap() else { return false };
        self.popped.push((tag, self.lengths[usize::from(tag)]));
        true
    }

    fn push(&mut self, which: usize) {
        let Some(device) = &mut self.device else { return };
        if self.popped.is_empty() {
            return;
        }
        let (tag, length) = self.popped.swap_remove(which % self.popped.len());
        device.push_used(tag, 0);
        self.pushed += u32::from(length);
    }

    fn publish(&mut self) {
        let Some(device) = &mut self.device else { return };
        device.publish();
        self.used += std::mem::take(&mut self.pushed);
    }

    fn serve(&mut self) {
        while self.pop() {}
        while !self.popped.is_empty() {
            self.push(0);
        }
        self.publish();
    }

    fn die(&mut self) {
        self.device = None; // it has no `Drop`
        self.popped.clear();
        self.pushed = 0;
    }

    fn open(&mut self, base: Base) -> Result<(), RingFault> {
        let base = match base {
            Base::New => FRESH_BASE,
            Base::Zero => 0,
            Base::Same => self.sent,
            Base::Exact => self.exact(),
        };
        let opened = DeviceQueue::new(&self.view, self.layout, self.features, base)?;
        self.sent = base;
        self.device = Some(opened);
        Ok(())
    }

    fn reset(&mut self, keeps_event: bool) {
        self.die();
        let event = self.event();
        self.driver = DriverQueue::new(&self.view, self.layout, self.features).unwrap();
        if keeps_event {
            self.set_event(event);
        }
        self.came_back.clear();
        self.used = 0;
    }

    fn step(&mut self, step: Step) -> Result<(), RingFault> {
        let (event, mut popped) = (self.event(), false);
        match step {
            Step::Add(descriptors) => self.add(descriptors),
            Step::DriverPublish => drop(self.driver.publish()),
            Step::DriverReap => self.reap(),
            Step::Pop => popped = self.pop(),
            Step::Unpop => {
                if self.last_was_pop
                    && let Some(device) = &mut self.device
                    && self.popped.pop().is_some()
                {
                    device.unpop();
                }
            }
            Step::Push(which) => self.push(which),
            Step::Publish => self.publish(),
            Step::Enable => drop(self.device.as_mut().map(DeviceQueue::enable_kicks)),
            Step::Disable => drop(self.device.as_mut().map(DeviceQueue::disable_kicks)),
            Step::Serve => self.serve(),
            Step::Die { base, torn, added } => {
                let position = self.exact() & 0xffff;
                let left_in_order = !torn && self.popped.is_empty() && self.pushed == 0 && event == position;
                self.die();
                if torn {
                    self.set_event(self.event_before);
                }
                (0..added).for_each(|_| self.add(1));
                self.driver.publish();
                let opened = self.open(base);
                assert!(opened.is_ok() || !left_in_order || self.looks_full_and_new(), "{opened:?}");
                opened?;
            }
            Step::Reset { base, keeps_event, added } => {
                self.reset(keeps_event);
                (0..added).for_each(|_| self.add(1));
                self.driver.publish();
                self.open(base)?;
            }
        }
        self.last_was_pop = popped;
        if matches!(step, Step::Publish) {
            self.event_before = event;
        } else {
            self.event_before = self.event();
        }
        Ok(())
    }

    /// Checks that every added chain comes back exactly once.
    fn finish(&mut self) {
        self.driver.publish();
        while !self.popped.is_empty() {
            self.push(0);
        }
        for _ in 0..3 {
            self.serve();
            self.reap();
        }
        assert!(self.came_back.iter().all(|&times| times == 1), "{:?}", self.came_back);
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let base = || prop::sample::select(vec![Base::New, Base::New, Base::Zero, Base::Same, Base::Exact]);
    let step = prop_oneof![
        6 => (1_u16..=5).prop_map(Step::Add),
        4 => Just(Step::DriverPublish),
        4 => Just(Step::DriverReap),
        4 => Just(Step::Pop),
        1 => Just(Step::Unpop),
        4 => any::<usize>().prop_map(Step::Push),
        3 => Just(Step::Publish),
        2 => Just(Step::Enable),
        2 => Just(Step::Disable),
        2 => Just(Step::Serve),
        2 => (base(), any::<bool>(), 0_u16..20).prop_map(|(base, torn, added)| Step::Die { base, torn, added }),
        1 => (base(), any::<bool>(), 0_u16..20)
            .prop_map(|(base, keeps_event, added)| Step::Reset { base, keeps_event, added }),
    ];
    prop::collection::vec(step, 1..120)
}

fn config() -> ProptestConfig {
    let cases = if cfg!(miri) { 4 } else { 2048 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn device_that_is_opened_goes_on_where_used_descriptors_end(
        steps in steps(),
        queue_size in prop::sample::select(vec![2_u16, 4, 8, 16, 32]),
        event_idx: bool,
    ) {
        let features = RingFeatures { event_idx, indirect: false, packed: true };
        let mut bed = Bed::new(queue_size, features);
        for step in steps {
            let opens = matches!(step, Step::Die { .. } | Step::Reset { .. });
            match bed.step(step) {
                Ok(()) if opens => {
                    let position = bed.device.as_ref().unwrap().position();
                    prop_assert_eq!(position, bed.exact(), "sent {:#x}", bed.sent);
                }
                Ok(()) => {}
                // A driver then makes a new ring.
                Err(_) => {
                    bed.reset(false);
                    bed.open(Base::New).unwrap();
                }
            }
        }
        bed.finish();
    }
}
