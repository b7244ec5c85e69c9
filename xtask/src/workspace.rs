//! Paths in the workspace.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};

use crate::command;

/// The folder of the workspace's `Cargo.toml`.
#[must_use]
pub fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

/// The folder for guest images: below `target/`, so that `cargo clean` removes them.
#[must_use]
pub fn guest_dir() -> PathBuf {
    root().join("target").join("guest")
}

/// Waits for other processes that work in `folder`. Closing the file releases the lock.
///
/// # Errors
/// If the lock file cannot be created or locked.
pub fn lock(folder: &Path) -> Result<File> {
    let path = folder.join("lock");
    let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    flock(&file, FlockOperation::LockExclusive).with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(file)
}

/// The output of `cargo metadata --no-deps` for the workspace.
///
/// # Errors
/// If cargo fails or its output is not JSON.
pub fn metadata() -> Result<serde_json::Value> {
    let text = command::output(
        Command::new(cargo()).args(["metadata", "--no-deps", "--format-version", "1"]).current_dir(root()),
    )?;
    serde_json::from_str(&text).context("cargo metadata's answer is not JSON")
}

/// Cargo's target folder for this workspace.
///
/// # Errors
/// If cargo fails.
pub fn build_dir() -> Result<PathBuf> {
    let metadata = metadata()?;
    let dir = metadata["target_directory"].as_str().context("cargo metadata names no target_directory")?;
    Ok(PathBuf::from(dir))
}

/// The cargo that runs this program, else the one in PATH.
#[must_use]
pub fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}
