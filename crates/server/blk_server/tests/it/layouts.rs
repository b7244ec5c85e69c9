//! Request layouts: any split over descriptors, indirect tables, ring sizes, memory regions.
//!
//! A VERSION_1 driver may frame a request in any way (virtio 1.3 §2.7.4).
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::collections::HashSet;

use crate::rig::format::{Format, on_both_formats};
use crate::rig::packed_guest::hostile_over;
use crate::rig::raw_guest::{connected, last, range, readable, table, writable};
use crate::rig::{Guest, MIB, Options, Rig, header_bytes, kind, ready};

const OK: Option<u8> = Some(0);
const IOERR: Option<u8> = Some(1);

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8).collect()
}

/// Writes `count` sectors one at a time, then reads them in one request.
fn writes_and_reads(guest: &mut Guest, count: u64) -> bool {
    let written = (0..count).all(|sector| guest.write(sector, &[sector as u8; 512]).status == OK);
    let read = guest.read(0, count as u32 * 512);
    written && read.data.chunks(512).zip(0u64..).all(|(data, sector)| data == [sector as u8; 512])
}

on_both_formats! {
    header_in_three_pieces_and_status_at_the_end_of_the_data_descriptor,
    header_and_data_of_a_write_in_one_descriptor,
    header_split_over_what_also_holds_data,
    pieces_misaligned_for_direct_io_are_read_and_written_all_the_same,
    misaligned_request_longer_than_a_bounce_buffer_is_whole,
    empty_descriptors_between_the_others_carry_nothing,
    indirect_chain_reads_and_writes_from_a_table_at_any_address,
    indirect_chain_longer_than_a_small_queue_is_read_up_to_the_length_seg_max_promised,
    ring_without_event_idx_wraps_and_goes_on,
    ring_with_event_idx_wraps_and_goes_on,
    indices_wrap_past_16_bits_with_event_idx,
    queue_of_two_entries_serves_with_data_and_status_in_one_descriptor,
    requests_of_one_to_1022_segments_are_whole,
    more_requests_than_large_buffers_on_four_queues_all_complete,
    more_requests_than_the_engine_takes_on_four_queues_all_complete,
    buffers_across_two_adjacent_regions_are_whole,
    indirect_table_across_two_adjacent_regions_is_read,
    rings_and_buffers_above_four_gib_work,
    data_between_two_regions_fails_and_the_next_request_works,
}

fn header_in_three_pieces_and_status_at_the_end_of_the_data_descriptor(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    guest.write(4, &pattern(512));
    let at = guest.area();
    guest.view.store(at, &header_bytes(kind::IN, 4)).unwrap();
    let header = [range(at, 3), range(at + 3, 6), range(at + 9, 7)];
    let answer = guest.exchange(&header, &[range(at + 0x1000, 513)]);
    assert_eq!((answer.status, answer.used_bytes, answer.data), (OK, 513, pattern(512)));
}

fn header_and_data_of_a_write_in_one_descriptor(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    let at = guest.area();
    guest.view.store(at, &header_bytes(kind::OUT, 9)).unwrap();
    guest.view.store(at + 16, &pattern(1024)).unwrap();
    let answer = guest.exchange(&[range(at, 16 + 1024)], &[range(at + 0x800, 1)]);
    assert_eq!((answer.status, answer.used_bytes), (OK, 1));
    assert_eq!(rig.image_bytes(9 * 512, 1024), pattern(1024));
}

fn header_split_over_what_also_holds_data(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    let at = guest.area();
    let bytes = [header_bytes(kind::OUT, 0).to_vec(), pattern(512)].concat();
    guest.view.store(at, &bytes[..10]).unwrap();
    guest.view.store(at + 0x1000, &bytes[10..200]).unwrap();
    guest.view.store(at + 0x2000, &bytes[200..]).unwrap();
    let readable = [range(at, 10), range(at + 0x1000, 190), range(at + 0x2000, 328)];
    let answer = guest.exchange(&readable, &[range(at + 0x800, 1)]);
    assert_eq!(answer.status, OK);
    assert_eq!(rig.image_bytes(0, 512), pattern(512));
}

