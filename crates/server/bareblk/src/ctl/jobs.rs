//! `bareblk ctl stream`, `commit` and `jobs`: what jobs do, as a table or as a bar that waits for the end.

use std::fmt::Write;
use std::io::{self, IsTerminal};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};

use super::connection::Connection;
use super::tables::{plain, size, table};
use crate::control::answers::jobs::{JobReport, JobState, JobsAnswer};
use crate::control::protocol::verbs::{JobStart, Verb};

/// How often `--wait` asks.
const PAUSE: Duration = Duration::from_millis(250);

pub fn shown(answer: &JobsAnswer) -> String {
    if answer.jobs.is_empty() {
        return "there are no jobs: bareblk ctl stream and commit start them\n".to_owned();
    }
    let row = |job: &JobReport| {
        vec![
            plain(&job.disk),
            job.kind.word().to_owned(),
            job.state.word().to_owned(),
            format!("{}%", percent(job)),
            size(job.copied_bytes),
            size(job.left_bytes),
            job.rate.map_or("off".to_owned(), |rate| format!("{}/s", size(rate))),
        ]
    };
    let headings = ["DISK", "JOB", "STATE", "LOOKED AT", "COPIED", "LEFT", "RATE LIMIT"];
    let mut text = table(&headings, 3, answer.jobs.iter().map(row));
    for job in &answer.jobs {
        let disk = plain(&job.disk);
        if let Some(error) = &job.error {
            let _ = writeln!(text, "disk {disk}: {}", plain(error));
        }
        if let Some(keys) = &job.keys {
            let _ = writeln!(text, "disk {disk}: before the next start, configure: {}", plain(keys));
        }
    }
    text
}

fn percent(job: &JobReport) -> u128 {
    u128::from(job.looked_bytes) * 100 / u128::from(job.size_bytes).max(1)
}

/// Waits until the job has ended. Returns what the user must know.
///
/// # Errors
/// The job has failed, or was cancelled.
pub fn wait(server: &mut Connection, started: &JobStart) -> Result<String> {
    let bar = if io::stderr().is_terminal() { ProgressBar::new(1) } else { ProgressBar::hidden() };
    bar.set_style(ProgressStyle::with_template("{msg} {wide_bar} {percent}%")?);
    loop {
        let answer: JobsAnswer = serde_json::from_value(server.ask(&Verb::Jobs)?.into_ok()?)
            .context("cannot read the server's answer")?;
        let job = answer.jobs.into_iter().find(|job| is_of(job, started));
        let job = job.context("the server has no such job any more")?;
        bar.set_length(job.size_bytes.max(1));
        bar.set_position(job.looked_bytes);
        bar.set_message(format!("{} {}, {} left", job.kind.word(), job.state.word(), size(job.left_bytes)));
        match job.state {
            JobState::Running | JobState::Paused => std::thread::sleep(PAUSE),
            JobState::Ended => {
                bar.finish_and_clear();
                let keys =
                    job.keys.map(|keys| format!("before the next start, configure: {}\n", plain(&keys)));
                return Ok(keys.unwrap_or_default());
            }
            JobState::Failed => {
                bar.finish_and_clear();
                bail!("{} of disk {}: {}", job.kind.word(), job.disk, job.error.unwrap_or_default());
            }
        }
    }
}

/// The disk may be given by the last parts of its image's path.
fn is_of(job: &JobReport, started: &JobStart) -> bool {
    job.kind == started.kind
        && (job.disk == started.disk || job.disk.ends_with(&format!("/{}", started.disk)))
}
