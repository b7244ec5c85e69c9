//! The user's request to end a run, checked between and during measurements.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A flag that the run shares with the code that receives the signal.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Uses a flag that a signal handler sets.
    #[must_use]
    pub fn new(flag: Arc<AtomicBool>) -> Self {
        Self(flag)
    }

    /// Whether the run should end.
    #[must_use]
    pub fn is_asked(&self) -> bool {
        // Relaxed: the flag publishes nothing else.
        self.0.load(Relaxed)
    }

    /// Requests the end.
    pub fn ask(&self) {
        self.0.store(true, Relaxed);
    }
}
