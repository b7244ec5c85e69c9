//! What a step requires of the machine, and how to install it.

use std::path::Path;
use std::process::Command;

use anyhow::Result;
use xtask::{command, workspace};

use crate::setup;

/// A requirement of a step.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wants {
    /// At least one benchmark in the workspace.
    BenchTargets,
    /// The standard library for a different machine.
    Target(&'static str),
    /// A different version of Rust. If it is the one in use, the other steps already cover it.
    Toolchain(&'static str),
    /// Miri, the interpreter that finds undefined behaviour. Only nightly versions of Rust have it.
    Miri,
}

impl Wants {
    /// The reason why the step cannot run; `None` if it can.
    pub(super) fn missing(self) -> Result<Option<String>> {
        match self {
            Self::BenchTargets => {
                let found = has_bench_targets(&workspace::metadata()?);
                Ok((!found).then(|| "the workspace has no benchmarks".to_owned()))
            }
            Self::Target(target) => {
                let found = has_target(target)? || (setup::in_ci() && add_target(target));
                Ok((!found).then(|| format!("not installed: `rustup target add {target}`")))
            }
            Self::Toolchain(version) if is_in_use(version) => {
                Ok(Some(format!("Rust {version} is the one that the other steps use")))
            }
            Self::Toolchain(version) => {
                let found = has_toolchain(version) || (setup::in_ci() && add_toolchain(version));
                let add = format!("rustup toolchain install --profile minimal {version}");
                Ok((!found).then(|| format!("not installed: `{add}`")))
            }
            Self::Miri => {
                let found = has_miri() || (setup::in_ci() && command::output(&mut install_miri()).is_ok());
                let add = command::describe(&install_miri());
                Ok((!found).then(|| format!("not installed: `{add}`")))
            }
        }
    }
}

fn has_bench_targets(metadata: &serde_json::Value) -> bool {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let mut targets = packages.flat_map(|package| package["targets"].as_array().into_iter().flatten());
    targets
        .any(|target| target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "bench")))
}

fn has_target(target: &str) -> Result<bool> {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let sysroot = command::output(Command::new(rustc).args(["--print", "sysroot"]))?;
    Ok(Path::new(sysroot.trim()).join("lib/rustlib").join(target).join("lib").is_dir())
}

fn add_target(target: &str) -> bool {
    command::output(Command::new("rustup").args(["target", "add", target])).is_ok()
}

fn is_in_use(version: &str) -> bool {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let says = command::output(Command::new(rustc).arg("--version"));
    says.is_ok_and(|says| is_version(&says, version))
}

/// Parses `rustc 1.95.0 (59807616e 2026-04-14)`. A nightly or beta has a suffix, and is another version.
fn is_version(says: &str, version: &str) -> bool {
    says.split_whitespace().nth(1) == Some(version)
}

/// Reads rustup's list, because `rustup run` would install a missing version or fail.
fn has_toolchain(version: &str) -> bool {
    let list = command::output(Command::new("rustup").args(["toolchain", "list"]));
    list.is_ok_and(|list| lists_toolchain(&list, version))
}

/// A line is `1.88-x86_64-unknown-linux-gnu (default)`. To rustup, `1.88.0` is another toolchain.
fn lists_toolchain(list: &str, version: &str) -> bool {
    list.lines().any(|line| line.strip_prefix(version).is_some_and(|rest| rest.starts_with('-')))
}

fn add_toolchain(version: &str) -> bool {
    let install = ["toolchain", "install", "--profile", "minimal", version];
    command::output(Command::new("rustup").args(install)).is_ok()
}

fn has_miri() -> bool {
    let list = ["component", "list", "--toolchain", "nightly"];
    has_toolchain("nightly")
        && command::output(Command::new("rustup").args(list)).is_ok_and(|list| lists_miri(&list))
}

/// A line is `miri-x86_64-unknown-linux-gnu (installed)`, or without the word if it is not.
fn lists_miri(components: &str) -> bool {
    components.lines().any(|line| line.starts_with("miri-") && line.ends_with("(installed)"))
}

fn install_miri() -> Command {
    let mut command = Command::new("rustup");
    command.args(["toolchain", "install", "--profile", "minimal", "--component", "miri,rust-src", "nightly"]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_in_use_is_the_same_to_the_last_digit() {
        let says = "rustc 1.95.0 (59807616e 2026-04-14)\n";
        assert!(is_version(says, "1.95.0"));
        assert!(!is_version(says, "1.95"));
        assert!(!is_version("rustc 1.95.0-nightly (0000000 2026-01-01)", "1.95.0"));
        assert!(!is_version("", "1.95.0"));
    }

    #[test]
    fn target_that_is_not_installed_is_a_reason_to_skip() {
        assert!(!has_target("no-such-target").unwrap());
    }

    #[test]
    fn toolchain_is_found_by_its_whole_version() {
        let list = "stable-x86_64-unknown-linux-gnu (active, default)\n1.88-x86_64-unknown-linux-gnu\n";
        assert!(lists_toolchain(list, "1.88"));
        assert!(!lists_toolchain(list, "1.8") && !lists_toolchain("1.88.0-x86_64-unknown-linux-gnu", "1.88"));
    }

    #[test]
    fn miri_counts_when_it_is_installed() {
        assert!(lists_miri("cargo-x86_64 (installed)\nmiri-x86_64-unknown-linux-gnu (installed)\n"));
        assert!(!lists_miri("cargo-x86_64 (installed)\nmiri-x86_64-unknown-linux-gnu\n"));
    }

    #[test]
    fn bench_target_is_found_by_its_kind() {
        let with = |kind: &str| serde_json::json!({"packages": [{"targets": [{"kind": [kind]}]}]});
        assert!(has_bench_targets(&with("bench")));
        assert!(!has_bench_targets(&with("lib")));
    }
}
