//! Tests with devices that die between any two of their stores: the log and the ring are enough for the successor.
//!
//! The driver half is real and notices a chain that comes back twice. At the moment of death the test copies
//! all memory; the running call continues without effect on the copy, and the successor opens the copy. The
//! successor may die while it reads the log, too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use guest_mem::{GuestAddress, GuestMemory, GuestRange, MemoryView, Region};
use proptest::prelude::*;

use crate::packed::FRESH_BASE;
use crate::step::observing;
use crate::{Chain, DeviceQueue, DriverQueue, LogArea, RingFeatures, RingLayout};

const RING_BYTES: u64 = 16 << 10;
const BUFFERS: u64 = 0x2000;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The driver adds a chain of this many descriptors, if that many are free, and publishes.
    Add(u16),
    Reap,
    Pop,
    Unpop,
    /// The device completes any one of the chains in flight.
    Push(usize),
    Publish,
}

fn memory(size_bytes: u64) -> MemoryView {
    let region = Arc::new(Region::from_memfd(GuestAddress(0), size_bytes).unwrap());
    MemoryView::new(Arc::new(GuestMemory::new(vec![region]).unwrap()))
}

fn bytes(view: &MemoryView) -> Vec<u8> {
    let mut bytes = vec![0; view.memory().regions()[0].spec().size_bytes as usize];
    view.read(0, &mut bytes).unwrap();
    bytes
}

/// When a device dies, and the memory it leaves behind.
#[derive(Default)]
struct Death {
    /// Number of crash points that the device still survives; `None`: it does not die.
    after: Option<usize>,
    left: Option<[Vec<u8>; 2]>,
}

struct Bed {
    ring: MemoryView,
    log: MemoryView,
    layout: RingLayout,
    features: RingFeatures,
    driver: DriverQueue,
    device: Option<DeviceQueue>,
    death: Rc<RefCell<Death>>,
    /// For each future death, the number of crash points survived before it.
    lives: Vec<usize>,
    deaths: usize,
    /// Tags and tokens that this device has popped and not pushed.
    popped: Vec<(u16, u64)>,
    /// Tokens, in the order in which a device first took them.
    order: Vec<u64>,
    /// How often the chain of each token came back.
    came_back: Vec<u32>,
    /// Index in `order` of the chain redone last.
    redone: Option<usize>,
    last_was_pop: bool,
}

impl Bed {
    fn new(queue_size: u16, packed: bool, lives: &[usize]) -> Self {
        let layout = RingLayout {
            queue_size,
            descriptors: GuestAddress(0),
            avail: GuestAddress(0x1000),
            used: GuestAddress(0x1800),
        };
        let features = RingFeatures { event_idx: false, indirect: false, packed };
        let (ring, log) =
            (memory(RING_BYTES), memory(LogArea::bytes(1, queue_size, packed).next_multiple_of(4096)));
        let driver = DriverQueue::new(&ring, layout, features).unwrap();
        let mut lives = lives.to_vec();
        lives.reverse();
        let mut bed = Self {
            ring,
            log,
            layout,
            features,
            driver,
            device: None,
            death: Rc::default(),
            lives,
            deaths: 0,
            popped: vec![],
            order: vec![],
            came_back: vec![],
            redone: None,
            last_was_pop: false,
        };
        bed.next_life();
        bed.open();
        bed
    }

    fn next_life(&mut self) {
        *self.death.borrow_mut() = Death { after: self.lives.pop(), left: None };
    }

    /// The result of `call`, if the device survives it.
    fn survives<T>(&mut self, call: impl FnOnce(&mut Self) -> T) -> Option<T> {
        let (death, ring, log) = (Rc::clone(&self.death), self.ring.clone(), self.log.clone());
        let observe = move || {
            let mut death = death.borrow_mut();
            match death.after {
                Some(0) => {
                    death.after = None;
                    death.left = Some([bytes(&ring), bytes(&log)]);
                }
                Some(more) => death.after = Some(more - 1),
                None => {}
            }
        };
        let result = observing(observe, || call(self));
        let left = self.death.borrow_mut().left.take();
        let Some([ring, log]) = left else { return Some(result) };
        self.ring.store(0, &ring).unwrap();
        self.log.store(0, &log).unwrap();
        self.deaths += 1;
        self.next_life();
        None
    }

