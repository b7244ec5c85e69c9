//! The verbs and their fields.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::control::limits::{DEFAULT_TIMEOUT_MS, MAX_TIMEOUT_MS};

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
    Jobs,
    JobStart(JobStart),
    JobChange(JobChange),
    JobCancel(JobCancel),
    Reload,
    Shutdown,
    #[serde(rename = "take-over")]
    LiveUpgrade(LiveUpgrade),
}

impl Verb {
    /// Whether the verb changes nothing. The monitor socket accepts only such verbs.
    pub fn only_shows(&self) -> bool {
        match self {
            Self::List
            | Self::Stats(_)
            | Self::Slow(_)
            | Self::Workers
            | Self::Show(_)
            | Self::Health(_)
            | Self::Jobs => true,
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
            | Self::JobStart(JobStart { disk, .. })
            | Self::JobChange(JobChange { disk, .. })
            | Self::JobCancel(JobCancel { disk })
            | Self::Pause(Pause { disk, .. }) => vec![disk],
            Self::Snapshot(Snapshot { files, .. }) => files.iter_mut().map(|file| &mut file.disk).collect(),
            Self::List
            | Self::Health(_)
            | Self::Unpause
            | Self::Workers
            | Self::WorkersAdd(_)
            | Self::WorkersRemove(_)
            | Self::Add(_)
            | Self::Jobs
            | Self::Reload
            | Self::Shutdown
            | Self::LiveUpgrade(_) => Vec::new(),
        }
    }
}

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
    /// Whether the guests go on in the new files.
    #[serde(default)]
    pub overlay: bool,
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

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JobKind {
    /// Copies the data of all backing files into the image, which then no longer needs them.
    Stream,
    /// Copies the image into its backing file, and switches the guest to that file.
    Commit,
    /// Frees leaked clusters of the image.
    Reclaim,
}

impl JobKind {
    /// As in commands.
    pub fn word(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Commit => "commit",
            Self::Reclaim => "reclaim",
        }
    }
}

/// A job to start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobStart {
    pub disk: String,
    pub kind: JobKind,
    /// The most bytes that it copies in a second; 0: no limit. A reclaim copies nothing, and has none.
    #[serde(default)]
    pub rate: u64,
    #[serde(default)]
    pub paused: bool,
}

/// A missing field does not change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobChange {
    pub disk: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    /// 0: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobCancel {
    pub disk: String,
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

/// At most [`MAX_TIMEOUT_MS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u64")]
pub struct TimeoutMs(pub(super) u64);

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

impl From<TimeoutMs> for Duration {
    fn from(TimeoutMs(ms): TimeoutMs) -> Self {
        Self::from_millis(ms)
    }
}
