//! `bareblk image`: what it prints about images of `qemu-img`, and its exit codes.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use xtask::skip::{Reason, skip};

use crate::rig::{Place, assert_says, bareblk, output, refusal};

fn img(words: &[&str]) -> Option<Output> {
    let Ok(output) = Command::new("qemu-img").args(words).output() else {
        skip(Reason::NoProgram("qemu-img".into()), "Debian: package qemu-utils");
        return None;
    };
    assert!(output.status.success(), "{words:?}: {output:?}");
    Some(output)
}

fn created(place: &Place, options: &[&str], size: &str) -> Option<PathBuf> {
    let path = place.path("disk.qcow2");
    let words = [&["create", "-q", "-f", "qcow2"], options, &[path.to_str().unwrap(), size]].concat();
    img(&words).map(|_| path)
}

fn image(verb: &str, path: &Path, options: &[&str]) -> Command {
    let mut command = bareblk();
    command.args(["image", verb]).arg(path).args(options);
    command
}

fn info(path: &Path) -> Value {
    serde_json::from_str(&output(image("info", path, &["--json"]))).unwrap()
}

/// Exit code and JSON of `check`.
fn check(path: &Path) -> (i32, Value) {
    let run = image("check", path, &["--json"]).output().unwrap();
    (run.status.code().unwrap(), serde_json::from_slice(&run.stdout).unwrap())
}

#[test]
fn info_says_what_create_was_told() {
    let place = Place::new();
    let options =
        ["-o", "cluster_size=32k,extended_l2=on,lazy_refcounts=on,refcount_bits=8,compression_type=zstd"];
    let Some(path) = created(&place, &options, "100M") else { return };
    let info = info(&path);
    let expected = json!({
        "version": 3, "size_bytes": 100 << 20, "cluster_bytes": 32768, "subcluster_bytes": 1024, "refcount_bits": 8,
        "compression": "zstd", "extended_l2": true, "lazy_refcounts": true, "dirty": false, "corrupt": false,
        "backing": null, "data_file": null, "bitmaps": 0, "snapshots": [],
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&info[key], value, "{key}");
    }
    assert_says(
        &output(image("info", &path, &[])),
        &["size            100M\n", "refcounts       8 bits, lazy\n"],
    );
}

/// The backing file does not exist: it is not opened.
#[test]
fn info_names_files_and_snapshots_without_opening_them() {
    let place = Place::new();
    let options = ["-u", "-b", "gone\u{1b}[2J.raw", "-F", "raw"];
    let Some(path) = created(&place, &options, "1M") else { return };
    let info = info(&path);
    assert_eq!(info["backing"], json!({"name": "gone\u{1b}[2J.raw", "format": "raw"}));
    assert_says(&output(image("info", &path, &[])), &["backing file    gone\\u{1b}[2J.raw (raw)\n"]);
    img(&["rebase", "-u", "-b", "", path.to_str().unwrap()]);
    img(&["snapshot", "-c", "before the update", path.to_str().unwrap()]);
    assert_says(&output(image("info", &path, &[])), &["SNAPSHOT", "before the update"]);
}

#[test]
fn check_exits_like_qemu_img_check() {
    let place = Place::new();
    let Some(path) = created(&place, &[], "10M") else { return };
    let (code, clean) = check(&path);
    assert_eq!((code, &clean["total_clusters"], &clean["findings"]), (0, &json!(160), &json!([])));
    // The refcount block is the third cluster. Four clusters are used.
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[0, 2], (2 << 16) + 2).unwrap();
    let (code, leaked) = check(&path);
    assert_eq!((code, &leaked["leaks"], &leaked["corruptions"]), (3, &json!(1), &json!(0)));
    file.write_all_at(&[0, 0], (2 << 16) + 4).unwrap();
    let (code, broken) = check(&path);
    assert_eq!((code, &broken["leaks"], &broken["corruptions"]), (2, &json!(1), &json!(1)));
    let findings = json!([
        {"severity": "leak", "text": "cluster 1: refcount 2, references 1"},
        {"severity": "corruption", "text": "cluster 2: refcount 0, references 1"},
    ]);
    assert_eq!(broken["findings"], findings);
    let text = String::from_utf8(image("check", &path, &[]).output().unwrap().stdout).unwrap();
    assert_says(
        &text,
        &["corruption: cluster 2: refcount 0, references 1\n", "corruptions: 1, leaked clusters: 1"],
    );
}

