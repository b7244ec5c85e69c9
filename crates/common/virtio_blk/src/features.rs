//! Feature bits: which ones the device offers, which ones the driver accepted, and what they mean for the
//! write cache.
//!
//! Spec: virtio 1.3 §5.2.3, §6.

use virtqueue::RingFeatures;

/// `VIRTIO_BLK_F_SEG_MAX`: `seg_max` is valid.
pub const SEG_MAX: u64 = 1 << 2;
/// `VIRTIO_BLK_F_RO`: the device is read-only.
pub const RO: u64 = 1 << 5;
/// `VIRTIO_BLK_F_BLK_SIZE`: `blk_size` is valid.
pub const BLK_SIZE: u64 = 1 << 6;
/// `VIRTIO_BLK_F_FLUSH`: there is a cache, and a command to flush it.
pub const FLUSH: u64 = 1 << 9;
/// `VIRTIO_BLK_F_TOPOLOGY`: the topology fields are valid.
pub const TOPOLOGY: u64 = 1 << 10;
/// `VIRTIO_BLK_F_CONFIG_WCE`: the driver may switch the cache mode with the `writeback` field.
pub const CONFIG_WCE: u64 = 1 << 11;
/// `VIRTIO_BLK_F_MQ`: the device has several queues.
pub const MQ: u64 = 1 << 12;
/// `VIRTIO_BLK_F_DISCARD`.
pub const DISCARD: u64 = 1 << 13;
/// `VIRTIO_BLK_F_WRITE_ZEROES`.
pub const WRITE_ZEROES: u64 = 1 << 14;
/// `VIRTIO_F_INDIRECT_DESC`.
pub const INDIRECT_DESC: u64 = 1 << 28;
/// `VIRTIO_F_EVENT_IDX`.
pub const EVENT_IDX: u64 = 1 << 29;
/// `VIRTIO_F_VERSION_1`: the driver is not a legacy driver.
pub const VERSION_1: u64 = 1 << 32;
/// `VIRTIO_F_RING_PACKED`: packed virtqueues (virtio 1.3 §2.8).
pub const RING_PACKED: u64 = 1 << 34;

/// Bits that are always offered. A guest sees RING_PACKED only if its front-end passes it on (QEMU:
/// `packed=on`). `SIZE_MAX` is not offered: the device has no limit on a segment's size.
const ALWAYS: u64 = VERSION_1 | INDIRECT_DESC | EVENT_IDX | RING_PACKED | SEG_MAX | BLK_SIZE | TOPOLOGY;

/// Determines the bits that are not always offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The image must not be written.
    pub read_only: bool,
    /// The image can deallocate blocks, and is allowed to.
    pub discard: bool,
    /// The image can be zeroed without sending zeroes.
    pub write_zeroes: bool,
    /// The cache mode that a driver starts with.
    pub write_cache: WriteCache,
    /// The driver may choose another cache mode.
    pub cache_is_settable: bool,
    /// Number of request queues.
    pub num_queues: u16,
}

/// The bits offered to a driver. A read-only device offers nothing that changes the image.
///
/// CONFIG_WCE is never offered without FLUSH (virtio 1.3 §5.2.5.2). A device that is permanently writethrough
/// has no cache to flush, so it offers neither (§5.2.6.2).
#[must_use]
pub fn device_features(offer: &Offer) -> u64 {
    let bit = |wanted: bool, bit: u64| if wanted { bit } else { 0 };
    ALWAYS
        | bit(offer.read_only, RO)
        | bit(offer.discard && !offer.read_only, DISCARD)
        | bit(offer.write_zeroes && !offer.read_only, WRITE_ZEROES)
        | bit(offer.num_queues > 1, MQ)
        | bit(offer.cache_is_settable, FLUSH | CONFIG_WCE)
        | bit(offer.write_cache == WriteCache::Writeback, FLUSH)
}

/// Why a driver's choice is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FeatureError {
    /// The driver accepted bits that were never offered.
    #[error("driver accepted feature bits {unoffered:#x} that were not offered (offered: {offered:#x})")]
    NotOffered {
        /** The accepted bits that were not offered. */
        unoffered: u64,
        /** The offered bits. */
        offered: u64,
    },
    /// The driver is a legacy driver, which uses a different byte order and layout.
    #[error(
        "driver accepted feature bits {accepted:#x} without VERSION_1 ({version_1:#x}): a legacy driver, which no \
         vhost-user server serves; with QEMU add disable-legacy=on to the device (firmware such as OVMF otherwise \
         uses its legacy interface)"
    )]
    Legacy {
        /** The bits that the driver accepted. */
        accepted: u64,
        /** The missing bit. */
        version_1: u64,
    },
}

/// The feature bits that both sides agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated(u64);

impl Negotiated {
    /// Checks the driver's choice `wanted`.
    ///
    /// # Errors
    /// [`FeatureError`].
    pub fn accept(offered: u64, wanted: u64) -> Result<Self, FeatureError> {
        let unoffered = wanted & !offered;
        if unoffered != 0 {
            return Err(FeatureError::NotOffered { unoffered, offered });
        }
        if wanted & VERSION_1 == 0 {
            return Err(FeatureError::Legacy { accepted: wanted, version_1: VERSION_1 });
        }
        Ok(Self(wanted))
    }

    /// All agreed bits.
    #[must_use]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Whether all of `bits` were accepted.
    #[must_use]
    pub fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }

    /// Whether the driver accepted FLUSH.
    #[must_use]
    pub fn has_flush(self) -> bool {
        self.has(FLUSH)
    }

    /// Whether the driver may switch the cache mode.
    #[must_use]
    pub fn has_config_wce(self) -> bool {
        self.has(CONFIG_WCE)
    }

    /// The bits that affect the rings.
    #[must_use]
    pub fn ring(self) -> RingFeatures {
        RingFeatures {
            event_idx: self.has(EVENT_IDX),
            indirect: self.has(INDIRECT_DESC),
            packed: self.has(RING_PACKED),
        }
    }
}

