//! `bareblk ctl pause`: runs a command while a disk is paused.
//!
//! `pause → the command, or a line of standard input → unpause → exit code`; the disk continues if this process ends.

use std::ffi::OsString;
use std::io;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use super::connection::Connection;
use super::output::print;
use super::tables;
use crate::control::protocol::verbs::{Pause, Verb};

/// The exit code of a command that a signal ended, as in a shell.
const SIGNALLED: u8 = 128;

/// Pauses the disk while the command runs. Returns the command's exit code.
pub fn run(server: &mut Connection, pause: Pause, command: &[OsString], json: bool) -> Result<ExitCode> {
    let disk = tables::plain(&pause.disk);
    let reply = server.ask(&Verb::Pause(pause))?;
    if json && reply.answer.error.is_some() {
        print(&format!("{}\n", reply.line))?;
    }
    reply.into_ok()?;
    let code = match command.split_first() {
        Some((program, words)) => run_command(program, words)?,
        None => wait_for_line(&disk, json)?,
    };
    let reply = server.ask(&Verb::Unpause)?;
    if json {
        print(&format!("{}\n", reply.line))?;
    }
    let paused_ns = reply.into_ok()?["paused_ns"].as_u64().unwrap_or_default();
    if !json && command.is_empty() {
        print(&format!("disk {disk} was paused for {} ms\n", paused_ns / 1_000_000))?;
    }
    Ok(code)
}

fn run_command(program: &OsString, words: &[OsString]) -> Result<ExitCode> {
    use std::os::unix::process::ExitStatusExt;
    let ended = Command::new(program).args(words).status();
    let ended = ended.with_context(|| format!("cannot run {}", program.display()))?;
    let code = ended.code().and_then(|code| u8::try_from(code).ok());
    let signal = ended.signal().and_then(|signal| u8::try_from(signal).ok()).unwrap_or_default();
    Ok(code.unwrap_or(SIGNALLED.saturating_add(signal)).into())
}

fn wait_for_line(disk: &str, json: bool) -> Result<ExitCode> {
    if !json {
        print(&format!("disk {disk} is paused for at most 60 s: press Enter to continue\n"))?;
    }
    io::stdin().read_line(&mut String::new()).context("cannot read standard input")?;
    Ok(ExitCode::SUCCESS)
}
