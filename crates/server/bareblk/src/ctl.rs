//! `bareblk ctl`: sends one request to a running server and prints its answer.
//!
//! `arguments → Verb → connection.rs → the server's answer → tables.rs, rates.rs, or the line itself (--json)`
//!
//! With `--json`, standard output has one JSON object whatever happens: an error that does not come from the server has
//! the form of the server's errors.

pub mod connection;

mod jobs;

mod json_error;

mod limits;

mod output;

mod page;

mod pause;

pub mod rates;

pub mod tables;

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};
use disk_image::Location;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::args::ctl_args::{Choice, CtlArgs, CtlCommand, JobArgs, JobChangeArgs, Timeout, WorkersCommand};
use crate::args::usage::Wrong;
use crate::args::values::NewSize;
use crate::control::answers::placement::PlacementAnswer;
use crate::control::answers::reports::{Disk, ListAnswer, StatsAnswer, WorkersAnswer};
use crate::control::disk_names::{self, KnownDisk};
use crate::control::protocol::answer::ErrorKind;
use crate::control::protocol::verbs::{
    Add, Attach, Flush, Health, JobCancel, JobChange, JobKind, JobStart, Limit, Pause, Placement, Remove,
    Resize, Resume, Show, Slow, Snapshot, SnapshotFile, Stats, TimeoutMs, Verb, WorkersRemove,
};
use crate::control::worker_settings;
use connection::{Connection, Reply};
use output::{NoDisk, ServerError, print};

pub use json_error::of_usage;

/// Runs the subcommand.
pub fn run(args: CtlArgs) -> Result<ExitCode> {
    let json = args.json;
    let outcome = carry_out(args);
    match &outcome {
        // The server's own error has been printed already.
        Err(error) if json && !error.is::<ServerError>() => {
            print(&format!("{}\n", json_error::line(error)))?;
        }
        _ => {}
    }
    outcome
}

