//! The contract against qemu-storage-daemon: a foreign back-end, with split rings only, and with SET_MEM_TABLE or
//! memory slots, depending on its version. If the program is missing, the tests report that they are skipped.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use crate::contract;
use crate::contract::{Setting, USUAL};
use crate::peers::{StorageDaemon, options};

/// Runs `setting` on a new daemon with that many queues.
fn works(setting: Setting) {
    with(setting.queues, |options| contract::setting_works(options, setting));
}

fn with(queues: u16, test: impl FnOnce(blk_driver::Options)) {
    if let Some(daemon) = StorageDaemon::start(queues) {
        test(options(&daemon.place.socket));
    }
}

#[test]
fn usual_setting_works() {
    works(USUAL);
}

#[test]
fn direct_descriptors_work() {
    works(Setting { indirect: false, ..USUAL });
}

#[test]
fn notification_by_flags_works() {
    works(Setting { event_idx: false, ..USUAL });
}

#[test]
fn sixteen_queues_work() {
    works(Setting { queues: 16, ..USUAL });
}

#[test]
fn queues_of_4_work() {
    works(Setting { queue_size: 4, ..USUAL });
}

#[test]
fn queues_of_1024_work() {
    works(Setting { queue_size: 1024, ..USUAL });
}

#[test]
fn queues_of_2_work() {
    works(Setting { queue_size: 2, ..USUAL });
}

#[test]
fn smallest_queue_with_direct_descriptors_flushes() {
    with(1, contract::smallest_queue_with_direct_descriptors_flushes);
}

#[test]
fn vectored_requests_read_back() {
    with(1, contract::vectored_requests_read_back);
}

#[test]
fn request_past_the_end_fails_and_the_next_one_works() {
    with(1, contract::request_past_the_end_fails_and_the_next_one_works);
}

#[test]
fn more_queues_than_there_are_is_an_error_that_names_both() {
    with(3, |options| contract::more_queues_than_there_are_is_an_error_that_names_both(options, 3));
}

#[test]
fn memory_registered_at_run_time_is_used_and_taken_back() {
    with(1, contract::memory_registered_at_run_time_is_used_and_taken_back);
}

#[test]
fn two_threads_with_a_queue_each_do_not_disturb_each_other() {
    with(2, contract::two_threads_with_a_queue_each_do_not_disturb_each_other);
}

#[test]
fn id_is_the_daemons() {
    with(1, |options| assert_eq!(contract::id(options), "vhost_user_blk"));
}

#[test]
fn device_dropped_with_requests_in_flight_ends_them_and_another_connects() {
    with(1, |options| {
        contract::device_dropped_with_requests_in_flight_ends_them_and_another_connects(&options);
    });
}

#[test]
fn packed_rings_are_an_error_that_names_the_feature() {
    with(1, |options| {
        let insisting = blk_driver::Options { packed: Some(true), ..options };
        let error = blk_driver::Device::connect(&insisting).unwrap_err();
        assert!(error.to_string().contains("VIRTIO_F_RING_PACKED"), "{error}");
    });
}

#[test]
fn process_of_the_daemon_is_known() {
    let Some(daemon) = StorageDaemon::start(1) else { return };
    let (device, _queues) = blk_driver::Device::connect(&options(&daemon.place.socket)).unwrap();
    assert_eq!(device.peer_pid(), i32::try_from(daemon.id()).ok());
}
