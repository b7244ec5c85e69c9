//! `vhost_user`: a front-end that sends any bytes and descriptors to a server, and a guest that writes its memory.
//!
//! `input → actions: negotiate, share memory, set up rings, kick, any bytes with any descriptors → session → end`
//!
//! - Each run has a separate server: a worker, an engine that moves no data, one disk. It usually has no threads, so
//!   that a run never waits; the tests and `--real-server` use one with threads.
//! - A session answers or ends. When the server stops, nothing is in flight.
//! - When the server has stopped, all descriptors that it received are closed.

mod peer;

use crate::input::{Input, Seed};
use crate::scribbler::{Scribbled, beside_a_scribbler};
use peer::{Fd, MEMFD_BYTES, MEMFDS, Peer, QUEUES, USER_BASE};

pub(crate) use peer::{disk_server, is_settled, open_fds};

const MOST_ACTS: usize = 200;
/// Request numbers; the last one is invalid.
const CODES: [u32; 34] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 24, 25, 30, 31, 32, 33,
    34, 36, 37, 38, 39, 0x1_0000,
];
/// Offsets of the parts of a ring in its queue's page.
const RING: [u64; 3] = [0, 0x400, 0x800];
const RING_SIZE: u32 = 8;
/// The ranges that a second thread overwrites: rings, headers and status bytes of both queues, and the same ranges in
/// the other files, which may contain logs.
const SHARED: [std::ops::Range<u64>; 5] =
    [0..0xc00, 0x1000..0x1c00, REQUEST..REQUEST + 0x400, 0x1_0000..0x1_0400, 0x2_0000..0x2_0400];
/// Address of the first queue's requests; those of the second are one page later.
const REQUEST: u64 = 0x4000;
/// VERSION_1, FLUSH, MQ, DISCARD, WRITE_ZEROES, INDIRECT, EVENT_IDX, PROTOCOL_FEATURES; and RING_PACKED.
const USUAL: u64 = 1 << 32 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 14 | 1 << 28 | 1 << 29 | 1 << 30;
const PACKED: u64 = 1 << 34;
/// MQ, REPLY_ACK, BACKEND_REQ, CONFIG, INFLIGHT_SHMFD, RESET_DEVICE, CONFIGURE_MEM_SLOTS, GET_VRING_BASE_INFLIGHT.
const PROTOCOL: u64 = 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15 | 1 << 20;

/// Runs the target once, entirely on this thread.
pub(crate) fn run(bytes: &[u8]) {
    play(bytes, |_| Peer::new(), all_acts);
}

/// Like [`run`], while a second thread overwrites the shared memory: rings, logs, requests.
pub(crate) fn run_with_second_thread(bytes: &[u8]) {
    play(
        bytes,
        |_| Peer::new(),
        |peer, input| {
            let memory = Scribbled::Files(peer.shared_files());
            beside_a_scribbler(memory, &SHARED, bytes, || all_acts(peer, input));
        },
    );
}

/// Like [`run`], with a server that has its own threads.
pub(crate) fn run_with_real_server(bytes: &[u8]) {
    play(bytes, Peer::of_a_real_server, all_acts);
}

