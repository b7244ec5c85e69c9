//! The two ring formats, so that one test of requests or sessions runs with both.
//!
//! `on_both_formats! { a, b }` makes two tests of `fn a(ring: Format)`, and two of `b`.
//!
//! Spec: virtio 1.3 §2.7 (split), §2.8 (packed).

use virtqueue::RingFeatures;

use super::feature;

/// How a guest's rings are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Split,
    Packed,
}

impl Format {
    /// The features that a usual guest accepts.
    pub fn usual(self) -> u64 {
        match self {
            Self::Split => feature::USUAL,
            Self::Packed => feature::USUAL | feature::RING_PACKED,
        }
    }

    /// Like `usual`, but without EVENT_IDX: the device signals each used chain.
    pub fn plain(self) -> u64 {
        self.usual() & !feature::EVENT_IDX
    }

    /// The reply to GET_VRING_BASE after these requests have completed: it counts chains in a split ring, descriptors
    /// in a packed one, whose wrap counters start at 1 (virtio 1.3 §2.8.1; vhost-user, "Ring states").
    pub fn base_after(self, chains: u32, descriptors: u32, queue_size: u32) -> u32 {
        match self {
            Self::Split => chains,
            Self::Packed => {
                let wrap_counter = 1 ^ ((descriptors / queue_size) & 1);
                let position = (descriptors % queue_size) | (wrap_counter << 15);
                (position << 16) | position
            }
        }
    }
}

/// The ring features among the features that a guest accepted.
pub fn ring_features(features: u64) -> RingFeatures {
    RingFeatures {
        event_idx: features & feature::EVENT_IDX != 0,
        indirect: features & feature::INDIRECT != 0,
        packed: features & feature::RING_PACKED != 0,
    }
}

/// Makes two tests of each function, one per format.
#[allow(unused_macros)] // not every program of tests has two formats
macro_rules! on_both_formats {
    ($($test:ident),+ $(,)?) => {
        mod split_rings {
            $(#[test] fn $test() { super::$test($crate::rig::format::Format::Split) })+
        }
        mod packed_rings {
            $(#[test] fn $test() { super::$test($crate::rig::format::Format::Packed) })+
        }
    };
}
#[allow(unused_imports)] // the same
pub(crate) use on_both_formats;
