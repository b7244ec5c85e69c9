//! Records the built commit, so that results can be traced to code.
//!
//! Not required for the build: outside a git checkout, results say that the commit is unknown.

use std::path::Path;
use std::process::Command;

fn main() {
    let revision = git(&["describe", "--always", "--dirty", "--abbrev=12"]);
    println!("cargo::rustc-env=LAB_REVISION={}", revision.as_deref().unwrap_or("commit unknown"));
    let watched =
        ["HEAD", "logs/HEAD", "index"].iter().filter_map(|name| git(&["rev-parse", "--git-path", name]));
    for path in watched.filter(|path| Path::new(path).exists()) {
        println!("cargo::rerun-if-changed={path}");
    }
    println!("cargo::rerun-if-changed=build.rs");
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
