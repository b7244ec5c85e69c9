//! The demo's disk image: filled with data, because holes read faster.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;
use xtask::workspace;

use super::progress::{Interrupt, Progress};

const SIZE_BYTES: u64 = 1 << 30;
const CHUNK_BYTES: usize = 1 << 20;
const BLOCK_BYTES: usize = 4096;

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
        let mut chunk = noise();
        for number in 0..SIZE_BYTES / CHUNK_BYTES as u64 {
            interrupt.check()?;
            mark(&mut chunk, number);
            file.write_all(&chunk).with_context(|| format!("cannot fill {}", path.display()))?;
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

    /// Keeps image and log; returns their folder.
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

/// A chunk that no file system or SSD can compress (xorshift64*).
fn noise() -> Vec<u8> {
    let mut state: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_F491_4F6C_DD1D)
    };
    (0..CHUNK_BYTES / 8).flat_map(|_| next().to_le_bytes()).collect()
}

/// Makes each block of this chunk different from those of other chunks.
fn mark(chunk: &mut [u8], number: u64) {
    for block in chunk.chunks_exact_mut(BLOCK_BYTES) {
        block[..8].copy_from_slice(&number.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_a_chunk_and_chunks_differ() {
        let mut first = noise();
        let mut second = first.clone();
        mark(&mut first, 1);
        mark(&mut second, 2);
        assert_eq!(first.len(), CHUNK_BYTES);
        assert_ne!(first[..4096], first[4096..8192]);
        assert_ne!(first[4096..8192], second[4096..8192]);
    }
}
