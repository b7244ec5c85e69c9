//! The protocol: lines of JSON, their fields, and the errors about wrong lines.
//!
//! `greeting ← | request → answer ← | request → answer ← | …`, one object per line.
//!
//! - An unknown field is refused by name: the server must not ignore a misspelt `force`.
//! - `PROTOCOL` grows when an old client would misunderstand an answer. New verbs, and new fields in answers, do not
//!   change it.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::limits::{DEFAULT_TIMEOUT_MS, MAX_TIMEOUT_MS};

/// The version of the protocol.
pub const PROTOCOL: u32 = 1;

/// The server's first line.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// The server's version.
    pub bareblk: String,
    /// [`PROTOCOL`].
    pub protocol: u32,
}

impl Greeting {
    pub fn ours() -> Self {
        Self { bareblk: env!("CARGO_PKG_VERSION").into(), protocol: PROTOCOL }
    }
}

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

/// The command that the server executes.
#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum Verb {
    List,
    Stats(Stats),
    Slow(Slow),
    Workers,
    WorkersAdd(WorkerSettings),
    WorkersRemove(WorkersRemove),
    Attach(Attach),
    Placement(Placement),
    Add(Add),
    Remove(Remove),
    Resize(Resize),
    Resume(Resume),
    Limit(Limit),
    Flush(Flush),
    Show(Show),
    Health(Health),
    Pause(Pause),
    Unpause,
    Snapshot(Snapshot),
    Reload,
    Shutdown,
    #[serde(rename = "take-over")]
    LiveUpgrade(LiveUpgrade),
}

impl Verb {
    /// Whether the verb changes nothing. The monitor socket accepts only such verbs.
    pub fn only_shows(&self) -> bool {
        match self {
            Self::List | Self::Stats(_) | Self::Slow(_) | Self::Workers | Self::Show(_) | Self::Health(_) => {
                true
            }
            Self::Limit(Limit { set, .. }) => set.is_empty(),
            _ => false,
        }
    }

    /// The disks that the request names.
    pub fn disks_mut(&mut self) -> Vec<&mut String> {
        match self {
            Self::Stats(Stats { disks, .. }) => disks.iter_mut().flatten().collect(),
            Self::Limit(Limit { disk, .. }) => disk.iter_mut().collect(),
            Self::Attach(Attach { disk, .. })
            | Self::Placement(Placement { disk, .. })
            | Self::Remove(Remove { disk, .. })
            | Self::Resize(Resize { disk, .. })
            | Self::Resume(Resume { disk, .. })
            | Self::Flush(Flush { disk, .. })
            | Self::Show(Show { disk })
            | Self::Slow(Slow { disk })
            | Self::Pause(Pause { disk, .. }) => vec![disk],
            Self::Snapshot(Snapshot { files, .. }) => files.iter_mut().map(|file| &mut file.disk).collect(),
            Self::List
            | Self::Health(_)
            | Self::Unpause
            | Self::Workers
            | Self::WorkersAdd(_)
            | Self::WorkersRemove(_)
            | Self::Add(_)
            | Self::Reload
            | Self::Shutdown
            | Self::LiveUpgrade(_) => Vec::new(),
        }
    }
}

/// A time in an answer, in nanoseconds; `u64` holds 584 years.
pub(super) fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// All verbs, for the error about an unknown one.
const VERBS: &str = "list, stats, slow, workers, workers-add, workers-remove, attach, placement, add, remove, resize, resume, limit, flush, show, health, pause, unpause, snapshot, reload, shutdown, take-over";

/// Which statistics to send.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stats {
    /// Missing: all disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<Vec<String>>,
    /// Whether to list the running queues.
    #[serde(default = "yes", skip_serializing_if = "Clone::clone")]
    pub queues: bool,
    /// Whether latencies have their buckets.
    #[serde(default, skip_serializing_if = "is_false")]
    pub histograms: bool,
}

impl Default for Stats {
    fn default() -> Self {
        Self { disks: None, queues: true, histograms: false }
    }
}

fn yes() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_false(value: &bool) -> bool {
    !value
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Slow {
    pub disk: String,
}

/// How a new worker runs. If a field is missing, the worker keeps the process's setting.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkerSettings {
    /// Numbers of CPUs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cpus: Vec<u32>,
    /// -20 to 19.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nice: Option<i8>,
    /// `other`, `batch`, `idle`, `fifo:PRIORITY`, `rr:PRIORITY`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// A path below the mount point of the hierarchy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkersRemove {
    pub worker: u32,
    #[serde(default)]
    pub timeout_ms: TimeoutMs,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    pub disk: String,
    pub queue: u16,
    pub worker: u32,
    #[serde(default)]
    pub timeout_ms: TimeoutMs,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    pub disk: String,
    /// Missing: nothing changes; null: the workers choose.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    pub completion_worker: Option<Option<u32>>,
    #[serde(default)]
    pub timeout_ms: TimeoutMs,
}

