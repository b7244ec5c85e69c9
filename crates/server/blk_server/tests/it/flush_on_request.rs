//! Flushes that an operator requests, on storage whose syncs fail or hang.
//!
//! docs/decisions/0012 has the reasons.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::time::Duration;

use blk_server::AdminError;
use disk_image::CacheMode;

use crate::rig::fuse_disk::{Call, FuseDisk};
use crate::rig::workers::{ENOUGH, SHORT, server};
use crate::rig::{Options, Rig, eventually, feature, kind, ready};

fn mount() -> Option<FuseDisk> {
    FuseDisk::mount(4 << 20, Arc::new(|| 0))
}

fn serve(host: &FuseDisk) -> Rig {
    Rig::start(Options { existing: Some(host.path()), ..Options::buffered() })
}

fn has_failed(rig: &Rig) -> bool {
    server(rig).report().disks[0].failed
}

/// The number of descriptors of the image in this process.
fn descriptors(host: &FuseDisk) -> usize {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let open = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    open.filter(|path| *path == host.path()).count()
}

#[test]
fn sync_that_fails_marks_the_disk_and_the_guests_next_flush_fails() {
    let Some(host) = mount() else { return };
    let rig = serve(&host);
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    assert_eq!(guest.write(0, &[1; 4096]).status, Some(0));
    host.fail(Call::Sync, 0..0, fuser::Errno::EIO);
    server(&rig).flush_disk("test0", ENOUGH).unwrap_err();
    host.heal();
    assert_eq!(guest.request(kind::FLUSH, 0, &[], 0).status, Some(1));
    assert!(has_failed(&rig));
}

#[test]
fn sync_that_fails_after_the_operators_timeout_marks_the_disk() {
    let Some(host) = mount() else { return };
    let rig = serve(&host);
    host.fail(Call::Sync, 0..0, fuser::Errno::EIO);
    host.hang_syncs();
    server(&rig).flush_disk("test0", SHORT).unwrap_err();
    assert!(!has_failed(&rig));
    host.let_go();
    assert!(eventually(|| has_failed(&rig)));
}

#[test]
fn unsafe_disk_whose_requested_flush_failed_is_not_paused() {
    let Some(host) = mount() else { return };
    let rig = Rig::start(Options { existing: Some(host.path()), ..Options::cached(CacheMode::Unsafe) });
    host.fail(Call::Sync, 0..0, fuser::Errno::EIO);
    server(&rig).flush_disk("test0", ENOUGH).unwrap_err();
    let paused = server(&rig).while_paused(&["test0".to_owned()], ENOUGH, || panic!("paused"));
    assert!(matches!(paused, Err(AdminError::FlushFailed { .. })), "{paused:?}");
}

/// Otherwise the kernel would report lost pages to the operator's flush instead of the guest's.
#[test]
fn image_is_synced_through_a_file_description_that_no_worker_uses() {
    let Some(host) = mount() else { return };
    let rig = serve(&host);
    let (_front_end, _guest) = ready(&rig, feature::USUAL);
    let before = descriptors(&host);
    host.hang_syncs();
    server(&rig).flush_disk("test0", SHORT).unwrap_err();
    assert!(eventually(|| host.hanging() == 1));
    assert_eq!(descriptors(&host), before + 1);
    host.let_go();
}

#[test]
fn many_flushes_of_storage_that_hangs_wait_for_the_first_one() {
    let Some(host) = mount() else { return };
    let rig = serve(&host);
    let before = descriptors(&host);
    host.hang_syncs();
    (0..3).for_each(|_| drop(server(&rig).flush_disk("test0", SHORT).unwrap_err()));
    assert!(eventually(|| host.hanging() == 1));
    assert_eq!(descriptors(&host), before + 1);
    host.let_go();
    server(&rig).flush_disk("test0", ENOUGH).unwrap();
}

#[test]
fn flush_ends_with_an_error_at_its_timeout_although_the_storage_answers_later() {
    let Some(host) = mount() else { return };
    let rig = serve(&host);
    host.hang_syncs();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let hangs = eventually(|| host.hanging() == 1);
            std::thread::sleep(Duration::from_secs(1));
            host.let_go();
            assert!(hangs);
        });
        server(&rig).flush_disk("test0", SHORT).unwrap_err();
    });
}
