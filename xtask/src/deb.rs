//! `cargo xtask deb`: builds the two Debian packages from the built programs and the files in packaging/.
//!
//! `program → staging folder (program, manual, units, configuration, completions, documents) → dpkg-deb → NAME_…_amd64.deb`
//!
//! - Needs only dpkg, and no root: dpkg-deb writes the owners.
//! - The same commit always gives the same package: file times are the commit's.
//! - Installation starts nothing and an upgrade restarts nothing, because guests use the disks.
//!
//! `package.rs`: what each package is. `program.rs`: building. `staging.rs`: where each file goes. `control.rs`: dpkg's
//! metadata.

mod control;
mod package;
pub(crate) mod program;
mod staging;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use xtask::{command, packages, workspace};

use package::Package;
use program::Profile;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder for the packages [default: target/debian]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Package unoptimised programs, which is enough to test the packages themselves
    #[arg(long)]
    dev: bool,
    /// Package the programs of this folder instead of building them
    #[arg(long, value_name = "DIR", conflicts_with = "dev")]
    programs: Option<PathBuf>,
    /// Maintainer of the packages
    #[arg(long, value_name = "NAME <MAIL>")]
    maintainer: Option<String>,
}

/// The packages, in an order in which dpkg can install them.
const PACKAGES: [&Package; 2] = [&package::SERVER, &package::BENCH];

pub(crate) fn run(args: &Args) -> Result<()> {
    let programs = match &args.programs {
        Some(folder) => folder.clone(),
        None => program::build(if args.dev { Profile::Dev } else { Profile::Release })?,
    };
    let out = match &args.out {
        Some(out) => out.clone(),
        None => workspace::build_dir()?.join("debian"),
    };
    for package in make(&programs, &out, args.maintainer.as_deref())? {
        println!("{}", package.display());
    }
    Ok(())
}

/// Makes both packages from the programs in the folder `programs`; returns the packages' paths.
pub(crate) fn make(programs: &Path, out: &Path, maintainer: Option<&str>) -> Result<Vec<PathBuf>> {
    if packages::find_program("dpkg-deb").is_none() {
        bail!("dpkg-deb, which makes the packages, is not installed: install the Debian package `dpkg`");
    }
    fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    PACKAGES.into_iter().map(|package| make_one(package, programs, out, maintainer)).collect()
}

fn make_one(
    package: &'static Package,
    programs: &Path,
    out: &Path,
    maintainer: Option<&str>,
) -> Result<PathBuf> {
    let about = control::About::read(package, maintainer, programs)?;
    let staged = staging::stage(package, programs, &about)?;
    control::write(staged.path(), &about)?;
    staging::set_times(staged.path(), about.time_s)?;
    let path = out.join(about.file_name());
    let mut build = Command::new("dpkg-deb");
    build.args(["--build", "--root-owner-group", "-Zxz"]).arg(staged.path()).arg(&path);
    command::output(build.env("SOURCE_DATE_EPOCH", about.time_s.to_string()))?;
    Ok(path)
}