fn pieces_misaligned_for_direct_io_are_read_and_written_all_the_same(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    let at = guest.area();
    let pieces = [range(at + 0x1001, 3), range(at + 0x2003, 509), range(at + 0x3005, 1024)];
    let data = pattern(1536);
    for (piece, from) in pieces.iter().zip([0, 3, 512]) {
        guest.view.store(piece.addr, &data[from..from + piece.len_bytes as usize]).unwrap();
    }
    guest.view.store(at, &header_bytes(kind::OUT, 1)).unwrap();
    let readable = [&[range(at, 16)], &pieces[..]].concat();
    let written = guest.exchange(&readable, &[range(at + 0x800, 1)]);
    guest.view.store(at, &header_bytes(kind::IN, 1)).unwrap();
    pieces.iter().for_each(|piece| guest.view.store(piece.addr, &[0]).unwrap());
    let read = guest.exchange(&[range(at, 16)], &[&pieces[..], &[range(at + 0x800, 1)]].concat());
    assert_eq!((written.status, rig.image_bytes(512, 1536)), (OK, data.clone()));
    assert_eq!((read.status, read.used_bytes, read.data), (OK, 1537, data));
}

fn misaligned_request_longer_than_a_bounce_buffer_is_whole(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    let at = 8 * MIB + 1;
    let data = pattern(768 * 1024 + 512);
    guest.view.store(at, &data).unwrap();
    let head = guest.area();
    let write = guest.scattered(kind::OUT, 5, head, &[range(at, data.len() as u32)]).unwrap();
    guest.submit();
    guest.wait_for(write);
    let read = guest.scattered(kind::IN, 5, head, &[range(at + 2 * MIB, data.len() as u32)]).unwrap();
    guest.submit();
    assert_eq!(guest.wait_for(read), data.len() as u32 + 1);
    assert_eq!(rig.image_bytes(5 * 512, data.len()), data);
    assert!(guest.bytes(at + 2 * MIB, data.len()) == data);
}

fn empty_descriptors_between_the_others_carry_nothing(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    guest.write(0, &pattern(512));
    let at = guest.area();
    guest.view.store(at, &header_bytes(kind::IN, 0)).unwrap();
    let readable = [range(at, 0), range(at, 16), range(0, 0)];
    let writable = [range(at + 0x1000, 512), range(at, 0), range(at + 0x800, 1), range(1 << 60, 0)];
    let answer = guest.exchange(&readable, &writable);
    assert_eq!((answer.status, answer.used_bytes, answer.data), (OK, 513, pattern(512)));
}

fn indirect_chain_reads_and_writes_from_a_table_at_any_address(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    let at = guest.area();
    guest.view.store(at, &header_bytes(kind::OUT, 2)).unwrap();
    guest.view.store(at + 0x1000, &pattern(1024)).unwrap();
    let (header, status) = (range(at, 16), range(at + 0x800, 1));
    let data = [range(at + 0x1000, 512), range(at + 0x1200, 512)];
    let written = guest.exchange_indirect(at + 0x7003, &[header, data[0], data[1]], &[status]);
    guest.view.store(at, &header_bytes(kind::IN, 2)).unwrap();
    let read = guest.exchange_indirect(at + 0x8001, &[header], &[data[1], data[0], status]);
    assert_eq!((written.status, written.used_bytes), (OK, 1));
    assert_eq!((read.status, read.used_bytes, read.data), (OK, 1025, pattern(1024)));
    assert_eq!(rig.image_bytes(1024, 1024), pattern(1024));
}

fn indirect_chain_longer_than_a_small_queue_is_read_up_to_the_length_seg_max_promised(ring: Format) {
    let rig = Rig::start(Options { queue_size: 256, ..Options::default() });
    let front_end = connected(&rig, ring.plain());
    let mut raw = hostile_over(front_end.start_queue(0, 16, ring.plain()), ring);
    let (at, entries) = (raw.area(), 8 * MIB);
    let mut chain: Vec<_> =
        (0..256).map(|i| writable(at + 0x1000 + u64::from(i) * 512, 512, i + 1)).collect();
    chain[0] = readable(at, 16, 1);
    chain[255] = last(at + 0x800, 1);
    raw.set_table(entries, &chain);
    assert_eq!(front_end.config(12, 4), 254u32.to_le_bytes());
    assert_eq!(raw.exchange(&[table(entries, 256 * 16)]), (254 * 512 + 1, 0));
    assert_eq!(raw.exchange(&[table(entries, 257 * 16)]), (0, 0xff));
}

fn ring_without_event_idx_wraps_and_goes_on(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.plain());
    assert!(writes_and_reads(&mut guest, 400));
}

fn ring_with_event_idx_wraps_and_goes_on(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    assert!(writes_and_reads(&mut guest, 400));
}

