//! `bareblk ctl`: sends one request to a running server and prints its answer.
//!
//! `arguments → Verb → connection.rs → the server's answer → tables.rs, rates.rs, or the line itself (--json)`

pub mod connection;

pub mod rates;

pub mod tables;

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::args::ctl_args::{Choice, CtlArgs, CtlCommand, Timeout, WorkersCommand};
use crate::args::usage::Wrong;
use crate::args::values::NewSize;
use crate::control::placement::PlacementAnswer;
use crate::control::protocol::{
    Add, Attach, Placement, Remove, Resize, Resume, TimeoutMs, Verb, WorkersRemove,
};
use crate::control::reports::{ListAnswer, StatsAnswer, WorkersAnswer};
use crate::control::worker_settings;
use connection::{Connection, Reply};

/// Runs the subcommand.
pub fn run(args: CtlArgs) -> Result<()> {
    let (socket, json) = (args.socket(), args.json);
    let watch = match args.command {
        CtlCommand::Stats { watch } => watch,
        _ => None,
    };
    let grows = matches!(args.command, CtlCommand::Resize { size: NewSize { is_growth: true, .. }, .. });
    let mut verb = verb(args.command)?;
    let mut server = Connection::open(&socket)?;
    if let (true, Verb::Resize(resize)) = (grows, &mut verb) {
        resize.size_bytes = grown(&mut server, &resize.disk, resize.size_bytes)?;
    }
    if let Some(pause) = watch {
        return keep_watching(&mut server, json, pause);
    }
    let reply = server.ask(&verb)?;
    let stops = verb == Verb::Shutdown && reply.answer.error.is_none();
    if json {
        print(&format!("{}\n", reply.line))?;
        reply.into_ok()?;
    } else {
        print(&shown(&verb, reply.into_ok()?)?)?;
    }
    if stops { server.wait_gone() } else { Ok(()) }
}

fn verb(command: CtlCommand) -> Result<Verb> {
    Ok(match command {
        CtlCommand::List => Verb::List,
        CtlCommand::Stats { .. } => Verb::Stats,
        CtlCommand::Workers { command: None | Some(WorkersCommand::List) } => Verb::Workers,
        CtlCommand::Workers { command: Some(WorkersCommand::Add(args)) } => {
            Verb::WorkersAdd(worker_settings::settings(&args.into()))
        }
        CtlCommand::Workers { command: Some(WorkersCommand::Remove { worker, timeout }) } => {
            Verb::WorkersRemove(WorkersRemove { worker, timeout_ms: timeout_ms(timeout)? })
        }
        CtlCommand::Attach { disk, queue, worker, timeout } => {
            Verb::Attach(Attach { disk, queue, worker, timeout_ms: timeout_ms(timeout)? })
        }
        CtlCommand::Placement { disk, completion_worker, timeout } => {
            let completion_worker = completion_worker.map(|Choice(worker)| worker);
            Verb::Placement(Placement { disk, completion_worker, timeout_ms: timeout_ms(timeout)? })
        }
        CtlCommand::Add { settings } => Verb::Add(Add { disk: table(settings)? }),
        CtlCommand::Remove { disk, force, timeout } => {
            Verb::Remove(Remove { disk, force, timeout_ms: timeout_ms(timeout)? })
        }
        CtlCommand::Resize { disk, size, force } => {
            Verb::Resize(Resize { disk, size_bytes: size.bytes, force })
        }
        CtlCommand::Resume { disk, timeout } => {
            Verb::Resume(Resume { disk, timeout_ms: timeout_ms(timeout)? })
        }
        CtlCommand::Reload => Verb::Reload,
        CtlCommand::Shutdown => Verb::Shutdown,
    })
}

/// The size of a disk that gets `more_bytes` more. If someone else resizes it meanwhile, the server may refuse the sum,
/// because it is then less than the size.
fn grown(server: &mut Connection, disk: &str, more_bytes: u64) -> Result<u64> {
    let disks = read::<ListAnswer>(server.ask(&Verb::List)?.into_ok()?)?.disks;
    let Some(found) = disks.iter().find(|other| other.name == disk) else {
        bail!("there is no disk `{disk}`");
    };
    let (now_bytes, sum) = (found.size_bytes, found.size_bytes.checked_add(more_bytes));
    sum.with_context(|| format!("{disk} has {now_bytes} bytes and cannot grow by {more_bytes}"))
}