    fn open(&mut self) {
        (self.device, self.redone, self.last_was_pop) = (None, None, false);
        self.popped.clear();
        let base = if self.features.packed { FRESH_BASE } else { 0 };
        while self.device.is_none() {
            let opened = self.survives(|bed| {
                let area = LogArea::new(Arc::clone(bed.log.memory()), 0, bed.layout.queue_size);
                DeviceQueue::with_log(&bed.ring, bed.layout, bed.features, base, &area).unwrap()
            });
            self.device = opened;
        }
        assert!(!self.device().recovery().was_foreign);
    }

    fn device(&mut self) -> &mut DeviceQueue {
        self.device.as_mut().unwrap()
    }

    /// Runs a call of the device; if the device dies, a successor takes over.
    fn device_call<T>(&mut self, call: impl FnOnce(&mut DeviceQueue) -> T) -> T {
        let mut result = None;
        if self.survives(|bed| result = Some(call(bed.device()))).is_none() {
            self.open();
        }
        result.unwrap()
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Add(descriptors) => self.add(descriptors),
            Step::Reap => self.reap(),
            Step::Pop => self.pop(),
            Step::Unpop => self.unpop(),
            Step::Push(any) => self.push(any),
            Step::Publish => {
                self.device_call(DeviceQueue::publish);
                self.last_was_pop = false;
            }
        }
    }

    /// Adds a chain; each one has its own address.
    fn add(&mut self, descriptors: u16) {
        let token = self.came_back.len() as u64;
        let buffer = |part: u16| GuestRange { addr: BUFFERS + token * 16 + u64::from(part), len_bytes: 1 };
        let buffers: Vec<_> = (0..descriptors).map(buffer).collect();
        if descriptors <= self.driver.free_descriptors() {
            self.driver.add(&buffers, &[], token).unwrap();
            self.came_back.push(0);
            self.driver.publish();
        }
    }

    fn reap(&mut self) {
        while let Some(used) = self.driver.pop_used().expect("each chain comes back once") {
            self.came_back[used.token as usize] += 1;
        }
    }

    fn pop(&mut self) {
        let again = self.device().to_redo() > 0;
        self.last_was_pop = false;
        let mut chain = Chain::with_capacity(self.layout.queue_size);
        let deaths = self.deaths;
        let tag = self.device_call(|device| device.pop(&mut chain)).unwrap();
        let Some(tag) = tag else { return };
        let token = (chain.readable()[0].addr - BUFFERS) / 16;
        let count = chain.readable().len() as u64;
        assert!((0..count).all(|part| chain.readable()[part as usize].addr == BUFFERS + token * 16 + part));
        assert_eq!(self.came_back[token as usize], 0, "{token} was acknowledged");
        let taken_before = self.order.iter().position(|&taken| taken == token);
        if again {
            let place = taken_before.expect("only chains that were taken before are redone");
            assert!(self.redone.is_none_or(|before| before < place), "redone in a different order");
            self.redone = Some(place);
        } else if taken_before.is_none() {
            self.order.push(token);
        }
        if self.deaths == deaths {
            self.popped.push((tag, token));
            self.last_was_pop = true;
        }
    }

    fn unpop(&mut self) {
        if std::mem::take(&mut self.last_was_pop) {
            let (_, token) = self.popped.pop().unwrap();
            let place = self.order.iter().position(|&taken| taken == token).unwrap();
            self.redone = self.redone.filter(|&redone| redone != place);
            self.device_call(DeviceQueue::unpop);
        }
    }

    fn push(&mut self, any: usize) {
        if !self.popped.is_empty() {
            let (tag, _) = self.popped.remove(any % self.popped.len());
            self.device_call(|device| device.push_used(tag, 0));
            self.last_was_pop = false;
        }
    }

    /// Every added chain comes back exactly once.
    fn finish(&mut self) {
        self.lives.clear();
        self.death.borrow_mut().after = None;
        loop {
            let before = self.popped.len();
            self.step(Step::Pop);
            if self.popped.len() == before {
                break;
            }
        }
        while !self.popped.is_empty() {
            self.step(Step::Push(0));
        }
        self.step(Step::Publish);
        self.reap();
        assert!(self.came_back.iter().all(|&times| times == 1), "{:?}", self.came_back);
    }
}

