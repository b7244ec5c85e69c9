//! Requests end to end: a test front-end, the real server, a real file with O_DIRECT.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

#[cfg(target_arch = "x86_64")] // the guest tests need x86-64
use std::fs::OpenOptions;

use disk_image::{Access, HostOpener, Image, ImageOptions};

use crate::rig;
use crate::rig::format::{Format, on_both_formats};
use crate::rig::{MIB, Options, Rig, feature, kind, ready, segment_bytes};

const OK: Option<u8> = Some(0);
const IOERR: Option<u8> = Some(1);
const UNSUPP: Option<u8> = Some(2);

on_both_formats! {
    written_sectors_are_read_back_and_are_in_the_file,
    flush_is_answered_and_get_id_tells_the_serial,
    unknown_type_is_unsupported_and_the_next_request_works,
    requests_past_the_capacity_fail_whatever_the_arithmetic,
    used_length_counts_what_was_stored_and_the_status_for_every_kind,
    serial_is_cut_to_the_room_there_is,
    requests_of_no_bytes_or_no_sectors_succeed,
    data_that_is_not_whole_sectors_fails,
    read_only_disk_says_so_and_refuses_whatever_would_change_it,
    block_size_of_4096_is_told_and_smaller_requests_fail,
    image_truncated_under_the_guest_fails_reads_and_never_makes_up_zeroes,
    image_truncated_inside_a_sector_fails_that_sector_through_the_page_cache_too,
    image_that_grew_is_larger_for_the_guest_after_a_refresh,
}

fn written_sectors_are_read_back_and_are_in_the_file(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    let data: Vec<u8> = (0..8192u32).map(|i| (i % 251) as u8).collect();
    let written = guest.write(16, &data);
    let read = guest.read(16, 8192);
    assert_eq!((written.status, written.used_bytes), (OK, 1));
    assert_eq!((read.status, read.used_bytes), (OK, 8193));
    assert_eq!(read.data, data);
    assert_eq!(rig.image_bytes(16 * 512, 8192), data);
}

fn flush_is_answered_and_get_id_tells_the_serial(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    let flushed = guest.request(kind::FLUSH, 0, &[], 0);
    let id = guest.request(kind::GET_ID, 0, &[], 20);
    assert_eq!((flushed.status, flushed.used_bytes), (OK, 1));
    assert_eq!((id.status, id.used_bytes), (OK, 21));
    assert!(id.data.iter().all(u8::is_ascii_hexdigit));
}

fn unknown_type_is_unsupported_and_the_next_request_works(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    assert_eq!(guest.request(77, 0, &[], 512).status, UNSUPP);
    assert_eq!(guest.read(0, 512).status, OK);
}

fn requests_past_the_capacity_fail_whatever_the_arithmetic(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    let capacity = 16 * rig::MIB / 512;
    assert_eq!(guest.read(capacity - 1, 512).status, OK);
    assert_eq!(guest.read(capacity - 1, 1024).status, IOERR);
    assert_eq!(guest.read(capacity, 512).status, IOERR);
    assert_eq!(guest.read(u64::MAX, 512).status, IOERR);
    assert_eq!(guest.write(u64::MAX / 512, &[1; 512]).status, IOERR);
}

fn used_length_counts_what_was_stored_and_the_status_for_every_kind(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    let segment = segment_bytes(0, 8, 0);
    let good = [
        guest.read(0, 4096).used_bytes,
        guest.write(0, &[1; 4096]).used_bytes,
        guest.request(kind::FLUSH, 0, &[], 0).used_bytes,
        guest.request(kind::GET_ID, 0, &[], 20).used_bytes,
        guest.request(kind::DISCARD, 0, &segment, 0).used_bytes,
        guest.request(kind::WRITE_ZEROES, 0, &segment, 0).used_bytes,
    ];
    let failed = [
        guest.read(1 << 40, 4096).used_bytes,
        guest.write(1 << 40, &[1; 4096]).used_bytes,
        guest.request(77, 0, &[], 512).used_bytes,
        guest.request(kind::DISCARD, 0, &segment[..15], 0).used_bytes,
    ];
    assert_eq!((good, failed), ([4097, 1, 1, 21, 1, 1], [1; 4]));
}

fn serial_is_cut_to_the_room_there_is(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    let whole = guest.request(kind::GET_ID, 0, &[], 20);
    let short = guest.request(kind::GET_ID, 0, &[], 5);
    let none = guest.request(kind::GET_ID, 0, &[], 0);
    let long = guest.request(kind::GET_ID, 0, &[], 512);
    assert_eq!((short.status, short.used_bytes, &short.data[..]), (OK, 6, &whole.data[..5]));
    assert_eq!((none.status, none.used_bytes), (OK, 1));
    assert_eq!((long.status, &long.data[..20]), (OK, &whole.data[..]));
}

