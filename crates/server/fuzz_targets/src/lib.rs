//! What a hostile guest, front-end, control client or file may send, each as a function of bytes.
//!
//! `bytes (libFuzzer's, or a test's) → Target::run → returns, or panics and says what is wrong`
//!
//! - One body for both: `fuzz/` has the programs for libFuzzer, `tests/smoke.rs` repeats the seeds and changes them.
//! - The same bytes do the same, on any machine; nothing is left behind by a run that the next one sees.
//! - A panic is the verdict: that is how both callers hear of it.
//!
//! How to run them: docs/internals/fuzzing.md. Not here: starting libFuzzer (`cargo xtask fuzz`), the seeds themselves
//! (`fuzz/seeds`).
#![forbid(unsafe_code)]
// A verdict is a panic, here and nowhere else.
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

/// One of the ways in.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// As on the command line, and the folder of its seeds.
    pub name: &'static str,
    /// Panics if something is wrong.
    pub run: fn(&[u8]),
    /// The same while a second thread writes into the memory that the code under test reads.
    pub run_with_second_thread: Option<fn(&[u8])>,
    /// The same, slower, with all threads that there are elsewhere.
    pub run_with_real_server: Option<fn(&[u8])>,
    /// Names and contents of the seeds in the tree.
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

    /// What `mode` runs, if the target has it.
    #[must_use]
    pub fn runs(&self, mode: Mode) -> Option<fn(&[u8])> {
        match mode {
            Mode::Alone => Some(self.run),
            Mode::SecondThread => self.run_with_second_thread,
            Mode::RealServer => self.run_with_real_server,
        }
    }
}

/// In which of its ways a target runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// On one thread.
    Alone,
    /// Beside a thread that writes into shared memory.
    SecondThread,
    /// With the server's own threads.
    RealServer,
}

/// Names the mode for programs that take nothing but bytes: `second-thread` or `real-server`.
pub const MODE_VARIABLE: &str = "BAREBLK_FUZZ_MODE";

fn mode_from_environment() -> Mode {
    match std::env::var(MODE_VARIABLE).as_deref() {
        Err(_) => Mode::Alone,
        Ok("second-thread") => Mode::SecondThread,
        Ok("real-server") => Mode::RealServer,
        Ok(other) => panic!("{MODE_VARIABLE}={other}: second-thread and real-server are possible"),
    }
}

/// In the order of a request: ring, request, session, then what operators write, then what a server left behind or hands on.
pub const TARGETS: [Target; 7] = [
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
];

/// By its name.
#[must_use]
pub fn target(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|target| target.name == name)
}

/// One run of the target of that name, in the mode that [`MODE_VARIABLE`] names.
///
/// # Panics
/// If the target says that something is wrong, or there is none of that name, or it has no such mode.
pub fn run(name: &str, bytes: &[u8]) {
    static MODE: OnceLock<Mode> = OnceLock::new();
    let mode = *MODE.get_or_init(mode_from_environment);
    target(name).and_then(|target| target.runs(mode)).expect("a target with this mode")(bytes);
}
