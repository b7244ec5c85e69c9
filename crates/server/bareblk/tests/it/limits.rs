//! Limits of IOPS and bandwidth through the real server: options, files, reloads and `bareblk ctl limit`.
//!
//! The upper bounds refer to the time that the client itself measures, so a busy machine cannot cause a failure.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::rig::{
    Place, Server, assert_says, bareblk, bench, ctl, eventually, ok, output, refusal, wrong_usage,
};

const MIB: u64 = 1 << 20;

fn controlled(place: &Place, options: &[&str]) -> Server {
    let mut command = place.serve(&place.image("disk.raw", 4 * MIB), "s");
    command.args(["--name", "root", "--control"]).arg(place.socket("c")).args(options);
    Server::start(command)
}

/// Runs random reads of 4 KiB. Returns how many completed, and the run time of the whole client.
fn reads(place: &Place, socket: &str, words: &[&str]) -> (u64, Duration) {
    let mut command = bench();
    command.args(["--rw=randread", "--bs=4k", "--runtime=1500ms", "--json", "--socket"]);
    command.arg(place.socket(socket)).args(words);
    let begin = Instant::now();
    let json: serde_json::Value = serde_json::from_str(&output(command)).unwrap();
    let jobs = json["jobs"].as_array().unwrap();
    let sum = jobs.iter().map(|job| job["read"]["total_ios"].as_u64().unwrap()).sum();
    (sum, begin.elapsed())
}

