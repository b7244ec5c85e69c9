//! The old server's end: offers its disks, freezes them, and gives them up or resumes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use blk_server::{Frozen, Offer, Server, Socket};
use tracing::{info, warn};

use super::messages::{Listener, Message, OfferedDisk};
use super::terms::{
    AT_ONCE, CLOSE_TIMEOUT, CUT_TIMEOUT, DRAIN_TIMEOUT, JOBS, MONITOR, PREPARE_TIMEOUT, QCOW2, QCOW2_WRITTEN,
    READY_TIMEOUT, RECLAIM, REMOTE, TOTALS, with_cure,
};
use super::wire::{receive, send};
use crate::control::protocol::verbs::{JobKind, JobStart};
use crate::serving::Serving;

/// A control socket or monitor socket, which is handed over with the disks.
#[derive(Clone, Debug)]
pub struct ControlListener {
    pub socket: Arc<Socket>,
    pub path: PathBuf,
}

/// The listening sockets that do not belong to a disk.
#[derive(Clone, Debug)]
pub struct Listeners {
    /// The control socket, through which the new server requests the live upgrade.
    pub control: Option<ControlListener>,
    pub monitor: Option<ControlListener>,
}

impl Listeners {
    /// The sockets that the new server takes over.
    fn handed_over(&self, extras: &[String]) -> impl Iterator<Item = &ControlListener> {
        let wants_monitor = extras.iter().any(|extra| extra == MONITOR);
        self.control.iter().chain(self.monitor.iter().filter(move |_| wants_monitor))
    }
}

/// Hands everything over, except for the sessions of the disks in `cut`, which end. `Ok`: this process owns nothing any
/// more and must end.
pub fn hand_over(
    serving: &Arc<Serving>,
    listeners: &Listeners,
    cut: &[String],
    channel: &UnixStream,
    agree: &mut dyn FnMut() -> io::Result<()>,
) -> Result<()> {
    let change = serving.begin_change()?;
    agree()?;
    info!("another server asks to take over the disks");
    let mut jobs = Vec::new();
    let outcome = serving
        .with_server(|server| converse(serving, server, listeners, cut, channel, &mut jobs))
        .and_then(|done| done);
    if let Err(error) = &outcome {
        warn!("live upgrade failed, this server keeps its disks: {error:#}");
        // This fails if the new server has disconnected, or has refused first.
        let _ = send(channel, &Message::No { why: format!("{error:#}") }, &[], AT_ONCE);
        drop(change);
        serving.resume_jobs(&jobs);
        return outcome;
    }
    // Prevents all changes until the process ends.
    std::mem::forget(change);
    outcome
}

fn converse(
    serving: &Serving,
    server: &Server,
    listeners: &Listeners,
    cut: &[String],
    channel: &UnixStream,
    jobs: &mut Vec<JobStart>,
) -> Result<()> {
    let extras = begin(channel)?;
    check_opened_again(serving, &extras)?;
    // The new server cannot open an image to which a job writes.
    serving.suspend_jobs(jobs)?;
    offer(server, listeners, &extras, channel).context("cannot send the list of disks to the new server")?;
    expect(channel, "Ready", READY_TIMEOUT)?;
    server.cut_off(cut, CUT_TIMEOUT)?;
    let mut frozen = server.freeze(DRAIN_TIMEOUT).map_err(with_cure)?;
    let deadline = Instant::now() + PREPARE_TIMEOUT;
    tell_all(&mut frozen, &extras, jobs, channel, deadline).context("cannot hand over the sessions")?;
    expect(channel, "Prepared", left(deadline))?;
    serving.unless_stopping(|| {
        let leave_files = |stay| {
            listeners.handed_over(&extras).for_each(|listener| listener.socket.leave_file(stay));
        };
        leave_files(true);
        send(channel, &Message::Yours, &[], AT_ONCE).inspect_err(|_| leave_files(false))?;
        // Removes the file of a monitor socket that the new server does not want; `leave_file` protects any other.
        listeners.monitor.iter().for_each(|listener| listener.socket.remove());
        // This process keeps the descriptors until it ends.
        let mut given_up = frozen.give_up();
        given_up.close_remote(CLOSE_TIMEOUT);
        std::mem::forget(given_up);
        Ok(())
    })
}

