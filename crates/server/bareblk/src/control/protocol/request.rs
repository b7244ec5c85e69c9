//! A client's line: clients write it, the server parses it.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::answer::{ErrorKind, Fault};
use super::verbs::Verb;

/// A client's line.
#[derive(Debug, PartialEq)]
pub struct Request {
    /// A number that the answer repeats.
    pub id: u64,
    pub verb: Verb,
}

/// The line for a [`Verb`], with its line break, as [`parse`] reads it.
pub fn line(id: u64, verb: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    let mut request = serde_json::to_value(verb)?;
    if let Value::Object(fields) = &mut request {
        fields.insert("id".into(), id.into());
    }
    let mut line = serde_json::to_vec(&request)?;
    line.push(b'\n');
    Ok(line)
}

/// All verbs, for the error about an unknown one.
const VERBS: &str = "list, stats, slow, workers, workers-add, workers-remove, attach, placement, add, remove, resize, resume, limit, flush, show, health, pause, unpause, snapshot, jobs, job-start, job-change, job-cancel, reload, shutdown, take-over";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

/// A line that is not a valid request, with its `id` if it has one.
#[derive(Debug, PartialEq, Eq)]
pub struct BadLine {
    pub id: Option<u64>,
    pub fault: Fault,
}

/// Parses one line.
pub fn parse(line: &[u8]) -> Result<Request, BadLine> {
    let bad = |id, kind, message: String| BadLine { id, fault: Fault::new(kind, message) };
    let value: Value = serde_json::from_slice(line).map_err(|error| {
        bad(None, ErrorKind::NotJson, format!("the line is not JSON: {error}; send one object per line"))
    })?;
    let Value::Object(mut fields) = value else {
        return Err(bad(
            None,
            ErrorKind::BadRequest,
            "the line is not an object: send {\"id\": 1, \"do\": \"list\"}".into(),
        ));
    };
    let id = fields.remove("id");
    let Some(id) = id.as_ref().and_then(Value::as_u64) else {
        let what = "`id` is missing or not a whole number from 0: give a number, which the answer repeats";
        return Err(bad(None, ErrorKind::BadRequest, what.into()));
    };
    let name = fields.remove("do");
    let Some(name) = name.as_ref().and_then(Value::as_str) else {
        let what = format!("`do` is missing or not a string: give one of {VERBS}");
        return Err(bad(Some(id), ErrorKind::BadRequest, what));
    };
    let verb = parse_verb(name, fields).map_err(|fault| BadLine { id: Some(id), fault })?;
    Ok(Request { id, verb })
}

fn parse_verb(name: &str, fields: Map<String, Value>) -> Result<Verb, Fault> {
    let without_fields = |verb| move |_: Nothing| verb;
    match name {
        "list" => read(name, fields).map(without_fields(Verb::List)),
        "stats" => read(name, fields).map(Verb::Stats),
        "slow" => read(name, fields).map(Verb::Slow),
        "workers" => read(name, fields).map(without_fields(Verb::Workers)),
        "workers-add" => read(name, fields).map(Verb::WorkersAdd),
        "workers-remove" => read(name, fields).map(Verb::WorkersRemove),
        "attach" => read(name, fields).map(Verb::Attach),
        "placement" => read(name, fields).map(Verb::Placement),
        "add" => read(name, fields).map(Verb::Add),
        "remove" => read(name, fields).map(Verb::Remove),
        "resize" => read(name, fields).map(Verb::Resize),
        "resume" => read(name, fields).map(Verb::Resume),
        "limit" => read(name, fields).map(Verb::Limit),
        "flush" => read(name, fields).map(Verb::Flush),
        "show" => read(name, fields).map(Verb::Show),
        "health" => read(name, fields).map(Verb::Health),
        "pause" => read(name, fields).map(Verb::Pause),
        "unpause" => read(name, fields).map(without_fields(Verb::Unpause)),
        "snapshot" => read(name, fields).map(Verb::Snapshot),
        "jobs" => read(name, fields).map(without_fields(Verb::Jobs)),
        "job-start" => read(name, fields).map(Verb::JobStart),
        "job-change" => read(name, fields).map(Verb::JobChange),
        "job-cancel" => read(name, fields).map(Verb::JobCancel),
        "reload" => read(name, fields).map(without_fields(Verb::Reload)),
        "shutdown" => read(name, fields).map(without_fields(Verb::Shutdown)),
        "take-over" => read(name, fields).map(Verb::LiveUpgrade),
        other => {
            let shown: String = other.escape_debug().take(64).collect();
            Err(Fault::new(
                ErrorKind::UnknownVerb,
                format!("there is no verb `{shown}`: give one of {VERBS}"),
            ))
        }
    }
}