#[test]
fn limit_of_an_option_holds_for_a_client_with_many_queues_and_a_change_applies_at_once() {
    let place = Place::new();
    let server = controlled(&place, &["--iops", "300", "--workers", "2"]);
    let (completed, elapsed) = reads(&place, "s", &["--numjobs=4", "--iodepth=8"]);
    // Allowed are the rate's requests, the initial credit, a turn, and one request of each queue.
    let allowed = 300.0 * elapsed.as_secs_f64() + 30.0 + 1.0 + 8.0;
    assert!(completed as f64 <= allowed, "{completed} in {elapsed:?}");
    assert!(completed >= 100, "{completed} in {elapsed:?}");
    let limit = ok(&place, &["limit", "root"])["disks"][0].clone();
    assert_eq!((&limit["limits"][0]["limit"], &limit["limits"][0]["rate"]), (&"iops".into(), &300.into()));
    assert!(limit["throttled_requests"].as_u64().unwrap() > 0, "{limit}");
    assert_says(&output(ctl(&place, &["stats"])), &["root: ", "requests waited for limits"]);
    // Without a configuration file, nothing restores the old limits.
    assert_eq!(output(ctl(&place, &["limit", "root", "iops=off", "bps=4K"])), "changed\n");
    let shown = output(ctl(&place, &["limit"]));
    assert!(shown.contains("root  -      bps") && !shown.contains("iops"), "{shown}");
    // A stop does not wait for requests that wait because of the limit.
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn requests_that_the_limits_refuse_name_what_is_wrong() {
    let place = Place::new();
    let _server = controlled(&place, &[]);
    let line = |words: &[&str]| wrong_usage(ctl(&place, words));
    assert_says(&line(&["limit", "root", "iops=0"]), &["iops: give a whole number from 1", "off"]);
    assert_says(&line(&["limit", "iops=5"]), &["give the disk", "--group"]);
    assert_says(&line(&["limit", "root", "speed=5"]), &["no limit `speed`", "iops-read"]);
    let line = |words: &[&str]| refusal(ctl(&place, words));
    assert_says(&line(&["limit", "none", "iops=5"]), &["there is no disk `none`"]);
    assert_says(&line(&["limit", "--group", "none"]), &["there is no group `none`", "[[group]]"]);
    assert_says(&line(&["limit", "root", "group=none"]), &["there is no group `none`"]);
    assert_says(
        &line(&["limit", "root", "iops=5", "iops-read=5"]),
        &["iops and iops-read cannot be set together: set either"],
    );
    assert_says(&line(&["limit", "root", "iops-max=5"]), &["iops-max is set without iops"]);
    let mut command = place.serve(&place.image("other.raw", MIB), "o");
    command.args(["--iops-max", "5", "--iops", "9"]);
    assert_says(&wrong_usage(command), &["--iops-max = 5 is below --iops = 9"]);
}

fn write(place: &Place, text: &str) -> PathBuf {
    let path = place.path("bareblk.toml");
    std::fs::write(&path, format!("control = '{}'\n{text}", place.socket("c").display())).unwrap();
    path
}

fn disk(place: &Place, name: &str, more: &str) -> String {
    let image = place.path(name);
    if !image.exists() {
        place.image(name, 4 * MIB);
    }
    let (image, socket) = (image.display(), place.socket(name).display().to_string());
    format!("[[disk]]\nname = '{name}'\nimage = '{image}'\nsocket = '{socket}'\n{more}\n")
}

#[test]
fn groups_of_a_file_hold_for_all_their_disks_and_a_reload_restores_what_ctl_changed() {
    let place = Place::new();
    let file = |group: &str, a: &str| {
        let disks = disk(&place, "a", &format!("group = 'acme'\n{a}")) + &disk(&place, "b", "group = 'acme'");
        write(&place, &format!("[[group]]\nname = 'acme'\n{group}\n{disks}"))
    };
    let mut command = bareblk();
    command.args(["serve", "--config"]).arg(file("iops = 300", ""));
    let server = Server::start(command);
    let [(a, first), (b, second)] = std::thread::scope(|scope| {
        let both = ["a", "b"].map(|name| {
            let place = &place;
            scope.spawn(move || reads(place, name, &["--iodepth=8"]))
        });
        both.map(|client| client.join().unwrap())
    });
    let elapsed = first.max(second);
    // Allowed are the rate's requests, the initial credit, two turns, and one request of each queue.
    assert!((a + b) as f64 <= 300.0 * elapsed.as_secs_f64() + 30.0 + 2.0 + 4.0, "{a} + {b} in {elapsed:?}");
    assert!(a + b >= 100, "{a} + {b} in {elapsed:?}");

    let changed = output(ctl(&place, &["limit", "--group", "acme", "iops=500"]));
    assert_says(&changed, &["a reload brings back the limits in the configuration file"]);
    output(ctl(&place, &["limit", "a", "bps=1M", "weight=300"]));
    let answer = ok(&place, &["limit"]);
    assert_eq!(
        (&answer["groups"][0]["limits"][0]["rate"], &answer["disks"][0]["weight"]),
        (&500.into(), &300.into())
    );
    assert_eq!(ok(&place, &["reload"])["changed"], serde_json::json!(["a", "b"]));
    let answer = ok(&place, &["limit"]);
    assert_eq!(
        (&answer["groups"][0]["limits"][0]["rate"], &answer["disks"][0]["weight"]),
        (&300.into(), &100.into())
    );
    assert_eq!(answer["disks"][0]["limits"], serde_json::json!([]));

    // Limits can change although a front-end is connected.
    let _front_end = std::os::unix::net::UnixStream::connect(place.socket("a")).unwrap();
    eventually("a session", || (ok(&place, &["list"])["disks"][0]["sessions"] == 1).then_some(()));
    file("bps = '8M'", "iops = 100\niops-max = 200");
    let reload = ok(&place, &["reload"]);
    assert_eq!(
        (&reload["changed"], &reload["refused"]),
        (&serde_json::json!(["a", "b"]), &serde_json::json!([]))
    );
    let limits = ok(&place, &["limit", "a"])["disks"][0]["limits"][0].clone();
    assert_eq!((&limits["rate"], &limits["max"]), (&100.into(), &200.into()));
    drop(server);
}

#[test]
fn mistakes_in_the_limits_of_a_file_are_named_with_their_lines() {
    let place = Place::new();
    let refused = |text: &str| {
        let mut command = bareblk();
        command.args(["serve", "--config"]).arg(write(&place, text));
        refusal(command)
    };
    let alone = |more: &str| disk(&place, "a", more);
    assert_says(&refused(&alone("group = 'none'")), &[":6: group = 'none': there is no [[group]]"]);
    assert_says(&refused(&alone("iops = 0")), &[":6: iops = 0 is invalid: give a whole number from 1"]);
    assert_says(
        &refused(&alone("iops = 5\niops-read = 5")),
        &[":6: iops and iops-read cannot be set together"],
    );
    assert_says(&refused(&alone("bps-max-length = 5")), &[":6: bps-max-length is set without bps-max"]);
    assert_says(
        &refused(&alone("weight = 0")),
        &[":6: weight = 0 is invalid: give a whole number from 1 to 10000"],
    );
    assert_says(&refused(&format!("[[group]]\niops = 5\n{}", alone(""))), &[":2: [[group]] has no `name`"]);
    let twice = "[[group]]\nname = 'g'\n[[group]]\nname = 'g'\n";
    assert_says(&refused(&format!("{twice}{}", alone(""))), &[":4: two [[group]] tables are named g"]);
}
