//! How long to wait before the next attempt to connect.
//!
//! - Each failed attempt doubles the pause.
//! - A connection that ended soon counts as a failed attempt. Otherwise a server that accepts connections and ends them
//!   would make the connecting threads and the log busy.

use std::time::Duration;

/// The shortest pause after a failed attempt.
const SHORTEST: Duration = Duration::from_millis(50);
/// The longest pause.
const LONGEST: Duration = Duration::from_secs(2);
/// A connection that lasted this long has worked.
const WORKED: Duration = Duration::from_secs(2);

/// The pause before the next attempt; none at first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pause(Duration);

impl Pause {
    pub fn duration(self) -> Duration {
        self.0
    }

    /// The pause after a failed attempt.
    pub fn after_failure(self) -> Self {
        Self((self.0 * 2).clamp(SHORTEST, LONGEST))
    }

    /// The pause after a connection ended that had `lasted` this long.
    pub fn after_connection(self, lasted: Duration) -> Self {
        if lasted >= WORKED { Self::default() } else { self.after_failure() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut pause = Pause::default();
        let pauses = [(); 8].map(|()| {
            pause = pause.after_failure();
            pause.duration().as_millis()
        });
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1600, 2000, 2000]);
    }

    #[test]
    fn connection_that_ended_soon_counts_as_a_failure_and_one_that_worked_ends_the_pauses() {
        let pause = Pause::default().after_failure();
        assert_eq!(pause.after_connection(Duration::ZERO), pause.after_failure());
        assert_eq!(pause.after_connection(WORKED), Pause::default());
    }
}
