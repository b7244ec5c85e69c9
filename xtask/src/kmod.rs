//! `cargo xtask kmod`: builds the kernel module `vhost_blk` (`kmod/vhost_blk/`) and tests it in an emulated guest.
//!
//! `headers, kernel, vhost.h (kmod/packages.rs) → make → static test program → guest → ok and FAIL lines`
//!
//! Everything is below `target/kmod`; nothing is installed, and this machine's kernel never loads the module.

mod packages;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use xtask::guest::{GuestImage, GuestOutput, Vm};
use xtask::{command, workspace};

use packages::Kernel;

/// Modules of the distribution that the tests need; `modules_for` of the guest adds what they depend on.
const MODULES: &[&str] = &["configfs", "null_blk", "brd", "loop", "vhost"];

const TIMEOUT: Duration = Duration::from_secs(900);

/// Options of `cargo xtask kmod`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Run only tests whose names begin so
    only: Vec<String>,
    /// Only build the module, and check the layout of vhost's structures
    #[arg(long)]
    build: bool,
    /// Run more rounds of the random tests
    #[arg(long)]
    long: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let start = Instant::now();
    let cache = workspace::root().join("target/kmod");
    fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
    let _held_until_return = workspace::lock(&cache)?;
    let kernel = packages::prepare(&cache, &mut |step| println!("{step}"))?;
    let module = build_module(&kernel)?;
    println!("built for {} in {:.1} s", kernel.release, start.elapsed().as_secs_f64());
    if args.build {
        return Ok(());
    }
    let test = build_test(&kernel)?;
    let image = GuestImage::of_unpacked(&kernel.dir, "guest", &kernel.tree(), MODULES)?;
    let output = Vm::new(&image)
        .memory_mib(1024)
        .file(&module, "/vhost_blk.ko")
        .file(&test, "/vhost-blk-test")
        .script(&script(args)?)
        .timeout(TIMEOUT)
        .run()?;
    report(&kernel, &output, &cache)
}

fn sources() -> PathBuf {
    workspace::root().join("kmod/vhost_blk")
}

/// Builds in a copy of the sources, and compares the layout of vhost's structures.
fn build_module(kernel: &Kernel) -> Result<PathBuf> {
    let build = kernel.dir.join("build");
    let _ = fs::remove_dir_all(&build);
    fs::create_dir_all(&build)?;
    for entry in fs::read_dir(sources())? {
        let path = entry?.path();
        if path.is_file() {
            fs::copy(&path, build.join(path.file_name().unwrap_or_default()))?;
        }
    }
    let mut make = Command::new("make");
    make.arg("-C").arg(&build).args(kernel.make_variables());
    let (path, libraries) = kernel.pahole_environment();
    command::output(make.env("PATH", path).env("LD_LIBRARY_PATH", libraries))?;
    Ok(build.join("vhost_blk.ko"))
}

fn build_test(kernel: &Kernel) -> Result<PathBuf> {
    let program = kernel.dir.join("vhost-blk-test");
    let mut cc = Command::new("gcc");
    cc.args(["-O2", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing", "-static", "-pthread", "-o"]);
    cc.arg(&program);
    for entry in fs::read_dir(sources().join("test"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "c") {
            cc.arg(path);
        }
    }
    command::output(&mut cc)?;
    Ok(program)
}

fn script(args: &Args) -> Result<String> {
    let path = sources().join("test/guest.sh");
    let tests = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let is_name = |name: &String| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    if let Some(name) = args.only.iter().find(|name| !is_name(name)) {
        bail!("{name:?} is not the beginning of a test's name");
    }
    let only = args.only.join(" ");
    let long = if args.long { "export LONG=1\n" } else { "" };
    Ok(format!("{long}MODULE=/vhost_blk.ko TEST=/vhost-blk-test ONLY='{only}'\n{tests}"))
}

fn report(kernel: &Kernel, output: &GuestOutput, cache: &Path) -> Result<()> {
    let log = cache.join("console.log");
    fs::write(&log, &output.console)?;
    let shown =
        |line: &&str| line.starts_with("ok ") || line.starts_with("FAIL ") || line.contains(" passed, ");
    output.console.lines().filter(shown).for_each(|line| println!("{line}"));
    println!(
        "kernel {}, guest {:.0} s, console in {}",
        kernel.release,
        output.wall.as_secs_f64(),
        log.display()
    );
    if output.exit_code != Some(0) {
        bail!("the module's tests failed (exit status of the guest: {:?})", output.exit_code);
    }
    Ok(())
}
