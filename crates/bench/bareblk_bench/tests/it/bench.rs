//! `bareblk bench` as a process, on files and on a real server: its output, its ends, its refusals.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::rig::{DEADLINE, Place, Server, assert_says, bareblk, eventually, output, refusal, wrong_usage};

const MIB: u64 = 1 << 20;

fn bench(words: &[&str]) -> Command {
    let mut command = bareblk();
    command.arg("bench").args(words);
    command
}

fn on_file(file: &Path, words: &[&str]) -> Command {
    let mut command = bench(&["--file"]);
    command.arg(file).args(words);
    command
}

fn on_socket(socket: &Path, words: &[&str]) -> Command {
    let mut command = bench(&["--socket"]);
    command.arg(socket).args(words);
    command
}

/// A server with a new image of 4 MiB.
fn server(place: &Place) -> Server {
    Server::start(place.serve(&place.image("disk.raw", 4 * MIB), "s"))
}

fn json(command: Command) -> Value {
    serde_json::from_str(&output(command)).unwrap()
}

/// The result, and the last line of standard error.
fn failure(command: Command) -> (String, String) {
    let run = assert_cmd::Command::from_std(command).timeout(DEADLINE).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let line = text(run.stderr);
    assert_eq!(run.status.code(), Some(1), "{line}");
    (text(run.stdout), line.lines().last().unwrap().to_owned())
}

// ---- measurements

#[test]
fn job_on_a_file_reads_each_block_of_its_size_once_per_loop() {
    let place = Place::new();
    let file = place.image("disk.raw", 4 * MIB);
    let words = ["--rw=read", "--bs=4k", "--size=1m", "--loops=2", "--iodepth=8", "--json"];
    let json = json(on_file(&file, &words));
    let read = &json["jobs"][0]["read"];
    assert_eq!((read["total_ios"].as_u64(), read["io_bytes"].as_u64()), (Some(512), Some(2 * MIB)));
    assert_eq!(json["jobs"][0]["write"]["total_ios"].as_u64(), Some(0));
}

#[test]
fn synchronous_engine_has_one_request_in_flight_and_says_so() {
    let place = Place::new();
    let file = place.image("disk.raw", MIB);
    let command = on_file(&file, &["--rw=randread", "--ioengine=psync", "--iodepth=8", "--json"]);
    let run = assert_cmd::Command::from_std(command).timeout(DEADLINE).assert().success();
    let json: Value = serde_json::from_slice(&run.get_output().stdout).unwrap();
    assert_eq!(json["jobs"][0]["iodepth_level"]["1"].as_f64(), Some(100.0));
    let note = String::from_utf8(run.get_output().stderr.clone()).unwrap();
    assert_says(&note, &["note: psync", "iodepth=8 becomes 1"]);
}

#[test]
fn every_engine_of_fios_writes_what_the_next_one_verifies() {
    let place = Place::new();
    let file = place.image("disk.raw", 4 * MIB);
    for (writer, reader) in [("io_uring", "libaio"), ("libaio", "psync"), ("psync", "posixaio")] {
        let engine = format!("--ioengine={writer}");
        let words = ["--rw=randwrite", "--iodepth=4", "--verify=crc32c", "--fsync=64", &engine];
        assert_says(&output(on_file(&file, &words)), &["blocks read and correct", "sync percentiles"]);
        // Random writes leave gaps in the file, so a sequential read with verification needs a file that was written
        // sequentially.
        output(on_file(&file, &["--rw=write", "--bs=64k", "--verify=crc32c", &engine]));
        let engine = format!("--ioengine={reader}");
        output(on_file(&file, &["--rw=read", "--bs=64k", "--verify=crc32c", &engine]));
    }
}

#[test]
fn job_on_a_socket_tells_of_kicks_and_of_the_servers_processor_time() {
    let place = Place::new();
    let _server = server(&place);
    let words = ["--rw=randrw", "--rwmixread=70", "--iodepth=16", "--runtime=300ms"];
    let text = output(on_socket(&place.socket("s"), &words));
    assert_says(&text, &["read: IOPS=", "write: IOPS=", "clat percentiles", "cpu          : usr="]);
    assert_says(&text, &["CPU per IO   : client=", "server=", "kicks=", "sleeps="]);
}

