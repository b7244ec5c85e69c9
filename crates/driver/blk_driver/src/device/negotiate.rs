//! Chooses features, and reads the device's configuration according to them.
//!
//! `offered ∩ known → wanted by the options → accepted;  configuration bytes + accepted → DeviceInfo, checked`
//!
//! - A field is valid only if its feature was accepted (virtio 1.3 §5.2.4). A valid field with an impossible
//!   value is an error here, so that the rest of the driver can trust a [`DeviceInfo`].
//! - After a reconnect, the new back-end must match the previous one, for which queues, rings and requests were made.
//!
//! Spec: virtio 1.3 §5.2.3, §5.2.4, §6.

use vhost::vhost_user::message::{VHOST_USER_MAX_VRINGS, VhostUserProtocolFeatures as Protocol};
use virtio_blk::{DeviceConfig, MAX_SEGMENTS, SECTOR_BYTES, features};

use super::info::DeviceInfo;
use super::options::Options;
use crate::error::ConnectError;
use crate::queue::area::DEFAULT_MAX_SEGMENTS;

/// `VHOST_USER_F_PROTOCOL_FEATURES` (vhost-user, "Feature negotiation").
const PROTOCOL_FEATURES: u64 = 1 << 30;

/// Features that this driver uses if they are offered, whatever the options say. CONFIG_WCE is not among
/// them: this driver never writes the configuration, and without CONFIG_WCE the device does not wait for
/// that.
const ALWAYS: u64 = PROTOCOL_FEATURES
    | features::VERSION_1
    | features::SEG_MAX
    | features::RO
    | features::BLK_SIZE
    | features::FLUSH
    | features::TOPOLOGY
    | features::MQ
    | features::DISCARD
    | features::WRITE_ZEROES;

/// Protocol features that the driver uses if they are offered.
const PROTOCOL: Protocol = Protocol::MQ
    .union(Protocol::CONFIG)
    .union(Protocol::REPLY_ACK)
    .union(Protocol::CONFIGURE_MEM_SLOTS)
    .union(Protocol::BACKEND_REQ)
    .union(Protocol::RESET_DEVICE);

/// Largest block size accepted: Linux's limit (`BLK_MAX_BLOCK_SIZE`).
const MAX_BLOCK_BYTES: u32 = 65536;

/// SET_VRING_KICK and similar messages have 8 bits for the queue (vhost-user, "Vring descriptor index").
const MAX_QUEUES: u16 = 256;

/// Sizes of the configuration to try: up to `write_zeroes_may_unmap`, padded as in `struct virtio_blk_config` (QEMU,
/// cloud-hypervisor); the same unpadded; all fields of virtio 1.3; up to `num_queues`. Back-ends refuse sizes larger
/// than their own, and some refuse smaller ones.
pub(super) const CONFIG_SIZES: [usize; 4] = [60, 57, 96, 36];

/// Chooses the features to use from `offered`.
pub(super) fn accept(offered: u64, options: &Options) -> Result<u64, ConnectError> {
    let bit = |wanted: bool, bit: u64| if wanted { bit } else { 0 };
    let wanted = ALWAYS
        | bit(options.packed == Some(true), features::RING_PACKED)
        | bit(options.indirect, features::INDIRECT_DESC)
        | bit(options.event_idx, features::EVENT_IDX);
    let required = [
        ("VIRTIO_F_VERSION_1", features::VERSION_1),
        ("VHOST_USER_F_PROTOCOL_FEATURES", PROTOCOL_FEATURES),
        ("VIRTIO_F_RING_PACKED", wanted & features::RING_PACKED),
    ];
    let missing = required.into_iter().find(|(_, bit)| offered & bit != *bit);
    match missing {
        Some((feature, bit)) => Err(ConnectError::Feature { feature, bit, offered }),
        None => Ok(offered & wanted),
    }
}

/// Chooses the protocol features to use from `offered`. CONFIG is required: without it the disk's size is unknown.
pub(super) fn accept_protocol(offered: u64, options: &Options) -> Result<Protocol, ConnectError> {
    let log = if options.wants_log() { Protocol::INFLIGHT_SHMFD } else { Protocol::empty() };
    let accepted = Protocol::from_bits_truncate(offered) & (PROTOCOL | log);
    let required = [
        ("VHOST_USER_PROTOCOL_F_CONFIG", Protocol::CONFIG),
        (
            "VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD",
            if options.in_flight_log == Some(true) { log } else { Protocol::empty() },
        ),
    ];
    match required.into_iter().find(|(_, feature)| !accepted.contains(*feature)) {
        Some((feature, bit)) => Err(ConnectError::Feature { feature, bit: bit.bits(), offered }),
        None => Ok(accepted),
    }
}

