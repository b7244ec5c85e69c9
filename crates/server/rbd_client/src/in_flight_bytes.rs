//! Bounds the bytes that an image's requests have in flight, for all workers together.
//!
//! `try_reserve → the request → release by its completion | no room → refused, until the signal says to try again`
//!
//! | request that finds no room | completion |
//! |---|---|
//! | 1. `is_full = true` | 1. subtracts its bytes |
//! | 2. fence | 2. fence |
//! | 3. refused if more than [`REOPEN_BYTES`] are in flight | 3. if at most [`REOPEN_BYTES`] are: `is_full = false`; signals if it was set |
//!
//! - This is Dekker's algorithm: either the request finds the bytes free, or the completion finds `is_full` set.
//! - While `is_full` is set, every request is refused. A busy worker therefore cannot keep the others out, and a full image
//!   costs one signal for many completions.
//! - A loom model checks this: `RUSTFLAGS="--cfg loom" cargo test -p rbd_client --lib model --target-dir target/loom`.

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// Maximum number of bytes in flight: librbd copies every write, and queues without limit while the cluster does not
/// answer. A single request may be longer.
const MAX_BYTES: u64 = 64 << 20;
/// When so few bytes are in flight again, refused requests are tried again.
const REOPEN_BYTES: u64 = MAX_BYTES / 4 * 3;

/// Tells every worker of the image that refused requests may have room now.
pub(crate) trait Signal {
    fn signal(&self);
}

/// The bytes in flight. `S` signals the workers.
#[derive(Debug)]
pub(crate) struct InFlightBytes<S> {
    bytes: AtomicU64,
    is_full: AtomicBool,
    pub signal: S,
}

impl<S: Signal> InFlightBytes<S> {
    pub fn new(signal: S) -> Self {
        Self { bytes: AtomicU64::new(0), is_full: AtomicBool::new(false), signal }
    }

    /// Takes room for `len_bytes`, which `release` gives back. After a refusal, the signal says when to try again.
    #[inline]
    pub fn try_reserve(&self, len_bytes: u64) -> bool {
        !self.is_full.load(Ordering::Relaxed) && self.take(len_bytes) || self.retry(len_bytes)
    }

    #[inline]
    fn take(&self, len_bytes: u64) -> bool {
        let fits = |bytes: u64| bytes <= REOPEN_BYTES || bytes.saturating_add(len_bytes) <= MAX_BYTES;
        let taken = |bytes: u64| fits(bytes).then(|| bytes.saturating_add(len_bytes));
        // Relaxed: a count, which orders nothing.
        self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).is_ok()
    }

    #[cold]
    fn retry(&self, len_bytes: u64) -> bool {
        loop {
            self.is_full.swap(true, Ordering::Relaxed);
            // Pairs with the fence in `release`.
            fence(Ordering::SeqCst);
            if self.bytes.load(Ordering::Relaxed) > REOPEN_BYTES {
                return false;
            }
            // The completion that made room may have seen no flag.
            self.reopen();
            if self.take(len_bytes) {
                return true;
            }
        }
    }

    /// Gives room back.
    #[inline]
    pub fn release(&self, len_bytes: u64) {
        let left_bytes = self.bytes.fetch_sub(len_bytes, Ordering::Relaxed) - len_bytes;
        // Pairs with the fence in `retry`.
        fence(Ordering::SeqCst);
        if left_bytes <= REOPEN_BYTES && self.is_full.load(Ordering::Relaxed) {
            self.reopen();
        }
    }

    #[cold]
    fn reopen(&self) {
        if self.is_full.swap(false, Ordering::Relaxed) {
            self.signal.signal();
        }
    }
}

#[cfg(all(test, loom))]
#[path = "in_flight_bytes_model.rs"]
mod model;

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[derive(Default)]
    struct Signals(Cell<u32>);

    impl Signal for Signals {
        fn signal(&self) {
            self.0.set(self.0.get() + 1);
        }
    }

    const MIB: u64 = 1 << 20;

    fn full() -> InFlightBytes<Signals> {
        let bytes = InFlightBytes::new(Signals::default());
        assert!((0..64).all(|_| bytes.try_reserve(MIB)));
        assert!(!bytes.try_reserve(1));
        bytes
    }

    #[test]
    fn every_request_is_refused_until_a_quarter_is_free_and_one_signal_says_so() {
        let bytes = full();
        for _ in 0..15 {
            bytes.release(MIB);
            assert!(!bytes.try_reserve(1));
        }
        assert_eq!(bytes.signal.0.get(), 0);
        bytes.release(MIB);
        assert_eq!(bytes.signal.0.get(), 1);
        assert!(bytes.try_reserve(MIB));
        bytes.release(MIB);
        assert_eq!(bytes.signal.0.get(), 1);
    }

    #[test]
    fn request_that_is_longer_than_the_bound_has_room_when_few_bytes_are_in_flight() {
        let bytes = InFlightBytes::new(Signals::default());
        assert!(bytes.try_reserve(u64::from(u32::MAX)));
        assert!(!bytes.try_reserve(1));
        bytes.release(u64::from(u32::MAX));
        assert!(bytes.try_reserve(1));
    }
}
