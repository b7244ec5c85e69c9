//! `cargo xtask setup`: names the missing Debian packages, asks once, installs them, and changes nothing else.

use std::io::{BufRead, IsTerminal, Write};

use anyhow::{Result, bail};
use xtask::packages::{self, Package};

/// Whether to ask before installing.
#[derive(Debug, Clone, Copy, clap::Args)]
#[group(skip)] // demo and test have a group of the same name
pub(crate) struct Args {
    /// Install missing packages without asking; CI=true in the environment has the same effect
    #[arg(long)]
    pub(crate) yes: bool,
}

/// Options of `cargo xtask setup`.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct ChoreArgs {
    /// Also install what `cargo xtask test --long` needs
    #[arg(long)]
    long: bool,
    #[command(flatten)]
    ask: Args,
}

/// Packages for `cargo xtask test --long`.
pub(crate) const LONG: &[&[Package]] = &[packages::NEEDED, packages::NEEDED_FOR_LONG];

/// Packages for the demo and for tests without `--long`.
pub(crate) const USUAL: &[&[Package]] = &[packages::NEEDED];

/// Packages for the demo with a Ceph cluster, whose own packages are not installed.
pub(crate) const CEPH: &[&[Package]] = &[packages::NEEDED, packages::NEEDED_FOR_CEPH];

pub(crate) fn run(args: &ChoreArgs) -> Result<()> {
    ensure(args.ask, if args.long { LONG } else { USUAL })?;
    println!("all packages that demo and test need are installed");
    Ok(())
}

/// Asks whether to install the missing packages of `wanted`, and installs them. Prints nothing if none is missing.
pub(crate) fn ensure(args: Args, wanted: &[&[Package]]) -> Result<()> {
    let missing = packages::missing(wanted);
    if missing.is_empty() {
        return Ok(());
    }
    eprintln!("These Debian packages are missing:\n{}", listing(&missing));
    if !(args.yes || in_ci() || confirmed()?) {
        bail!("nothing was installed");
    }
    packages::install(&missing)?;
    let still_missing = packages::missing(wanted);
    if !still_missing.is_empty() {
        bail!("installed, but their programs are still not found:\n{}", listing(&still_missing));
    }
    Ok(())
}

pub(crate) fn in_ci() -> bool {
    std::env::var("CI").is_ok_and(|value| value == "true" || value == "1")
}

fn listing(packages: &[Package]) -> String {
    let line = |package: &Package| format!("  {:<18} {}", package.name, package.purpose);
    packages.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn confirmed() -> Result<bool> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        bail!("cannot ask whether to install them, because standard input is no terminal: pass --yes");
    }
    eprint!("Install them with apt-get? [Y/n] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    stdin.lock().read_line(&mut answer)?;
    Ok(means_yes(&answer))
}

/// Enter means yes; end of input (no line at all) does not.
fn means_yes(answer: &str) -> bool {
    !answer.is_empty() && matches!(answer.trim().to_lowercase().as_str(), "" | "y" | "yes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enter_and_yes_mean_yes() {
        assert!(means_yes("\n") && means_yes("y\n") && means_yes("YES\n"));
    }

    #[test]
    fn no_and_end_of_input_mean_no() {
        assert!(!means_yes("n\n") && !means_yes("") && !means_yes("what\n"));
    }

    #[test]
    fn listing_names_package_and_purpose() {
        let fio = packages::NEEDED.iter().copied().find(|package| package.name == "fio").unwrap();
        assert!(listing(&[fio]).contains("fio                load"));
    }
}
