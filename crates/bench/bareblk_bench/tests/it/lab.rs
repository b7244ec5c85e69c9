//! `bareblk lab` as a process: its output, its refusals, the files that it leaves.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use xtask::packages::find_program;
use xtask::skip::{Reason, skip};

use crate::rig::{Place, assert_says, bareblk, eventually, output, refusal, wrong_usage};

fn run_aio(out: &Path) -> Command {
    let mut command = bareblk();
    command.args(["lab", "run", "aio", "--quick", "--out"]).arg(out);
    command
}

fn entries(folder: &Path) -> usize {
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

#[test]
fn list_names_each_experiment_with_its_question() {
    let mut command = bareblk();
    command.args(["lab", "list"]);
    let more = ["qspinlock-overcommit", "vhost-ssd", "2022", "locality", "submitted and completed", "2007"];
    let first = ["aio", "native speed?", "2008", "kick", "2012"];
    assert_says(&output(command), &[&first[..], &more[..]].concat());
}

#[test]
fn unknown_experiment_is_refused_with_the_known_ones() {
    let place = Place::new();
    let mut command = bareblk();
    command.args(["lab", "run", "nonsense", "--out"]).arg(place.path("out"));
    assert_says(&wrong_usage(command), &["'nonsense' is unknown", "aio"]);
    assert!(!place.path("out").exists());
}

#[test]
fn folder_for_results_that_cannot_be_made_is_named() {
    // Not even root can create a folder in a file.
    let place = Place::new();
    let file = place.image("file", 512);
    assert_says(&refusal(run_aio(&file.join("out"))), &["file/out", "--out", "Not a directory"]);
}

#[test]
fn missing_storage_is_named_and_nothing_is_left() {
    let place = Place::new();
    let mut command = run_aio(&place.path("out"));
    command.arg("--storage").arg(place.path("none"));
    assert_says(&refusal(command), &["none", "--storage", "No such file"]);
    assert!(!place.path("out").exists());
}

#[test]
fn rounds_and_seconds_outside_their_limits_are_refused() {
    let place = Place::new();
    let mut command = run_aio(&place.path("out"));
    command.args(["--rounds", "0"]);
    assert_says(&wrong_usage(command), &["--rounds", "0"]);
    let mut command = run_aio(&place.path("out"));
    command.args(["--seconds", "1e9"]);
    assert_says(&wrong_usage(command), &["--seconds", "0.001 to 3600"]);
}

#[test]
fn short_run_prints_a_table_and_where_the_report_is() {
    let place = Place::new();
    let mut command = run_aio(&place.path("out"));
    command.args(["--rounds", "1", "--seconds", "0.002"]);
    let text = output(command);
    assert_says(&text, &["bare metal, O_DIRECT", "cache=none, io_uring", "report: ", "report.html"]);
    assert_eq!(entries(&place.path("out")), 2);
    // The tests and the program are built in the same profile.
    assert_eq!(text.contains("This is a debug build"), cfg!(debug_assertions), "{text}");
}

/// An experiment starts and ends servers about sixty times.
const PATIENCE: Duration = Duration::from_secs(600);

/// Runs one short round of an experiment with server processes; returns the stored result.
fn run_with_servers(part: &str) -> lab::RunResult {
    run_for(part, "0.02")
}

fn run_for(part: &str, seconds: &str) -> lab::RunResult {
    run_in(&Place::new(), part, seconds)
}

fn run_in(place: &Place, part: &str, seconds: &str) -> lab::RunResult {
    let out = place.path("out");
    let mut command = bareblk();
    command.args(["lab", "run", part, "--quick", "--rounds", "1", "--seconds", seconds, "--out"]).arg(&out);
    command.env("XDG_CACHE_HOME", place.path("cache"));
    assert_cmd::Command::from_std(command).timeout(PATIENCE).assert().success();
    assert!(place.path("out/report.html").exists());
    let result = std::fs::read_to_string(out.join(part).join("result.json")).unwrap();
    serde_json::from_str(&result).unwrap()
}

/// Checks that every variant has figures, or names the program to install.
fn assert_measured(result: &lab::RunResult) {
    assert!(!result.cells.is_empty());
    for cell in &result.cells {
        match &cell.unavailable {
            Some(why) => assert!(why.contains("is not installed: apt install"), "{cell:?}"),
            // On a busy machine, fio may complete nothing in so short a time.
            None => {
                assert!(cell.variant.starts_with("host") || cell.measures[0].summary.is_some(), "{cell:?}")
            }
        }
    }
}

fn figure(result: &lab::RunResult, workload: &str, variant: &str, column: &str) -> f64 {
    let cell = result.cell(workload, variant).unwrap();
    cell.summary(column).unwrap_or_else(|| panic!("no {column}: {cell:?}")).median
}

#[test]
fn vhost_measures_a_disk_through_servers_that_are_processes() {
    let result = run_with_servers("vhost-ssd");
    assert_measured(&result);
    for column in ["iops", "cpu", "client-cpu", "latency", "p99"] {
        assert!(figure(&result, "randwrite", "bareblk-sleep", column) > 0.0, "{column}");
    }
}

#[test]
fn vhost_sets_one_request_beside_one_wake_up() {
    let result = run_with_servers("vhost-depth1");
    assert_measured(&result);
    assert!(figure(&result, "randread", "wake-up", "latency") > 0.0);
    let beside =
        &result.verdicts.iter().find(|verdict| verdict.target.contains("one wake-up")).unwrap().details;
    assert!(beside.iter().all(|line| line.contains("beside a wake-up by eventfd")), "{beside:?}");
}

#[test]
fn vhost_measures_every_queue_and_engine_on_the_ram_disk() {
    let result = run_with_servers("vhost-ram");
    assert_measured(&result);
    for engine in ["mmap-1", "mmap-2", "sync-2", "io_uring-2"] {
        assert!(figure(&result, "randwrite-8", engine, "iops") > 0.0, "{engine}");
    }
}

#[test]
fn vhost_looks_at_the_threads_and_memory_of_an_idle_server() {
    let result = run_with_servers("vhost-idle");
    assert_measured(&result);
    for variant in ["bareblk-1", "bareblk-2"] {
        assert!(figure(&result, "silent", variant, "resident") > 0.0);
        // The count itself is not asserted: a busy machine may preempt a worker.
        let _is_there = figure(&result, "silent", variant, "wakes");
    }
    let threads = |variant| figure(&result, "silent", variant, "threads");
    // The second worker, and the balancer, which runs with two workers.
    assert_eq!(threads("bareblk-2"), threads("bareblk-1") + 2.0);
}

#[test]
fn locality_measures_every_placement_on_one_device_and_on_two() {
    let result = run_with_servers("locality");
    assert_measured(&result);
    for workload in ["disk-1", "disk-2", "ram-2"] {
        for column in ["iops", "cpu", "p50", "p99", "p99.9"] {
            assert!(figure(&result, workload, "adaptive", column) > 0.0, "{workload}, {column}");
        }
        assert!(figure(&result, workload, "count-16", "batch") >= 1.0, "{workload}: nothing was handed over");
        assert!(figure(&result, workload, "no-reap", "lock-takes") > 0.0, "{workload}: no lock was taken");
        let queue = result.cell(workload, "queue").unwrap();
        assert!(queue.summary("batch").is_none() && queue.ratio.is_some(), "{queue:?}");
    }
    assert!(result.cell("disk-1", "aio-shared").unwrap().ratio.is_none(), "it is what AIO is compared with");
    assert!(result.cell("disk-1", "adaptive-one").is_none(), "one device has one completion worker");
}

#[test]
fn hostile_measures_nine_guests_beside_each_kind_of_a_tenth() {
    let mut result = run_with_servers("hostile");
    // Storage that hangs needs root, a loop device and a recent kernel; the cell says what was missing.
    let reason = |cell: &lab::CellResult| cell.unavailable.clone().filter(|why| why.contains("to freeze"));
    let no_hung = result.cell("ram", "hung").and_then(reason);
    if let Some(why) = &no_hung {
        let details = result.verdicts.iter().flat_map(|verdict| &verdict.details);
        assert!(details.into_iter().any(|line| line.contains(why.as_str())), "{why}");
        result.cells.retain(|cell| cell.variant != "hung");
    }
    assert_measured(&result);
    for cell in &result.cells {
        assert_eq!(cell.summary("unanswered").unwrap().median, 0.0, "{cell:?}");
    }
    for workload in ["ram", "disk"] {
        let hung = no_hung.is_none().then_some("hung");
        for attack in ["invalid", "loops", "kicks", "tables", "queues", "logs"].into_iter().chain(hung) {
            assert!(figure(&result, workload, attack, "attacks") > 0.0, "{workload}, {attack}");
            assert!(figure(&result, workload, attack, "worst") <= figure(&result, workload, attack, "iops"));
        }
        for attack in ["large", "queues"] {
            let latencies = ["p50", "p99", "max"].map(|column| figure(&result, workload, attack, column));
            assert!(latencies.is_sorted() && latencies[0] > 0.0, "{workload}, {attack}: {latencies:?}");
        }
        let busy = result.cell(workload, "busy").unwrap();
        assert!(busy.summary("attacks").is_none() && busy.ratio.is_none(), "{busy:?}");
    }
    assert!(result.cell("disk", "large-cached").unwrap().ratio.is_some());
    assert!(result.cell("disk", "busy-cached").unwrap().ratio.is_none());
}

#[test]
fn disks_measures_servers_with_up_to_a_thousand() {
    let result = run_with_servers("disks");
    assert_measured(&result);
    for variant in ["disks-10", "disks-100", "disks-1000", "disks-1000-busy"] {
        for column in ["iops", "cpu", "p99", "start", "control"] {
            assert!(figure(&result, "randread", variant, column) > 0.0, "{variant}, {column}");
        }
        // A difference of two processes' memory; with few disks it may be less than their noise.
        assert!(result.cell("randread", variant).unwrap().summary("memory").is_some(), "{variant}");
    }
    assert!(
        result.cell("randread", "disks-1").unwrap().summary("memory").is_none(),
        "it has no further disk"
    );
}

#[test]
fn limits_measures_what_clients_get_also_while_queues_move_and_the_server_is_replaced() {
    let result = run_for("limits", "0.2");
    assert!(result.cells.iter().all(|cell| cell.unavailable.is_none()), "{:?}", result.cells);
    for condition in ["quiet", "moved", "upgraded"] {
        for variant in ["iops-1000", "iops-20000-64", "bps-100M"] {
            let kept = figure(&result, condition, variant, "kept");
            // The clients wait for the limit, unless the machine is too slow to reach it.
            assert!(kept > 0.0 && kept < 400.0, "{condition}, {variant}: {kept}");
        }
        assert!(result.cell(condition, "iops-1000").unwrap().summary("worst-100ms").is_some());
    }
    for column in ["raise", "lower"] {
        assert!(result.cell("quiet", "change").unwrap().summary(column).is_some(), "{column}");
    }
    assert!(figure(&result, "quiet", "weights-4-1", "kept") > 0.0);
}

#[test]
fn qcow2_measures_images_beside_raw_files() {
    if find_program("qemu-img").is_none() {
        return skip(Reason::NoProgram("qemu-img".to_owned()), "");
    }
    let result = run_with_servers("qcow2");
    for variant in ["raw", "qcow2", "raw-2", "qcow2-2"] {
        for column in ["iops", "cpu", "client-cpu", "latency"] {
            assert!(figure(&result, "disk-read", variant, column) > 0.0, "{variant}, {column}");
        }
        // An older kernel's tmpfs has no O_DIRECT. On a busy machine, no copy may end in so short a time.
        for workload in ["disk-write", "disk-new", "disk-over"] {
            let cell = result.cell(workload, variant).unwrap();
            assert!(cell.unavailable.is_none(), "{cell:?}");
        }
    }
    assert!(figure(&result, "disk-read", "chain", "iops") > 0.0);
    assert!(result.cell("disk-new", "chain").is_none());
}

#[test]
fn remote_measures_exports_of_an_nbd_server() {
    if find_program("nbdkit").is_none() {
        return skip(Reason::NoProgram("nbdkit".to_owned()), "");
    }
    let result = run_with_servers("remote-nbd");
    assert_measured(&result);
    for workload in ["memory-read-1", "memory-write-32", "file-read-32", "file-write-1"] {
        for column in ["iops", "cpu", "client-cpu", "switches", "writes"] {
            assert!(figure(&result, workload, "bareblk", column) > 0.0, "{workload}, {column}");
        }
    }
}

/// A place whose cache has the packages of the cluster that `BAREBLK_CEPH` names, so that nothing is downloaded.
fn place_with_ceph() -> Option<Place> {
    let Some(packages) = std::env::var_os("BAREBLK_CEPH") else {
        skip(Reason::NoCeph, "");
        return None;
    };
    let place = Place::new();
    std::fs::create_dir_all(place.path("cache/bareblk")).unwrap();
    std::os::unix::fs::symlink(packages, place.path("cache/bareblk/ceph")).unwrap();
    Some(place)
}

#[test]
fn remote_measures_images_in_a_cluster_of_its_own_that_is_gone_afterwards() {
    let Some(place) = place_with_ceph() else { return };
    let result = run_in(&place, "remote-memstore", "0.1");
    assert_measured(&result);
    for variant in ["bareblk", "bareblk-2", "bareblk-2-2"] {
        for column in ["iops", "cpu", "client-cpu", "switches", "writes"] {
            assert!(figure(&result, "randwrite-32", variant, column) > 0.0, "{variant}, {column}");
        }
    }
    assert!(result.cell("randread-1", "bareblk-2").is_none(), "a queue would have no request");
    assert_eq!(entries(&place.path("out")), 2);
    // The daemons' environment names their cluster.
    let out = place.path("out").into_os_string().into_string().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let left = processes.filter(|process| {
        let environment = std::fs::read(process.path().join("environ")).unwrap_or_default();
        String::from_utf8_lossy(&environment).contains(&out)
    });
    assert_eq!(left.count(), 0);
}

#[test]
fn remote_counts_the_threads_of_disks_with_and_without_a_shared_connection() {
    let Some(place) = place_with_ceph() else { return };
    let result = run_in(&place, "remote-disks", "0.02");
    assert_measured(&result);
    let threads = |variant| figure(&result, "randread", variant, "threads-more");
    assert!(threads("disks-16") > 1.0 && threads("disks-16-shared") < 1.0);
}

#[test]
fn remote_measures_the_neighbour_of_a_disk_whose_server_is_in_trouble() {
    let Some(place) = place_with_ceph() else { return };
    let result = run_in(&place, "remote-neighbour", "0.05");
    assert_measured(&result);
    for workload in ["nbd-stopped", "nbd-killed", "osd-stopped"] {
        for column in ["p50", "p99", "other"] {
            assert!(figure(&result, workload, "trouble", column) > 0.0, "{workload}, {column}");
        }
    }
}

#[test]
fn remote_without_a_way_to_get_ceph_says_so_in_one_line() {
    let place = Place::new();
    let mut command = bareblk();
    command.args(["lab", "run", "remote-memstore", "--quick", "--out"]).arg(place.path("out"));
    // No folder contains apt-get, or packages of an earlier run.
    command.env("PATH", place.path("")).env("XDG_CACHE_HOME", place.path("cache"));
    assert_says(&refusal(command), &["no variant could be measured: no Ceph cluster", "`apt-get`"]);
}

#[test]
fn vhost_without_fio_and_the_peer_goes_on_and_says_how_to_get_them() {
    let place = Place::new();
    let mut command = bareblk();
    command.args(["lab", "run", "vhost-ssd", "--quick", "--seconds", "0.02", "--out"]).arg(place.path("out"));
    // The only folder in PATH contains no programs.
    command.env("PATH", place.path(""));
    let text = output(command);
    let peer = "qemu-storage-daemon is not installed: apt install";
    let client = "qemu-img with libblkio is not installed: apt install qemu-utils qemu-block-extra";
    assert_says(
        &text,
        &["fio is not installed: apt install fio", peer, "not measured: there is no baseline", client],
    );
    assert!(text.contains("│ bareblk, asleep"), "{text}");
}

/// Interrupts a run once it has a test file of at least `size_bytes` open below `folder`.
fn interrupt_with_file_in(folder: &Path, size_bytes: u64, place: &Place) {
    let out = place.path("out");
    let mut command = run_aio(&out);
    command.args(["--rounds", "1000"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let file = eventually("the file is filled", || test_file(child.id(), folder, size_bytes));
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(
        (ended.status.code(), said.as_str()),
        (Some(130), "bareblk: interrupted; no result was written\n")
    );
    assert!(ended.stdout.is_empty());
    assert!(!out.exists(), "{} entries are left", entries(&out));
    assert!(!file.parent().unwrap().exists(), "{} is left", file.display());
}

/// The test file among the open files of process `pid`.
fn test_file(pid: u32, folder: &Path, size_bytes: u64) -> Option<PathBuf> {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten();
    let mut paths = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    paths.find(|path| {
        let is_large = std::fs::metadata(path).is_ok_and(|metadata| metadata.len() >= size_bytes);
        path.starts_with(folder) && path.ends_with("disk.raw") && is_large
    })
}

#[test]
fn interrupt_while_the_file_is_filled_leaves_nothing() {
    let place = Place::new();
    interrupt_with_file_in(&place.path(""), 1, &place);
}

#[test]
fn interrupt_while_it_measures_leaves_nothing() {
    let place = Place::new();
    // Of its files, the run fills this one last; the first round follows.
    interrupt_with_file_in(Path::new("/dev/shm"), 256 << 20, &place);
}