/// How many queues are usable on a device that reports `counted` (GET_QUEUE_NUM; `None` without MQ).
pub(super) fn check_queues(counted: Option<u64>, config: u16, accepted: u64) -> Result<u16, ConnectError> {
    if accepted & features::MQ == 0 {
        return Ok(1);
    }
    let counted = counted.unwrap_or(1);
    if counted == 0 || counted > VHOST_USER_MAX_VRINGS {
        return Err(ConnectError::Config { field: "number of queues (GET_QUEUE_NUM)", value: counted });
    }
    if config == 0 {
        return Err(ConnectError::Config { field: "num_queues", value: 0 });
    }
    let counted = u16::try_from(counted).unwrap_or(u16::MAX);
    Ok(counted.min(config).min(MAX_QUEUES))
}

/// The device's description of itself, for queues of `queue_size` descriptors.
pub(super) fn device_info(
    config: &DeviceConfig,
    counted_queues: Option<u64>,
    queue_size: u16,
    accepted: u64,
    protocol: Protocol,
) -> Result<DeviceInfo, ConnectError> {
    let has = |bit: u64| accepted & bit != 0;
    let if_has = |bit: u64, value: u32| if has(bit) { value } else { 0 };
    let capacity_sectors = config.capacity_sectors;
    if capacity_sectors.checked_mul(SECTOR_BYTES).is_none() {
        return Err(ConnectError::Config { field: "capacity", value: capacity_sectors });
    }
    // A device that supports discards accepts at least one segment.
    let most = u32::try_from(MAX_SEGMENTS).unwrap_or(u32::MAX);
    let segments = |bit, count: u32| if_has(bit, count.clamp(1, most));
    Ok(DeviceInfo {
        capacity_sectors,
        block_size_bytes: block_size(config, accepted)?,
        num_queues: check_queues(counted_queues, config.num_queues, accepted)?,
        max_segments: max_segments(if_has(features::SEG_MAX, config.seg_max), queue_size, accepted),
        read_only: has(features::RO),
        flush: has(features::FLUSH),
        max_discard_segments: segments(features::DISCARD, config.max_discard_seg),
        max_discard_sectors: if_has(features::DISCARD, config.max_discard_sectors),
        max_write_zeroes_segments: segments(features::WRITE_ZEROES, config.max_write_zeroes_seg),
        max_write_zeroes_sectors: if_has(features::WRITE_ZEROES, config.max_write_zeroes_sectors),
        features: accepted,
        protocol_features: protocol.bits(),
    })
}

/// Without SEG_MAX, a request has one buffer, to be safe, as in Linux. With indirect tables, only `seg_max` limits a
/// request, as in Linux, although virtio 1.3 §2.7.5.3.1 limits it to the queue size. Without such tables, header and
/// status also need descriptors of the ring.
fn max_segments(seg_max: u32, queue_size: u16, accepted: u64) -> u32 {
    let in_ring = u32::from(queue_size.saturating_sub(2));
    let of_queue = if accepted & features::INDIRECT_DESC == 0 { in_ring } else { u32::MAX };
    seg_max.min(u32::from(DEFAULT_MAX_SEGMENTS)).min(of_queue).max(1)
}

fn block_size(config: &DeviceConfig, accepted: u64) -> Result<u32, ConnectError> {
    if accepted & features::BLK_SIZE == 0 {
        return Ok(512);
    }
    let size_bytes = config.blk_size;
    if size_bytes.is_power_of_two() && (512..=MAX_BLOCK_BYTES).contains(&size_bytes) {
        return Ok(size_bytes);
    }
    Err(ConnectError::Config { field: "blk_size", value: u64::from(size_bytes) })
}