fn indices_wrap_past_16_bits_with_event_idx(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    let at = guest.area();
    guest.view.store(at, &header_bytes(kind::GET_ID, 0)).unwrap();
    for _ in 0..33_000 {
        guest.add(&[range(at, 16)], &[range(at + 0x800, 1)]);
        guest.add(&[range(at, 16)], &[range(at + 0x801, 1)]);
        guest.submit();
        assert!(guest.next_used().is_some() && guest.next_used().is_some());
    }
    assert_eq!(guest.read(0, 512).status, OK);
}

fn queue_of_two_entries_serves_with_data_and_status_in_one_descriptor(ring: Format) {
    let rig = Rig::start(Options { queue_size: 2, ..Options::default() });
    let front_end = connected(&rig, ring.usual());
    let mut guest = front_end.start_queue(0, 2, ring.usual());
    let at = guest.area();
    guest.view.store(at, &[header_bytes(kind::OUT, 1).to_vec(), pattern(512)].concat()).unwrap();
    assert_eq!(guest.exchange(&[range(at, 528)], &[range(at + 0x800, 1)]).status, OK);
    guest.view.store(at, &header_bytes(kind::IN, 1)).unwrap();
    let reads = (0..5).map(|_| guest.exchange(&[range(at, 16)], &[range(at + 0x1000, 513)]));
    assert!(reads.into_iter().all(|read| read.status == OK && read.data == pattern(512)));
    assert_eq!(front_end.config(12, 4), 1u32.to_le_bytes());
}

fn requests_of_one_to_1022_segments_are_whole(ring: Format) {
    let rig = Rig::start(Options { queue_size: 1024, ..Options::default() });
    let front_end = connected(&rig, ring.usual());
    let mut guest = front_end.start_queue(0, 1024, ring.usual());
    assert_eq!(front_end.config(12, 4), 1022u32.to_le_bytes());
    for count in [1, 2, 7, 8, 9, 64, 511, 1022] {
        let data: Vec<u8> = (0..count * 512).map(|i| (i / 512 + i % 199 + count) as u8).collect();
        let at = |base: u64, i: usize| range(base + i as u64 * 1024, 512);
        let from: Vec<_> = (0..count).map(|i| at(8 * MIB, i)).collect();
        let to: Vec<_> = (0..count).map(|i| at(10 * MIB, i)).collect();
        from.iter()
            .zip(data.chunks(512))
            .for_each(|(piece, data)| guest.view.store(piece.addr, data).unwrap());
        let head = guest.area();
        let write = guest.scattered(kind::OUT, 3, head, &from).unwrap();
        guest.submit();
        assert_eq!((guest.wait_for(write), guest.bytes(head + 0x800, 1)), (1, vec![0]));
        let read = guest.scattered(kind::IN, 3, head, &to).unwrap();
        guest.submit();
        assert_eq!((guest.wait_for(read), guest.bytes(head + 0x800, 1)), (data.len() as u32 + 1, vec![0]));
        let back: Vec<u8> = to.iter().flat_map(|piece| guest.bytes(piece.addr, 512)).collect();
        assert!(back == data && rig.image_bytes(3 * 512, data.len()) == data);
    }
}

/// Fills the queue with requests of `pieces` buffers each and returns the tokens.
fn fill(guest: &mut Guest, requests: u64, pieces: u64) -> HashSet<u64> {
    let base = 8 * MIB + u64::from(guest.index) * MIB;
    let one = |request: u64| {
        let buffers: Vec<_> = (0..pieces).map(|i| range(base + (request * pieces + i) * 1024, 512)).collect();
        // Headers fill half a page, their status bytes the other half.
        let head = guest.area() + request / 128 * 0x1000 + request % 128 * 16;
        guest.scattered(kind::IN, request * pieces, head, &buffers).unwrap()
    };
    (0..requests).map(one).collect()
}

fn more_requests_than_large_buffers_on_four_queues_all_complete(ring: Format) {
    let rig = Rig::start(Options::default());
    let front_end = connected(&rig, ring.usual());
    let mut guests: Vec<_> = (0..4).map(|i| front_end.start_queue(i, 256, ring.usual())).collect();
    let mut waiting: Vec<_> = guests.iter_mut().map(|guest| fill(guest, 20, 10)).collect();
    guests.iter_mut().for_each(Guest::submit);
    for (guest, waiting) in guests.iter_mut().zip(&mut waiting) {
        while !waiting.is_empty() {
            let used = guest.next_used().expect("a request never completes");
            assert!(waiting.remove(&used.token) && used.written_bytes == 5121);
        }
    }
}

