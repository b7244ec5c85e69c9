//! Random ops of all kinds with cancellations in between: all ops complete, and the data is correct.
//!
//! See also: single cases (`cases.rs`).

use std::time::{Duration, Instant};

use io_engine::{Durability, Event, OpError, OpKind, Unmap};

use xtask::sizes::unless_emulated;

use crate::bed::{Bed, pattern};

const SLOTS: u64 = 48;
const SLOT_BYTES: u64 = 64 << 10;
/// A sleep that lasts this long has lost its wake-up.
const PATIENCE: Duration = Duration::from_secs(300);

fn random(state: &mut u64, end: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 11) % end
}

/// One part of the image and of memory, with at most one op in flight.
#[derive(Clone, Default)]
struct Slot {
    busy: Option<OpKind>,
    /// The seed of the image's contents in this part; `None` if they are unknown.
    seed: Option<u64>,
    writing: u64,
    memory_at: u64,
    len_bytes: u64,
}

struct Stream {
    bed: Bed,
    slots: Vec<Slot>,
    state: u64,
    cancelled: bool,
}

impl Stream {
    fn push(&mut self, index: u64) {
        let len_bytes = 4096 << random(&mut self.state, 5);
        let memory_at = 2 * index * SLOT_BYTES + [0, 0, 512, 1][random(&mut self.state, 4) as usize];
        let range = self.bed.range(index * SLOT_BYTES, len_bytes);
        let durability = [Durability::Cached, Durability::Durable][random(&mut self.state, 2) as usize];
        let unmap = [Unmap::Allowed, Unmap::Forbidden][random(&mut self.state, 2) as usize];
        let kind = match random(&mut self.state, 12) {
            0 => OpKind::Flush,
            1 => OpKind::WriteZeroes { range, unmap, durability },
            2..6 => OpKind::Write { range, durability },
            _ => OpKind::Read { range },
        };
        let seed = random(&mut self.state, 1 << 20);
        if let OpKind::Write { .. } = kind {
            self.bed.store(memory_at, &pattern(seed, len_bytes as usize));
        }
        let half = len_bytes / 2;
        let pieces = [(memory_at, half), (memory_at + half, half)];
        self.bed.push(index, kind, if kind.moves_data() { &pieces } else { &[] });
        let slot = &mut self.slots[index as usize];
        (slot.busy, slot.writing, slot.memory_at, slot.len_bytes) = (Some(kind), seed, memory_at, len_bytes);
    }

    fn ended(&mut self, index: u64, result: Result<(), OpError>) {
        let slot = &mut self.slots[index as usize];
        let kind = slot.busy.take().expect("ended twice");
        let cancelled = result == Err(OpError::Cancelled);
        assert!(result.is_ok() || cancelled && self.cancelled, "{kind:?}: {result:?}");
        match kind {
            OpKind::Write { .. } if result.is_ok() => slot.seed = Some(slot.writing),
            OpKind::Write { .. } | OpKind::WriteZeroes { .. } => slot.seed = None,
            OpKind::Read { .. } if result.is_ok() => {
                let Some(seed) = slot.seed else { return };
                let first = self.bed.load(slot.memory_at, 4096);
                assert!(first == pattern(seed, 4096), "slot {index}");
            }
            _ => {}
        }
    }

    fn reap(&mut self) {
        let mut events = Vec::new();
        self.bed.engine.reap(&mut events);
        for event in events {
            let Event::Completed(done) = event else { continue };
            self.ended(done.token, done.result);
        }
    }

    fn sleep(&mut self) {
        let slept = Instant::now();
        self.bed.engine.wait(Some(PATIENCE)).unwrap();
        assert!(
            slept.elapsed() < PATIENCE,
            "{} ops in flight and nothing wakes up",
            self.bed.engine.in_flight()
        );
    }

    fn step(&mut self) {
        match random(&mut self.state, 100) {
            0 => {
                self.cancelled = true;
                self.bed.engine.cancel_all();
            }
            1..20 => self.bed.engine.submit().unwrap(),
            20..40 => self.reap(),
            40..50 if self.bed.engine.in_flight() > 0 => self.sleep(),
            _ => {
                let index = random(&mut self.state, SLOTS);
                if self.slots[index as usize].busy.is_none() {
                    self.push(index);
                }
            }
        }
    }
}

pub fn stream_with_cancellations_completes_and_its_data_is_right(bed: Bed) {
    let seed = u64::from(std::process::id()) * 7919; // different calls in every run
    println!("seed {seed}");
    let slots = vec![Slot::default(); SLOTS as usize];
    let mut stream = Stream { bed, slots, state: seed, cancelled: false };
    (0..unless_emulated(3000, 1000)).for_each(|_| stream.step());
    while stream.bed.engine.in_flight() > 0 {
        stream.bed.engine.submit().unwrap();
        stream.reap();
        if stream.bed.engine.in_flight() > 0 {
            stream.sleep();
        }
    }
    assert!(stream.slots.iter().all(|slot| slot.busy.is_none()));
}
