//! The five cache modes with each kind of driver and each choice of the guest: the `writeback` byte that the guest
//! reads, and the calls that reach the kernel.
//!
//! Spec: virtio 1.3 §5.2.5.2, §5.2.6.2.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use blk_server::Wce;
use disk_image::CacheMode;
use io_engine::Verb;

use crate::rig::cache_bed::{BARE, Bed, WRITEBACK, verbs};
use crate::rig::{Options, Rig, code, feature, kind, segment_bytes};

/// The features that a usual driver accepts.
const FULL: u64 = feature::USUAL | feature::CONFIG_WCE;
/// Drivers with each of the cache-related bits: none, CONFIG_WCE, FLUSH, both.
const DRIVERS: [u64; 4] = [BARE, BARE | feature::CONFIG_WCE, feature::USUAL, FULL];

const CACHED: (u8, bool) = (1, false);
const DURABLE: (u8, bool) = (0, true);

fn options(cache: CacheMode, wce: Wce) -> Options {
    Options { wce, ..Options::cached(cache) }
}

fn bed(cache: CacheMode, features: u64) -> Bed {
    Bed::start_on(options(cache, Wce::Guest), features)
}

/// The `writeback` byte, and whether a write is durable when it completes.
fn mode(bed: &mut Bed) -> (u8, bool) {
    (bed.writeback(), bed.write_is_durable())
}

/// What each of [`DRIVERS`] finds when it starts.
fn starts(cache: CacheMode, wce: Wce) -> [(u8, bool); 4] {
    DRIVERS.map(|features| mode(&mut Bed::start_on(options(cache, wce), features)))
}

/// What a guest finds after it enables its cache, disables it, and enables it again.
fn switched(cache: CacheMode) -> [(u8, bool); 3] {
    let mut bed = bed(cache, FULL);
    [1, 0, 1].map(|value| {
        bed.set_writeback(value);
        mode(&mut bed)
    })
}

fn flush_calls(cache: CacheMode, wce: Wce) -> Vec<Verb> {
    verbs(&Bed::start_on(options(cache, wce), feature::USUAL).calls(kind::FLUSH, &[]))
}

fn offered(cache: CacheMode, wce: Wce) -> u64 {
    let rig = Rig::start(options(cache, wce));
    rig.connect().ask_u64(code::GET_FEATURES) & (feature::FLUSH | feature::CONFIG_WCE)
}

/// A second driver attaches to the same device, as after a guest reboot.
fn reboot(bed: &mut Bed, reset: impl FnOnce(&Bed)) {
    reset(bed);
    bed.front_end.negotiate(FULL);
    bed.guest = bed.front_end.start_queue(0, 256, FULL);
}

// ---- the cache mode at the start

#[test]
fn disks_that_start_writeback_are_writeback_for_drivers_that_flush() {
    let expected = [DURABLE, DURABLE, CACHED, CACHED];
    assert_eq!(starts(CacheMode::None, Wce::Guest), expected);
    assert_eq!(starts(CacheMode::Writeback, Wce::Guest), expected);
}

#[test]
fn disks_that_start_writethrough_are_so_for_every_driver() {
    assert_eq!(starts(CacheMode::Writethrough, Wce::Guest), [DURABLE; 4]);
    assert_eq!(starts(CacheMode::Directsync, Wce::Guest), [DURABLE; 4]);
}

#[test]
fn front_end_that_looks_before_it_negotiates_sees_how_the_disk_starts() {
    let shown = CacheMode::ALL.map(|cache| {
        let rig = Rig::start(options(cache, Wce::Guest));
        rig.connect().config(WRITEBACK, 1)[0]
    });
    assert_eq!(shown, [1, 1, 0, 0, 1]);
}

#[test]
fn flush_is_one_sync_unless_the_disk_is_unsafe() {
    let calls = CacheMode::ALL.map(|cache| flush_calls(cache, Wce::Guest).len());
    assert_eq!(calls, [1, 1, 1, 1, 0]);
}

#[test]
fn zeroes_and_discards_of_disks_that_start_writethrough_are_synced_before_they_complete() {
    let mut bed = bed(CacheMode::Directsync, FULL);
    let zeroes = bed.calls(kind::WRITE_ZEROES, &segment_bytes(0, 64, 0));
    let discard = bed.calls(kind::DISCARD, &segment_bytes(64, 64, 0));
    assert_eq!([verbs(&zeroes), verbs(&discard)], [[Verb::Allocate, Verb::Sync]; 2]);
}

// ---- guests that change the cache mode

#[test]
fn guest_switches_its_cache_in_every_mode() {
    let modes = [CacheMode::None, CacheMode::Writeback, CacheMode::Writethrough, CacheMode::Directsync];
    assert_eq!(modes.map(switched), [[CACHED, DURABLE, CACHED]; 4]);
}

#[test]
fn writeback_chosen_on_a_disk_that_starts_writethrough_ends_with_the_devices_reset() {
    let mut bed = bed(CacheMode::Writethrough, FULL);
    bed.set_writeback(1);
    bed.front_end.ok(code::RESET_DEVICE, &[], &[]);
    assert_eq!(bed.writeback(), 0);
    reboot(&mut bed, |_| ());
    assert_eq!(mode(&mut bed), DURABLE);
}

