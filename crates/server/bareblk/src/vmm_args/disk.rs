//! What the options depend on: the disk's socket and queues, from the command line or from a running server.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use blk_server::MAX_QUEUE_SIZE;

use crate::args::ctl_args;
use crate::args::vmm_args::VmmArgs;
use crate::control::answers::reports::ShowAnswer;
use crate::control::protocol::answer::ErrorKind;
use crate::control::protocol::verbs::{Show, Verb};
use crate::ctl::connection::Connection;

/// A disk that a virtual machine connects to.
#[derive(Debug)]
pub struct Disk {
    /// Absolute, because the monitor may run in another folder.
    pub socket: String,
    /// The number of queues; `None`: the monitor chooses it.
    pub queues: Option<u16>,
    pub queue_size: u16,
}

impl Disk {
    pub fn of(args: &VmmArgs) -> Result<Self> {
        let Some(name) = &args.disk else {
            let path = args.path.as_ref().or(args.socket.as_ref()).context("no socket is given")?;
            return Ok(Self {
                socket: absolute(path)?,
                queues: args.queues,
                queue_size: args.queue_size.unwrap_or(MAX_QUEUE_SIZE),
            });
        };
        let served = ask(name, ctl_args::socket(args.control.as_deref()))?;
        let offered = served.disk.disk.queues_offered;
        let longest = served.settings.get("queue-size").and_then(|size| size.parse().ok());
        let longest: u16 = longest.context("the server does not report the disk's queue size")?;
        let (queues, size) = (args.queues.unwrap_or(1), args.queue_size.unwrap_or(longest));
        ensure!(
            queues <= offered,
            "--queues {queues} is too high: disk {name} offers only {offered} (set by its `queues` setting)"
        );
        ensure!(
            size <= longest,
            "--queue-size {size} is too large: disk {name} allows only {longest} (set by its `queue-size` setting)"
        );
        let socket = absolute(Path::new(&served.disk.disk.socket))?;
        Ok(Self { socket, queues: args.queues, queue_size: size })
    }
}

fn absolute(socket: &Path) -> Result<String> {
    let path = std::path::absolute(socket).context("cannot make the socket's path absolute")?;
    let path = path.to_str().context("the socket's path is not UTF-8: choose another path")?;
    Ok(path.to_owned())
}

fn ask(disk: &str, control: PathBuf) -> Result<ShowAnswer> {
    let mut server = Connection::open(&control)?;
    let answer = server.ask(&Verb::Show(Show { disk: disk.to_owned() }))?.answer;
    match (answer.ok, answer.error) {
        (Some(ok), None) => serde_json::from_value(ok).context("cannot read the server's answer"),
        (_, Some(fault)) if fault.kind == ErrorKind::UnknownVerb => Err(anyhow!(
            "the server at {} is too old to describe a disk: give the disk's socket instead of --disk",
            control.display()
        )),
        (_, fault) => Err(anyhow!(fault.map_or("no answer".to_owned(), |fault| fault.message))),
    }
}