fn requests_of_no_bytes_or_no_sectors_succeed(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    let read = guest.read(3, 0);
    let write = guest.write(3, &[]);
    let discard = guest.request(kind::DISCARD, 0, &segment_bytes(3, 0, 0), 0);
    assert_eq!((read.status, read.used_bytes), (OK, 1));
    assert_eq!((write.status, discard.status), (OK, OK));
    assert_eq!(guest.read(1 << 40, 0).status, IOERR);
}

fn data_that_is_not_whole_sectors_fails(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    assert_eq!(guest.read(0, 511).status, IOERR);
    assert_eq!(guest.write(0, &[1; 513]).status, IOERR);
    assert_eq!(rig.image_bytes(0, 513), vec![0; 513]);
}

fn read_only_disk_says_so_and_refuses_whatever_would_change_it(ring: Format) {
    let mut options = Options::default();
    options.image.access = Access::ReadOnly;
    let rig = Rig::start(options);
    let (front_end, mut guest) = ready(&rig, ring.usual() | feature::RO);
    let offered = front_end.ask_u64(rig::code::GET_FEATURES);
    assert_eq!(offered & (feature::RO | feature::DISCARD | feature::WRITE_ZEROES), feature::RO);
    assert_eq!(guest.write(0, &[1; 512]).status, IOERR);
    assert_eq!(guest.request(kind::DISCARD, 0, &segment_bytes(0, 8, 0), 0).status, IOERR);
    assert_eq!(guest.request(kind::WRITE_ZEROES, 0, &segment_bytes(0, 8, 0), 0).status, IOERR);
    assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).status, OK);
    assert_eq!(guest.read(0, 512).data, vec![0; 512]);
}

#[test]
fn read_only_disk_can_be_served_twice_at_once() {
    let mut options = Options::default();
    options.image.access = Access::ReadOnly;
    let first = Rig::start(options);
    let image = ImageOptions { access: Access::ReadOnly, ..ImageOptions::new(&first.image) };
    assert!(Image::open(&HostOpener, &image).is_ok());
}

fn block_size_of_4096_is_told_and_smaller_requests_fail(ring: Format) {
    let mut options = Options::default();
    options.image.block_size = Some(4096);
    let rig = Rig::start(options);
    let (front_end, mut guest) = ready(&rig, ring.usual());
    assert_eq!(front_end.config(20, 4), 4096u32.to_le_bytes());
    assert_eq!(guest.read(0, 512).status, IOERR);
    assert_eq!(guest.read(1, 4096).status, IOERR);
    assert_eq!(guest.write(0, &[1; 512]).status, IOERR);
    assert_eq!(guest.write(8, &[1; 4096]).status, OK);
    assert_eq!(guest.read(8, 4096).data, vec![1; 4096]);
}

fn image_truncated_under_the_guest_fails_reads_and_never_makes_up_zeroes(ring: Format) {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    assert_eq!(guest.write(0, &[7; 8192]).status, OK);
    OpenOptions::new().write(true).open(&rig.image).unwrap().set_len(4096).unwrap();
    assert_eq!(guest.read(0, 4096).data, vec![7; 4096]);
    assert_eq!(guest.read(0, 8192).status, IOERR);
    assert_eq!(guest.read(8, 4096).status, IOERR);
    assert_eq!(guest.read(1 << 14, 512).status, IOERR);
    assert_eq!(guest.read(0, 512).status, OK);
}

fn image_truncated_inside_a_sector_fails_that_sector_through_the_page_cache_too(ring: Format) {
    let rig = Rig::start(Options::buffered());
    let (_front_end, mut guest) = ready(&rig, ring.usual());
    assert_eq!(guest.write(0, &[7; 4096]).status, OK);
    OpenOptions::new().write(true).open(&rig.image).unwrap().set_len(1000).unwrap();
    assert_eq!(guest.read(0, 512).status, OK);
    assert_eq!(guest.read(1, 512).status, IOERR);
    assert_eq!(guest.read(0, 4096).status, IOERR);
}

fn image_that_grew_is_larger_for_the_guest_after_a_refresh(ring: Format) {
    let rig = Rig::start(Options::default());
    let (front_end, mut guest) = ready(&rig, ring.usual());
    OpenOptions::new().write(true).open(&rig.image).unwrap().set_len(32 * MIB).unwrap();
    assert_eq!(guest.read(20 * MIB / 512, 512).status, IOERR);
    rig.server.as_ref().unwrap().refresh_capacities();
    assert_eq!(front_end.config(0, 8), (32 * MIB / 512).to_le_bytes());
    assert_eq!(guest.write(20 * MIB / 512, &[5; 512]).status, OK);
    assert_eq!(rig.image_bytes(20 * MIB, 512), vec![5; 512]);
}
