//! DISCARD and WRITE_ZEROES end to end: freed blocks, sectors that read as zeroes, and refused requests.
//!
//! Spec: virtio 1.3 §5.2.6.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use blk_server::InlineWorker;
use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, MemoryView, Region};
use io_engine::{EngineConfig, SyncEngine};
use virtqueue::{DriverQueue, RingFeatures, RingLayout};

use crate::rig;
use crate::rig::passed::event;
use crate::rig::{FrontEnd, Guest, MIB, Options, Rig, feature, kind, ready, segment_bytes};

const OK: Option<u8> = Some(0);
const IOERR: Option<u8> = Some(1);
const UNSUPP: Option<u8> = Some(2);
/// Flag of a segment.
const UNMAP: u32 = 1;

/// A disk of one MiB, which is fully allocated and filled with 0xaa.
fn full_disk(options: Options) -> (Rig, FrontEnd, Guest) {
    let mut rig = Rig::start(Options { image_bytes: MIB, ..Options::default() });
    assert!(rig.stop().is_clean());
    rig::fill_file(&rig.image, 0xaa, MIB as usize);
    rig.start_server(options);
    let (front_end, guest) = ready(&rig, feature::USUAL);
    (rig, front_end, guest)
}

/// The file's allocated size in units of 512 bytes.
fn allocated(rig: &Rig) -> u64 {
    std::fs::metadata(&rig.image).unwrap().blocks()
}

#[test]
fn discard_frees_blocks_of_every_segment_and_reads_zeroes() {
    let (rig, _front_end, mut guest) = full_disk(Options::default());
    let before = allocated(&rig);
    let segments = [segment_bytes(0, 128, 0), segment_bytes(512, 128, 0)].concat();
    let discarded = guest.request(kind::DISCARD, 0, &segments, 0);
    assert_eq!(discarded.status, OK);
    assert_eq!(before - allocated(&rig), 256);
    assert_eq!(guest.read(512, 4096).data, vec![0; 4096]);
    assert_eq!(guest.read(128, 4096).data, vec![0xaa; 4096]);
}

#[test]
fn zeroes_with_unmap_free_blocks_and_without_keep_them() {
    let (rig, front_end, mut guest) = full_disk(Options::default());
    let before = allocated(&rig);
    let kept = guest.request(kind::WRITE_ZEROES, 0, &segment_bytes(0, 128, 0), 0);
    let after_kept = allocated(&rig);
    let freed = guest.request(kind::WRITE_ZEROES, 0, &segment_bytes(256, 128, UNMAP), 0);
    let after_freed = allocated(&rig);
    assert_eq!((kept.status, freed.status), (OK, OK));
    assert_eq!((before - after_kept, before - after_freed), (0, 128));
    assert_eq!(front_end.config(56, 1), [1]);
    assert_eq!(guest.read(0, 128 * 512).data, vec![0; 128 * 512]);
    assert_eq!(guest.read(256, 128 * 512).data, vec![0; 128 * 512]);
    assert_eq!(guest.read(128, 512).data, vec![0xaa; 512]);
}

#[test]
fn each_segment_of_zeroes_keeps_its_own_flag() {
    let (rig, _front_end, mut guest) = full_disk(Options::default());
    let before = allocated(&rig);
    let segments = [segment_bytes(0, 64, UNMAP), segment_bytes(64, 64, 0), segment_bytes(128, 8, UNMAP)];
    let zeroed = guest.request(kind::WRITE_ZEROES, 0, &segments.concat(), 0);
    assert_eq!(zeroed.status, OK);
    assert_eq!(before - allocated(&rig), 72);
    assert_eq!(rig.image_bytes(0, 136 * 512), vec![0; 136 * 512]);
    assert_eq!(rig.image_bytes(136 * 512, 512), vec![0xaa; 512]);
}

#[test]
fn zeroes_smaller_than_a_block_of_the_file_system_leave_their_neighbours() {
    let (rig, _front_end, mut guest) = full_disk(Options::default());
    let zeroed = guest.request(kind::WRITE_ZEROES, 0, &segment_bytes(3, 2, UNMAP), 0);
    assert_eq!(zeroed.status, OK);
    let expected = [vec![0xaa; 1536], vec![0; 1024], vec![0xaa; 1536]].concat();
    assert_eq!(rig.image_bytes(0, 4096), expected);
}