fn carry_out(args: CtlArgs) -> Result<ExitCode> {
    let (socket, json) = (args.socket(), args.json);
    if let CtlCommand::Pause { disk, timeout, command } = args.command {
        let pause = Pause { disk, timeout_ms: timeout_ms(timeout)? };
        return pause::run(&mut Connection::open(&socket)?, pause, &command, json);
    }
    let names_only = matches!(args.command, CtlCommand::Names);
    let watch = match args.command {
        CtlCommand::Stats { watch, .. } => watch,
        _ => None,
    };
    let waits = matches!(&args.command, CtlCommand::Stream { job } | CtlCommand::Commit { job } if job.wait)
        || matches!(args.command, CtlCommand::Reclaim { wait: true, .. });
    let grows = matches!(args.command, CtlCommand::Resize { size: NewSize { is_growth: true, .. }, .. });
    let mut verb = verb(args.command, json)?;
    let mut server = Connection::open(&socket)?;
    if let (true, Verb::Resize(resize)) = (grows, &mut verb) {
        resize.size_bytes = grown(&mut server, &resize.disk, resize.size_bytes)?;
    }
    if let Some(pause) = watch {
        return keep_watching(&mut server, &verb, json, pause).map(|()| ExitCode::SUCCESS);
    }
    if let (false, Verb::Limit(Limit { set, .. })) = (json, &verb)
        && set.is_empty()
    {
        print(&limits_in_use(&mut server, &verb)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let reply = ask(&mut server, &verb)?;
    let started =
        reply.answer.ok.as_ref().and_then(|ok| ok["disk"].as_str()).filter(|_| waits).map(str::to_owned);
    let stops = verb == Verb::Shutdown && reply.answer.error.is_none();
    let is_ill = matches!(verb, Verb::Health(_)) && is_ill(&reply);
    if json {
        print(&format!("{}\n", reply.line))?;
        reply.into_ok()?;
    } else if names_only {
        print(&names(reply.into_ok()?)?)?;
    } else {
        print(&shown(&verb, reply.into_ok()?)?)?;
    }
    if let Some(disk) = started {
        let text = jobs::wait(&mut server, &disk)?;
        if !json {
            print(&text)?;
        }
    }
    if stops {
        server.wait_gone()?;
    }
    Ok(if is_ill { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn is_ill(reply: &Reply) -> bool {
    reply.answer.ok.as_ref().is_some_and(|ok| ok["healthy"] != true)
}

/// `json`: the answer is printed as it is, so it needs no histograms for percentiles.
fn verb(command: CtlCommand, json: bool) -> Result<Verb> {
    Ok(match command {
        CtlCommand::List | CtlCommand::Names => Verb::List,
        CtlCommand::Stats { disks, .. } => {
            let disks = Some(disks).filter(|disks| !disks.is_empty());
            Verb::Stats(Stats { disks, histograms: !json, ..Stats::default() })
        }
        CtlCommand::Slow { disk } => Verb::Slow(Slow { disk }),
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
        CtlCommand::Limit { words, group } => Verb::Limit(limits::request(words, group)?),
        CtlCommand::Show { disk } => Verb::Show(Show { disk }),
        CtlCommand::Health { timeout } => Verb::Health(Health { timeout_ms: timeout_ms(timeout)? }),
        CtlCommand::Flush { disk, timeout } => Verb::Flush(Flush { disk, timeout_ms: timeout_ms(timeout)? }),
        CtlCommand::Pause { disk, timeout, .. } => {
            Verb::Pause(Pause { disk, timeout_ms: timeout_ms(timeout)? })
        }
        CtlCommand::Snapshot { files, overlay, timeout } => Verb::Snapshot(Snapshot {
            overlay,
            files: files.into_iter().map(snapshot_file).collect::<Result<_>>()?,
            timeout_ms: timeout_ms(timeout)?,
        }),
        CtlCommand::Stream { job } => job_start(job, JobKind::Stream),
        CtlCommand::Commit { job } => job_start(job, JobKind::Commit),
        CtlCommand::Reclaim { disk, wait } => job_start(JobArgs { disk, rate: None, wait }, JobKind::Reclaim),
        CtlCommand::Jobs => Verb::Jobs,
        CtlCommand::Job { disk, change: JobChangeArgs { cancel: true, .. } } => {
            Verb::JobCancel(JobCancel { disk })
        }
        CtlCommand::Job { disk, change: JobChangeArgs { pause, resume, rate, .. } } => {
            Verb::JobChange(JobChange { disk, paused: (pause || resume).then_some(pause), rate })
        }
        CtlCommand::Reload => Verb::Reload,
        CtlCommand::Shutdown => Verb::Shutdown,
    })
}

fn job_start(job: JobArgs, kind: JobKind) -> Verb {
    let JobArgs { disk, rate, .. } = job;
    Verb::JobStart(JobStart { disk, kind, rate: rate.unwrap_or_default(), paused: false })
}

/// Makes the path absolute: the server may run in another folder.
fn snapshot_file((disk, file): (String, PathBuf)) -> Result<SnapshotFile> {
    let path = std::path::absolute(file).context("DISK=FILE")?;
    let file = path.to_str().context("the path of a snapshot is not UTF-8: choose another path")?.to_owned();
    Ok(SnapshotFile { disk, file })
}

/// The names that a shell completes, one per line.
fn names(ok: Value) -> Result<String> {
    let mut list: ListAnswer = read(ok)?;
    shorten(list.disks.iter_mut());
    Ok(list.disks.iter().map(|disk| format!("{}\n", tables::plain(&disk.name))).collect())
}

/// The new size of a disk that grows by `more_bytes`. If another client enlarges the disk meanwhile, the server may
/// refuse the new size, because the disk would shrink.
fn grown(server: &mut Connection, disk: &str, more_bytes: u64) -> Result<u64> {
    let disks = read::<ListAnswer>(server.ask(&Verb::List)?.into_ok()?)?.disks;
    let name = disk_names::resolve(disk, &known(disks.iter())).map_err(|fault| NoDisk(fault.message))?;
    let found =
        disks.iter().find(|other| other.name == name).context("the server no longer has this disk")?;
    let (now_bytes, sum) = (found.size_bytes, found.size_bytes.checked_add(more_bytes));
    sum.with_context(|| {
        format!("disk {disk} has {now_bytes} bytes and cannot grow by {more_bytes} bytes: the sum does not fit in 64 bits")
    })
}

/// Reads the limits twice, to show how much they are used between the readings.
fn limits_in_use(server: &mut Connection, verb: &Verb) -> Result<String> {
    let before = read(server.ask(verb)?.into_ok()?)?;
    std::thread::sleep(limits::PAUSE);
    Ok(limits::shown(&before, &read(server.ask(verb)?.into_ok()?)?))
}

fn timeout_ms(timeout: Timeout) -> Result<TimeoutMs> {
    TimeoutMs::try_from(timeout.seconds.saturating_mul(1000)).map_err(|why| Wrong(why).into())
}

/// Makes paths absolute: the server may run in another folder.
fn table(settings: Vec<(String, Value)>) -> Result<Map<String, Value>> {
    let mut table = Map::new();
    for (key, value) in settings {
        let value = match (key.as_str(), value) {
            ("image", Value::String(uri))
                if Location::parse(Path::new(&uri)).context("image=")?.is_remote() =>
            {
                Value::from(uri)
            }
            ("image" | "socket" | "backing", Value::String(path)) => {
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

/// An older server may refuse the fields of `stats`: it is asked again without them.
fn ask(server: &mut Connection, verb: &Verb) -> Result<Reply> {
    let reply = server.ask(verb)?;
    let is_unknown = reply.answer.error.as_ref().is_some_and(|fault| fault.kind == ErrorKind::BadRequest);
    match verb {
        Verb::Stats(wanted) if is_unknown && wanted.disks.is_none() => {
            server.ask(&Verb::Stats(Stats::default()))
        }
        _ => Ok(reply),
    }
}

fn known<'a>(disks: impl Iterator<Item = &'a Disk>) -> Vec<KnownDisk> {
    disks.map(|disk| KnownDisk { name: disk.name.clone(), image: disk.image.clone() }).collect()
}

/// Shows disks without a name of their own by their file names.
fn shorten<'a>(disks: impl Iterator<Item = &'a mut Disk>) {
    let mut disks: Vec<_> = disks.collect();
    let mut short = disk_names::short(&known(disks.iter().map(|disk| &**disk)));
    disks.iter_mut().for_each(|disk| {
        if let Some(word) = short.remove(&disk.name) {
            disk.name = word;
        }
    });
}

fn read_stats(ok: Value) -> Result<StatsAnswer> {
    let mut stats: StatsAnswer = read(ok)?;
    shorten(stats.disks.iter_mut().map(|stats| &mut stats.disk));
    Ok(stats)
}

fn shown(verb: &Verb, ok: Value) -> Result<String> {
    Ok(match verb {
        Verb::List => {
            let mut list: ListAnswer = read(ok)?;
            shorten(list.disks.iter_mut());
            tables::disks(&list.disks) + &tables::waiting(&list.waiting)
        }
        Verb::Workers => tables::workers(&read::<WorkersAnswer>(ok)?.workers),
        Verb::Stats(_) => tables::stats(&read_stats(ok)?),
        Verb::Slow(Slow { disk }) => tables::slow(disk, &read(ok)?, SystemTime::now()),
        Verb::Placement(Placement { disk, completion_worker: None, .. }) => {
            tables::placement(disk, read::<PlacementAnswer>(ok)?.placement.as_ref())
        }
        Verb::WorkersAdd(_) => format!("worker {}\n", ok["worker"]),
        Verb::Add(_) => format!("{}\n", tables::plain(ok["disk"].as_str().unwrap_or_default())),
        Verb::Resume(Resume { disk, .. }) if ok["resumed"] == 0 => {
            format!("disk {} has no parked requests\n", tables::plain(disk))
        }
        Verb::Resume(_) => format!("retrying {} parked requests\n", ok["resumed"]),
        Verb::Limit(_) => limits::changed(&ok),
        Verb::Show(_) => page::disk(&read(ok)?),
        Verb::Health(_) => page::health(&read(ok)?),
        Verb::Snapshot(Snapshot { files, overlay, .. }) => page::snapshots(files, *overlay, &ok),
        // An older server does not say whether the queue runs.
        Verb::Attach(Attach { disk, queue, worker, .. }) if ok["runs"] == false => {
            let disk = tables::plain(disk);
            format!("queue {queue} of disk {disk} does not run yet: it will start on worker {worker}\n")
        }
        Verb::Jobs => jobs::shown(&read(ok)?),
        Verb::Reload => tables::changes(&read(ok)?),
        _ => String::new(),
    })
}

fn read<T: DeserializeOwned>(ok: Value) -> Result<T> {
    serde_json::from_value(ok).context("cannot read the server's answer")
}

/// Repeats until the reader closes standard output, or a signal ends the process.
fn keep_watching(server: &mut Connection, verb: &Verb, json: bool, pause: Duration) -> Result<()> {
    let clear = if io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
    let mut before: Option<StatsAnswer> = None;
    loop {
        let reply = ask(server, verb)?;
        let text = if json {
            let line = format!("{}\n", reply.line);
            if reply.answer.error.is_some() {
                print(&line)?;
            }
            reply.into_ok()?;
            line
        } else {
            let now = read_stats(reply.into_ok()?)?;
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
