//! The contract against our own server, in this process: split and packed rings.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use blk_driver::{Device, Event};

use crate::contract;
use crate::contract::{Setting, USUAL};
use crate::peers::{DISK_BYTES, MIB, Own, PATIENCE, SECTOR};

const PACKED: Setting = Setting { packed: true, ..USUAL };

/// Runs `setting` on a new server with that many queues.
fn works(setting: Setting) {
    let own = Own::start(setting.queues);
    contract::setting_works(own.options(), setting);
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
fn direct_descriptors_and_notification_by_flags_work() {
    works(Setting { indirect: false, event_idx: false, ..USUAL });
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
fn queues_of_4_with_direct_descriptors_work() {
    works(Setting { queue_size: 4, indirect: false, ..USUAL });
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
fn packed_rings_work() {
    works(PACKED);
}

#[test]
fn packed_rings_with_direct_descriptors_work() {
    works(Setting { indirect: false, ..PACKED });
}

#[test]
fn packed_rings_with_notification_by_flags_work() {
    works(Setting { event_idx: false, ..PACKED });
}

#[test]
fn sixteen_packed_queues_of_4_with_direct_descriptors_work() {
    works(Setting { queues: 16, queue_size: 4, indirect: false, ..PACKED });
}

#[test]
fn packed_queues_of_2_work() {
    works(Setting { queue_size: 2, ..PACKED });
}

#[test]
fn packed_queues_of_1024_work() {
    works(Setting { queue_size: 1024, ..PACKED });
}

#[test]
fn smallest_queue_with_direct_descriptors_flushes() {
    contract::smallest_queue_with_direct_descriptors_flushes(Own::start(1).options());
}

#[test]
fn vectored_requests_read_back() {
    contract::vectored_requests_read_back(Own::start(1).options());
}

#[test]
fn request_past_the_end_fails_and_the_next_one_works() {
    contract::request_past_the_end_fails_and_the_next_one_works(Own::start(1).options());
}

#[test]
fn more_queues_than_there_are_is_an_error_that_names_both() {
    contract::more_queues_than_there_are_is_an_error_that_names_both(Own::start(3).options(), 3);
}

#[test]
fn memory_registered_at_run_time_is_used_and_taken_back() {
    contract::memory_registered_at_run_time_is_used_and_taken_back(Own::start(1).options());
}

#[test]
fn two_threads_with_a_queue_each_do_not_disturb_each_other() {
    contract::two_threads_with_a_queue_each_do_not_disturb_each_other(Own::start(2).options());
}

#[test]
fn id_is_the_disks_serial() {
    assert_eq!(contract::id(Own::start(1).options()), "serial-of-the-test");
}

#[test]
fn device_dropped_with_requests_in_flight_ends_them_and_another_connects() {
    let own = Own::start(1);
    contract::device_dropped_with_requests_in_flight_ends_them_and_another_connects(&own.options());
}

#[test]
fn what_was_written_is_in_the_image() {
    let own = Own::start(1);
    let (device, mut queues) = USUAL.connect(own.options());
    let (bytes, buffer) = (contract::pattern(3, 8192), device.pool().take(8192).unwrap());
    contract::write(&mut queues[0], &buffer, 24, &bytes, blk_driver::Durability::Durable);
    assert_eq!(own.place.image_bytes(24 * SECTOR, 8192), bytes);
}

#[test]
fn back_end_of_this_process_has_its_id() {
    let own = Own::start(1);
    let (device, _queues) = Device::connect(&own.options()).unwrap();
    assert_eq!(device.peer_pid(), i32::try_from(std::process::id()).ok());
}

#[test]
fn disk_that_grows_is_seen_and_can_be_used_to_its_new_end() {
    let own = Own::start(1);
    let (device, mut queues) = USUAL.connect(own.options());
    own.place.resize(DISK_BYTES + MIB);
    own.server.as_ref().unwrap().refresh_capacities();
    let Some(Event::ConfigChanged(info)) = device.next_event(PATIENCE) else { panic!("no event") };
    assert_eq!(info.capacity_sectors, (DISK_BYTES + MIB) / SECTOR);
    assert_eq!(device.info(), info);
    let (bytes, buffer) = (contract::pattern(4, 4096), device.pool().take(4096).unwrap());
    contract::write(
        &mut queues[0],
        &buffer,
        info.capacity_sectors - 8,
        &bytes,
        blk_driver::Durability::Cached,
    );
    assert_eq!(contract::read(&mut queues[0], &buffer, info.capacity_sectors - 8, 4096), bytes);
}