/// QEMU before 8.2 has no message for a reset: it stops the rings and negotiates again.
#[test]
fn writeback_chosen_on_a_disk_that_starts_writethrough_ends_when_the_rings_are_stopped_and_features_said_again()
 {
    let mut bed = bed(CacheMode::Directsync, FULL);
    bed.set_writeback(1);
    reboot(&mut bed, |bed| _ = bed.front_end.stop_queue(0));
    assert_eq!(mode(&mut bed), DURABLE);
}

#[test]
fn writeback_chosen_on_a_disk_that_starts_writethrough_ends_with_the_connection() {
    let mut bed = bed(CacheMode::Writethrough, FULL);
    bed.set_writeback(1);
    bed.reconnect(FULL);
    assert_eq!(mode(&mut bed), DURABLE);
}

#[test]
fn features_said_again_to_a_running_guest_leave_its_choice_of_writeback_alone() {
    let mut bed = bed(CacheMode::Writethrough, FULL);
    bed.set_writeback(1);
    bed.front_end.negotiate(FULL);
    assert_eq!(mode(&mut bed), CACHED);
}

#[test]
fn writethrough_chosen_on_a_disk_that_starts_writethrough_outlives_the_reset() {
    let mut bed = bed(CacheMode::Writethrough, FULL);
    bed.set_writeback(1);
    bed.set_writeback(0);
    reboot(&mut bed, |bed| bed.front_end.ok(code::RESET_DEVICE, &[], &[]));
    assert_eq!(mode(&mut bed), DURABLE);
}

#[test]
fn front_end_that_looks_before_it_negotiates_sees_that_the_guest_switched_the_cache_off() {
    let bed = bed(CacheMode::None, FULL);
    bed.set_writeback(0);
    assert_eq!(bed.rig.connect().config(WRITEBACK, 1), [0]);
}

// ---- --wce fixed

#[test]
fn fixed_disks_offer_no_cache_control_and_those_that_are_writethrough_no_flush_either() {
    let bits = CacheMode::ALL.map(|cache| offered(cache, Wce::Fixed));
    let flush = feature::FLUSH;
    assert_eq!(bits, [flush, flush, 0, 0, flush]);
}

#[test]
fn disks_that_are_not_fixed_offer_flush_and_cache_control() {
    let bits = CacheMode::ALL.map(|cache| offered(cache, Wce::Guest));
    assert_eq!(bits, [feature::FLUSH | feature::CONFIG_WCE; 5]);
}

#[test]
fn fixed_disks_serve_every_driver_in_the_mode_they_start_with() {
    assert_eq!(starts(CacheMode::None, Wce::Fixed), [DURABLE, DURABLE, CACHED, CACHED]);
    assert_eq!(starts(CacheMode::Writeback, Wce::Fixed), [DURABLE, DURABLE, CACHED, CACHED]);
    assert_eq!(starts(CacheMode::Writethrough, Wce::Fixed), [DURABLE; 4]);
    assert_eq!(starts(CacheMode::Directsync, Wce::Fixed), [DURABLE; 4]);
}

#[test]
fn fixed_disk_refuses_to_be_switched_and_says_what_it_is() {
    let mut bed = Bed::start_on(options(CacheMode::Directsync, Wce::Fixed), FULL);
    assert_ne!(bed.front_end.set_config(WRITEBACK, &[1]), 0);
    assert_eq!(mode(&mut bed), DURABLE);
}

#[test]
fn flush_that_a_fixed_writethrough_disk_never_offered_is_carried_out() {
    assert_eq!(flush_calls(CacheMode::Writethrough, Wce::Fixed), [Verb::Sync]);
}

// ---- unsafe

#[test]
fn unsafe_disk_never_asks_the_kernel_for_a_sync_whatever_the_guest_wants() {
    let mut bed = bed(CacheMode::Unsafe, FULL);
    bed.set_writeback(0);
    let shown = bed.writeback();
    let calls = [
        bed.calls(kind::OUT, &[1; 4096]),
        bed.calls(kind::FLUSH, &[]),
        bed.calls(kind::DISCARD, &segment_bytes(64, 64, 0)),
        bed.calls(kind::WRITE_ZEROES, &segment_bytes(0, 64, 0)),
    ]
    .concat();
    assert_eq!((shown, verbs(&calls)), (0, vec![Verb::Write, Verb::Allocate, Verb::Allocate]));
    assert_eq!(calls[0].flags, 0);
}

#[test]
fn unsafe_disk_shows_each_driver_what_it_expects_and_makes_nothing_durable() {
    assert_eq!(starts(CacheMode::Unsafe, Wce::Guest), [(0, false), (0, false), CACHED, CACHED]);
}

#[test]
fn stop_of_an_unsafe_disk_says_that_it_was_not_flushed() {
    let mut bed = bed(CacheMode::Unsafe, FULL);
    let report = bed.rig.stop();
    assert!(report.is_clean());
    assert_eq!(report.never_flushed, ["test0"]);
}

#[test]
fn unsafe_disk_that_is_read_only_has_nothing_to_flush() {
    let mut options = options(CacheMode::Unsafe, Wce::Guest);
    options.image.access = disk_image::Access::ReadOnly;
    let mut rig = Rig::start(options);
    assert!(rig.stop().never_flushed.is_empty());
}
