//! The answer to `jobs`.

use serde::{Deserialize, Serialize};

use crate::control::protocol::verbs::JobKind;

/// The last job of each disk, also those that have ended.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct JobsAnswer {
    pub jobs: Vec<JobReport>,
}

/// A job that merges a disk's layers, or frees leaked clusters.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JobReport {
    pub disk: String,
    pub kind: JobKind,
    pub state: JobState,
    /// The disk's size.
    pub size_bytes: u64,
    /// The guest's offset up to which the job has looked for clusters to copy. Of a reclaim: its progress, as a part of
    /// `size_bytes`.
    pub scanned_bytes: u64,
    /// Of a commit: what it has found and not copied yet, which is not all that remains.
    pub pending_bytes: u64,
    /// What it has copied; a commit copies again what the guest overwrites.
    pub copied_bytes: u64,
    /// Leaked clusters that a reclaim has freed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freed_clusters: Option<u64>,
    /// Their bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub freed_bytes: Option<u64>,
    /// Bytes per second; missing: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Why it has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The keys with which the disk's next start must serve it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<String>,
}

/// What a job does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JobState {
    Running,
    Paused,
    Completed,
    Failed,
    Cancelled,
}

impl JobState {
    /// As in tables.
    pub fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}
