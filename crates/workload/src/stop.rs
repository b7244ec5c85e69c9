//! Whether the user wants the run to end: looked at between and inside measurements.
//!
//! Not here: catching signals (`bareblk`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Shared with whoever hears the signal.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Around a flag that a signal handler sets.
    #[must_use]
    pub fn new(flag: Arc<AtomicBool>) -> Self {
        Self(flag)
    }

    /// Whether to end.
    #[must_use]
    pub fn is_asked(&self) -> bool {
        // Relaxed: nothing else is passed through it.
        self.0.load(Relaxed)
    }

    /// Asks for the end.
    pub fn ask(&self) {
        self.0.store(true, Relaxed);
    }
}
