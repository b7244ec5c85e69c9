//! Compares the JSON of `bareblk bench` with that of fio, if fio is installed: same keys, same types.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use xtask::skip::{Reason, skip};

use crate::rig::{Place, bareblk, output};

/// Keys that only one of the two has; `docs/how-to/bench.md` names them.
const OURS: &[&str] = &["/jobs/0/bareblk"];
/// Keys that depend on the given options, or on the host's other disk traffic.
const NOT_COMPARED: &[&str] = &["/disk_util", "/jobs/0/job options", "/global options"];

/// Path of every value, with its type.
fn layout(json: &Value) -> BTreeMap<String, &'static str> {
    let mut found = BTreeMap::new();
    let mut left = vec![(String::new(), json)];
    while let Some((path, value)) = left.pop() {
        let children: Vec<(String, &Value)> = match value {
            Value::Object(entries) => {
                entries.iter().map(|(key, value)| (format!("{path}/{key}"), value)).collect()
            }
            Value::Array(items) => {
                items.iter().enumerate().map(|(place, value)| (format!("{path}/{place}"), value)).collect()
            }
            _ => Vec::new(),
        };
        left.extend(children);
        found.insert(path, kind(value));
    }
    found.retain(|path, _| !NOT_COMPARED.iter().chain(OURS).any(|left_out| path.starts_with(left_out)));
    found
}

/// Tells integers from fractions: programs that read fio's results parse them into different types.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Object(_) => "object",
        Value::Array(_) => "array",
        Value::String(_) => "string",
        Value::Number(number) if number.is_f64() => "fraction",
        Value::Number(_) => "integer",
        Value::Bool(_) => "bool",
        Value::Null => "null",
    }
}

fn job(file: &Path, rw: &str) -> Vec<String> {
    let file = file.display();
    let words = [
        "--name=layout",
        "--bs=4k",
        "--iodepth=4",
        "--ioengine=libaio",
        "--direct=1",
        "--thread",
        "--numjobs=2",
        "--group_reporting",
        "--time_based",
        "--runtime=1",
        "--size=1m",
        "--fsync=8",
    ];
    let words = words.map(str::to_owned).into_iter();
    words.chain([format!("--rw={rw}"), format!("--filename={file}")]).collect()
}

fn of_fio(file: &Path, rw: &str) -> Option<Value> {
    let run = Command::new("fio").args(job(file, rw)).arg("--output-format=json").output().ok()?;
    let text = String::from_utf8(run.stdout).unwrap();
    let start = text.find("{\n").expect("fio's report");
    serde_json::from_str(&text[start..]).ok()
}

fn of_ours(file: &Path, rw: &str) -> Value {
    let mut command = bareblk();
    let words = job(file, rw).into_iter().filter(|word| !word.starts_with("--filename="));
    command.arg("bench").arg("--file").arg(file).args(words).arg("--json");
    serde_json::from_str(&output(command)).unwrap()
}

#[test]
fn every_key_of_fios_result_is_in_ours_with_its_type_and_no_other() {
    let place = Place::new();
    let file = place.image("disk.raw", 1 << 20);
    for rw in ["randrw", "read"] {
        let Some(theirs) = of_fio(&file, rw) else { return skip(Reason::NoProgram("fio".into()), "") };
        let ours = of_ours(&file, rw);
        let (theirs, ours) = (layout(&theirs), layout(&ours));
        let differ = |left: &BTreeMap<String, &'static str>, right: &BTreeMap<String, &'static str>| {
            let missing = left.iter().filter(|(path, kind)| right.get(*path) != Some(kind));
            missing.map(|(path, kind)| format!("{path}: {kind}")).collect::<Vec<_>>()
        };
        assert_eq!(differ(&theirs, &ours), [""; 0], "{rw}: fio has these");
        assert_eq!(differ(&ours, &theirs), [""; 0], "{rw}: only ours has these");
        assert!(theirs.len() > 200, "{}", theirs.len());
    }
}