fn more_requests_than_the_engine_takes_on_four_queues_all_complete(ring: Format) {
    let rig = Rig::start(Options { queue_size: 1024, ..Options::default() });
    let front_end = connected(&rig, ring.usual());
    let mut guests: Vec<_> = (0..4).map(|i| front_end.start_queue(i, 1024, ring.usual())).collect();
    let mut waiting: Vec<_> = guests.iter_mut().map(|guest| fill(guest, 341, 1)).collect();
    guests.iter_mut().for_each(Guest::submit);
    for (guest, waiting) in guests.iter_mut().zip(&mut waiting) {
        while !waiting.is_empty() {
            let used = guest.next_used().expect("a request never completes");
            assert!(waiting.remove(&used.token) && used.written_bytes == 513);
        }
    }
}

fn buffers_across_two_adjacent_regions_are_whole(ring: Format) {
    let rig = Rig::start(Options::default());
    let mut front_end = rig.connect();
    front_end.negotiate(ring.usual());
    front_end.share_regions(&[(0, 8 * MIB), (8 * MIB, 8 * MIB)]);
    let mut guest = front_end.start_queue(0, 256, ring.usual());
    let border = 8 * MIB;
    guest.view.store(border - 5000, &pattern(10_240)).unwrap();
    let head = guest.area();
    let write = guest.scattered(kind::OUT, 0, head, &[range(border - 5000, 10_240)]).unwrap();
    guest.submit();
    guest.wait_for(write);
    guest.view.store(border - 8, &header_bytes(kind::IN, 0)).unwrap();
    let data_and_status = [range(border - 4096 - 8192, 8192), range(border - 4096, 2049)];
    let read = guest.exchange(&[range(border - 8, 16)], &data_and_status);
    assert_eq!(rig.image_bytes(0, 10_240), pattern(10_240));
    assert_eq!((read.status, read.data), (OK, pattern(10_240)));
}

fn indirect_table_across_two_adjacent_regions_is_read(ring: Format) {
    let rig = Rig::start(Options::default());
    let mut front_end = rig.connect();
    front_end.negotiate(ring.usual());
    front_end.share_regions(&[(0, 8 * MIB), (8 * MIB, 8 * MIB)]);
    let mut guest = front_end.start_queue(0, 256, ring.usual());
    let at = guest.area();
    guest.view.store(at, &header_bytes(kind::IN, 0)).unwrap();
    let writable = [range(at + 0x1000, 512), range(at + 0x800, 1)];
    let read = guest.exchange_indirect(8 * MIB - 20, &[range(at, 16)], &writable);
    assert_eq!((read.status, read.used_bytes), (OK, 513));
}

fn rings_and_buffers_above_four_gib_work(ring: Format) {
    const HIGH: u64 = 5 << 30;
    let rig = Rig::start(Options::default());
    let mut front_end = rig.connect();
    front_end.negotiate(ring.usual());
    front_end.share_regions(&[(0, 8 * MIB), (HIGH, 8 * MIB)]);
    let mut guest = front_end.start_queue_at(HIGH, 0, 256, ring.usual());
    guest.view.store(HIGH + 2 * MIB, &pattern(4096)).unwrap();
    let head = HIGH + MIB;
    let write = guest.scattered(kind::OUT, 8, head, &[range(HIGH + 2 * MIB, 4096)]).unwrap();
    guest.submit();
    guest.wait_for(write);
    let read = guest.scattered(kind::IN, 8, head, &[range(HIGH + 3 * MIB, 4096)]).unwrap();
    guest.submit();
    assert_eq!(guest.wait_for(read), 4097);
    assert_eq!(rig.image_bytes(4096, 4096), pattern(4096));
    assert_eq!(guest.bytes(HIGH + 3 * MIB, 4096), pattern(4096));
}

fn data_between_two_regions_fails_and_the_next_request_works(ring: Format) {
    let rig = Rig::start(Options::default());
    let mut front_end = rig.connect();
    front_end.negotiate(ring.usual());
    front_end.share_regions(&[(0, 8 * MIB), (9 * MIB, 7 * MIB)]);
    let mut guest = front_end.start_queue(0, 256, ring.usual());
    let head = guest.area();
    let read = guest.scattered(kind::IN, 0, head, &[range(8 * MIB - 512, 1024)]).unwrap();
    guest.submit();
    assert_eq!((guest.wait_for(read), guest.bytes(head + 0x800, 1)), (1, vec![1]));
    assert_eq!(guest.write(0, &[1; 512]).status, OK);
    assert_eq!(guest.read(1 << 50, 512).status, IOERR);
}