/// Distinguishes null from a missing field.
fn given<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Option<u32>>, D::Error> {
    Option::deserialize(value).map(Some)
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Add {
    /// The keys of a `[[disk]]` table of the configuration file.
    pub disk: Map<String, Value>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remove {
    pub disk: String,
    #[serde(default)]
    pub force: bool,
    #[serde(default)]
    pub timeout_ms: TimeoutMs,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    pub disk: String,
    pub size_bytes: u64,
    #[serde(default)]
    pub force: bool,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resume {
    pub disk: String,
    #[serde(default)]
    pub timeout_ms: TimeoutMs,
}

/// Without `set`, shows the limits of the disk, of the group, or all.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Not together with `disk`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Keys of a `[[disk]]` or `[[group]]` table; null removes a limit.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub set: Map<String, Value>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flush {
    pub disk: String,
    #[serde(default)]
    pub timeout_ms: TimeoutMs,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Show {
    pub disk: String,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Health {
    /// How long to wait for the workers' answers.
    #[serde(default)]
    pub timeout_ms: TimeoutMs,
}

/// The pause lasts from the answer until the client's next request, the connection's end, or the time limit.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pause {
    pub disk: String,
    #[serde(default)]
    pub timeout_ms: TimeoutMs,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    pub files: Vec<SnapshotFile>,
    #[serde(default)]
    pub timeout_ms: TimeoutMs,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotFile {
    pub disk: String,
    /// The new file.
    pub file: String,
}

/// After its answer, the connection carries another protocol (`live_upgrade`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LiveUpgrade {
    /// The version of the live-upgrade protocol.
    pub version: u32,
    /// Disks whose front-ends the old server disconnects.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cut: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

/// At most [`MAX_TIMEOUT_MS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u64")]
pub struct TimeoutMs(u64);

impl Default for TimeoutMs {
    fn default() -> Self {
        Self(DEFAULT_TIMEOUT_MS)
    }
}

impl TryFrom<u64> for TimeoutMs {
    type Error = String;

    fn try_from(ms: u64) -> Result<Self, String> {
        (ms <= MAX_TIMEOUT_MS)
            .then_some(Self(ms))
            .ok_or_else(|| format!("{ms} ms is out of range: give 0 to {MAX_TIMEOUT_MS} ms"))
    }
}

impl From<TimeoutMs> for std::time::Duration {
    fn from(TimeoutMs(ms): TimeoutMs) -> Self {
        Self::from_millis(ms)
    }
}

/// The server's line after each request: `ok` or `error`.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer<T = Value> {
    /// The request's `id`; null without a request, or if its `id` cannot be read.
    pub id: Option<u64>,
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    pub ok: Option<T>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Fault>,
}

fn none<T>() -> Option<T> {
    None
}

impl<T> Answer<T> {
    pub fn new(id: Option<u64>, outcome: Result<T, Fault>) -> Self {
        match outcome {
            Ok(ok) => Self { id, ok: Some(ok), error: None },
            Err(fault) => Self { id, ok: None, error: Some(fault) },
        }
    }
}

/// An error in an answer.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The kind, for programs.
    pub kind: ErrorKind,
    /// One line for people, which says what to do.
    pub message: String,
}

impl Fault {
    /// Escapes control characters: a client's names may contain line breaks and terminal commands.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let shown = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
        Self { kind, message: message.into().chars().map(shown).collect() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    // Errors of the connection.
    NotAllowed,
    TooManyClients,
    MadeRoom,
    Stopping,
    LineTooLong,
    LineTooSlow,
    // Errors of the request.
    NotJson,
    BadRequest,
    UnknownVerb,
    ReadOnly,
    BadSettings,
    // Errors of the server's state.
    NoDisk,
    DiskExists,
    NoWorker,
    NoQueue,
    NotPlaced,
    NoGroup,
    LastWorker,
    NotDrained,
    Unsuitable,
    InUse,
    WouldShrink,
    NotPaused,
    Failed,
    /// A kind that only a newer server knows.
    #[serde(other)]
    Other,
}

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
        assert_eq!(VERBS.split(", ").count(), 22); // the number of variants of `Verb`
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

    #[test]
    fn error_kind_of_a_newer_server_is_understood_as_another_one() {
        let fault: Fault = serde_json::from_str(r#"{"kind": "too-hot", "message": "m"}"#).unwrap();
        assert_eq!(fault.kind, ErrorKind::Other);
    }
}