/// Exit code and JSON of a repair.
fn repair(path: &Path, what: &str) -> (i32, Value) {
    let run = image("check", path, &["--json", "--repair", what]).output().unwrap();
    (run.status.code().unwrap(), serde_json::from_slice(&run.stdout).unwrap())
}

/// The exit code of QEMU's check, which changes nothing.
fn qemu_check(path: &Path) -> i32 {
    Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(path).output().unwrap().status.code().unwrap()
}

/// An image with data.
fn written(place: &Place) -> Option<PathBuf> {
    let path = created(place, &[], "10M")?;
    let write = ["-f", "qcow2", "-c", "write -P 7 0 256k"];
    assert!(Command::new("qemu-io").args(write).arg(&path).output().unwrap().status.success());
    Some(path)
}

fn change(path: &Path, at: u64, bytes: &[u8]) {
    std::fs::File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

/// Where the count of a cluster is: the refcount block is the third cluster.
const fn count_at(cluster: u64) -> u64 {
    (2 << 16) + cluster * 2
}

#[test]
fn repair_of_leaks_leaves_an_image_without_leaks() {
    let place = Place::new();
    let Some(path) = written(&place) else { return };
    change(&path, count_at(6), &[0, 2]);
    change(&path, count_at(1), &[0, 3]);
    let (code, both) = repair(&path, "leaks");
    assert_eq!((code, &both["before"]["leaks"], &both["after"]["leaks"]), (0, &json!(2), &json!(0)));
    // A copied bit does not fit as long as a count is 2.
    let repaired = json!({"leaks_freed": 2, "corruptions_repaired": 1, "notes": []});
    assert_eq!((qemu_check(&path), &both["repair"]), (0, &repaired));
    change(&path, count_at(6), &[0, 0]);
    change(&path, count_at(1), &[0, 3]);
    let run = image("check", &path, &["--repair", "leaks"]).output().unwrap();
    let text = String::from_utf8(run.stdout).unwrap();
    assert_eq!((run.status.code(), qemu_check(&path)), (Some(2), 2));
    let lines = ["leak: cluster 1: refcount 3, references 1\n", "leaks freed: 1, corruptions repaired: 0\n"];
    let (before, after) = text.split_once("after the repair:\n").unwrap();
    assert_says(before, &lines);
    assert!(before.starts_with("before the repair:\n"), "{text}");
    assert_says(after, &["cluster 6: refcount 0", "leaked clusters: 0"]);
}

/// `abort` ends qemu-io without a word to the image.
#[test]
fn image_that_qemu_left_dirty_is_repaired() {
    let place = Place::new();
    let Some(path) = created(&place, &["-o", "lazy_refcounts=on"], "10M") else { return };
    let crash = ["-f", "qcow2", "-c", "write -P 7 0 256k", "-c", "flush", "-c", "abort"];
    Command::new("qemu-io").args(crash).arg(&path).output().unwrap();
    assert_eq!(info(&path)["dirty"], true);
    let (code, both) = repair(&path, "all");
    assert_eq!((code, qemu_check(&path), &info(&path)["dirty"]), (0, 0, &json!(false)), "{both}");
    assert_eq!(both["after"]["corruptions"], 0);
    let read = ["-f", "qcow2", "-c", "read -P 7 0 256k"];
    let read = Command::new("qemu-io").args(read).arg(&path).output().unwrap();
    assert!(!String::from_utf8(read.stdout).unwrap().contains("failed"));
}

#[test]
fn repair_of_everything_builds_a_refcount_table_that_qemu_accepts() {
    let place = Place::new();
    let Some(path) = written(&place) else { return };
    // The refcount table is the second cluster.
    change(&path, 1 << 16, &[0; 8]);
    let (code, both) = repair(&path, "all");
    assert_eq!((code, qemu_check(&path)), (0, 0), "{both}");
    assert_says(both["repair"]["notes"][0].as_str().unwrap(), &["all reference counts are new"]);
    let (code, both) = repair(&path, "all");
    assert_eq!((code, &both["repair"]["corruptions_repaired"]), (0, &json!(0)));
}

/// QEMU frees what the damaged entry meant.
#[test]
fn what_cannot_be_repaired_is_left_and_says_so() {
    let place = Place::new();
    let Some(path) = written(&place) else { return };
    // The L1 table is the fourth cluster.
    change(&path, 3 << 16, &(1_u64 << 40).to_be_bytes());
    let (code, both) = repair(&path, "all");
    assert_eq!((code, &both["after"]["leaks"]), (2, &both["before"]["leaks"]));
    assert_says(both["repair"]["notes"][0].as_str().unwrap(), &["leaked clusters that are kept", ": 5"]);
    change(&path, 1 << 16, &[0; 8]);
    let run = image("check", &path, &["--repair", "all"]).output().unwrap();
    assert_eq!(run.status.code(), Some(1));
    assert_says(&String::from_utf8(run.stdout).unwrap(), &["past the end of the file"]);
    assert_says(&String::from_utf8(run.stderr).unwrap(), &["`qemu-img check -r all` does it"]);
}

/// An entry is changed before the refcount table turns out to be one that is not built.
#[test]
fn what_was_changed_before_an_error_is_said() {
    let place = Place::new();
    let Some(path) = written(&place) else { return };
    let damage = || {
        // The refcount table is the second cluster, the first L2 table the fifth.
        change(&path, 1 << 16, &[0; 8]);
        change(&path, 4 << 16, &(1_u64 << 40).to_be_bytes());
        change(&path, (4 << 16) + 512, &((9_u64 << 16) + 513).to_be_bytes());
    };
    damage();
    let (code, both) = repair(&path, "all");
    assert_eq!((code, &both["after"], &both["repair"]["leaks_freed"]), (1, &Value::Null, &Value::Null));
    let said = ["L2 entry 64 ", "it had no data, and has no offset any more"];
    assert_says(both["repair"]["notes"][0].as_str().unwrap(), &said);
    damage();
    let run = image("check", &path, &["--repair", "all"]).output().unwrap();
    assert_eq!(run.status.code(), Some(1));
    assert_says(&String::from_utf8(run.stdout).unwrap(), &said);
    assert_says(&String::from_utf8(run.stderr).unwrap(), &["the reference counts must be built anew"]);
}

#[test]
fn wrong_repairs_are_refused() {
    let place = Place::new();
    let raw = place.image("disk.raw", 1 << 20);
    let repair = |path: &Path, what| image("check", path, &["--repair", what]);
    assert_says(&refusal(repair(&raw, "all")), &["disk.raw: not a qcow2 image"]);
    assert_says(&refusal(repair(&place.path(""), "all")), &["is a directory: only a file can be repaired"]);
    let usage = repair(&raw, "some").output().unwrap();
    assert_eq!(usage.status.code(), Some(2));
    assert_says(&String::from_utf8(usage.stderr).unwrap(), &["--repair", "leaks", "all"]);
}

#[test]
fn other_files_are_refused() {
    let place = Place::new();
    let raw = place.image("disk.raw", 1 << 20);
    assert_says(
        &refusal(image("info", &raw, &[])),
        &["disk.raw: not a qcow2 image: it begins with 0x00000000"],
    );
    assert_says(&refusal(image("check", &place.path(""), &[])), &["is a directory"]);
    assert_says(&refusal(image("check", &place.path("none"), &[])), &["none cannot be opened: No such file"]);
}

#[test]
fn image_that_a_program_may_write_is_not_checked() {
    let place = Place::new();
    let Some(path) = created(&place, &[], "10M") else { return };
    let mut writer = Command::new("qemu-io");
    writer.args(["-f", "qcow2", "-c", "write 0 64k", "-c", "sleep 20000"]).arg(&path);
    let mut writer = writer.stdout(std::process::Stdio::null()).spawn().unwrap();
    let size = || std::fs::metadata(&path).unwrap().len();
    let before = size();
    crate::rig::eventually("a write", || (size() > before).then_some(()));
    let line = refusal(image("check", &path, &[]));
    let repair = refusal(image("check", &path, &["--repair", "leaks"]));
    let pid = format!("(pid {}): stop it first", writer.id());
    writer.kill().unwrap();
    writer.wait().unwrap();
    assert_says(&line, &["disk.qcow2 is in use by a program that may write it"]);
    assert_says(&repair, &["disk.qcow2 is in use by qemu-io ", &pid]);
}
