//! The parts of `qspinlock` at the smallest size: every lock is tried, every drawing is written.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use lab::{Effort, Output, Quiet, RunResult, Setup, Stop};

/// Runs the experiment once and writes everything; returns the result and the names of the drawings.
fn smallest(name: &str) -> (RunResult, Vec<String>) {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let output = Output::prepare(place.path()).unwrap();
    let setup = Setup {
        scratch: output.scratch().to_path_buf(),
        storage: output.folder().to_path_buf(),
        effort: Effort { rounds: 1, seconds: 0.005, file_bytes: 0 },
        program: None,
        qemu_img: None,
        stop: Stop::default(),
    };
    let experiment = lab::find(name).unwrap();
    let result = lab::run(&experiment, &setup, "bareblk", true, &mut Quiet).unwrap();
    lab::write_all(output.folder(), &result).unwrap();
    let entries = std::fs::read_dir(output.folder().join(name)).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    (result, names)
}

/// In any workload: within 5 ms on a busy machine a lock may not be acquired even once.
fn assert_measured(result: &RunResult, column: &str, variant: &str) {
    let mut cells = result.cells.iter().filter(|cell| cell.variant == variant);
    assert!(cells.any(|cell| cell.summary(column).is_some()), "nothing in {column} of {variant}");
}

fn assert_fits_a_terminal(result: &RunResult) {
    let text = lab::table_text(result);
    let lines = text.lines().filter(|line| line.starts_with(['│', '┌']));
    let widest = lines.map(|line| line.chars().count()).max();
    assert!(widest.unwrap() <= 160, "{widest:?} columns: {text}");
}

#[test]
fn overcommit_asks_every_lock_with_every_number_of_threads() {
    let (result, drawings) = smallest("qspinlock-overcommit");
    for cell in &result.cells {
        let is_skipped = cell.unavailable.as_ref().is_some_and(|why| why.starts_with("skipped: "));
        assert!(is_skipped || cell.measures[0].samples[0].is_some(), "{cell:?}");
    }
    assert_measured(&result, "voluntary", "hybrid");
    assert_measured(&result, "halts", "fair");
    assert!(result.cell("over-4x", "std").unwrap().summary("halts").is_none(), "std has no counters");
    assert!(result.cell("over-64x", "ticket").is_none() && result.cell("over-64x", "hybrid").is_some());
    for drawing in ["throughput.svg", "dice.svg", "wait.svg", "throughput-beside.svg", "result.json"] {
        assert!(drawings.contains(&drawing.to_owned()), "no {drawing} in {drawings:?}");
    }
    assert_fits_a_terminal(&result);
}

#[test]
fn plane_measures_every_point_and_shows_them_as_a_map() {
    let (result, drawings) = smallest("qspinlock-plane");
    assert_eq!(result.cells.len(), 400);
    for cell in &result.cells {
        assert!(cell.unavailable.is_none() && cell.measures[0].samples[0].is_some(), "{cell:?}");
    }
    assert_measured(&result, "halts", "fair");
    assert!(result.cell("short-4x-0p", "parking_lot").unwrap().ratio.is_none(), "it is the baseline");
    assert!(drawings.contains(&"plane.svg".to_owned()), "{drawings:?}");
    let text = lab::table_text(&result);
    assert!(
        text.contains("held a few ns, pinned threads") && text.contains("pauses between two acquisitions")
    );
    assert_fits_a_terminal(&result);
}

#[test]
fn wakes_sets_each_lock_beside_the_one_that_wakes_ahead() {
    let (result, drawings) = smallest("qspinlock-wakes");
    assert!(result.cells.iter().all(|cell| cell.measures[0].samples[0].is_some()), "{:?}", result.cells);
    assert!(result.cell("over-4x", "fair").unwrap().ratio.is_none(), "it is the baseline");
    assert!(drawings.contains(&"halts.svg".to_owned()), "{drawings:?}");
    assert_fits_a_terminal(&result);
}

#[test]
fn timed_locks_that_are_held_give_up_and_say_how_late() {
    let (result, _) = smallest("qspinlock-timed");
    for cell in &result.cells {
        assert!(cell.unavailable.is_none(), "{cell:?}");
        assert!(cell.summary("late-p99").is_some_and(|late| late.median >= 0.0), "{cell:?}");
    }
    assert_fits_a_terminal(&result);
}

#[test]
fn lock_that_nobody_else_wants_has_a_cost() {
    let (result, drawings) = smallest("qspinlock-alone");
    assert!(result.cells.iter().all(|cell| cell.summary("cost").is_some_and(|cost| cost.median > 0.0)));
    assert!(drawings.contains(&"alone-cost.svg".to_owned()), "{drawings:?}");
}

#[test]
fn name_of_the_whole_stands_for_all_parts() {
    let parts = lab::find_all("qspinlock").unwrap();
    let names: Vec<_> = parts.iter().map(|part| part.declaration.name.as_str()).collect();
    assert!(names.contains(&"qspinlock-overcommit") && names.contains(&"qspinlock-wakes"), "{names:?}");
    assert_eq!(lab::find_all("kick").unwrap().len(), 1);
    assert!(lab::find_all("qspin").is_err());
}
