//! `requests`: block requests of every kind and shape, one after another, sent through a worker to a small image.
//!
//! `input → header, data, room, cut anywhere → ring → the worker's loop, sync engine → image, memory, used length`
//!
//! - All of the guest's memory and the image must match the model (`requests/model.rs`): one status byte at the end of
//!   the writable part, and no store outside.
//! - The used length is exact.
//! - With a second thread that changes the memory, no model can predict the result. The worker then continues or stops
//!   the queue, the image keeps its size, and a new queue behaves like the model.

mod bed;
mod model;

use crate::input::{Input, Seed};
use crate::scribbler::{Scribbled, beside_a_scribbler};
use bed::Bed;
use model::SECTOR;

/// Maximum length of a request's data.
const MOST_BYTES: usize = 12 << 10;
const MOST_REQUESTS: usize = 24;

/// Runs the target once.
pub(crate) fn run(bytes: &[u8]) {
    play(bytes);
}

/// Returns the memory and image after the run, for comparison by `tests`.
fn play(bytes: &[u8]) -> Vec<u8> {
    let mut input = Input::new(bytes);
    let mut bed = Bed::take(input.u8());
    for _ in 0..MOST_REQUESTS {
        if input.is_empty() {
            break;
        }
        let (said, room) = (said(&mut input), room(&mut input));
        bed.request(&mut input, &said, room);
    }
    bed.put_back()
}

/// Like [`run`], with a second thread.
pub(crate) fn run_with_second_thread(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let choices = input.u8();
    let mut bed = Bed::take(choices);
    let memory = Scribbled::Mapped(bed.guest.view.clone());
    beside_a_scribbler(memory, &bed::SHARED, bytes, || {
        for _ in 0..MOST_REQUESTS {
            if input.is_empty() {
                break;
            }
            let (said, room) = (said(&mut input), room(&mut input));
            bed.request_unchecked(&mut input, &said, room);
        }
    });
    bed.check_image_size();
    bed.renew(choices);
    let mut input = Input::new(&READ_AND_MORE);
    let (said, room) = (said(&mut input), room(&mut input));
    bed.request(&mut input, &said, room);
    bed.put_back();
}

/// A read of three sectors, with header and room in one piece each.
const READ_AND_MORE: [u8; 10] = [0, 3, 0, 0, 0, 0, 3, 3, 0, 0];

/// The header and the readable data.
fn said(input: &mut Input<'_>) -> Vec<u8> {
    let (shape, sector_shape) = (input.u8(), input.u8());
    let kinds = [0, 1, 4, 8, 11, 13, 1, 0];
    let kind = if shape & 0x80 != 0 { input.u32() } else { kinds[usize::from(shape & 7)] };
    let sector = if sector_shape < 0xe0 { u64::from(sector_shape) % 36 } else { input.u64() };
    let mut said = kind.to_le_bytes().to_vec();
    said.extend_from_slice(&input.u32().to_le_bytes());
    said.extend_from_slice(&sector.to_le_bytes());
    match shape >> 3 & 7 {
        // Segments.
        0..=2 if kind == 11 || kind == 13 => (0..input.below(18)).for_each(|_| said.extend(segment(input))),
        0 | 1 if kind == 1 => {
            let (sectors, byte) = (input.below(12), input.u8());
            let step: Vec<u8> = (0..251).map(|step| byte.wrapping_add(step)).collect();
            let end = said.len() + sectors * SECTOR;
            while said.len() < end {
                said.extend_from_slice(&step[..step.len().min(end - said.len())]);
            }
        }
        3 => said.truncate(input.below(17)),
        4 => said.extend(vec![input.u8(); usize::from(input.u16()) % MOST_BYTES]),
        5 => {
            let len = input.below(64);
            said.extend_from_slice(input.take(len));
        }
        _ => {}
    }
    said
}

