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

/// The crates of the packages' programs.
pub(crate) const CRATES: [&str; 3] = ["bareblk", "bareblk_monitor", "bareblk_bench"];

/// Builds all programs and returns their folder.
pub(crate) fn build(profile: Profile) -> Result<PathBuf> {
    let mut cargo = Command::new(workspace::cargo());
    cargo.args(["build", "--quiet", "--locked"]);
    cargo.args(CRATES.iter().flat_map(|name| ["--package", name]));
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