/// When a write is durable (virtio 1.3 §5.2.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteCache {
    /// Before it completes.
    Writethrough,
    /// After the next flush.
    Writeback,
}

impl WriteCache {
    /// The `writeback` field's value.
    #[must_use]
    pub fn to_byte(self) -> u8 {
        match self {
            Self::Writethrough => 0,
            Self::Writeback => 1,
        }
    }
}

/// The cache mode for a driver, on a device that starts with `device`.
///
/// Only a driver that accepted FLUSH can make a write durable later. Without FLUSH, the mode is writethrough: with
/// neither bit, virtio requires writethrough (virtio 1.3 §5.2.6.2, case 1), and CONFIG_WCE alone starts with
/// `writeback` 0 (§5.2.5.2).
///
/// A driver with FLUSH alone assumes writeback, and flushes. On a device that starts as writethrough, its writes are
/// durable anyway: the driver did not request that, but the disk's owner did.
#[must_use]
pub fn initial_write_cache(device: WriteCache, negotiated: Negotiated) -> WriteCache {
    if negotiated.has_flush() { device } else { WriteCache::Writethrough }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Offer = Offer {
        read_only: false,
        discard: true,
        write_zeroes: true,
        write_cache: WriteCache::Writeback,
        cache_is_settable: true,
        num_queues: 4,
    };

    fn write_cache_of(device: WriteCache, bits: u64) -> WriteCache {
        let negotiated = Negotiated::accept(device_features(&PLAIN), VERSION_1 | bits);
        initial_write_cache(device, negotiated.unwrap())
    }

    fn cache_bits(write_cache: WriteCache, cache_is_settable: bool) -> u64 {
        device_features(&Offer { write_cache, cache_is_settable, ..PLAIN }) & (FLUSH | CONFIG_WCE)
    }

    #[test]
    fn writable_disk_with_discard_and_queues_offers_all_but_size_max_and_read_only() {
        let bits = device_features(&PLAIN);
        assert_eq!(bits, ALWAYS | MQ | DISCARD | WRITE_ZEROES | FLUSH | CONFIG_WCE);
        assert_eq!(bits & (1 << 1 | RO), 0);
    }

    #[test]
    fn read_only_disk_offers_neither_discard_nor_write_zeroes() {
        let bits = device_features(&Offer { read_only: true, ..PLAIN });
        assert_eq!(bits & (RO | DISCARD | WRITE_ZEROES), RO);
    }

    #[test]
    fn discard_switched_off_and_a_single_queue_are_not_offered() {
        let bits = device_features(&Offer { discard: false, num_queues: 1, ..PLAIN });
        assert_eq!(bits & (DISCARD | MQ | WRITE_ZEROES), WRITE_ZEROES);
    }

    #[test]
    fn driver_without_version_1_is_refused_with_its_bits() {
        let refused = Negotiated::accept(device_features(&PLAIN), FLUSH | MQ).unwrap_err();
        assert_eq!(refused, FeatureError::Legacy { accepted: FLUSH | MQ, version_1: VERSION_1 });
        let said = refused.to_string();
        assert!(
            said.starts_with("driver accepted feature bits 0x1200 without VERSION_1 (0x100000000)"),
            "{said}"
        );
        assert!(said.contains("disable-legacy=on"), "{said}");
    }

    #[test]
    fn bits_never_offered_are_refused() {
        let refused = Negotiated::accept(VERSION_1, VERSION_1 | RO);
        assert_eq!(refused, Err(FeatureError::NotOffered { unoffered: RO, offered: VERSION_1 }));
    }

    #[test]
    fn ring_features_follow_the_accepted_bits() {
        let ring = |bits| Negotiated::accept(device_features(&PLAIN), VERSION_1 | bits).unwrap().ring();
        let none = RingFeatures::default();
        assert_eq!(ring(EVENT_IDX), RingFeatures { event_idx: true, ..none });
        assert_eq!(ring(INDIRECT_DESC), RingFeatures { indirect: true, ..none });
        assert_eq!(ring(RING_PACKED), RingFeatures { packed: true, ..none });
    }

    #[test]
    fn cache_is_writethrough_unless_the_driver_can_flush() {
        let on_writeback_device = |bits| write_cache_of(WriteCache::Writeback, bits);
        assert_eq!(on_writeback_device(0), WriteCache::Writethrough);
        assert_eq!(on_writeback_device(CONFIG_WCE), WriteCache::Writethrough);
        assert_eq!(on_writeback_device(FLUSH), WriteCache::Writeback);
        assert_eq!(on_writeback_device(FLUSH | CONFIG_WCE), WriteCache::Writeback);
    }

    #[test]
    fn every_driver_starts_writethrough_on_a_device_that_does() {
        let modes = [0, CONFIG_WCE, FLUSH, FLUSH | CONFIG_WCE]
            .map(|bits| write_cache_of(WriteCache::Writethrough, bits));
        assert_eq!(modes, [WriteCache::Writethrough; 4]);
    }

    #[test]
    fn device_that_is_writethrough_for_good_offers_neither_flush_nor_cache_control() {
        assert_eq!(cache_bits(WriteCache::Writethrough, false), 0);
        assert_eq!(cache_bits(WriteCache::Writeback, false), FLUSH);
        assert_eq!(cache_bits(WriteCache::Writethrough, true), FLUSH | CONFIG_WCE);
    }
}