#[test]
fn unknown_flags_and_unmap_on_a_discard_are_unsupported_and_change_nothing() {
    let (rig, _front_end, mut guest) = full_disk(Options::default());
    let before = allocated(&rig);
    let answers = [
        guest.request(kind::DISCARD, 0, &segment_bytes(0, 128, UNMAP), 0),
        guest.request(kind::DISCARD, 0, &segment_bytes(0, 128, 2), 0),
        guest.request(kind::WRITE_ZEROES, 0, &segment_bytes(0, 128, 2), 0),
        guest.request(kind::WRITE_ZEROES, 0, &segment_bytes(0, 128, 1 << 31 | UNMAP), 0),
    ];
    assert_eq!(answers.map(|answer| answer.status), [UNSUPP; 4]);
    assert_eq!(allocated(&rig), before);
    assert_eq!(guest.read(0, 512).data, vec![0xaa; 512]);
}

#[test]
fn sixteen_segments_are_done_and_seventeen_fail_untouched() {
    let (rig, front_end, mut guest) = full_disk(Options::default());
    let segments: Vec<_> = (0..17).map(|i| segment_bytes(i * 8, 8, 0)).collect();
    let before = allocated(&rig);
    let refused = guest.request(kind::DISCARD, 0, &segments.concat(), 0);
    let after_refused = allocated(&rig);
    let done = guest.request(kind::DISCARD, 0, &segments[..16].concat(), 0);
    assert_eq!((refused.status, before - after_refused), (IOERR, 0));
    assert_eq!((done.status, rig.image_bytes(0, 65_536)), (OK, vec![0; 65_536]));
    // A file system may need a block to record holes that were punched out of order.
    assert!(before - allocated(&rig) >= 120);
    assert_eq!(front_end.config(40, 4), 16u32.to_le_bytes());
    assert_eq!(guest.read(128, 512).data, vec![0xaa; 512]);
}

#[test]
fn one_segment_past_the_end_fails_the_request_before_any_is_done() {
    let (rig, _front_end, mut guest) = full_disk(Options::default());
    let before = allocated(&rig);
    let segments = [segment_bytes(0, 8, 0), segment_bytes(2040, 16, 0)].concat();
    let overflowing = [segment_bytes(0, 8, 0), segment_bytes(u64::MAX, 16, 0)].concat();
    assert_eq!(guest.request(kind::DISCARD, 0, &segments, 0).status, IOERR);
    assert_eq!(guest.request(kind::WRITE_ZEROES, 0, &overflowing, 0).status, IOERR);
    assert_eq!(allocated(&rig), before);
    assert_eq!(guest.read(0, 512).data, vec![0xaa; 512]);
}

#[test]
fn segment_longer_than_advertised_fails() {
    let rig = Rig::start(Options { image_bytes: 2048 * MIB, ..Options::default() });
    let (front_end, mut guest) = ready(&rig, feature::USUAL);
    let limit = |offset| u32::from_le_bytes(front_end.config(offset, 4).try_into().unwrap());
    let (discard, zeroes) = (limit(36), limit(48));
    assert_eq!(guest.request(kind::DISCARD, 0, &segment_bytes(0, discard, 0), 0).status, OK);
    assert_eq!(guest.request(kind::DISCARD, 0, &segment_bytes(0, discard + 8, 0), 0).status, IOERR);
    assert_eq!(guest.request(kind::WRITE_ZEROES, 0, &segment_bytes(0, zeroes, UNMAP), 0).status, OK);
    assert_eq!(guest.request(kind::WRITE_ZEROES, 0, &segment_bytes(0, zeroes + 8, UNMAP), 0).status, IOERR);
}

#[test]
fn segments_that_are_cut_off_or_missing_fail() {
    let (rig, _front_end, mut guest) = full_disk(Options::default());
    let before = allocated(&rig);
    let segments = [segment_bytes(0, 8, 0), segment_bytes(8, 8, 0)].concat();
    assert_eq!(guest.request(kind::DISCARD, 0, &[], 0).status, IOERR);
    assert_eq!(guest.request(kind::DISCARD, 0, &segments[..31], 0).status, IOERR);
    assert_eq!(allocated(&rig), before);
}

