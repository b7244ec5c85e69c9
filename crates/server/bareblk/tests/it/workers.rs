//! The program's worker threads: their number, CPUs, nice value and scheduling class, and invalid options.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::fs;

use crate::rig::{Place, Server, assert_says, eventually, refusal, wrong_usage};

const MIB: u64 = 1 << 20;
const SCHED_BATCH: &str = "3";

/// One worker thread: name, CPUs, nice value, scheduling class.
type Worker = (String, String, String, String);

fn workers(server: &Server) -> Vec<Worker> {
    let tasks = fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
    let mut workers: Vec<Worker> = tasks.filter_map(|task| worker(&task.unwrap().path())).collect();
    workers.sort();
    workers
}

fn worker(task: &std::path::Path) -> Option<Worker> {
    let read = |file: &str| fs::read_to_string(task.join(file)).ok();
    let name = read("comm")?.trim().to_owned();
    let (status, stat) = (read("status")?, read("stat")?);
    let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim().to_owned();
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    // Fields 19 and 41 of proc(5); the first field after the name is field 3.
    let (nice, class) = (fields.get(16)?.to_string(), fields.get(38)?.to_string());
    name.starts_with("bareblk-work-").then_some((name, cpus, nice, class))
}

/// The first CPU of this process.
fn own_cpu() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
    cpus.split(['-', ',']).next().unwrap().to_owned()
}

fn serve(place: &Place, args: &[&str]) -> std::process::Command {
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.args(args);
    command
}

#[test]
fn one_worker_serves_by_default_wherever_the_process_may_run() {
    let place = Place::new();
    let server = Server::start(serve(&place, &[]));
    let own = worker_like_this_process();
    assert_eq!(workers(&server), [("bareblk-work-0".into(), own, "0".into(), "0".into())]);
    assert!(!server.log().contains("worker started"), "{}", server.log());
}

fn worker_like_this_process() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    cpus.unwrap().trim().to_owned()
}

#[test]
fn workers_run_as_they_are_told_and_the_log_says_where() {
    let place = Place::new();
    let cpu = own_cpu();
    let args = ["--workers", "2", "--cpus", &cpu, "--worker-nice", "3", "--worker-class", "batch"];

    let server = Server::start(serve(&place, &args));

    let like = |name: &str| (name.to_owned(), cpu.clone(), "3".to_owned(), SCHED_BATCH.to_owned());
    assert_eq!(workers(&server), [like("bareblk-work-0"), like("bareblk-work-1")]);
    let log = server.log();
    let started: Vec<&str> = log.lines().filter(|line| line.contains("worker started")).collect();
    assert_eq!(started.len(), 2, "{log}");
    assert_says(started[0], &["worker=0", &format!("cpus=\"{cpu}\""), "nice=3", "class=batch"]);
    assert_says(&log, &["more workers than CPUs that they may use", "workers=2"]);
}

#[test]
fn cpus_alone_make_a_worker_for_each() {
    let place = Place::new();
    let server = Server::start(serve(&place, &["--cpus", &own_cpu()]));
    eventually("one worker", || (workers(&server).len() == 1).then_some(()));
    assert_eq!(workers(&server)[0].1, own_cpu());
    assert!(!server.log().contains("more workers"), "{}", server.log());
}

#[test]
fn workers_that_cannot_be_are_refused_before_an_image_is_made() {
    let place = Place::new();
    let image = place.path("new.raw");
    for (args, parts) in [
        (
            ["--cpus", "1023"],
            ["worker 0: CPU 1023", "CPU 1023 is offline or does not exist: the online CPUs are"],
        ),
        (["--worker-cgroup", "/no/such/group{}"], ["worker 0", "group0"]),
    ] {
        let mut command = place.serve(&image, "s");
        command.args(["--create", "1M"]).args(args);
        assert_says(&refusal(command), &parts);
        assert!(!image.exists() && !place.socket("s").exists());
    }
}

#[test]
fn arguments_that_say_nothing_sensible_are_wrong_usage() {
    let place = Place::new();
    for (args, part) in [
        (["--workers", "0"], "from 1 to 1024"),
        (["--cpus", "3-1"], "the smaller number must come first"),
        (["--cpus", "0-4294967295"], "the highest possible is 1023"),
        (["--cpus", ""], "the list contains no CPU"),
        (["--worker-nice", "fast"], "-20"),
        (["--worker-class", "fifo:0"], "1 to 99"),
        (["--worker-cgroup", "//"], "threaded group"),
    ] {
        assert_says(&wrong_usage(serve(&place, &args)), &[part]);
    }
}
