//! The guest's requests end to end: a front-end of our own, the real server, a real file with O_DIRECT.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod rig;

use rig::{Options, Rig, feature, kind, ready, segment_bytes};

const OK: Option<u8> = Some(0);
const IOERR: Option<u8> = Some(1);
const UNSUPP: Option<u8> = Some(2);

#[test]
fn written_sectors_are_read_back_and_are_in_the_file() {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    let data: Vec<u8> = (0..8192u32).map(|i| (i % 251) as u8).collect();
    let written = guest.write(16, &data);
    let read = guest.read(16, 8192);
    assert_eq!((written.status, written.used_bytes), (OK, 1));
    assert_eq!((read.status, read.used_bytes), (OK, 8193));
    assert_eq!(read.data, data);
    assert_eq!(rig.image_bytes(16 * 512, 8192), data);
}

#[test]
fn flush_is_answered_and_get_id_tells_the_serial() {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    let flushed = guest.request(kind::FLUSH, 0, &[], 0);
    let id = guest.request(kind::GET_ID, 0, &[], 20);
    assert_eq!((flushed.status, flushed.used_bytes), (OK, 1));
    assert_eq!((id.status, id.used_bytes), (OK, 21));
    assert!(id.data.iter().all(u8::is_ascii_hexdigit));
}

#[test]
fn unknown_type_is_unsupported_and_the_next_request_works() {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    assert_eq!(guest.request(77, 0, &[], 512).status, UNSUPP);
    assert_eq!(guest.read(0, 512).status, OK);
}

#[test]
fn requests_past_the_capacity_fail_whatever_the_arithmetic() {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    let capacity = 16 * rig::MIB / 512;
    assert_eq!(guest.read(capacity - 1, 512).status, OK);
    assert_eq!(guest.read(capacity - 1, 1024).status, IOERR);
    assert_eq!(guest.read(capacity, 512).status, IOERR);
    assert_eq!(guest.read(u64::MAX, 512).status, IOERR);
    assert_eq!(guest.write(u64::MAX / 512, &[1; 512]).status, IOERR);
}

#[test]
fn discard_frees_blocks_of_every_segment_and_reads_zeroes() {
    use std::os::unix::fs::MetadataExt;
    let mut rig = Rig::start(Options { image_bytes: rig::MIB, ..Options::default() });
    drop(rig.stop());
    rig::fill_file(&rig.image, 0xaa, rig::MIB as usize);
    rig.start_server(Options::default());
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    let before = std::fs::metadata(&rig.image).unwrap().blocks();
    let segments = [segment_bytes(0, 128, 0), segment_bytes(512, 128, 0)].concat();
    let discarded = guest.request(kind::DISCARD, 0, &segments, 0);
    let after = std::fs::metadata(&rig.image).unwrap().blocks();
    assert_eq!(discarded.status, OK);
    assert_eq!(before - after, 256);
    assert_eq!(guest.read(512, 4096).data, vec![0; 4096]);
    assert_eq!(guest.read(128, 4096).data, vec![0xaa; 4096]);
}
