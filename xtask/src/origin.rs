//! The origin of a kept result (date, commit, machine), and keeping the result.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde::Serialize;
use xtask::{command, workspace};

/// Where and when a result was made; part of every kept result.
#[derive(Debug, Serialize)]
pub(crate) struct Origin {
    pub(crate) date: String,
    commit: String,
    /// Whether there are uncommitted changes.
    uncommitted_changes: bool,
    machine: Machine,
}

#[derive(Debug, Serialize)]
struct Machine {
    kernel: String,
    cpu: String,
    cpus: usize,
    memory_mib: u64,
}

impl Origin {
    /// The origin of a result made now on this machine.
    pub(crate) fn now() -> Result<Self> {
        Ok(Self {
            date: command::output(Command::new("date").args(["-u", "+%F"]))?.trim().to_owned(),
            commit: git(&["rev-parse", "HEAD"])?.trim().to_owned(),
            uncommitted_changes: !git(&["status", "--porcelain"])?.is_empty(),
            machine: machine()?,
        })
    }
}

/// Writes `bench_results/<date>-<what>/<file>`, replacing a file of the same day.
pub(crate) fn keep(origin: &Origin, what: &str, file: &str, result: &impl Serialize) -> Result<PathBuf> {
    let dir = workspace::root().join("bench_results").join(format!("{}-{what}", origin.date));
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let path = dir.join(file);
    fs::write(&path, serde_json::to_string_pretty(result)? + "\n")?;
    Ok(path)
}

fn git(args: &[&str]) -> Result<String> {
    command::output(Command::new("git").args(args).current_dir(workspace::root()))
}

fn machine() -> Result<Machine> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let memory_kib = field(&meminfo, "MemTotal").and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    Ok(Machine {
        kernel: command::output(Command::new("uname").arg("-srm"))?.trim().to_owned(),
        cpu: field(&cpuinfo, "model name").unwrap_or("unknown").to_owned(),
        cpus: std::thread::available_parallelism()?.get(),
        memory_mib: memory_kib.unwrap_or(0) / 1024,
    })
}

/// The value in a line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut values = text.lines().filter_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'));
    values.next().map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origin_names_commit_and_machine() {
        let value = serde_json::to_value(Origin::now().unwrap()).unwrap();
        assert_eq!(value["commit"].as_str().map(str::len), Some(40));
        assert!(value["machine"]["cpus"].as_u64() > Some(0));
    }

    #[test]
    fn field_is_what_follows_the_colon() {
        let text = "MemTotalX:  1 kB\nMemTotal:       24576 kB\nmodel name\t: Some CPU\n";
        assert_eq!(field(text, "MemTotal"), Some("24576 kB"));
        assert_eq!(field(text, "model name"), Some("Some CPU"));
        assert_eq!(field(text, "absent"), None);
    }
}