#[test]
fn discard_switched_off_is_not_offered_is_unsupported_and_zeroes_keep_every_block() {
    let mut options = Options::default();
    options.image.discard = false;
    let (rig, front_end, mut guest) = full_disk(options);
    let before = allocated(&rig);
    let offered = front_end.ask_u64(rig::code::GET_FEATURES);
    assert_eq!(offered & (feature::DISCARD | feature::WRITE_ZEROES), feature::WRITE_ZEROES);
    assert_eq!(guest.request(kind::DISCARD, 0, &segment_bytes(0, 128, 0), 0).status, UNSUPP);
    assert_eq!(guest.request(kind::WRITE_ZEROES, 0, &segment_bytes(128, 128, UNMAP), 0).status, OK);
    assert_eq!(allocated(&rig), before);
    assert_eq!(front_end.config(56, 1), [0]);
    assert_eq!(guest.read(0, 512).data, vec![0xaa; 512]);
    assert_eq!(guest.read(128, 512).data, vec![0; 512]);
}

/// A worker on this thread, and the driver's half of its queue.
struct Inline {
    worker: InlineWorker,
    ring: DriverQueue,
    view: MemoryView,
    kick: OwnedFd,
}

fn inline() -> (Rig, Inline) {
    let mut rig = Rig::start(Options::default());
    assert!(rig.stop().is_clean());
    let mut disk = rig.disk(1).0;
    let options = ImageOptions { cache: CacheMode::Writeback, ..ImageOptions::new(rig.image_of(0)) };
    disk.image = Image::open(&HostOpener, &options).unwrap();
    let region = Region::from_memfd(GuestAddress(0), 2 * MIB).unwrap();
    let memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
    let view = MemoryView::new(Arc::clone(&memory));
    let layout = RingLayout {
        queue_size: 64,
        descriptors: GuestAddress(0),
        avail: GuestAddress(0x1_0000),
        used: GuestAddress(0x2_0000),
    };
    let features = RingFeatures { event_idx: true, indirect: true, packed: false };
    let ring = DriverQueue::new(&view, layout, features).unwrap();
    let (kick, call) = (event(), event());
    let engine = Box::new(SyncEngine::new(EngineConfig::default()).unwrap());
    let worker = InlineWorker::start(engine, disk, memory, layout, features, kick.try_clone().unwrap(), call);
    (rig, Inline { worker: worker.unwrap(), ring, view, kick })
}

/// Sends one request of each type that reaches the image, all at once; each must succeed.
fn one_of_each(inline: &mut Inline) {
    let data = GuestRange { addr: MIB, len_bytes: 4096 };
    let segments = GuestRange { addr: 0x5_0000, len_bytes: 16 * 16 };
    for (slot, verb) in (0..).zip([kind::IN, kind::OUT, kind::FLUSH, kind::DISCARD, kind::WRITE_ZEROES]) {
        let at = 0x4_0000 + slot * 64;
        let (header, status) =
            (GuestRange { addr: at, len_bytes: 16 }, GuestRange { addr: at + 32, len_bytes: 1 });
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&verb.to_le_bytes());
        inline.view.store(at, &bytes).unwrap();
        inline.view.store(at + 32, &[0xff]).unwrap();
        let added = match verb {
            kind::IN => inline.ring.add(&[header], &[data, status], slot),
            kind::OUT => inline.ring.add(&[header, data], &[status], slot),
            kind::FLUSH => inline.ring.add(&[header], &[status], slot),
            _ => inline.ring.add(&[header, segments], &[status], slot),
        };
        added.unwrap();
    }
    inline.ring.publish();
    rustix::io::write(&inline.kick, &1_u64.to_ne_bytes()).unwrap();
    let mut used = 0;
    while used < 5 {
        inline.worker.serve();
        while inline.ring.pop_used().unwrap().is_some() {
            used += 1;
        }
    }
    for slot in 0..5 {
        let mut status = [0xff];
        inline.view.read(0x4_0000 + slot * 64 + 32, &mut status).unwrap();
        assert_eq!(status, [0]);
    }
}

#[test]
fn warm_request_path_does_not_allocate_whatever_is_asked() {
    let (_rig, mut inline) = inline();
    for segment in 0..16 {
        inline.view.store(0x5_0000 + segment * 16, &segment_bytes(segment * 64, 64, 0)).unwrap();
    }
    (0..20).for_each(|_| one_of_each(&mut inline));
    let counted = allocation_counter::measure(|| (0..100).for_each(|_| one_of_each(&mut inline)));
    assert_eq!(counted.count_total, 0);
}