/// Covers everything that a device does: completions out of order and in batches, chains around the end of the ring,
/// and a pop inside an unpublished batch.
const LIFE: [Step; 33] = [
    Step::Add(1),
    Step::Add(2),
    Step::Add(1),
    Step::Pop,
    Step::Pop,
    Step::Pop,
    Step::Unpop,
    Step::Pop,
    Step::Push(1),
    Step::Publish,
    Step::Reap,
    Step::Add(2),
    Step::Pop,
    Step::Push(2),
    Step::Push(1),
    Step::Publish,
    Step::Reap,
    Step::Add(1),
    Step::Add(2),
    Step::Pop,
    Step::Push(1),
    Step::Pop,
    Step::Push(0),
    Step::Publish,
    Step::Push(0),
    Step::Publish,
    Step::Reap,
    Step::Add(4),
    Step::Pop,
    Step::Push(0),
    Step::Publish,
    Step::Reap,
    Step::Add(1),
];

/// Runs the same life once per crash point: the device dies at point 0, then 1, 2 …, until none is left. Returns the
/// number of crash points.
fn deaths_at_every_place(packed: bool, then: &[usize]) -> usize {
    let mut place = 0;
    loop {
        let mut bed = Bed::new(4, packed, &[&[place], then].concat());
        LIFE.into_iter().for_each(|step| bed.step(step));
        let died = bed.deaths > 0;
        bed.finish();
        if !died {
            return place;
        }
        place += 1;
    }
}

#[test]
#[cfg_attr(miri, ignore = "too long for the interpreter")]
fn split_device_that_dies_at_any_store_is_followed_by_one_that_loses_and_repeats_nothing() {
    assert!(deaths_at_every_place(false, &[]) > 40);
}

#[test]
#[cfg_attr(miri, ignore = "too long for the interpreter")]
fn packed_device_that_dies_at_any_store_is_followed_by_one_that_loses_and_repeats_nothing() {
    assert!(deaths_at_every_place(true, &[]) > 60);
}

#[test]
#[cfg_attr(miri, ignore = "too long for the interpreter")]
fn successors_that_die_while_they_read_the_log_or_soon_after_change_nothing() {
    for soon in 0..8 {
        deaths_at_every_place(false, &[soon, 0, soon]);
        deaths_at_every_place(true, &[soon, 0, soon]);
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (1_u16..=4).prop_map(Step::Add),
        2 => Just(Step::Reap),
        4 => Just(Step::Pop),
        1 => Just(Step::Unpop),
        3 => any::<usize>().prop_map(Step::Push),
        2 => Just(Step::Publish),
    ];
    prop::collection::vec(step, 1..120)
}

/// Disables proptest's file of failures, because Miri has no file system.
fn config() -> ProptestConfig {
    let cases = if cfg!(miri) { 4 } else { 400 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_life_with_deaths_anywhere_loses_and_repeats_nothing(
        packed: bool,
        size in 1_u32..=4,
        lives in prop::collection::vec(0_usize..60, 0..8),
        steps in steps(),
    ) {
        let mut bed = Bed::new(1 << size, packed, &lives);
        steps.into_iter().for_each(|step| bed.step(step));
        bed.finish();
    }
}
