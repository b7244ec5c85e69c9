//! Runs every target on its seeds, then on as many mutations of them as fit into a test. Needs no libFuzzer.
//!
//! - Each run uses the same inputs: the numbers come from a fixed seed.
//! - A failing input is written to a file, with the command that repeats it.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use fastrand::Rng;
use fuzz_targets::{Mode, TARGETS, Target, target};
use xtask::sizes::FUZZ_INPUTS;

/// Longest mutated input.
const MOST_BYTES: usize = 4096;

/// One target at a time: they count this process's descriptors, and a flag records panics of other threads.
static TURN: Mutex<()> = Mutex::new(());
static PANICKED: AtomicBool = AtomicBool::new(false);

fn folder(target: &Target) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../fuzz/seeds").join(target.name)
}

/// Sorted by name.
fn seeds(target: &Target) -> Vec<Vec<u8>> {
    let mut paths: Vec<_> =
        std::fs::read_dir(folder(target)).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| std::fs::read(path).unwrap()).collect()
}

fn run_one(target: &Target, mode: Mode, input: &[u8]) {
    let run = target.runs(mode).expect("a mode of this target");
    let outcome = catch_unwind(AssertUnwindSafe(|| run(input)));
    if outcome.is_err() || PANICKED.load(SeqCst) {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{}", target.name));
        std::fs::write(&path, input).unwrap();
        panic!(
            "input in {}; repeat it with `cargo xtask fuzz {}{} --repeat FILE`",
            path.display(),
            target.name,
            match mode {
                Mode::Alone => "",
                Mode::SecondThread => " --second-thread",
                Mode::RealServer => " --real-server",
            }
        );
    }
}

/// Mutates an input like a fuzzer without feedback: changes, removes or doubles bytes, or takes them from another seed.
fn changed(rng: &mut Rng, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut input = seeds[rng.usize(..seeds.len())].clone();
    for _ in 0..rng.usize(1..8) {
        let at = rng.usize(..=input.len());
        let len = rng.usize(..=(input.len() - at).min(16));
        match rng.u8(..8) {
            0 | 1 if at < input.len() => input[at] = rng.u8(..),
            2 if at < input.len() => input[at] ^= 1 << rng.u8(..8),
            3 if at < input.len() => input[at] = *rng.choice(&[0, 1, 0x7f, 0x80, 0xf0, 0xff]).unwrap(),
            4 => drop(input.drain(at..at + len)),
            5 => input.insert(at, rng.u8(..)),
            6 => {
                let part = input[at..at + len].to_vec();
                let to = rng.usize(..=input.len());
                input.splice(to..to, part);
            }
            _ => {
                let other = &seeds[rng.usize(..seeds.len())];
                let from = rng.usize(..=other.len());
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
        }
    }
    input.truncate(MOST_BYTES);
    input
}

fn survives(name: &str) {
    survives_in(name, Mode::Alone, FUZZ_INPUTS.now());
}

/// Runs that many mutations. With a second thread, each run of the same input may show another race.
fn survives_in(name: &str, mode: Mode, inputs: u32) {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // Also notices panics of a server's threads, which alone end no test.
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICKED.store(true, SeqCst);
        usual(info);
    }));
    PANICKED.store(false, SeqCst);
    let target = target(name).unwrap();
    let seeds = seeds(&target);
    seeds.iter().for_each(|seed| run_one(&target, mode, seed));
    let mut rng = Rng::with_seed(37);
    for _ in 0..inputs {
        run_one(&target, mode, &changed(&mut rng, &seeds));
    }
}

#[test]
fn chains_hold_against_changed_seeds() {
    survives("chains");
}

#[test]
fn requests_hold_against_changed_seeds() {
    survives("requests");
}

#[test]
fn sessions_hold_against_changed_seeds() {
    survives("vhost_user");
}

#[test]
fn sessions_of_a_server_with_threads_hold_against_changed_seeds() {
    survives_in("vhost_user", Mode::RealServer, FUZZ_INPUTS.now() / 16);
}

#[test]
fn nbd_client_holds_against_changed_seeds() {
    survives("nbd");
}

#[test]
fn qcow2_images_hold_against_changed_seeds() {
    survives("qcow2");
}

#[test]
fn chains_hold_beside_a_second_thread() {
    survives_in("chains", Mode::SecondThread, FUZZ_INPUTS.now() / 2);
}

#[test]
fn requests_hold_beside_a_second_thread() {
    survives_in("requests", Mode::SecondThread, FUZZ_INPUTS.now() / 4);
}

#[test]
fn sessions_hold_beside_a_second_thread() {
    survives_in("vhost_user", Mode::SecondThread, FUZZ_INPUTS.now() / 8);
}

#[test]
fn logs_hold_beside_a_second_thread() {
    survives_in("logs", Mode::SecondThread, FUZZ_INPUTS.now() / 2);
}

#[test]
fn control_lines_hold_against_changed_seeds() {
    survives("control");
}

#[test]
fn configurations_hold_against_changed_seeds() {
    survives("config");
}

#[test]
fn logs_hold_against_changed_seeds() {
    survives("logs");
}

#[test]
fn live_upgrades_hold_against_changed_seeds() {
    survives("live_upgrade");
}

#[test]
fn seeds_in_the_tree_are_those_that_the_targets_make_and_perhaps_more() {
    // A panic of this test would count as one of the target that runs at the same time.
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for target in TARGETS {
        for (name, bytes) in (target.seeds)() {
            let path = folder(&target).join(&name);
            let found = std::fs::read(&path).unwrap_or_default();
            assert!(
                found == bytes,
                "{} is out of date: cargo run -p fuzz_targets --bin fuzz_seeds",
                path.display()
            );
        }
    }
}
