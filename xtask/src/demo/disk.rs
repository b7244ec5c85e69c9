//! The demo's disk image: filled, because holes read faster than data.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;
use xtask::workspace;

use super::{Interrupt, Progress};

const SIZE_BYTES: u64 = 1 << 30;
const CHUNK_BYTES: usize = 1 << 20;

/// An image below `target/demo`, removed when dropped unless kept.
#[derive(Debug)]
pub(super) struct DemoDisk {
    dir: TempDir,
}

impl DemoDisk {
    pub(super) fn create(progress: &Progress, interrupt: &Interrupt) -> Result<Self> {
        let parent = workspace::root().join("target").join("demo");
        fs::create_dir_all(&parent).with_context(|| format!("cannot create {}", parent.display()))?;
        check_space(&parent)?;
        let disk = Self { dir: tempfile::Builder::new().prefix("run-").tempdir_in(&parent)? };
        let path = disk.image();
        let bar = progress.bytes("filling a 1 GiB disk image", SIZE_BYTES);
        let mut file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        for chunk in 0..SIZE_BYTES / CHUNK_BYTES as u64 {
            interrupt.check()?;
            file.write_all(&noise(chunk)).with_context(|| format!("cannot fill {}", path.display()))?;
            bar.inc(CHUNK_BYTES as u64);
        }
        file.sync_all()?;
        bar.finish_and_clear();
        Ok(disk)
    }

    pub(super) fn image(&self) -> PathBuf {
        self.dir.path().join("disk.raw")
    }

    pub(super) fn log(&self) -> PathBuf {
        self.dir.path().join("server.log")
    }

    /// Leaves image and log in the folder that is returned.
    pub(super) fn keep(&mut self) -> &Path {
        self.dir.disable_cleanup(true);
        self.dir.path()
    }
}

fn check_space(dir: &Path) -> Result<()> {
    let found = rustix::fs::statvfs(dir)?;
    let free_bytes = found.f_bavail * found.f_frsize;
    if free_bytes < SIZE_BYTES {
        bail!("{} has {free_bytes} bytes free; the demo's disk image needs {SIZE_BYTES}", dir.display());
    }
    Ok(())
}

/// Data that no file system or SSD can shrink (xorshift64*).
fn noise(chunk: u64) -> Vec<u8> {
    let mut state = chunk.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_F491_4F6C_DD1D)
    };
    (0..CHUNK_BYTES / 8).flat_map(|_| next().to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_full_and_differ() {
        let (first, second) = (noise(0), noise(1));
        assert_eq!(first.len(), CHUNK_BYTES);
        assert_ne!(first[..4096], first[4096..8192]);
        assert_ne!(first, second);
    }
}
