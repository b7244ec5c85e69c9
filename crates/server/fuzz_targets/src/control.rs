//! `control`: a client's lines on the control socket.
//!
//! `bytes → lines → parsed, executed by a server without disks → one line of JSON each`
//!
//! - Each answer is one line with the request's id, if that is readable, and either `ok` or an `error` with a kind and
//!   one line of text.
//! - An error repeats the invalid input, and is at most a few times as long.

use bareblk::inputs::{MAX_LINE_BYTES, control_answer};
use serde_json::Value;

/// Maximum number of lines per run.
const MOST_LINES: usize = 64;
/// An answer may repeat each byte as an escape such as `\u0000`, escaped twice.
const MOST_TIMES: usize = 16;
const MOST_MORE: usize = 4096;

/// Runs the target once.
pub(crate) fn run(bytes: &[u8]) {
    let lines = bytes.split(|&byte| byte == b'\n').filter(|line| line.len() <= MAX_LINE_BYTES);
    lines.take(MOST_LINES).for_each(one_line);
}

fn one_line(line: &[u8]) {
    let answer = control_answer(line);
    let room = line.len() * MOST_TIMES + MOST_MORE;
    assert!(answer.len() <= room, "{} bytes for a line of {}", answer.len(), line.len());
    assert!(!answer.contains('\n'), "two lines: {answer}");
    let value: Value = serde_json::from_str(&answer).expect("an answer in JSON");
    let asked = serde_json::from_slice::<Value>(line).ok();
    let id = asked.as_ref().and_then(|asked| asked.get("id")).and_then(Value::as_u64);
    assert_eq!(value["id"].as_u64(), id, "{answer}");
    match (value.get("ok"), value.get("error")) {
        (Some(_), None) => {}
        (None, Some(error)) => {
            assert!(error["kind"].is_string(), "{answer}");
            let message = error["message"].as_str().expect("a message");
            assert!(!message.is_empty() && !message.contains(char::is_control), "{answer}");
        }
        _ => panic!("neither done nor refused: {answer}"),
    }
}

/// Each verb in correct form, and some incorrect ones.
pub(crate) fn seeds() -> Vec<(String, Vec<u8>)> {
    let lines = [
        r#"{"id":1,"do":"list"}"#,
        r#"{"id":2,"do":"stats"}"#,
        r#"{"id":3,"do":"workers"}"#,
        r#"{"id":4,"do":"workers-add","cpus":[0],"nice":5,"class":"batch"}"#,
        r#"{"id":5,"do":"workers-add","class":"fifo:1","cgroup":"a/b"}"#,
        r#"{"id":6,"do":"workers-remove","worker":3,"timeout_ms":20}"#,
        r#"{"id":7,"do":"attach","disk":"a","queue":1,"worker":2}"#,
        r#"{"id":8,"do":"placement","disk":"a"}"#,
        r#"{"id":9,"do":"placement","disk":"a","completion_worker":null}"#,
        r#"{"id":10,"do":"add","disk":{"image":"/nowhere/a","socket":"/nowhere/s","queues":4,"readonly":true}}"#,
        r#"{"id":11,"do":"add","disk":{"name":"a\nb","size":"20G"}}"#,
        r#"{"id":12,"do":"remove","disk":"a","force":true}"#,
        r#"{"id":13,"do":"resize","disk":"a","size_bytes":512}"#,
        r#"{"id":14,"do":"reload"}"#,
        r#"{"id":15,"do":"shutdown"}"#,
        r#"{"id":16,"do":"dance"}"#,
        r#"{"do":"list"}"#,
        r#"[1,2,{"id":1}]"#,
        "GET / HTTP/1.1",
        r#"{"id":20,"do":"workers-add","a\nb":1}"#,
    ];
    let one = |(number, line): (usize, &&str)| (format!("line-{number:02}"), line.as_bytes().to_vec());
    let mut seeds: Vec<_> = lines.iter().enumerate().map(one).collect();
    seeds.push(("all".to_owned(), lines.join("\n").into_bytes()));
    seeds
}
