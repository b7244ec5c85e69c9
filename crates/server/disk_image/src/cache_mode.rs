//! Cache modes, with QEMU's meanings: whether I/O bypasses the page cache, and when a write is durable.
//!
//! | mode | page cache | a guest starts with | a flush causes |
//! |---|---|---|---|
//! | `none` | bypassed (`O_DIRECT`) | writeback | `fdatasync` |
//! | `writeback` | used | writeback | `fdatasync` |
//! | `writethrough` | used | writethrough | `fdatasync` |
//! | `directsync` | bypassed | writethrough | `fdatasync` |
//! | `unsafe` | used | writeback | nothing |
//!
//! A guest may change its starting mode (`VIRTIO_BLK_F_CONFIG_WCE`), unless the mode is fixed.

/// How reads and writes reach the image, and the guest's starting mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CacheMode {
    /// Bypasses the host's page cache (`O_DIRECT`).
    None,
    /// Through the host's page cache.
    Writeback,
    /// Through the host's page cache; a guest starts with durable writes.
    Writethrough,
    /// Bypasses the host's page cache; a guest starts with durable writes.
    Directsync,
    /// Through the host's page cache; no write is ever made durable.
    Unsafe,
}

impl CacheMode {
    /// Every mode.
    pub const ALL: [Self; 5] =
        [Self::None, Self::Writeback, Self::Writethrough, Self::Directsync, Self::Unsafe];

    /// The mode's name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Writeback => "writeback",
            Self::Writethrough => "writethrough",
            Self::Directsync => "directsync",
            Self::Unsafe => "unsafe",
        }
    }

    /// Whether the mode bypasses the page cache.
    #[must_use]
    pub fn is_direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }

    /// Whether a guest starts in writethrough mode, in which every write is durable on completion.
    #[must_use]
    pub fn starts_writethrough(self) -> bool {
        matches!(self, Self::Writethrough | Self::Directsync)
    }

    /// Whether flushes succeed without doing anything, and no write is made durable.
    #[must_use]
    pub fn ignores_flushes(self) -> bool {
        matches!(self, Self::Unsafe)
    }
}

/// The word is not the name of a cache mode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cache mode '{value}' is unknown: use none, writeback, writethrough, directsync or unsafe")]
pub struct ParseCacheModeError {
    /** The unknown word. */
    pub value: String,
}

impl std::str::FromStr for CacheMode {
    type Err = ParseCacheModeError;

    fn from_str(value: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|mode| mode.name() == value);
        known.ok_or_else(|| ParseCacheModeError { value: value.to_owned() })
    }
}

impl std::fmt::Display for CacheMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_modes_are_read_as_they_are_written() {
        let read_back = CacheMode::ALL.map(|mode| mode.to_string().parse());
        assert_eq!(read_back, CacheMode::ALL.map(Ok));
    }

    #[test]
    fn unknown_cache_mode_is_named_with_the_known_ones() {
        let error = "direct".parse::<CacheMode>().unwrap_err();
        let known = "use none, writeback, writethrough, directsync or unsafe";
        assert_eq!(error.to_string(), format!("cache mode 'direct' is unknown: {known}"));
    }
}