fn read<T: DeserializeOwned>(verb: &str, fields: Map<String, Value>) -> Result<T, Fault> {
    serde_path_to_error::deserialize(Value::Object(fields))
        .map_err(|error| Fault::new(ErrorKind::BadRequest, format!("{verb}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::super::verbs::*;
    use super::*;

    fn verb(line: &str) -> Verb {
        parse(line.as_bytes()).unwrap().verb
    }

    fn fault(line: &str) -> (Option<u64>, ErrorKind, String) {
        let BadLine { id, fault } = parse(line.as_bytes()).unwrap_err();
        (id, fault.kind, fault.message)
    }

    #[test]
    fn attach_is_read_with_its_default_timeout() {
        let expected = Attach { disk: "a".into(), queue: 1, worker: 2, timeout_ms: TimeoutMs(10_000) };
        let line = r#"{"id": 7, "do": "attach", "disk": "a", "queue": 1, "worker": 2}"#;
        assert_eq!(parse(line.as_bytes()).unwrap(), Request { id: 7, verb: Verb::Attach(expected) });
    }

    #[test]
    fn every_request_that_is_written_is_read_again() {
        let disk = || "a".to_owned();
        let timeout_ms = TimeoutMs(1);
        let settings = WorkerSettings {
            cpus: vec![2, 3],
            nice: Some(-5),
            class: Some("fifo:3".into()),
            cgroup: Some("x".into()),
        };
        let verbs = [
            Verb::List,
            Verb::Stats(Stats::default()),
            Verb::Stats(Stats { disks: Some(vec![disk()]), queues: false, histograms: true }),
            Verb::Slow(Slow { disk: disk() }),
            Verb::Workers,
            Verb::WorkersAdd(settings),
            Verb::WorkersAdd(WorkerSettings::default()),
            Verb::WorkersRemove(WorkersRemove { worker: 3, timeout_ms }),
            Verb::Attach(Attach { disk: disk(), queue: 1, worker: 2, timeout_ms }),
            Verb::Placement(Placement { disk: disk(), completion_worker: None, timeout_ms }),
            Verb::Placement(Placement { disk: disk(), completion_worker: Some(None), timeout_ms }),
            Verb::Placement(Placement { disk: disk(), completion_worker: Some(Some(1)), timeout_ms }),
            Verb::Add(Add { disk: [("image".to_owned(), Value::from("/x"))].into_iter().collect() }),
            Verb::Remove(Remove { disk: disk(), force: true, timeout_ms }),
            Verb::Resize(Resize { disk: disk(), size_bytes: 512, force: false }),
            Verb::Resume(Resume { disk: disk(), timeout_ms }),
            Verb::Limit(Limit::default()),
            Verb::Limit(Limit {
                disk: Some(disk()),
                set: [("iops".to_owned(), Value::from(5)), ("bps".to_owned(), Value::Null)]
                    .into_iter()
                    .collect(),
                ..Limit::default()
            }),
            Verb::Limit(Limit { group: Some(disk()), ..Limit::default() }),
            Verb::Flush(Flush { disk: disk(), timeout_ms }),
            Verb::Show(Show { disk: disk() }),
            Verb::Health(Health { timeout_ms }),
            Verb::Pause(Pause { disk: disk(), timeout_ms }),
            Verb::Unpause,
            Verb::Snapshot(Snapshot {
                files: vec![SnapshotFile { disk: disk(), file: "/f".into() }],
                overlay: false,
                timeout_ms,
            }),
            Verb::Reload,
            Verb::Shutdown,
            Verb::LiveUpgrade(LiveUpgrade { version: 2, cut: Vec::new() }),
            Verb::LiveUpgrade(LiveUpgrade { version: 2, cut: vec![disk()] }),
        ];
        for (id, verb) in (1_u64..).zip(verbs) {
            let line = line(id, &verb).unwrap();
            assert_eq!(parse(&line).unwrap(), Request { id, verb });
        }
    }

    #[test]
    fn unknown_verb_is_answered_with_those_that_exist() {
        let (id, kind, message) = fault(r#"{"id": 1, "do": "dance"}"#);
        assert_eq!((id, kind), (Some(1), ErrorKind::UnknownVerb));
        assert_eq!(message, format!("there is no verb `dance`: give one of {VERBS}"));
    }

    #[test]
    fn list_of_verbs_is_complete() {
        let serialised = |verb: &Verb| serde_json::to_value(verb).unwrap()["do"].as_str().unwrap().to_owned();
        assert_eq!(serialised(&Verb::List), "list");
        let unknown: Vec<_> = VERBS
            .split(", ")
            .filter(|name| {
                parse_verb(name, Map::new()).is_err_and(|fault| fault.kind == ErrorKind::UnknownVerb)
            })
            .collect();
        assert_eq!(unknown, Vec::<&str>::new());
        assert_eq!(VERBS.split(", ").count(), 26); // the number of variants of `Verb`
    }

    #[test]
    fn unknown_field_is_refused_by_name() {
        let (id, kind, message) = fault(r#"{"id": 1, "do": "remove", "disk": "a", "forse": true}"#);
        assert_eq!((id, kind), (Some(1), ErrorKind::BadRequest));
        assert!(message.starts_with("remove: ") && message.contains("unknown field `forse`"), "{message}");
    }

    /// Found by `cargo xtask fuzz control`.
    #[test]
    fn name_with_a_line_break_is_told_in_one_line() {
        let (_, _, message) = fault(r#"{"id": 1, "do": "workers-add", "a\nb\u001b[2J": 5}"#);
        assert!(message.contains("unknown field `a\\nb\\u{1b}[2J`"), "{message}");
        assert_eq!(fault(r#"{"id": 1, "do": "a\nb"}"#).2.lines().count(), 1);
    }

    #[test]
    fn field_of_a_verb_without_fields_is_refused_by_name() {
        let (_, kind, message) = fault(r#"{"id": 1, "do": "shutdown", "timeout_ms": 5}"#);
        assert_eq!(kind, ErrorKind::BadRequest);
        assert!(message.contains("unknown field `timeout_ms`"), "{message}");
    }

    #[test]
    fn missing_field_is_named() {
        let (_, kind, message) = fault(r#"{"id": 1, "do": "attach", "disk": "a", "queue": 1}"#);
        assert_eq!((kind, message.as_str()), (ErrorKind::BadRequest, "attach: missing field `worker`"));
    }

    #[test]
    fn value_of_the_wrong_type_is_named_with_its_field() {
        let (_, _, message) = fault(r#"{"id": 1, "do": "attach", "disk": "a", "queue": 65536, "worker": 0}"#);
        assert!(message.starts_with("attach: queue: "), "{message}");
    }

    #[test]
    fn timeout_beyond_its_limit_is_refused_with_the_limit() {
        assert_eq!(
            fault(r#"{"id": 1, "do": "workers-remove", "worker": 1, "timeout_ms": 60001}"#).2,
            "workers-remove: timeout_ms: 60001 ms is out of range: give 0 to 60000 ms"
        );
        assert!(matches!(
            verb(r#"{"id": 1, "do": "workers-remove", "worker": 1, "timeout_ms": 60000}"#),
            Verb::WorkersRemove(_)
        ));
    }

    #[test]
    fn id_is_told_as_missing_when_it_is_not_a_whole_number() {
        assert_eq!(fault(r#"{"do": "list"}"#).1, ErrorKind::BadRequest);
        assert_eq!(fault(r#"{"id": -1, "do": "list"}"#).0, None);
        assert_eq!(fault(r#"{"id": "1", "do": "list"}"#).0, None);
    }

    #[test]
    fn garbage_and_what_is_no_object_are_told_apart() {
        assert_eq!(fault("GET / HTTP/1.1").1, ErrorKind::NotJson);
        assert_eq!(parse(b"\xff\xfe").unwrap_err().fault.kind, ErrorKind::NotJson);
        assert_eq!(fault("").1, ErrorKind::NotJson);
        assert_eq!(fault("[1]").1, ErrorKind::BadRequest);
    }

    #[test]
    fn nesting_without_end_is_refused_not_followed() {
        assert_eq!(fault(&"[".repeat(60_000)).1, ErrorKind::NotJson);
    }
}
