//! Where the workspace is. Not here: what is in it (`layers`, `tidy`).

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::command;

/// The folder of the workspace's `Cargo.toml`.
#[must_use]
pub fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_path_buf()
}

/// Where guest images are kept: below `target/`, so that `cargo clean` removes them.
#[must_use]
pub fn guest_dir() -> PathBuf {
    root().join("target").join("guest")
}

/// What `cargo metadata --no-deps` says about the workspace.
///
/// # Errors
/// If cargo fails or its answer is not JSON.
pub fn metadata() -> Result<serde_json::Value> {
    let text = command::output(
        Command::new(cargo()).args(["metadata", "--no-deps", "--format-version", "1"]).current_dir(root()),
    )?;
    serde_json::from_str(&text).context("cargo metadata's answer is not JSON")
}

/// Where cargo puts what it builds here.
///
/// # Errors
/// If cargo cannot say.
pub fn build_dir() -> Result<PathBuf> {
    let metadata = metadata()?;
    let dir = metadata["target_directory"].as_str().context("cargo metadata names no target_directory")?;
    Ok(PathBuf::from(dir))
}

/// The cargo that runs us, or the one in PATH.
#[must_use]
pub fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned())
}
