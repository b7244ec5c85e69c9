//! Tests that each field of the configuration space is at its offset, and that only one byte is writable.

use super::*;

fn config() -> DeviceConfig {
    DeviceConfig {
        capacity_sectors: 0x0102_0304_0506_0708,
        seg_max: 0x1112_1314,
        blk_size: 4096,
        physical_block_exp: 3,
        alignment_offset: 5,
        min_io_size_blocks: 0x2122,
        opt_io_size_blocks: 0x3132_3334,
        writeback: WriteCache::Writeback,
        num_queues: 0x4142,
        max_discard_sectors: 0x5152_5354,
        max_discard_seg: 16,
        discard_sector_alignment: 8,
        max_write_zeroes_sectors: 0x6162_6364,
        max_write_zeroes_seg: 15,
        write_zeroes_may_unmap: true,
    }
}

#[test]
fn fields_lie_where_the_standard_puts_them() {
    let expected: Vec<u8> = [
        &[8, 7, 6, 5, 4, 3, 2, 1][..],
        &[0; 4],
        &[0x14, 0x13, 0x12, 0x11],
        &[0; 4],
        &[0, 0x10, 0, 0],
        &[3, 5, 0x22, 0x21, 0x34, 0x33, 0x32, 0x31],
        &[1, 0, 0x42, 0x41],
        &[0x54, 0x53, 0x52, 0x51, 16, 0, 0, 0, 8, 0, 0, 0],
        &[0x64, 0x63, 0x62, 0x61, 15, 0, 0, 0, 1, 0, 0, 0],
        &[0; 36],
    ]
    .concat();
    assert_eq!(config().to_bytes().as_slice(), expected);
}

#[test]
fn read_inside_and_past_the_structure_is_filled_with_zeroes() {
    assert_eq!(config().read(20, 5).unwrap(), [0, 0x10, 0, 0, 3]);
    let all = config().read(0, MAX_CONFIG_BYTES).unwrap();
    assert_eq!((&all[..CONFIG_BYTES], all.len()), (&config().to_bytes()[..], 256));
    assert!(all[CONFIG_BYTES..].iter().all(|&byte| byte == 0));
}

#[test]
fn read_past_the_limit_is_refused_overflow_included() {
    let refused = |offset_bytes, size_bytes| {
        Err(ConfigReadError { offset_bytes, size_bytes, max_bytes: MAX_CONFIG_BYTES })
    };
    assert_eq!(config().read(1, 256), refused(1, 256));
    assert_eq!(config().read(u32::MAX, 2), refused(u32::MAX, 2));
}

#[test]
fn writeback_byte_switches_the_cache_both_ways() {
    let mut config = config();
    assert_eq!(config.write(32, &[0]), Ok(WriteCache::Writethrough));
    assert_eq!(config.read(32, 1).unwrap(), [0]);
    assert_eq!(config.write(32, &[1]), Ok(WriteCache::Writeback));
    assert_eq!(config.read(32, 1).unwrap(), [1]);
}

#[test]
fn write_elsewhere_or_of_more_bytes_is_refused_and_changes_nothing() {
    let mut changed = config();
    let refused = |offset_bytes, size_bytes| {
        Err(ConfigWriteError::ReadOnly { offset_bytes, size_bytes, writable_offset_bytes: 32 })
    };
    assert_eq!(changed.write(0, &[0]), refused(0, 1));
    assert_eq!(changed.write(32, &[0, 0]), refused(32, 2));
    assert_eq!(changed.write(32, &[]), refused(32, 0));
    assert_eq!(changed, config());
}

#[test]
fn writeback_value_that_is_no_mode_is_refused_and_changes_nothing() {
    let mut changed = config();
    assert_eq!(changed.write(32, &[2]), Err(ConfigWriteError::Value { value: 2 }));
    assert_eq!(changed, config());
}

#[test]
fn seg_max_leaves_room_for_header_and_status_and_stays_within_one_system_call() {
    assert_eq!(seg_max(128), 126);
    assert_eq!(seg_max(1024), 1022);
    assert_eq!(seg_max(2048), 1022);
}

#[test]
fn seg_max_of_the_smallest_queue_is_one() {
    assert_eq!(seg_max(2), 1);
    assert_eq!(seg_max(0), 1);
}

#[test]
fn what_a_device_wrote_is_what_a_driver_reads() {
    assert_eq!(DeviceConfig::from_bytes(&config().to_bytes()), config());
    assert_eq!(DeviceConfig::from_bytes(&config().to_bytes()[..57]), config());
}

#[test]
fn fields_after_the_end_of_a_short_configuration_are_zero() {
    let short = DeviceConfig::from_bytes(&config().to_bytes()[..37]);
    assert_eq!((short.num_queues, short.max_discard_sectors), (0x4142, 0x54));
    assert_eq!((short.max_write_zeroes_sectors, short.write_zeroes_may_unmap), (0, false));
    assert_eq!(DeviceConfig::from_bytes(&[]).capacity_sectors, 0);
}