#[test]
fn jobs_that_share_a_queue_lose_nothing_under_any_lock_and_kick() {
    let place = Place::new();
    let _server = server(&place);
    let locks = ["ticket", "std", "parking_lot"].map(|lock| ["locked", "unlocked"].map(|kick| (lock, kick)));
    for (lock, kick) in locks.into_iter().flatten() {
        let words = ["--lock", lock, "--kick", kick, "--jobs=3", "--queues=1", "--iodepth=8", "--bs=4k"];
        let mut command = on_socket(&place.socket("s"), &words);
        command.args(["--rw=randwrite", "--verify=crc32c", "--size=2m", "--json"]);
        let json = json(command);
        assert_eq!(json["jobs"][0]["write"]["total_ios"].as_u64(), Some(510), "{lock} {kick}");
        assert!(json["jobs"][0]["bareblk"]["verified_blocks"].as_u64() > Some(100), "{lock} {kick}: {json}");
    }
}

#[test]
fn jobs_with_a_queue_each_and_polling_ones_verify_what_they_wrote() {
    let place = Place::new();
    let _server = server(&place);
    for extra in [&["--queues=2"][..], &["--queues=2", "--poll"], &["--queues=1", "--poll"], &[]] {
        let mut command = on_socket(&place.socket("s"), &["--jobs=2", "--iodepth=8", "--rw=write"]);
        let text = output({
            command.args(["--verify=crc32c", "--fsync=32"]).args(extra);
            command
        });
        assert_says(&text, &["verify       : 1024 blocks read and correct"]);
    }
}

/// The job of the published "unlocked kick" change.
const KICK_JOB: &str = "\
[global]
group_reporting
norandommap
ioscheduler=noop
thread
bs=512
size=4MB
direct=1
numjobs=256
ioengine=aio
iodepth=64
loops=3
stonewall
[read]
rw=read
[write]
rw=write
[randread]
rw=randread
[randwrite]
rw=randwrite
";

#[test]
fn published_job_of_256_threads_runs_from_its_job_file_on_a_socket() {
    let place = Place::new();
    let image = place.image("disk.raw", 4 * MIB);
    // Filled first: in a hole, ext4 admits one write of less than a block at a time, so a thousand would crawl.
    std::fs::write(&image, vec![0; 4 << 20]).unwrap();
    std::fs::File::open(&image).unwrap().sync_all().unwrap();
    let _server = Server::start(place.serve(&image, "s"));
    let job = place.path("kick.fio");
    std::fs::write(&job, KICK_JOB).unwrap();
    let mut command = bench(&["--runtime=200ms", "--json", "--queues=1", "--socket"]);
    command.arg(place.socket("s")).arg(&job);
    let json = json(command);
    let jobs = json["jobs"].as_array().unwrap();
    let ios = |job: &Value| ["read", "write"].map(|rw| job[rw]["total_ios"].as_u64() > Some(0));
    let expected = [[true, false], [false, true], [true, false], [false, true]];
    assert_eq!(jobs.iter().map(ios).collect::<Vec<_>>(), expected);
    assert_eq!(json["global options"]["numjobs"], "256");
}

#[test]
fn comparison_of_two_files_gives_both_ratios_with_their_intervals() {
    let place = Place::new();
    let (a, b) = (place.image("a.raw", MIB), place.image("b.raw", MIB));
    let mut command = bench(&["--rw=randread", "--iodepth=4", "--runtime=600ms", "--rounds=6", "--compare"]);
    command.arg(format!("file:{}", a.display())).arg(&b);
    let text = output(command);
    assert_says(&text, &["A: file:", "a.raw", "B: file:", "b.raw", "rounds: 6", "96.9 % interval"]);
    assert_says(&text, &["IOPS: A=", "mean lat: A=", "ratio ", "exceeds the noise"]);
}

