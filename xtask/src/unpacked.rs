//! Programs for tests from Debian packages that are unpacked below `target/`, and not installed because their packages
//! would start a service.

use std::fs;
use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::{guest, packages, workspace};

/// The path of a program of `package`: the installed one, or one from the package, which the first call downloads.
/// `None` on a machine without apt-get.
///
/// # Errors
/// apt-get cannot download the package, or the package does not contain the program.
pub fn program(package: &str, name: &str) -> Result<Option<PathBuf>> {
    if let Some(installed) = packages::find_program(name) {
        return Ok(Some(installed));
    }
    if packages::find_program("apt-get").is_none() {
        return Ok(None);
    }
    let cache = workspace::root().join("target/unpacked");
    fs::create_dir_all(&cache)?;
    let _held_until_return = workspace::lock(&cache)?;
    let folder = cache.join(package);
    if !folder.is_dir() {
        packages::make_available(&[package])?;
        fs::rename(guest::unpack_package(&cache, package)?, &folder)?;
    }
    let program = folder.join("usr/bin").join(name);
    if !program.is_file() {
        bail!("the package {package} does not contain usr/bin/{name}");
    }
    Ok(Some(program))
}
