//! `cargo xtask deb`: builds the Debian package from the built program and the files in packaging/.
//!
//! `program → staging folder (program, manual, units, configuration, completions, documents) → dpkg-deb → bareblk_…_amd64.deb`
//!
//! - Needs only dpkg, and no root: dpkg-deb writes the owners.
//! - The same commit always gives the same package: file times are the commit's.
//! - Installation starts nothing and an upgrade restarts nothing, because guests use the disks.
//!
//! `program.rs`: building. `staging.rs`: where each file goes. `control.rs`: dpkg's metadata. Not here: the
//! units.

mod control;
pub(crate) mod program;
mod staging;

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use xtask::{command, packages, workspace};

use program::Profile;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder for the package [default: target/debian]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Package the unoptimised program, to test the package itself
    #[arg(long)]
    dev: bool,
    /// Package this program instead of building one
    #[arg(long, value_name = "PATH", conflicts_with = "dev")]
    program: Option<PathBuf>,
    /// Maintainer of the package
    #[arg(long, value_name = "NAME <MAIL>")]
    maintainer: Option<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if packages::find_program("dpkg-deb").is_none() {
        bail!("no dpkg-deb here: it makes the package (Debian has it in `dpkg`)");
    }
    let program = match &args.program {
        Some(program) => program.clone(),
        None => program::build(if args.dev { Profile::Dev } else { Profile::Release })?,
    };
    let out = match &args.out {
        Some(out) => out.clone(),
        None => workspace::build_dir()?.join("debian"),
    };
    std::fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let about = control::About::read(args.maintainer.clone(), &program)?;
    let staged = staging::stage(&program, &about)?;
    control::write(staged.path(), &about)?;
    staging::set_times(staged.path(), about.time_s)?;
    let package = out.join(about.file_name());
    let mut build = Command::new("dpkg-deb");
    build.args(["--build", "--root-owner-group", "-Zxz"]).arg(staged.path()).arg(&package);
    command::output(build.env("SOURCE_DATE_EPOCH", about.time_s.to_string()))?;
    println!("{}", package.display());
    Ok(())
}