fn segment(input: &mut Input<'_>) -> [u8; 16] {
    let shape = input.u8();
    let sector = if shape & 0x80 == 0 { u64::from(input.u8()) % 34 } else { input.u64() };
    let sectors = if shape & 0x40 == 0 { u32::from(input.u8()) % 20 } else { input.u32() };
    let flags = if shape & 0x20 == 0 { u32::from(shape & 1) } else { input.u32() };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..].copy_from_slice(&flags.to_le_bytes());
    bytes
}

/// The number of writable bytes, for data and status.
fn room(input: &mut Input<'_>) -> usize {
    match input.u8() % 8 {
        0..=2 => 1,
        3 | 4 => input.below(12) * SECTOR + 1,
        5 => input.below(64),
        6 => usize::from(input.u16()) % MOST_BYTES,
        _ => input.below(12) * SECTOR,
    }
}

/// A request of each kind with each setting of the bed, whole and cut, then invalid ones.
pub(crate) fn seeds() -> Vec<(String, Vec<u8>)> {
    let plain = [0, 0];
    let request = |shape: u8, sector: u8, more: &[u8], room: &[u8], cuts: &[u8]| {
        Seed::new(&[shape, sector]).and(&[0; 4]).and(more).and(room).and(cuts).bytes()
    };
    let kinds = [
        request(0, 3, &[], &[3, 2], &[plain, plain].concat()),
        request(1, 5, &[4, 0x33], &[0], &[plain, plain].concat()),
        request(2, 0, &[], &[0], &[plain, plain].concat()),
        request(3, 0, &[], &[5, 21], &[plain, plain].concat()),
        request(4, 0, &[2, 0, 8, 8, 0, 20, 3], &[0], &[plain, plain].concat()),
        request(5, 0, &[2, 1, 30, 8, 0, 2, 19], &[0], &[plain, plain].concat()),
    ];
    let cut = request(1, 7, &[3, 9], &[0], &[3, 5, 0, 1, 200, 0, 2, 0, 4, 3, 0, 0, 0]);
    let wrong = [
        request(0, 0x3f, &[], &[3, 5], &[plain, plain].concat()),
        request(0x18, 0, &[9], &[3, 1], &[plain, plain].concat()),
        request(0x81, 0, &[], &[0], &[plain, plain].concat()),
        request(1, 1, &[1, 1], &[0], &[0, 0xf4, 0, 0]),
        request(0, 1, &[], &[3, 1], &[0, 0, 0, 0xf0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ];
    let mut seeds = Vec::new();
    for choices in 0..0x20_u8 {
        let all = kinds.iter().chain([&cut]).chain(&wrong);
        let seed = all.fold(Seed::new(&[choices]), |seed, request| seed.and(request));
        seeds.push((format!("disk-{choices:02x}"), seed.bytes()));
    }
    // The second part of the id's buffer ends outside the memory; the first part and the status byte do not.
    let id = Seed::new(&[0, 3, 0]).and(&[0; 4]).and(&[5, 21]).and(&[0, 0]);
    seeds.push(("id-partly-nowhere".to_owned(), id.and(&[2, 12, 0, 0, 4, 0, 0xf4, 0]).bytes()));
    seeds
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Covers other settings of the same bed and other beds, after writes, discards and invalid requests.
    #[test]
    fn run_after_another_run_ends_as_it_does_alone() {
        let seeds: Vec<_> = seeds().into_iter().map(|(_, bytes)| bytes).collect();
        let alone = |seed: &Vec<u8>| {
            let seed = seed.clone();
            std::thread::spawn(move || play(&seed)).join().expect("no verdict")
        };
        let fresh: Vec<_> = seeds.iter().map(alone).collect();
        for first in &seeds {
            for (second, alone) in seeds.iter().zip(&fresh) {
                play(first);
                let after = play(second);
                let differs = (0..after.len()).find(|&at| after[at] != alone[at]);
                assert_eq!(differs, None, "{first:x?} changes what {second:x?} leaves behind there");
            }
        }
    }

    #[test]
    fn run_after_one_with_a_second_thread_ends_as_it_does_alone() {
        let seed = seeds().pop().expect("a seed").1;
        let alone = play(&seed);
        run_with_second_thread(&seed);
        assert!(play(&seed) == alone);
    }
}
