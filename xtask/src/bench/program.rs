//! The benchmark `device_half`: builds it, and counts its instructions with callgrind.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;
use xtask::{command, workspace};

/// Ring format, criterion's group, and extra arguments of the benchmark when it counts.
pub(super) const FORMATS: [(&str, &str, &[&str]); 2] =
    [("split", "device_half_4k_read", &[]), ("packed", "device_half_4k_read_packed", &["--packed"])];
/// With `--callgrind` the benchmark runs 1000 batches of 64 requests.
const COUNTED_REQUESTS: u64 = 64_000;

/// Cargo arguments that build the benchmark as it is measured.
pub(super) const RELEASE: &[&str] =
    &["bench", "--package", "blk_server", "--bench", "device_half", "--no-run"];
/// Cargo arguments that build the benchmark as the tests do, so that counting needs no separate build.
pub(super) const AS_IN_TESTS: &[&str] =
    &["test", "--workspace", "--all-features", "--bench", "device_half", "--no-run"];

/// Builds the benchmark of the sources in `root`, in `target` instead of the usual folder.
pub(super) fn build(root: &Path, words: &[&str], target: Option<&Path>) -> Result<PathBuf> {
    let mut cargo = Command::new(workspace::cargo());
    cargo.args(words).arg("--message-format=json").current_dir(root);
    cargo.envs(target.map(|target| ("CARGO_TARGET_DIR", target)));
    let messages = command::output(&mut cargo)?;
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut programs = messages.filter_map(|message| {
        let is_it = message["target"]["name"] == "device_half";
        message["executable"].as_str().filter(|_| is_it).map(PathBuf::from)
    });
    programs.next().with_context(|| format!("the package {} has no benchmark device_half", root.display()))
}

/// Counts the instructions per request at depth 64, between the kick and the call.
pub(super) fn instructions(program: &Path, args: &[&str]) -> Result<u64> {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    valgrind.args(["--toggle-collect=*InlineWorker*serve*"]).arg(program).arg("--callgrind").args(args);
    let output = valgrind.output().context("cannot start valgrind: run `cargo xtask setup`")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let all = collected(&said).with_context(|| format!("callgrind counted nothing:\n{said}"))?;
    Ok(all / COUNTED_REQUESTS)
}

fn collected(said: &str) -> Option<u64> {
    let line = said.lines().find(|line| line.contains("Collected :"))?;
    line.split_whitespace().next_back()?.parse().ok().filter(|&count| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callgrinds_count_is_found_and_nothing_is_none() {
        assert_eq!(collected("==1== Events    : Ir\n==1== Collected : 67077209\n"), Some(67_077_209));
        assert_eq!(collected("==1== Collected : 0\n"), None);
    }
}