#[test]
fn socket_and_file_can_be_compared() {
    let place = Place::new();
    let _server = server(&place);
    let file = place.image("b.raw", 4 * MIB);
    let words = ["--rw=randread", "--iodepth=4", "--runtime=200ms", "--rounds=2", "--compare"];
    let mut command = bench(&words);
    command.arg(place.socket("s")).arg(&file);
    assert_says(&output(command), &["A: socket:", "B: file:", "smallest to largest", "too few rounds"]);
}

#[test]
fn socket_with_and_without_an_in_flight_log_can_be_compared() {
    let place = Place::new();
    let _server = server(&place);
    let words =
        ["--rw=randread", "--iodepth=4", "--runtime=200ms", "--rounds=2", "--inflight=off,on", "--compare"];
    let mut command = bench(&words);
    command.arg(place.socket("s")).arg(place.socket("s"));
    let text = output(command);
    assert_says(&text, &["without an in-flight log", "with an in-flight log", "rounds: 2"]);
}

// ---- corrupt data

/// Flips a bit of the byte.
fn damage(file: &Path, at: u64) {
    let file = std::fs::File::options().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn damaged_block_is_named_with_what_was_expected_and_found() {
    let place = Place::new();
    let file = place.image("disk.raw", MIB);
    output(on_file(&file, &["--rw=write", "--iodepth=8", "--verify=crc32c"]));
    output(on_file(&file, &["--rw=read", "--iodepth=8", "--verify=crc32c"]));
    damage(&file, 40960 + 1000);
    let (text, line) = failure(on_file(&file, &["--rw=read", "--iodepth=8", "--verify=crc32c"]));
    assert_says(&line, &["verify: block at offset 40960", "crc32c", "expected 0x", "found 0x"]);
    assert_says(&text, &["err= 5"]);
}

#[test]
fn block_that_went_to_another_place_is_found() {
    let place = Place::new();
    let file = place.image("disk.raw", MIB);
    output(on_file(&file, &["--rw=write", "--verify=crc32c"]));
    let handle = std::fs::File::options().read(true).write(true).open(&file).unwrap();
    let mut block = vec![0; 4096];
    handle.read_exact_at(&mut block, 8192).unwrap();
    handle.write_all_at(&block, 4096).unwrap();
    drop(handle);
    let (_, line) = failure(on_file(&file, &["--rw=read", "--verify=crc32c"]));
    assert_says(&line, &["block at offset 4096", "expected 4096", "found 8192"]);
}

// ---- ends of a run

/// Starts a run of ten minutes, and waits until its thread works.
fn long_run(mut command: Command) -> Child {
    command.args(["--runtime=600", "--rw=randread"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    eventually("it works", || working_thread(child.id()));
    child
}

/// The folder in /proc of the run's first thread.
fn working_thread(pid: u32) -> Option<std::path::PathBuf> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten();
    let mut folders = threads.map(|thread| thread.path());
    folders.find(|folder| std::fs::read_to_string(folder.join("comm")).is_ok_and(|name| name == "bench-0\n"))
}

/// Interrupts the run once its standard error contains `wanted`. Returns its exit status and standard error.
fn interrupted_once_it_says(mut child: Child, wanted: &str) -> (ExitStatus, String) {
    let (mut errors, mut text) = (BufReader::new(child.stderr.take().unwrap()), String::new());
    while !text.contains(wanted) {
        assert_ne!(errors.read_line(&mut text).unwrap(), 0, "it ended without: {text}");
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    errors.read_to_string(&mut text).unwrap();
    (child.wait().unwrap(), text)
}

#[test]
fn interrupt_ends_a_run_with_its_result_so_far() {
    let place = Place::new();
    let child = long_run(on_file(&place.image("disk.raw", MIB), &[]));
    std::thread::sleep(std::time::Duration::from_secs(2));
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let ended = child.wait_with_output().unwrap();
    let text = String::from_utf8(ended.stdout).unwrap();
    assert_eq!(ended.status.code(), Some(130), "{text}");
    assert_says(&text, &["read: IOPS=", "interrupted: this is the result so far"]);
}

#[test]
fn threads_are_bound_to_the_cpus_given() {
    let place = Place::new();
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let cpu = (0..1024).rev().find(|&cpu| allowed.is_set(cpu)).unwrap();
    let mut child = long_run(on_file(&place.image("disk.raw", MIB), &["--pin", &cpu.to_string()]));
    let bound = eventually("it is bound", || {
        let status = std::fs::read_to_string(working_thread(child.id())?.join("status")).ok()?;
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim().to_owned();
        (list == cpu.to_string()).then_some(list)
    });
    assert_eq!(bound, cpu.to_string());
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    child.wait().unwrap();
}

#[test]
fn back_end_that_dies_ends_the_run_with_an_error() {
    let place = Place::new();
    let server = server(&place);
    let child = long_run(on_socket(&place.socket("s"), &["--iodepth=8"]));
    server.kill();
    let ended = child.wait_with_output().unwrap();
    let line = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{line}");
    assert_says(&line, &["disconnected", "the run does not wait for the back-end: use --reconnect"]);
}

#[test]
fn back_end_that_hangs_ends_the_run_with_the_request_it_did_not_answer() {
    let place = Place::new();
    let server = server(&place);
    let child = long_run(on_socket(&place.socket("s"), &["--iodepth=8", "--deadline=1"]));
    server.signal(Signal::STOP);
    let ended = child.wait_with_output().unwrap();
    let line = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{line}");
    assert_says(&line, &["read at offset", "not answered for 1 s"]);
}

#[test]
fn back_end_that_comes_back_is_waited_for_and_the_run_goes_on() {
    let place = Place::new();
    let first = server(&place);
    let child = long_run(on_socket(&place.socket("s"), &["--iodepth=8", "--reconnect=300"]));
    first.kill();
    let _second = Server::start(place.serve(&place.path("disk.raw"), "s"));
    let (status, text) = interrupted_once_it_says(child, "the back-end is back after");
    assert_eq!(status.code(), Some(130), "{text}");
    assert_says(&text, &["the back-end disconnected", "from its in-flight log"]);
}

#[test]
fn back_end_that_comes_back_to_a_run_without_a_log_is_sent_everything_again() {
    let place = Place::new();
    let first = server(&place);
    let words = ["--iodepth=8", "--reconnect=300", "--inflight=off"];
    let child = long_run(on_socket(&place.socket("s"), &words));
    first.kill();
    let _second = Server::start(place.serve(&place.path("disk.raw"), "s"));
    let (_, text) = interrupted_once_it_says(child, "the back-end is back after");
    assert_says(&text, &["requests sent again"]);
}

// ---- refused arguments

#[test]
fn sockets_that_cannot_be_used_are_told_apart() {
    let place = Place::new();
    assert_says(&refusal(on_socket(&place.socket("none"), &[])), &["none", "does not exist"]);
    let file = place.image("disk.raw", MIB);
    assert_says(&wrong_usage(on_socket(&file, &[])), &["disk.raw", "is not a socket", "--file"]);
    drop(std::os::unix::net::UnixListener::bind(place.socket("dead")).unwrap());
    assert_says(&refusal(on_socket(&place.socket("dead"), &[])), &["dead", "refuses connections"]);
}

#[test]
fn queues_get_a_job_each_unless_jobs_says_otherwise() {
    let place = Place::new();
    let _server = server(&place);
    let jobs = |words: &[&str]| {
        let more = ["--runtime=100ms", "--group_reporting=0", "--json"];
        json(on_socket(&place.socket("s"), &[words, &more].concat()))["jobs"].as_array().unwrap().len()
    };
    assert_eq!((jobs(&["--queues=2"]), jobs(&["--queues=1", "--jobs=3"])), (2, 3));
}

#[test]
fn loads_that_do_not_fit_the_device_are_wrong_usage() {
    let place = Place::new();
    let _server = server(&place);
    let socket = place.socket("s");
    let line = |words: &[&str]| wrong_usage(on_socket(&socket, words));
    assert_says(&line(&["--size=1g"]), &["size=1g", "has 4m", "smaller"]);
    assert_says(&line(&["--offset=1g"]), &["offset=1g", "has 4m", "smaller offset"]);
    assert_says(&line(&["--bs=1000"]), &["bs=1000", "512"]);
    assert_says(&line(&["--iodepth=2000"]), &["iodepth=2000", "1024", "give iodepth=1024"]);
    assert_says(&line(&["--iodepth=64", "--queue-size=32"]), &["iodepth=64", "32"]);
    assert_says(&line(&["--jobs=100", "--queues=100"]), &["--queues 100", "64"]);
    assert_says(&line(&["--pin=4000"]), &["CPU 4000", "this process may use CPUs 0"]);
    assert_says(&line(&["--queues=2", "--jobs=1"]), &["queues=2", "jobs=1"]);
    assert_says(&line(&["--rw=trim"]), &["--rw", "randread"]);
}

#[test]
fn job_file_with_an_unknown_option_is_wrong_usage_with_its_place() {
    let place = Place::new();
    let job = place.path("job.fio");
    std::fs::write(&job, "[global]\nbs=4k\n[one]\nrw=read\nzonemode=zbd\n").unwrap();
    let mut command = on_file(&place.image("disk.raw", MIB), &[]);
    command.arg(&job);
    assert_says(&wrong_usage(command), &["job.fio", "line 5", "[one]", "'zonemode' is unknown", "rwmixread"]);
}

#[test]
fn job_file_that_is_no_text_or_never_ends_is_wrong_usage() {
    let place = Place::new();
    let (file, job) = (place.image("disk.raw", MIB), place.path("job.fio"));
    std::fs::write(&job, b"[a]\n\xff").unwrap();
    let line = |job: &Path| {
        let mut command = on_file(&file, &[]);
        command.arg(job);
        wrong_usage(command)
    };
    assert_says(&line(&job), &["job.fio", "byte 4 is not UTF-8"]);
    assert_says(&line(Path::new("/dev/zero")), &["/dev/zero", "more than 1048576 bytes"]);
}

#[test]
fn result_that_cannot_be_written_is_refused_before_the_run() {
    let place = Place::new();
    let file = place.image("disk.raw", MIB);
    let run = on_file(&file, &["--json=/no/dir/result.json"]).output().unwrap();
    assert_eq!((run.status.code(), run.stdout.len()), (Some(1), 0));
    assert_says(&String::from_utf8(run.stderr).unwrap(), &["--json /no/dir/result.json", "No such file"]);
}

#[test]
fn file_that_is_not_there_is_not_blamed_on_options_of_the_server() {
    let line = refusal(on_file(Path::new("/no/disk.raw"), &[]));
    assert!(
        line.contains("/no/disk.raw") && line.contains("does not exist") && !line.contains("--create"),
        "{line}"
    );
}

#[test]
fn options_of_files_are_wrong_usage_for_sockets() {
    let place = Place::new();
    let line = wrong_usage(on_socket(&place.socket("s"), &["--ioengine=psync"]));
    assert_says(&line, &["--ioengine", "only on files"]);
}

#[test]
fn options_of_sockets_and_missing_targets_are_wrong_usage() {
    let two = bench(&["--socket=/no", "--inflight=on,off"]);
    assert_says(&wrong_usage(two), &["--inflight", "--compare", "give on or off"]);
    let place = Place::new();
    let file = place.image("disk.raw", MIB);
    assert_says(&wrong_usage(on_file(&file, &["--kick=locked"])), &["--kick", "only on sockets"]);
    assert_says(&wrong_usage(bench(&["--rw=read"])), &["--socket PATH", "--file PATH", "--compare"]);
    assert_says(&wrong_usage(bench(&["--compare", "/no/a", "/no/b"])), &["/no/a", "socket:PATH"]);
}

#[test]
fn file_that_a_server_writes_to_is_in_use() {
    let place = Place::new();
    let server = server(&place);
    let line = refusal(on_file(&place.path("disk.raw"), &["--rw=randwrite"]));
    assert_says(&line, &["disk.raw", "in use by", &format!("pid {}", server.pid())]);
}
