//! Builds the program for the package.
//!
//! Not here: where it goes in the package (`staging.rs`).

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;
use xtask::{command, workspace};

/// The build profile.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Profile {
    Release,
    Dev,
}

/// Builds the program and returns its path.
pub(crate) fn build(profile: Profile) -> Result<PathBuf> {
    let mut cargo = Command::new(workspace::cargo());
    cargo.args(["build", "--quiet", "--locked", "--package", "bareblk"]).current_dir(workspace::root());
    let folder = match profile {
        Profile::Release => {
            cargo.arg("--release");
            "release"
        }
        Profile::Dev => "debug",
    };
    command::run(&mut cargo)?;
    Ok(workspace::build_dir()?.join(folder).join("bareblk"))
}
