//! Builds the programs for the packages.

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

/// Builds both programs and returns their folder.
pub(crate) fn build(profile: Profile) -> Result<PathBuf> {
    let mut cargo = Command::new(workspace::cargo());
    cargo.args(["build", "--quiet", "--locked", "--package", "bareblk", "--package", "bareblk_bench"]);
    cargo.current_dir(workspace::root());
    let folder = match profile {
        Profile::Release => {
            cargo.arg("--release");
            "release"
        }
        Profile::Dev => "debug",
    };
    command::run(&mut cargo)?;
    Ok(workspace::build_dir()?.join(folder))
}
