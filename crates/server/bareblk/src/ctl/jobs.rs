//! `bareblk ctl stream`, `commit`, `reclaim` and `jobs`: what jobs do, as a table or as a bar that waits for the end.

use std::fmt::Write;
use std::io::{self, IsTerminal};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use super::connection::Connection;
use super::tables::{plain, size, table};
use crate::control::answers::jobs::{JobReport, JobState, JobsAnswer};
use crate::control::protocol::verbs::Verb;

/// How often `--wait` asks.
const PAUSE: Duration = Duration::from_millis(250);

pub fn shown(answer: &JobsAnswer) -> String {
    if answer.jobs.is_empty() {
        return "there are no jobs: start one with `bareblk ctl stream`, `bareblk ctl commit` or `bareblk ctl reclaim`\n".to_owned();
    }
    let row = |job: &JobReport| {
        vec![
            plain(&job.disk),
            job.kind.word().to_owned(),
            job.state.word().to_owned(),
            format!("{}%", percent(job)),
            size(job.copied_bytes),
            size(job.pending_bytes),
            job.rate.map_or("off".to_owned(), |rate| format!("{}/s", size(rate))),
        ]
    };
    let headings = ["DISK", "JOB", "STATE", "SCANNED", "COPIED", "PENDING", "RATE LIMIT"];
    let mut text = table(&headings, 3, answer.jobs.iter().map(row));
    for job in &answer.jobs {
        let disk = plain(&job.disk);
        if let Some(error) = &job.error {
            let _ = writeln!(text, "disk {disk}: {}", plain(error));
        }
        if let Some(freed) = freed(job) {
            let _ = writeln!(text, "disk {disk}: {freed}");
        }
        if let Some(keys) = &job.keys {
            let _ = writeln!(text, "disk {disk}: before the next start, configure: {}", plain(keys));
        }
    }
    text
}

/// What a reclaim has done.
fn freed(job: &JobReport) -> Option<String> {
    let (clusters, bytes) = (job.freed_clusters?, size(job.freed_bytes?));
    match (clusters, job.state) {
        (0, JobState::Completed) => Some("no leaks".to_owned()),
        (0, _) => None,
        _ => Some(format!("reclaimed {clusters} clusters ({bytes})")),
    }
}

fn percent(job: &JobReport) -> u128 {
    u128::from(job.scanned_bytes) * 100 / u128::from(job.size_bytes).max(1)
}

/// Waits until the job of this disk has ended. Returns what the user must know.
///
/// # Errors
/// The job has failed, or was cancelled.
pub fn wait(server: &mut Connection, disk: &str) -> Result<String> {
    let bar = if io::stderr().is_terminal() { ProgressBar::new(1) } else { ProgressBar::hidden() };
    bar.set_style(ProgressStyle::with_template("{msg} {wide_bar} {percent}%")?);
    loop {
        let answer = server.ask(&Verb::Jobs)?.into_ok()?;
        let answer: JobsAnswer = serde_json::from_value(answer).context("cannot read the server's answer")?;
        let job = answer.jobs.into_iter().find(|job| job.disk == disk);
        let job = job.context("the server does not list the job: see bareblk ctl jobs")?;
        let (kind, state) = (job.kind.word(), job.state.word());
        bar.set_length(job.size_bytes.max(1));
        bar.set_position(job.scanned_bytes);
        let done = job.freed_bytes.map_or_else(
            || format!("{} copied", size(job.copied_bytes)),
            |bytes| format!("{} freed", size(bytes)),
        );
        bar.set_message(format!("{kind} {state}, {done}"));
        match job.state {
            JobState::Running | JobState::Paused => std::thread::sleep(PAUSE),
            JobState::Completed => {
                bar.finish_and_clear();
                let freed = freed(&job).map(|freed| format!("{freed}\n"));
                let keys =
                    job.keys.map(|keys| format!("before the next start, configure: {}\n", plain(&keys)));
                return Ok(freed.or(keys).unwrap_or_default());
            }
            JobState::Failed | JobState::Cancelled => {
                bar.finish_and_clear();
                let why = job.error.map(|why| format!(": {why}")).unwrap_or_default();
                bail!(
                    "the {kind} of disk {disk} {}{why}",
                    if why.is_empty() { "was cancelled" } else { "failed" }
                );
            }
        }
    }
}