/// Checks that the back-end found by a reconnect serves the same device. Returns the features in use; `offered` must
/// contain them.
pub(super) fn check_same(offered: u64, before: &DeviceInfo) -> Result<u64, ConnectError> {
    // If the disk had become read-only, writes that were already taken would fail.
    let missing = before.features & !offered;
    let read_only_now = offered & !before.features & features::RO;
    if missing | read_only_now != 0 {
        let (was, is) = (before.features, offered);
        return Err(ConnectError::OtherFeatures { missing, read_only: read_only_now != 0, was, is });
    }
    Ok(before.features)
}

/// Checks that the disk found by a reconnect has at least the limits in use.
pub(super) fn check_not_smaller(
    now: &DeviceInfo,
    before: &DeviceInfo,
    queues: u16,
) -> Result<(), ConnectError> {
    if now.num_queues < queues {
        return Err(ConnectError::Queues { wanted: queues, available: now.num_queues });
    }
    if now.block_size_bytes != before.block_size_bytes {
        let (was_bytes, is_bytes) = (before.block_size_bytes, now.block_size_bytes);
        return Err(ConnectError::OtherBlockSize { was_bytes, is_bytes });
    }
    let numbers = |info: &DeviceInfo| {
        [
            ("capacity in sectors", info.capacity_sectors),
            ("buffers per request", u64::from(info.max_segments)),
            ("discard segments", u64::from(info.max_discard_segments)),
            ("discard sectors", u64::from(info.max_discard_sectors)),
            ("write-zeroes segments", u64::from(info.max_write_zeroes_segments)),
            ("write-zeroes sectors", u64::from(info.max_write_zeroes_sectors)),
        ]
    };
    match numbers(now).into_iter().zip(numbers(before)).find(|((_, is), (_, was))| is < was) {
        Some(((field, is), (_, was))) => Err(ConnectError::Smaller { field, is, was }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Reconnect;

    const OFFERED: u64 = ALWAYS | features::RING_PACKED | features::INDIRECT_DESC | features::EVENT_IDX;

    fn options() -> Options {
        Options::new("nowhere")
    }

    fn config() -> DeviceConfig {
        DeviceConfig {
            capacity_sectors: 2048,
            blk_size: 4096,
            seg_max: 126,
            num_queues: 4,
            max_discard_seg: 99,
            ..DeviceConfig::from_bytes(&[])
        }
    }

    fn info(config: &DeviceConfig, accepted: u64) -> Result<DeviceInfo, String> {
        device_info(config, Some(4), 256, accepted, Protocol::CONFIG).map_err(|error| error.to_string())
    }

    #[test]
    fn packed_rings_are_used_only_when_insisted_on() {
        let with =
            |packed| accept(OFFERED, &Options { packed, ..options() }).unwrap() & features::RING_PACKED;
        assert_eq!([with(None), with(Some(false)), with(Some(true))], [0, 0, features::RING_PACKED]);
    }

    #[test]
    fn packed_rings_that_are_not_offered_and_insisted_on_are_an_error_that_names_them() {
        let insisting = Options { packed: Some(true), ..options() };
        let error = accept(OFFERED & !features::RING_PACKED, &insisting).unwrap_err();
        assert!(error.to_string().contains("VIRTIO_F_RING_PACKED"), "{error}");
    }

    #[test]
    fn legacy_device_is_refused() {
        let error = accept(OFFERED & !features::VERSION_1, &options()).unwrap_err();
        assert!(error.to_string().contains("VIRTIO_F_VERSION_1"), "{error}");
    }

    #[test]
    fn cache_control_and_unknown_bits_are_not_accepted() {
        let accepted = accept(u64::MAX, &options()).unwrap();
        assert_eq!(accepted, ALWAYS | features::INDIRECT_DESC | features::EVENT_IDX);
    }

    #[test]
    fn back_end_without_configuration_is_refused() {
        let error = accept_protocol(Protocol::MQ.bits(), &options()).unwrap_err();
        assert!(error.to_string().contains("VHOST_USER_PROTOCOL_F_CONFIG"), "{error}");
    }

    #[test]
    fn log_is_used_where_it_is_wanted_and_by_itself_where_a_reconnect_could_use_it() {
        let offered = (Protocol::CONFIG | Protocol::INFLIGHT_SHMFD).bits();
        let with = |in_flight_log, reconnect| {
            let options = Options { in_flight_log, reconnect, ..options() };
            accept_protocol(offered, &options).unwrap().contains(Protocol::INFLIGHT_SHMFD)
        };
        let (never, patient) = (Reconnect::Never, Reconnect::For(Duration::from_secs(1)));
        assert_eq!([with(None, never), with(None, patient)], [false, true]);
        assert_eq!([with(Some(true), never), with(Some(false), patient)], [true, false]);
    }

    #[test]
    fn log_that_is_not_offered_is_done_without_unless_it_is_insisted_on() {
        let with = |in_flight_log| {
            let options = Options { in_flight_log, ..options() };
            accept_protocol(Protocol::CONFIG.bits(), &options)
        };
        assert_eq!(with(None).unwrap(), Protocol::CONFIG);
        let error = with(Some(true)).unwrap_err();
        assert!(error.to_string().contains("VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD"), "{error}");
    }

    #[test]
    fn fields_of_features_that_were_not_accepted_do_not_count() {
        let info = info(&config(), features::VERSION_1).unwrap();
        assert_eq!((info.block_size_bytes, info.num_queues, info.max_segments), (512, 1, 1));
        assert_eq!((info.max_discard_segments, info.flush, info.read_only), (0, false, false));
    }

    #[test]
    fn fields_of_accepted_features_count_within_what_we_can_do() {
        let info = info(&config(), ALWAYS).unwrap();
        assert_eq!((info.block_size_bytes, info.num_queues, info.max_segments), (4096, 4, 126));
        assert_eq!((info.max_discard_segments, info.max_write_zeroes_segments), (16, 1));
    }

    #[test]
    fn buffers_per_request_leave_room_for_header_and_status() {
        assert_eq!(
            [max_segments(126, 256, 0), max_segments(126, 64, 0), max_segments(126, 2, 0)],
            [126, 62, 1]
        );
    }

    #[test]
    fn buffers_per_request_with_tables_of_their_own_go_by_what_the_device_says() {
        let with_table = |seg_max| max_segments(seg_max, 4, features::INDIRECT_DESC);
        assert_eq!([with_table(0), with_table(62), with_table(u32::MAX)], [1, 62, 128]);
    }

    #[test]
    fn block_sizes_that_make_no_sense_are_refused_with_their_value() {
        let with = |blk_size| info(&DeviceConfig { blk_size, ..config() }, ALWAYS).unwrap_err();
        assert!(with(0).contains("blk_size 0"), "{}", with(0));
        assert!(with(511).contains("blk_size 511"));
        assert!(with(131_072).contains("blk_size 131072"));
    }

    #[test]
    fn capacity_beyond_64_bits_of_bytes_is_refused() {
        let capacity_sectors = u64::MAX / 512 + 1;
        assert!(info(&DeviceConfig { capacity_sectors, ..config() }, ALWAYS).is_err());
    }

    #[test]
    fn queue_counts_of_zero_and_beyond_the_protocol_are_refused() {
        let count = |counted, config| check_queues(Some(counted), config, features::MQ).ok();
        assert_eq!([count(0, 4), count(65535, 4), count(4, 0)], [None; 3]);
        assert_eq!([count(2, 4), count(4, 3), count(0x8000, 0x8000)], [Some(2), Some(3), Some(256)]);
    }

    #[test]
    fn device_that_comes_back_with_more_is_taken_and_with_less_is_not() {
        let before = info(&config(), ALWAYS & !features::RO).unwrap();
        assert_eq!(check_same(OFFERED & !features::RO, &before).unwrap(), before.features);
        assert!(check_same(OFFERED & !features::RO & !features::FLUSH, &before).is_err());
        assert!(check_same(OFFERED, &before).is_err(), "read-only now");
    }

    #[test]
    fn disk_that_comes_back_smaller_or_with_fewer_queues_is_not_taken() {
        let before = info(&config(), ALWAYS).unwrap();
        let larger = DeviceInfo { capacity_sectors: 4096, ..before.clone() };
        let other_blocks = DeviceInfo { block_size_bytes: 512, ..before.clone() };
        assert!(check_not_smaller(&larger, &before, 4).is_ok());
        assert!(check_not_smaller(&before, &larger, 4).is_err());
        assert!(check_not_smaller(&larger, &before, 5).is_err());
        assert!(check_not_smaller(&other_blocks, &before, 4).is_err());
    }
}
