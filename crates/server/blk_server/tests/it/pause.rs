//! Disks are paused while guests use them: no request runs during the pause, and everything continues afterwards.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::time::Duration;

use blk_server::AdminError;

use crate::rig::format::{Format, on_both_formats};
use crate::rig::passed::{add_transfer, hold, let_go, serves};
use crate::rig::workers::{ENOUGH, SHORT, fake_in_the_first_worker, guests, server};
use crate::rig::{MIB, Options, Rig, eventually, feature, kind, ready};

on_both_formats! {
    requests_wait_while_the_disk_is_paused_and_are_answered_then,
}

/// Long enough for a request to be answered if the disk were not paused.
const A_WHILE: Duration = Duration::from_millis(100);

fn names() -> [String; 1] {
    ["test0".to_owned()]
}

fn requests_wait_while_the_disk_is_paused_and_are_answered_then(ring: Format) {
    let rig = Rig::start(Options { workers: 2, ..Options::default() });
    let mut front_end = rig.connect();
    let mut guests = guests(&mut front_end, ring.usual(), 2);
    assert!(guests.iter_mut().all(serves));
    let reads =
        || server(&rig).report().disks[0].queues.iter().map(|queue| queue.counters.reads).sum::<u64>();
    // A worker counts a request shortly after the guest has seen its answer.
    assert!(eventually(|| reads() == 2));
    let paused = server(&rig).while_paused(&names(), ENOUGH, || {
        for guest in &mut guests {
            add_transfer(guest, kind::IN, 0, 8 * MIB, 4096);
            guest.submit();
        }
        std::thread::sleep(A_WHILE);
        assert_eq!(reads(), 2);
    });
    assert!(paused.unwrap() >= A_WHILE);
    assert!(guests.iter_mut().all(|guest| guest.next_used().is_some()));
    assert!(guests.iter_mut().all(serves));
}

#[test]
fn disk_with_a_request_that_hangs_is_not_paused_and_all_its_queues_go_on() {
    let (options, handle) = fake_in_the_first_worker();
    let rig = Rig::start(options);
    let mut front_end = rig.connect();
    let mut guests = guests(&mut front_end, feature::USUAL, 2);
    hold(&handle);
    // One of the two queues is on the first worker.
    for guest in &mut guests {
        add_transfer(guest, kind::IN, 0, 8 * MIB, 4096);
        guest.submit();
    }
    assert!(eventually(|| handle.hanging() == 1));
    let refused = server(&rig).while_paused(&names(), SHORT, || panic!("it is not drained")).unwrap_err();
    assert!(matches!(refused, AdminError::NotDrained { .. }), "{refused}");
    let_go(&handle);
    assert!(guests.iter_mut().all(|guest| guest.next_used().is_some()));
    assert!(guests.iter_mut().all(serves));
    server(&rig).while_paused(&names(), ENOUGH, || {}).unwrap();
    assert!(guests.iter_mut().all(serves));
}

#[test]
fn queue_that_a_guest_starts_during_a_pause_starts_after_it() {
    let rig = Rig::start(Options::default());
    let mut front_end = rig.connect();
    let mut first = guests(&mut front_end, feature::USUAL, 1);
    std::thread::scope(|scope| {
        let mut starting = None;
        server(&rig)
            .while_paused(&names(), ENOUGH, || {
                let front_end = &front_end;
                starting = Some(scope.spawn(move || front_end.start_queue(1, 256, feature::USUAL)));
                std::thread::sleep(A_WHILE);
                assert_eq!(server(&rig).report().disks[0].queues.len(), 1);
            })
            .unwrap();
        let mut guest = starting.unwrap().join().unwrap();
        assert!(serves(&mut guest));
    });
    assert!(first.iter_mut().all(serves));
}

#[test]
fn paused_disk_can_be_neither_resized_nor_removed_and_then_it_can() {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    std::thread::scope(|scope| {
        let mut removing = None;
        server(&rig)
            .while_paused(&names(), ENOUGH, || {
                removing = Some(scope.spawn(|| server(&rig).remove_disk("test0", false, ENOUGH)));
                std::thread::sleep(A_WHILE);
                assert_eq!(server(&rig).disk_names(), ["test0"]);
            })
            .unwrap();
        let refused = removing.unwrap().join().unwrap().unwrap_err();
        assert!(matches!(refused, AdminError::InUse { .. }), "{refused}");
    });
    assert!(serves(&mut guest));
}

#[test]
fn disk_that_does_not_exist_pauses_nothing() {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    let both = ["test0".to_owned(), "none".to_owned()];
    let refused = server(&rig).while_paused(&both, ENOUGH, || panic!("paused")).unwrap_err();
    assert!(matches!(refused, AdminError::NoDisk { .. }), "{refused}");
    assert!(matches!(server(&rig).flush_disk("none", ENOUGH), Err(AdminError::NoDisk { .. })));
    server(&rig).flush_disk("test0", ENOUGH).unwrap();
    assert!(serves(&mut guest));
}

#[test]
fn disk_is_not_paused_beside_a_live_upgrade_and_is_after_it_came_to_nothing() {
    let rig = Rig::start(Options::default());
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    assert!(serves(&mut guest));
    let frozen = server(&rig).freeze(ENOUGH).unwrap();
    let paused = server(&rig).while_paused(&names(), SHORT, || panic!("the queues are frozen, not paused"));
    assert!(matches!(paused, Err(AdminError::OthersChange { .. })), "{paused:?}");
    drop(frozen);
    server(&rig).while_paused(&names(), ENOUGH, || {}).unwrap();
    assert!(serves(&mut guest));
}

/// The new server might start queues of it.
#[test]
fn paused_disk_without_queues_is_not_handed_over_before_the_pause_ends() {
    let rig = Rig::start(Options::default());
    let pause = server(&rig).while_paused(&names(), ENOUGH, || drop(server(&rig).freeze(SHORT).unwrap_err()));
    pause.unwrap();
    drop(server(&rig).freeze(ENOUGH).unwrap());
}
