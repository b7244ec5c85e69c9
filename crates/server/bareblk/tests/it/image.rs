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
        &["corruption: cluster 2: refcount 0, references 1\n", "1 corruptions, 1 leaked clusters"],
    );
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
    writer.kill().unwrap();
    writer.wait().unwrap();
    assert_says(&line, &["disk.qcow2 is in use by a program that may write it"]);
}
