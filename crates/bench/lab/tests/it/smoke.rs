//! Whole runs at the smallest size: every variant is tried, every file is written and can be read.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;

use lab::{Effort, LabError, Output, Quiet, RunResult, Setup, Stop};

fn smallest(output: &Output, rounds: usize) -> Setup {
    Setup {
        scratch: output.scratch().to_path_buf(),
        storage: output.folder().to_path_buf(),
        effort: Effort { rounds, seconds: 0.005, file_bytes: 4 << 20 },
        program: None,
        qemu_img: None,
        stop: Stop::default(),
    }
}

/// The folder is on a real file system, because older kernels support O_DIRECT only there.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn run_aio(out: &Path, rounds: usize) -> RunResult {
    run("aio", out, rounds)
}

fn run(name: &str, out: &Path, rounds: usize) -> RunResult {
    let output = Output::prepare(out).unwrap();
    let experiment = lab::find(name).unwrap();
    let result = lab::run(&experiment, &smallest(&output, rounds), "bareblk", true, &mut Quiet).unwrap();
    lab::write_all(output.folder(), &result).unwrap();
    result
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn every_variant_has_figures_or_a_reason_and_every_file_is_there() {
    let place = folder();
    let out = place.path().join("results");
    let result = run_aio(&out, 2);
    for cell in &result.cells {
        let has_figures = cell.measures[0].samples.iter().all(Option::is_some);
        assert_ne!(has_figures, cell.unavailable.is_some(), "{cell:?}");
    }
    let ring = result.cell("disk-randwrite", "none-io_uring").unwrap();
    assert!(ring.unavailable.is_none(), "{ring:?}");
    // On a busy machine, a round may be too short for one of them.
    assert!(ring.measures.iter().all(|measure| measure.samples.iter().any(Option::is_some)), "{ring:?}");
    assert_eq!(names(&out), ["aio", "report.html"]);
    let mut expected = vec!["result.json".to_owned(), "summary.json".to_owned()];
    for workload in &result.experiment.workloads {
        let plots = ["bandwidth", "latency", "ratio"];
        expected.extend(plots.map(|plot| format!("{}-{plot}.svg", workload.id)));
    }
    expected.sort();
    assert_eq!(names(&out.join("aio")), expected);
    let text = std::fs::read_to_string(out.join("aio/result.json")).unwrap();
    // Not `assert_eq!`, which would print both results.
    assert!(
        serde_json::from_str::<RunResult>(&text).unwrap() == result,
        "what was read is not what was written"
    );
    let page = std::fs::read_to_string(out.join("report.html")).unwrap();
    assert_eq!(page.matches("<svg").count(), 12);
}

#[test]
fn kick_runs_every_lock_and_policy_under_every_load_and_fills_every_column() {
    let place = folder();
    let out = place.path().join("results");
    let result = run("kick", &out, 1);
    for cell in &result.cells {
        assert!(cell.unavailable.is_none() && cell.measures[0].samples[0].is_some(), "{cell:?}");
    }
    // Not every cell has a result: within 5 ms on a busy machine, a lock that only spins may complete no request.
    for column in &result.experiment.columns {
        let filled = result.cells.iter().filter(|cell| cell.summary(&column.id).is_some()).count();
        assert!(filled > 0, "nothing in {}", column.id);
    }
    let alone = ["process-0us-1t", "process-1us-1t", "process-2us-1t", "process-5us-1t", "process-10us-1t"];
    let of_std = alone.map(|workload| result.cell(workload, "std-unlocked").unwrap());
    // Not every cell, for the same reason.
    let kicks: Vec<_> = of_std.iter().filter_map(|cell| cell.summary("kicks")).collect();
    assert!(!kicks.is_empty() && kicks.iter().all(|kicks| kicks.median == 1.0), "{kicks:?}");
    assert!(result.cell("process-2us-1t", "ticket-locked").unwrap().ratio.is_none(), "it is the baseline");
    let drawings = names(&out.join("kick"));
    for drawing in ["gain-by-cost.svg", "gain-by-threads.svg", "jobs-write-iops.svg", "result.json"] {
        assert!(drawings.contains(&drawing.to_owned()), "no {drawing} in {drawings:?}");
    }
    let text = lab::table_text(&result);
    let widest =
        text.lines().filter(|line| line.starts_with(['│', '┌'])).map(|line| line.chars().count()).max();
    // Figures of a busy machine have more digits.
    assert!(widest.unwrap() <= 160, "{widest:?} columns: {text}");
}

#[test]
fn aim7_runs_the_users_over_every_family_of_locks_and_tells_their_callers_apart() {
    let place = folder();
    let out = place.path().join("results");
    let result = run("qspinlock-aim7", &out, 1);
    for cell in &result.cells {
        assert!(cell.unavailable.is_none() && cell.measures[0].samples[0].is_some(), "{cell:?}");
    }
    let of = |workload: &str, variant: &str, column: &str| {
        result.cell(workload, variant).unwrap().summary(column).map(|found| found.median)
    };
    assert!(of("cores-500", "ticket", "jobs").unwrap() > 0.0);
    assert!(of("threads-2000", "hybrid", "jobs").unwrap() > 0.0);
    assert!(result.cell("threads-500", "native").is_none(), "it only spins");
    let callers = ["lru", "zone", "rq", "rwsem", "tasks"];
    for caller in callers {
        let (cpu, contended) = (format!("cpu-{caller}"), format!("contended-{caller}"));
        let has = |column: &str| result.cells.iter().any(|cell| cell.summary(column).is_some());
        assert!(has(&cpu) && has(&contended), "{caller} never took its lock, under no lock and no load");
    }
    // One figure is for all acquisitions, the others are per caller: it lies between theirs.
    for cell in &result.cells {
        let of = |column: &str| cell.summary(column).map(|found| found.median);
        let Some(all) = of("contended") else { continue };
        let shares: Vec<f64> =
            callers.iter().filter_map(|caller| of(&format!("contended-{caller}"))).collect();
        let (least, most) =
            (shares.iter().copied().fold(100.0, f64::min), shares.iter().copied().fold(0.0, f64::max));
        assert!((least - 1e-6..=most + 1e-6).contains(&all), "{all} % of all, of each {shares:?}");
        assert!((0.0..=100.0).contains(&least) && (0.0..=100.0).contains(&most), "{shares:?}");
    }
    let drawings = names(&out.join("qspinlock-aim7"));
    for drawing in ["jobs-on-cores.svg", "jobs-with-threads.svg", "threads-500-callers.svg", "result.json"] {
        assert!(drawings.contains(&drawing.to_owned()), "no {drawing} in {drawings:?}");
    }
}

#[test]
fn table_of_a_run_has_its_workloads_and_a_verdict() {
    let place = folder();
    let text = lab::table_text(&run_aio(place.path(), 1));
    assert!(text.contains("16k random writes, disk") && text.contains("undecided: "), "{text}");
}

#[test]
fn run_that_is_stopped_gives_nothing_and_leaves_nothing() {
    let place = folder();
    let out = place.path().join("results");
    let output = Output::prepare(&out).unwrap();
    let setup = smallest(&output, 1000);
    let (stop, experiment) = (setup.stop.clone(), lab::find("aio").unwrap());
    let stopper = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(300));
        stop.ask();
    });
    let ended = lab::run(&experiment, &setup, "bareblk", true, &mut Quiet);
    assert!(matches!(ended, Err(LabError::Interrupted)), "{ended:?}");
    stopper.join().unwrap();
    drop(output);
    assert!(!out.exists());
}

#[test]
fn results_that_were_there_stay_in_the_report() {
    let place = folder();
    let mut other = run_aio(place.path(), 1);
    other.experiment.name = "other".into();
    std::fs::create_dir(place.path().join("other")).unwrap();
    let text = serde_json::to_string(&other).unwrap();
    std::fs::write(place.path().join("other/result.json"), text).unwrap();
    run_aio(place.path(), 1);
    let page = std::fs::read_to_string(place.path().join("report.html")).unwrap();
    assert!(page.contains("id=\"aio\"") && page.contains("id=\"other\""));
}

#[test]
fn folder_with_a_broken_result_is_refused_before_anything_is_measured() {
    let place = folder();
    std::fs::create_dir(place.path().join("aio")).unwrap();
    std::fs::write(place.path().join("aio/result.json"), "not json").unwrap();
    let line = Output::prepare(place.path()).unwrap_err().to_string();
    assert!(line.contains("aio/result.json"), "{line}");
    assert_eq!(names(place.path()), ["aio"]);
}