fn timeout_ms(timeout: Timeout) -> Result<TimeoutMs> {
    TimeoutMs::try_from(timeout.seconds.saturating_mul(1000)).map_err(|why| Wrong(why).into())
}

/// Makes paths absolute: the server may run in another folder.
fn table(settings: Vec<(String, Value)>) -> Result<Map<String, Value>> {
    let mut table = Map::new();
    for (key, value) in settings {
        let value = match (key.as_str(), value) {
            ("image" | "socket", Value::String(path)) => {
                let path = std::path::absolute(path).with_context(|| format!("{key}="))?;
                Value::from(path.to_string_lossy())
            }
            (_, value) => value,
        };
        if table.contains_key(&key) {
            bail!(Wrong(format!("{key}= appears twice: give it once")));
        }
        table.insert(key, value);
    }
    Ok(table)
}

fn shown(verb: &Verb, ok: Value) -> Result<String> {
    Ok(match verb {
        Verb::List => tables::disks(&read::<ListAnswer>(ok)?.disks),
        Verb::Workers => tables::workers(&read::<WorkersAnswer>(ok)?.workers),
        Verb::Stats => tables::stats(&read(ok)?),
        Verb::Placement(Placement { disk, completion_worker: None, .. }) => {
            tables::placement(disk, read::<PlacementAnswer>(ok)?.placement.as_ref())
        }
        Verb::WorkersAdd(_) => format!("worker {}\n", ok["worker"]),
        Verb::Add(_) => format!("{}\n", tables::plain(ok["disk"].as_str().unwrap_or_default())),
        Verb::Resume(_) => format!("retrying {} parked requests\n", ok["resumed"]),
        Verb::Reload => tables::changes(&read(ok)?),
        _ => String::new(),
    })
}

fn read<T: DeserializeOwned>(ok: Value) -> Result<T> {
    serde_json::from_value(ok).context("cannot read the server's answer")
}

/// Repeats until the reader closes standard output, or a signal ends the process.
fn keep_watching(server: &mut Connection, json: bool, pause: Duration) -> Result<()> {
    let clear = if io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
    let mut before: Option<StatsAnswer> = None;
    loop {
        let reply = server.ask(&Verb::Stats)?;
        let text = if json {
            let line = format!("{}\n", reply.line);
            reply.into_ok()?;
            line
        } else {
            let now: StatsAnswer = read(reply.into_ok()?)?;
            let text = before.as_ref().map(|before| format!("{clear}{}\n", tables::rates(before, &now)));
            before = Some(now);
            text.unwrap_or_default()
        };
        if !print(&text)? {
            return Ok(());
        }
        std::thread::sleep(pause);
    }
}

/// False if the reader has closed standard output, which is no error.
fn print(text: &str) -> Result<bool> {
    let mut out = io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error.into()),
    }
}

impl Reply {
    /// The answer's content; the server's error, as this one.
    ///
    /// # Errors
    /// The server's, or the answer has neither content nor error.
    pub fn into_ok(self) -> Result<Value> {
        match (self.answer.ok, self.answer.error) {
            (_, Some(fault)) => bail!("{}", tables::plain(&fault.message)),
            (Some(ok), None) => Ok(ok),
            (None, None) => bail!("the server's answer is neither `ok` nor `error`"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_a_new_disk_are_absolute_before_they_are_sent() {
        let settings = vec![("image".into(), Value::from("a.raw")), ("serial".into(), Value::from("a.raw"))];
        let table = table(settings).unwrap();
        assert!(table["image"].as_str().unwrap().starts_with('/'));
        assert_eq!(table["serial"], "a.raw");
    }

    #[test]
    fn setting_given_twice_is_wrong_usage() {
        let settings = vec![("queues".into(), Value::from(1)), ("queues".into(), Value::from(2))];
        assert!(table(settings).unwrap_err().is::<Wrong>());
    }
}
