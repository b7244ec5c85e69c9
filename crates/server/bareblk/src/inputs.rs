//! Entry points for fuzzing: the program's untrusted inputs as functions of text.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blk_server::{AdminError, Attached, Server, ServerReport, SlowRequest, WorkerId, WorkerOptions};
use disk_image::HostOpener;
use serde_json::{Map, Value};

use crate::config::config_file;
use crate::control::answers::jobs::JobReport;
use crate::control::answers::reports::{Overlaid, ReloadAnswer, Waiting};
use crate::control::disk_names::KnownDisk;
use crate::control::protocol::answer::Answer;
use crate::control::protocol::request::{BadLine, parse};
use crate::control::protocol::verbs::{JobChange, JobStart, LiveUpgrade, Verb};
use crate::control::refused::Refused;
use crate::control::{Control, dispatch};
use crate::live_upgrade::{AT_ONCE, Message, receive};

/// Maximum length of a line that a control client may send.
pub const MAX_LINE_BYTES: usize = crate::control::limits::MAX_LINE_BYTES;

/// The answer of a server with one worker and no disks to a control client's line, without the line break.
#[must_use]
pub fn control_answer(line: &[u8]) -> String {
    let answer = match parse(line) {
        Err(BadLine { id, fault }) => Answer::new(id, Err(fault)),
        Ok(request) if request.verb == Verb::Shutdown => {
            Answer::new(Some(request.id), Ok(Value::Object(Map::new())))
        }
        Ok(request) => Answer::new(Some(request.id), dispatch::execute(request.verb, &NoDisks)),
    };
    serde_json::to_string(&answer).unwrap_or_default()
}

/// The number of disks in a configuration. Looks up the named paths, but opens nothing.
///
/// # Errors
/// The error line.
pub fn configuration(text: &str) -> Result<usize, String> {
    let read = config_file::read_text(Path::new("bareblk.toml"), text, &HostOpener, &[]);
    read.map(|configuration| configuration.disks.len())
        .map_err(|error| format!("{:#}", anyhow::Error::from(error)))
}

/// A parsed frame of a live upgrade.
#[derive(Debug)]
pub struct LiveUpgradeFrame {
    /// The name of its message.
    pub name: &'static str,
    /// The message, written as JSON again.
    pub body: String,
    /// The number of descriptors that it carries.
    pub descriptors: usize,
    /// For a session: whether the server can continue it, or the error line.
    pub session: Option<Result<(), String>>,
}

/// Reads the next frame from the channel of a live upgrade, as the old and the new server do. For a session, `server`,
/// which has the session's disk, rebuilds the session and drops it before any ring starts.
///
/// # Errors
/// The error line.
pub fn live_upgrade_frame(channel: &UnixStream, server: &Server) -> Result<LiveUpgradeFrame, String> {
    let told = |error: anyhow::Error| format!("{error:#}");
    let (message, fds) = receive(channel, Some(AT_ONCE)).map_err(|error| told(error.into()))?;
    let body = serde_json::to_string(&message).map_err(|error| told(error.into()))?;
    let (name, descriptors) = (message.name(), fds.len());
    let session = match message {
        Message::Session { disk, state, .. } => {
            let rebuilt = server.rebuild(&disk, state, fds).and_then(|session| session.wait_prepared());
            Some(rebuilt.map_err(|error| told(error.into())))
        }
        _ => None,
    };
    Ok(LiveUpgradeFrame { name, body, descriptors, session })
}

struct NoDisks;

fn no_disk<T>(name: &str) -> Result<T, Refused> {
    Err(AdminError::NoDisk { name: name.to_owned() }.into())
}

fn no_worker<T>(id: WorkerId) -> Result<T, Refused> {
    Err(AdminError::NoWorker { id }.into())
}

impl Control for NoDisks {
    fn disks(&self) -> Vec<KnownDisk> {
        Vec::new()
    }

    fn waiting(&self) -> Vec<Waiting> {
        Vec::new()
    }

    fn report(&self) -> ServerReport {
        ServerReport::default()
    }

    fn slow_requests(&self, disk: &str) -> Result<(Option<Duration>, Vec<SlowRequest>), Refused> {
        no_disk(disk)
    }

    fn add_worker(&self, _: WorkerOptions) -> Result<WorkerId, Refused> {
        Ok(WorkerId(1))
    }

    fn remove_worker(&self, id: WorkerId, _: Duration) -> Result<(), Refused> {
        no_worker(id)
    }

    fn attach(&self, disk: &str, _: u16, _: WorkerId, _: Duration) -> Result<Attached, Refused> {
        no_disk(disk)
    }

    fn set_completion_worker(&self, disk: &str, _: Option<WorkerId>, _: Duration) -> Result<(), Refused> {
        no_disk(disk)
    }

    fn add_disk(&self, table: Map<String, Value>) -> Result<String, Refused> {
        let settings = config_file::disk(&table, &HostOpener)
            .map_err(|error| Refused::Settings(format!("{error:#}")))?;
        Ok(settings.name(&HostOpener))
    }

    fn remove_disk(&self, name: &str, _: bool, _: Duration) -> Result<(), Refused> {
        no_disk(name)
    }

    fn resize_disk(&self, name: &str, _: u64, _: bool) -> Result<(), Refused> {
        no_disk(name)
    }

    fn resume_disk(&self, name: &str, _: Duration) -> Result<usize, Refused> {
        no_disk(name)
    }

    fn limit_disk(&self, name: &str, _: &Map<String, Value>) -> Result<bool, Refused> {
        no_disk(name)
    }

    fn limit_group(&self, name: &str, _: &Map<String, Value>) -> Result<bool, Refused> {
        Err(AdminError::NoGroup { group: name.to_owned() }.into())
    }

    fn flush_disk(&self, name: &str, _: Duration) -> Result<(), Refused> {
        no_disk(name)
    }

    fn settings(&self, name: &str) -> Result<BTreeMap<String, String>, Refused> {
        no_disk(name)
    }

    fn silent_workers(&self, _: Duration) -> Result<Vec<WorkerId>, Refused> {
        Ok(Vec::new())
    }

    fn pause(&self, name: &str, _: Duration, _: &mut dyn FnMut()) -> Result<Duration, Refused> {
        no_disk(name)
    }

    fn overlay(&self, _: &[(String, PathBuf)], _: Duration) -> Result<Overlaid, Refused> {
        Ok(Overlaid { paused: Duration::ZERO, keys: Vec::new() })
    }

    fn snapshot(&self, _: &[(String, PathBuf)], _: Duration) -> Result<Duration, Refused> {
        Ok(Duration::ZERO)
    }

    fn jobs(&self) -> Vec<JobReport> {
        Vec::new()
    }

    fn start_job(&self, job: &JobStart) -> Result<(), Refused> {
        no_disk(&job.disk)
    }

    fn change_job(&self, change: &JobChange) -> Result<(), Refused> {
        no_disk(&change.disk)
    }

    fn cancel_job(&self, disk: &str) -> Result<(), Refused> {
        no_disk(disk)
    }

    fn reload(&self) -> Result<ReloadAnswer, Refused> {
        Ok(ReloadAnswer::default())
    }

    fn live_upgrade(
        &self,
        _: LiveUpgrade,
        _: &UnixStream,
        _: &mut dyn FnMut() -> io::Result<()>,
    ) -> Result<(), Refused> {
        Err(Refused::Settings("there is nothing to take over".into()))
    }

    fn shutdown(&self) {}
}
