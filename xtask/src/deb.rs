//! `cargo xtask deb`: the Debian package, from the built program and the files in packaging/.
//!
//! `program → staging folder (program, manual, units, configuration, completions, documents) → dpkg-deb → bareblk_…_amd64.deb`
//!
//! - Nothing but dpkg is needed, and root is not: owners are written by dpkg-deb.
//! - Twice from the same commit is the same package: times are the commit's.
//! - Installing starts nothing, and an upgrade restarts nothing: guests use the disks.
//!
//! `program.rs`: building. `staging.rs`: which file goes where. `control.rs`: what dpkg reads. Not here: what the units say.

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
    /// Where the package goes [default: target/debian]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Package the unoptimised program, to try the package itself
    #[arg(long)]
    dev: bool,
    /// Package this program instead of building one
    #[arg(long, value_name = "PATH", conflicts_with = "dev")]
    program: Option<PathBuf>,
    /// Who answers for the package
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
