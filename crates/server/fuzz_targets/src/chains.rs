//! `chains`: a driver that breaks every rule and restarts at any time, against the real device side.
//!
//! `input → features, size, then actions: write anything, offer, pop, use, publish, die and restart with the log`
//!
//! - The device accepts or refuses each chain exactly as the model (`chains/model.rs`) does from the same bytes.
//! - The device writes only to its own parts of the ring, and only entries for chains that it has used.
//! - The number of requests redone from a hostile log is limited: each is a tag of the ring, and none occurs twice.

mod machine;
mod model;
mod raced;

use virtqueue::RingFeatures;

use crate::input::{Input, Seed};
use crate::scribbler::beside_a_scribbler;
use machine::{Machine, TABLES};
use model::{AVAIL_RING, DESCRIPTORS, USED_RING};
use raced::Raced;

/// Possible sizes: small, so that rings wrap.
const SIZES: [u16; 4] = [2, 4, 8, 16];
/// Maximum number of actions per run, however long the input is.
const MOST_ACTS: usize = 512;

fn machine(choices: u8) -> Machine {
    let features =
        RingFeatures { packed: choices & 1 != 0, event_idx: choices & 2 != 0, indirect: choices & 4 != 0 };
    let size = SIZES[usize::from(choices >> 4 & 3)];
    let limit = if choices & 0x40 != 0 { 24 } else { size };
    Machine::new(features, size, limit)
}

/// Runs the target once.
pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let choices = input.u8();
    let features = RingFeatures { packed: choices & 1 != 0, ..RingFeatures::default() };
    let mut machine = machine(choices);
    machine.start(choices & 8 != 0, if features.packed { virtqueue::packed::FRESH_BASE } else { 0 });
    for _ in 0..MOST_ACTS {
        if input.is_empty() {
            break;
        }
        act(&mut machine, &mut input);
    }
    machine.check_memory();
}

/// The same actions without the model, while a second thread writes to the ring or the log.
pub(crate) fn run_with_second_thread(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let choices = input.u8();
    let mut driver = machine(choices);
    let mut device = Raced::new(&driver, choices & 8 != 0);
    let (memory, spans) = device.scribbled(bytes.last().is_some_and(|last| last & 1 == 0));
    beside_a_scribbler(memory, &spans, bytes, || {
        for _ in 0..MOST_ACTS {
            if input.is_empty() {
                break;
            }
            raced_act(&mut driver, &mut device, &mut input);
        }
    });
}

/// Applies the driver's actions to the memory, and the device's actions to another device.
fn raced_act(driver: &mut Machine, device: &mut Raced, input: &mut Input<'_>) {
    let kind = *input.peek().unwrap_or(&0) % 16;
    match kind {
        4..=8 | 11 | 12 => {
            input.u8();
            match kind {
                4 | 5 => device.pop(),
                6 => device.push(input.below(16), input.u16().into()),
                7 => device.publish(),
                8 => device.unpop(),
                11 => device.ask(input.u8()),
                _ => device.start(input.u8() & 1 != 0, input.u8(), driver),
            }
        }
        _ => act(driver, input),
    }
}

fn act(machine: &mut Machine, input: &mut Input<'_>) {
    match input.u8() % 16 {
        0 | 1 => {
            let at = DESCRIPTORS + 16 * input.below(usize::from(machine.size())) as u64;
            let descriptor = descriptor(machine, input);
            machine.guest.store(at, &descriptor);
        }
        2 => {
            let at = TABLES[input.below(TABLES.len())] + 16 * input.below(26) as u64;
            let descriptor = descriptor(machine, input);
            machine.guest.store(at, &descriptor);
        }
        3 => machine.offer(input.u8().into()),
        4 | 5 => machine.pop(),
        6 => machine.push(input.below(16), input.u16().into()),
        7 => machine.publish(),
        8 => machine.unpop(),
        9 => {
            let (at, len) = (u64::from(input.u16()), input.below(9));
            machine.guest.store(at, input.take(len));
        }
        10 => machine.guest.store(AVAIL_RING + 2, &input.u16().to_le_bytes()),
        11 => machine.ask(input.u8()),
        12 => machine.start(input.u8() & 1 != 0, base(machine, input)),
        13 => {
            let (at, len) = (u64::from(input.u16() & 0x7ff), input.below(9));
            machine.scribble_log(at, input.take(len));
        }
        14 => machine.guest.store(USED_RING + u64::from(input.u8()), &input.u16().to_le_bytes()),
        _ => machine.offer_chain(input.below(6), input.u8()),
    }
}

/// A ring position: that of a new ring, the ring's last one, or any other.
fn base(machine: &Machine, input: &mut Input<'_>) -> u32 {
    match input.u8() % 4 {
        0 => virtqueue::packed::FRESH_BASE,
        1 | 2 => machine.position(),
        _ => input.u32(),
    }
}

/// A descriptor's sixteen bytes, which are usually valid.
fn descriptor(machine: &Machine, input: &mut Input<'_>) -> [u8; 16] {
    let shape = input.u8();
    let addr = match shape & 3 {
        0 | 1 => 0x2000 + 16 * u64::from(input.u8()),
        2 => TABLES[input.below(TABLES.len())],
        _ => input.u64(),
    };
    let len = match shape >> 2 & 3 {
        0 => u32::from(input.u8()),
        1 | 2 => 16 * u32::from(input.u8() % 32),
        _ => input.u32(),
    };
    let flags = if shape & 0x80 == 0 { u16::from(shape >> 4 & 7) } else { input.u16() };
    let other = u16::from(input.u8());
    let other = if other < 0xf0 { other % (machine.size() + 1) } else { other << 8 | other };
    machine.descriptor(addr, len, flags, other)
}

/// Well-formed runs of both formats, with and without tables and logs, each with a restart in the middle.
pub(crate) fn seeds() -> Vec<(String, Vec<u8>)> {
    let mut seeds = Vec::new();
    for choices in (0..0x80).filter(|choices| choices % 5 == 0 || *choices < 16) {
        let well_formed = [15, 3, 0x5a, 15, 1, 0x11, 4, 5, 6, 0, 1, 2, 6, 0, 0, 0, 7, 11, 7];
        let with_table =
            [2, 0, 0, 0, 7, 0x10, 1, 2, 0, 1, 0, 7, 0x20, 0, 0, 0, 2, 0x46, 2, 0, 3, 0, 4, 6, 0, 0, 0, 7];
        let crash =
            [15, 2, 0x33, 4, 15, 2, 0x30, 4, 12, 1, 1, 4, 4, 4, 6, 0, 9, 9, 6, 0, 1, 1, 7, 12, 0, 1, 4];
        let seed = Seed::new(&[choices]).and(&well_formed).and(&with_table).and(&well_formed).and(&crash);
        seeds.push((format!("ring-{choices:02x}"), seed.bytes()));
    }
    // A queue of four and a chain of five: one descriptor, then a table with as many entries as the queue.
    let direct = [0, 0, 0x10, 1, 0x20, 1, 0, 1, 0x46, 0, 4, 0];
    let entries = (0..4).flat_map(|at| [2, 0, at, if at < 3 { 0x10 } else { 0x20 }, at, 0x10, at + 1]);
    let entries: Vec<u8> = entries.collect();
    let longer = Seed::new(&[0x14]).and(&direct).and(&entries).and(&[3, 0, 4]);
    seeds.push(("one-too-many".to_owned(), longer.bytes()));
    seeds
}
