//! `--on-error`: its log lines, and `bareblk ctl resume`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use crate::rig::{Place, Server, assert_says, ctl, ok, output, refusal, wrong_usage};

const MIB: u64 = 1 << 20;

fn served(place: &Place, args: &[&str]) -> Server {
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.arg("--control").arg(place.socket("c")).args(["--name", "vm1"]).args(args);
    Server::start(command)
}

fn listed(place: &Place) -> serde_json::Value {
    ok(place, &["list"])["disks"][0].clone()
}

#[test]
fn errors_are_reported_unless_the_disk_is_to_hold_them() {
    let place = Place::new();
    let _server = served(&place, &[]);
    let disk = listed(&place);
    assert_eq!(
        (&disk["on_error"], &disk["retry_after_ns"], &disk["held"]),
        (&"report".into(), &().into(), &0.into())
    );
}

#[test]
fn list_shows_what_is_held_and_for_how_long() {
    let place = Place::new();
    let _server = served(&place, &["--on-error", "hold-on-enospc", "--retry-after", "7"]);
    let disk = listed(&place);
    assert_eq!(
        (&disk["on_error"], &disk["retry_after_ns"]),
        (&"hold-on-enospc".into(), &7_000_000_000_u64.into())
    );
    assert_says(&output(ctl(&place, &["list"])), &["ON ERROR", "hold-on-enospc", "ok"]);
}

#[test]
fn retry_after_zero_is_never_by_itself() {
    let place = Place::new();
    let _server = served(&place, &["--on-error", "hold", "--retry-after", "0"]);
    let disk = listed(&place);
    assert_eq!((&disk["on_error"], &disk["retry_after_ns"]), (&"hold".into(), &().into()));
}

#[test]
fn resume_says_how_many_requests_there_are_and_which_disk_there_is_not() {
    let place = Place::new();
    let _server = served(&place, &["--on-error", "hold"]);
    assert_eq!(output(ctl(&place, &["resume", "vm1"])), "disk vm1 has no parked requests\n");
    assert_says(&refusal(ctl(&place, &["resume", "vm2"])), &["there is no disk `vm2`"]);
}

#[test]
fn word_that_is_no_policy_is_refused_with_those_there_are() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.args(["--on-error", "pray"]);
    assert_says(&wrong_usage(command), &["pray", "report", "hold", "hold-on-enospc"]);
}
