//! Fuzz targets for the inputs of a hostile guest, front-end, control client or file. Each target is a function of
//! bytes.
//!
//! `bytes (from libFuzzer or a test) → Target::run → returns, or panics with a message`
//!
//! - libFuzzer and the tests share the targets: `fuzz/` has the programs for libFuzzer, `tests/smoke.rs` runs the seeds
//!   and mutations of them.
//! - The same bytes have the same effect on any machine. A run leaves no state that affects the next.
//! - A target reports a failure by a panic.
//!
//! How to run them: docs/internals/fuzzing.md. `cargo xtask fuzz` starts libFuzzer.
#![forbid(unsafe_code)]
// A target reports a failure by a panic, unlike other code.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::OnceLock;

mod input;

mod guest;

mod scribbler;

mod chains;

mod requests;

mod vhost_user;

mod control;

mod config;

mod logs;

mod live_upgrade;

mod nbd;

mod qcow2;

/// One fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The target's name on the command line, and the name of its seeds' folder.
    pub name: &'static str,
    /// Runs the target once. Panics on a failure.
    pub run: fn(&[u8]),
    /// Like `run`, while a second thread writes to the memory that the code under test reads.
    pub run_with_second_thread: Option<fn(&[u8])>,
    /// Like `run`, but slower: with all threads of a real server.
    pub run_with_real_server: Option<fn(&[u8])>,
    /// Names and contents of the generated seeds.
    pub seeds: fn() -> Vec<(String, Vec<u8>)>,
}

impl Target {
    const fn new(name: &'static str, run: fn(&[u8]), seeds: fn() -> Vec<(String, Vec<u8>)>) -> Self {
        Self { name, run, run_with_second_thread: None, run_with_real_server: None, seeds }
    }

    const fn with_second_thread(mut self, run: fn(&[u8])) -> Self {
        self.run_with_second_thread = Some(run);
        self
    }

    const fn with_real_server(mut self, run: fn(&[u8])) -> Self {
        self.run_with_real_server = Some(run);
        self
    }

    /// The function for `mode`, if the target has it.
    #[must_use]
    pub fn runs(&self, mode: Mode) -> Option<fn(&[u8])> {
        match mode {
            Mode::Alone => Some(self.run),
            Mode::SecondThread => self.run_with_second_thread,
            Mode::RealServer => self.run_with_real_server,
        }
    }
}

/// How a target runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// On one thread.
    Alone,
    /// With a second thread that writes to shared memory.
    SecondThread,
    /// With the server's own threads.
    RealServer,
}

/// Names the mode, for programs whose only input is bytes: `second-thread` or `real-server`.
pub const MODE_VARIABLE: &str = "BAREBLK_FUZZ_MODE";

fn mode_from_environment() -> Mode {
    match std::env::var(MODE_VARIABLE).as_deref() {
        Err(_) => Mode::Alone,
        Ok("second-thread") => Mode::SecondThread,
        Ok("real-server") => Mode::RealServer,
        Ok(other) => panic!("{MODE_VARIABLE}={other}: use second-thread or real-server"),
    }
}

/// All targets: first in the order of a request (ring, request, session), then the operator's input, then data passed
/// between servers, then what other machines send, then images.
pub const TARGETS: [Target; 9] = [
    Target::new("chains", chains::run, chains::seeds).with_second_thread(chains::run_with_second_thread),
    Target::new("requests", requests::run, requests::seeds)
        .with_second_thread(requests::run_with_second_thread),
    Target::new("vhost_user", vhost_user::run, vhost_user::seeds)
        .with_second_thread(vhost_user::run_with_second_thread)
        .with_real_server(vhost_user::run_with_real_server),
    Target::new("control", control::run, control::seeds),
    Target::new("config", config::run, config::seeds),
    Target::new("logs", logs::run, logs::seeds).with_second_thread(logs::run_with_second_thread),
    Target::new("live_upgrade", live_upgrade::run, live_upgrade::seeds),
    Target::new("nbd", nbd::run, nbd::seeds),
    Target::new("qcow2", qcow2::run, qcow2::seeds),
];

/// The target with this name.
#[must_use]
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|target| target.name == name)
}

/// Runs the target of this name once, in the mode that [`MODE_VARIABLE`] names.
///
/// # Panics
/// The target fails, does not exist, or lacks this mode.
pub fn run(name: &str, bytes: &[u8]) {
    static MODE: OnceLock<Mode> = OnceLock::new();
    let mode = *MODE.get_or_init(mode_from_environment);
    target(name).and_then(|target| target.runs(mode)).expect("a target with this mode")(bytes);
}