fn play(bytes: &[u8], peer: impl FnOnce(bool) -> Peer, acts: impl FnOnce(&mut Peer, &mut Input<'_>)) {
    peer::prepare();
    let before = open_fds();
    let mut input = Input::new(bytes);
    let mut peer = peer(input.u8() & 1 != 0);
    acts(&mut peer, &mut input);
    peer.end();
    assert!(is_settled(before), "{} descriptors were open, now {}", before, open_fds());
}

fn all_acts(peer: &mut Peer, input: &mut Input<'_>) {
    for _ in 0..MOST_ACTS {
        if input.is_empty() {
            break;
        }
        act(peer, input);
    }
}

fn act(peer: &mut Peer, input: &mut Input<'_>) {
    match input.u8() % 14 {
        0 => negotiate(peer, input),
        1 => share(peer, input),
        2 | 3 => set_ring_up(peer, input),
        4 | 5 => any_message(peer, input),
        6 => {
            let (memfd, at, len) = (input.below(MEMFDS), input.u16(), input.below(17));
            peer.poke(memfd, at.into(), input.take(len));
        }
        7 => peer.kick(input.below(QUEUES)),
        8 => peer.message(11, 1, &state(input.below(QUEUES), 0), &[]),
        9 => in_flight_log(peer, input),
        10 => {
            let len = input.below(40);
            peer.bytes(input.take(len), &[]);
        }
        11 => peer.truncate(input.below(MEMFDS), u64::from(input.u8()) << 12),
        12 => memory_slot(peer, input),
        _ => request(peer, input),
    }
}

fn state(queue: usize, number: u32) -> Vec<u8> {
    [u32::try_from(queue).unwrap_or(u32::MAX), number].map(u32::to_ne_bytes).concat()
}

/// Header flags: version 1, with or without NEED_REPLY.
fn flags(wish: u8) -> u32 {
    if wish & 1 == 0 { 1 } else { 9 }
}

fn negotiate(peer: &mut Peer, input: &mut Input<'_>) {
    let choices = input.u8();
    let protocol = if choices & 4 == 0 { PROTOCOL } else { PROTOCOL & input.u64() };
    let features = USUAL | if choices & 2 == 0 { 0 } else { PACKED };
    let features = if choices & 8 == 0 { features } else { features & input.u64() };
    for (code, body) in [(1, None), (15, None), (16, Some(protocol)), (3, None), (2, Some(features))] {
        let body = body.map_or(Vec::new(), |word| word.to_ne_bytes().to_vec());
        peer.message(code, flags(choices), &body, &[]);
    }
}

/// One region of a message, usually a whole file.
fn region(input: &mut Input<'_>, memfd: usize) -> Vec<u8> {
    let shape = input.u8();
    let guest = memfd as u64 * MEMFD_BYTES;
    let mut words = [guest, MEMFD_BYTES, guest + USER_BASE, 0];
    if shape >= 0xe0 {
        words[usize::from(shape & 3)] = input.u64();
    }
    words.into_iter().flat_map(u64::to_ne_bytes).collect()
}

fn share(peer: &mut Peer, input: &mut Input<'_>) {
    let choices = input.u8();
    let count = usize::from(choices >> 1 & 3).clamp(1, MEMFDS);
    let mut body = [u32::try_from(count).unwrap_or(0), 0].map(u32::to_ne_bytes).concat();
    (0..count).for_each(|memfd| body.extend(region(input, memfd)));
    let fds: Vec<_> = (0..count).map(Fd::Memory).collect();
    peer.message(5, flags(choices), &body, &fds);
}

fn memory_slot(peer: &mut Peer, input: &mut Input<'_>) {
    let (choices, memfd) = (input.u8(), input.below(MEMFDS));
    let body = [vec![0; 8], region(input, memfd)].concat();
    let fds = if choices & 8 == 0 { vec![Fd::Memory(memfd)] } else { vec![] };
    peer.message(if choices & 2 == 0 { 37 } else { 38 }, flags(choices), &body, &fds);
}

/// The messages that start a ring. Some may be missing or contain invalid values.
fn set_ring_up(peer: &mut Peer, input: &mut Input<'_>) {
    let (queue, left_out, wish, base) = (input.below(QUEUES), input.u8(), input.u8(), input.u8());
    let has = |bit: u8| left_out >> bit & 1 == 0;
    let number = queue as u64;
    let page = queue as u64 * 0x1000 + USER_BASE;
    let mut places = [0, page + RING[0], page + RING[2], page + RING[1], 0];
    places[0] = number;
    let size = if wish & 2 == 0 { RING_SIZE } else { input.u32() };
    let base = match base % 4 {
        0 => 0,
        1 => 0x8000_8000,
        2 => u32::from(base),
        _ => input.u32(),
    };
    if wish & 4 != 0 {
        places[1 + input.below(4)] = input.u64();
    }
    let word = number.to_ne_bytes();
    let address: Vec<u8> = places.into_iter().flat_map(u64::to_ne_bytes).collect();
    let messages: [(u32, Vec<u8>, Vec<Fd>); 7] = [
        (8, state(queue, size), vec![]),
        (10, state(queue, base), vec![]),
        (9, address, vec![]),
        (13, word.to_vec(), vec![Fd::Call(queue)]),
        (14, word.to_vec(), vec![Fd::Call(queue)]),
        (12, word.to_vec(), vec![Fd::Kick(queue)]),
        (18, state(queue, 1), vec![]),
    ];
    for (bit, (code, body, fds)) in (0..).zip(messages) {
        if has(bit) {
            peer.message(code, flags(wish), &body, &fds);
        }
    }
}

fn in_flight_log(peer: &mut Peer, input: &mut Input<'_>) {
    let choices = input.u8();
    let mut body = Vec::new();
    for word in [MEMFD_BYTES, if choices & 4 == 0 { 0 } else { input.u64() }] {
        body.extend_from_slice(&word.to_ne_bytes());
    }
    let (queues, size) = if choices & 8 == 0 { (2_u16, 8_u16) } else { (input.u16(), input.u16()) };
    body.extend_from_slice(&queues.to_ne_bytes());
    body.extend_from_slice(&size.to_ne_bytes());
    if choices & 0x10 == 0 {
        body.extend_from_slice(&[0; 4]);
    }
    if choices & 2 == 0 {
        peer.message(31, 1, &body, &[]);
    } else {
        peer.message(32, flags(choices), &body, &[Fd::Memory(input.below(MEMFDS))]);
    }
}

/// Sends any header, any body and any descriptors.
fn any_message(peer: &mut Peer, input: &mut Input<'_>) {
    let code = CODES[input.below(CODES.len())];
    let code = if code == 0x1_0000 { input.u32() } else { code };
    let (shape, len) = (input.u8(), input.below(72));
    let body = input.take(len).to_vec();
    let header = if shape & 0x40 == 0 { flags(shape) } else { input.u32() };
    let fds: Vec<_> = (0..shape >> 1 & 7).map(|_| Fd::of(input.u8())).collect();
    // More descriptors than any message may carry.
    let fds = if shape & 0x90 == 0x90 { vec![Fd::Null; 33 + input.below(8)] } else { fds };
    if shape & 0x20 == 0 {
        peer.message(code, header, &body, &fds);
    } else {
        let said = [code, header, input.u32()].map(u32::to_ne_bytes).concat();
        peer.bytes(&[said, body].concat(), &fds);
    }
}

/// A read of one sector, or another request, in the first three descriptors of a split ring.
fn request(peer: &mut Peer, input: &mut Input<'_>) {
    let (queue, kind, sector) = (input.below(QUEUES), input.u8(), input.u8());
    let (ring, at) = (queue as u64 * 0x1000, REQUEST + queue as u64 * 0x1000);
    let header = [u32::from(kind & 15), 0, u32::from(sector), 0].map(u32::to_le_bytes).concat();
    peer.poke(0, at, &header);
    let parts = [(at, 16_u32, 1_u16, 1_u16), (at + 0x200, 512, 3, 2), (at + 0x100, 1, 2, 0)];
    for (slot, (addr, len, flags, next)) in (0..).zip(parts) {
        let mut bytes = addr.to_le_bytes().to_vec();
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes.extend_from_slice(&next.to_le_bytes());
        peer.poke(0, ring + RING[0] + 16 * slot, &bytes);
    }
    peer.poke(0, ring + RING[1] + 2, &u16::from(sector & 7).to_le_bytes());
    peer.kick(queue);
}

/// Typical sessions of front-ends, with a request in the middle, and with one invalid message each.
pub(crate) fn seeds() -> Vec<(String, Vec<u8>)> {
    let start = |packed: u8, wish: u8| {
        let base = if packed == 0 { 0 } else { 1 };
        let seed = Seed::new(&[wish, 0, wish | packed << 1, 1, wish | 4, 0, 0]);
        seed.and(&[2, 0, 0, wish, base]).and(&[2, 1, 0, wish, base])
    };
    let requests = [13, 0, 0, 1, 13, 1, 8, 1, 13, 0, 4, 2, 7, 0, 8, 0, 8, 1];
    let mut seeds = Vec::new();
    for choices in 0..4_u8 {
        let (packed, wish) = (choices >> 1, choices & 1);
        seeds.push((format!("session-{choices}"), start(packed, wish).and(&requests).bytes()));
        let log = Seed::new(&[wish, 0, wish | packed << 1, 1, wish | 4, 0, 0, 9, 0, 9, 2, 1]);
        let logged = log.and(&[2, 0, 0, wish, packed]).and(&requests);
        seeds.push((format!("logged-{choices}"), logged.bytes()));
        let cut = start(packed, wish).and(&requests).and(&[11, 0, 0, 13, 0, 0, 3, 7, 0]);
        seeds.push((format!("truncated-{choices}"), cut.bytes()));
        let slots = start(packed, wish).and(&[12, 2, 1, 0, 12, 0, 1, 0, 12, 0, 1, 0]).and(&requests);
        seeds.push((format!("slots-{choices}"), slots.bytes()));
    }
    for code in 0..u8::try_from(CODES.len()).unwrap_or(0) {
        let with_fd = Seed::new(&[0, 0, 1, 4, code, 3, 8, 0, 0, 0, 0, 0, 0, 0, 0, code % 9]);
        seeds.push((format!("message-{code:02}"), with_fd.bytes()));
    }
    seeds
}