/// Refuses a new server that does not know disks that it must open itself.
fn check_opened_again(serving: &Serving, extras: &[String]) -> Result<()> {
    let knows = |extra: &str| extras.iter().any(|known| known == extra);
    for disk in serving.disks() {
        let what = match &disk.settings {
            settings if settings.is_remote() && !knows(REMOTE) => "is on another machine",
            settings if settings.options.is_qcow2() && !knows(QCOW2) => "is a qcow2 image",
            settings if settings.is_written_qcow2() && !knows(QCOW2_WRITTEN) => "is a writable qcow2 image",
            _ => continue,
        };
        bail!(
            "disk `{}` {what}, and the new server's version cannot take it over: restart the server instead",
            disk.name
        );
    }
    Ok(())
}

/// Returns the extras that the new server wants.
fn begin(channel: &UnixStream) -> Result<Vec<String>> {
    match receive(channel, Some(AT_ONCE))?.0 {
        Message::Begin => Ok(Vec::new()),
        Message::BeginWith { extras } => Ok(extras),
        Message::No { why } => Err(anyhow!("the new server cannot take over: {why}")),
        message => bail!("the new server sent {}, but Begin was expected", message.name()),
    }
}

/// Receives the next message, which must have this name.
fn expect(channel: &UnixStream, name: &str, limit: Duration) -> Result<()> {
    match receive(channel, Some(limit))?.0 {
        Message::No { why } => Err(anyhow!("the new server refused the live upgrade: {why}")),
        message if message.name() == name => Ok(()),
        message => bail!("the new server sent {}, but {name} was expected", message.name()),
    }
}

fn offer(server: &Server, listeners: &Listeners, extras: &[String], channel: &UnixStream) -> Result<()> {
    let messages = [Message::Control, Message::Monitor];
    for (message, listener) in messages.into_iter().zip(listeners.handed_over(extras)) {
        let described =
            Listener { path: listener.path.clone().into(), managed: listener.socket.is_managed() };
        send(channel, &message(described), &[listener.socket.as_fd()], AT_ONCE)?;
    }
    for offer in server.offers() {
        let fds: Vec<BorrowedFd<'_>> = offer
            .file()
            .map(AsFd::as_fd)
            .into_iter()
            .chain([offer.listener()])
            .chain(offer.claim().map(AsFd::as_fd))
            .collect();
        send(channel, &Message::Disk(offered(&offer)), &fds, AT_ONCE)?;
    }
    Ok(send(channel, &Message::OffersEnd, &[], AT_ONCE)?)
}

fn offered(offer: &Offer) -> OfferedDisk {
    OfferedDisk {
        name: offer.name.clone(),
        image: offer.image.clone().into(),
        socket: Listener { path: offer.socket.clone().into(), managed: offer.socket_is_managed },
        facts: offer.facts.clone(),
        capacity_sectors: offer.capacity_sectors,
        claimed: offer.claim().is_some(),
    }
}

/// The time left. Never zero, which would mean no limit.
fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

fn tell_all(
    frozen: &mut Frozen<'_>,
    extras: &[String],
    jobs: &[JobStart],
    channel: &UnixStream,
    deadline: Instant,
) -> Result<()> {
    for (disk, state, sessions) in frozen.take_parts() {
        send(channel, &Message::State { disk: disk.clone(), state }, &[], left(deadline))?;
        for handed in sessions {
            let fds: Vec<BorrowedFd<'_>> = handed.fds.iter().map(|fd| fd.as_fd()).collect();
            let (disk, frozen_ns, state) = (disk.clone(), handed.frozen_ns, handed.state);
            send(channel, &Message::Session { disk, frozen_ns, state }, &fds, left(deadline))?;
        }
    }
    if extras.iter().any(|extra| extra == TOTALS) {
        for (disk, totals) in frozen.totals() {
            let message = Message::Totals { disk: disk.to_owned(), totals };
            send(channel, &message, &[], left(deadline))?;
        }
    }
    for job in jobs {
        let wanted = if job.kind == JobKind::Reclaim { RECLAIM } else { JOBS };
        if extras.iter().any(|extra| extra == wanted) {
            send(channel, &Message::Job(job.clone()), &[], left(deadline))?;
        } else {
            let (disk, job) = (&job.disk, job.kind.word());
            warn!(
                disk,
                job, "the new server's version cannot resume the job: start it again in the new server"
            );
        }
    }
    Ok(send(channel, &Message::StatesEnd, &[], left(deadline))?)
}
