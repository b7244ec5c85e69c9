//! What a hostile guest, front-end, control client or file may send, each as a function of bytes.
//!
//! `bytes (libFuzzer's, or a test's) → Target::run → returns, or panics and says what is wrong`
//!
//! - One body for both: `fuzz/` has the programs for libFuzzer, `tests/smoke.rs` repeats the seeds and changes them.
//! - The same bytes do the same, on any machine; nothing is left behind by a run that the next one sees.
//! - A panic is the verdict: that is how both callers hear of it.
//!
//! How to run them: docs/fuzzing.md. Not here: starting libFuzzer (`cargo xtask fuzz`), the seeds themselves
//! (`fuzz/seeds`).
#![forbid(unsafe_code)]
// A verdict is a panic, here and nowhere else.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod input;

mod guest;

mod chains;

mod requests;

mod vhost_user;

mod control;

mod config;

mod logs;

mod take_over;

/// One of the ways in.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// As on the command line, and the folder of its seeds.
    pub name: &'static str,
    /// Panics if something is wrong.
    pub run: fn(&[u8]),
    /// Names and contents of the seeds in the tree.
    pub seeds: fn() -> Vec<(String, Vec<u8>)>,
}

/// In the order of a request: ring, request, session, then what operators write, then what a server left behind or hands on.
pub const TARGETS: [Target; 7] = [
    Target { name: "chains", run: chains::run, seeds: chains::seeds },
    Target { name: "requests", run: requests::run, seeds: requests::seeds },
    Target { name: "vhost_user", run: vhost_user::run, seeds: vhost_user::seeds },
    Target { name: "control", run: control::run, seeds: control::seeds },
    Target { name: "config", run: config::run, seeds: config::seeds },
    Target { name: "logs", run: logs::run, seeds: logs::seeds },
    Target { name: "take_over", run: take_over::run, seeds: take_over::seeds },
];

/// By its name.
#[must_use]
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|target| target.name == name)
}

/// One run of the target of that name.
///
/// # Panics
/// If the target says that something is wrong, or there is none of that name.
pub fn run(name: &str, bytes: &[u8]) {
    (target(name).expect("a target").run)(bytes);
}
