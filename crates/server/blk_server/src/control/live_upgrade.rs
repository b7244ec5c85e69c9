//! Hands a server's disks and front-end connections to another process.
//!
//! old: `offers → … the new server prepares … → freeze → Frozen ─ give_up (never touched again), or dropped: all resumes`
//! new: `Server::prepare → facts compared → rebuild → Rebuilt ─ go → rings run → accept_front_ends`
//!
//! - All sessions drain their queues at the same time, so the pause is as long as the slowest session needs.
//! - Until `give_up`, an abort loses nothing: dropping [`Frozen`] or [`Rebuilt`] restores the previous state.
//! - After `give_up`, this process must not access rings or images: it flushes nothing and removes no socket file.
//!
//! `session/hand_over.rs` handles one session. The messages between the two servers are in `bareblk`.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use disk_image::volume::link::Use;
use disk_image::{Image, WeakBacking};
use sandbox::Role;
use serde::{Deserialize, Serialize};
use tracing::{error, info};

use crate::control::exports::{Export, Exports, SESSION_STACK_BYTES};
use crate::control::removal::{LOOK_AGAIN, all_ended, tell_to_end, wait_ended};
use crate::control::server::Server;
use crate::data_path::assignment::WorkerSet;
use crate::data_path::assignment::deadline::deadline_in;
use crate::data_path::assignment::frozen::Changes;
use crate::data_path::disk::Disk;
use crate::data_path::disk::storage_thread::StorageThread;
use crate::data_path::disk::totals::DiskTotals;
use crate::data_path::throttle::disk_throttle::ThrottleState;
use crate::data_path::worker::workers::AbortOnPanic;
use crate::error::AdminError;
use crate::host::error_line::error_line;
use crate::session::Session;
use crate::session::shared::{Go, NotHanded, Order, SessionShared, Theirs};
use crate::session::state::{Handed, SessionState};

/// Extra time for sessions to report queues that did not drain in time.
const LAST_ANSWERS: Duration = Duration::from_millis(500);
/// Time limit for sessions to resume after a failed upgrade.
const GOING_ON: Duration = Duration::from_secs(5);
/// Time limit for queues to start in the new process.
const STARTING: Duration = Duration::from_secs(10);

/// The key of the fact whose value is a set of feature bits.
const FEATURES: &str = "device features";

/// A property of a disk on which a guest relies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fact {
    /// The name of the property's setting.
    pub key: String,
    /// The setting's value, in the form that users write.
    pub value: String,
}

impl Fact {
    /// Whether a guest that relies on this fact can continue in a server where its value is `here`. Values must be
    /// equal, but a newer server may offer more feature bits, because the guest keeps those that it accepted.
    #[must_use]
    pub fn holds_with(&self, here: &str) -> bool {
        let bits = |value: &str| u64::from_str_radix(value.strip_prefix("0x")?, 16).ok();
        match (bits(&self.value), bits(here)) {
            (Some(theirs), Some(ours)) if self.key == FEATURES => theirs & !ours == 0,
            _ => self.value == here,
        }
    }
}

/// A disk and its open files.
#[derive(Debug)]
pub struct Offer {
    /// The disk's name.
    pub name: String,
    /// The image's path, with symbolic links resolved.
    pub image: PathBuf,
    /// The socket's path, as it was given.
    pub socket: PathBuf,
    /// Whether a service manager owns the socket's file.
    pub socket_is_managed: bool,
    /// Properties that must not change.
    pub facts: Vec<Fact>,
    /// The size, which must not shrink.
    pub capacity_sectors: u64,
    opened: Arc<Image>,
    export: Arc<Export>,
}

impl Offer {
    /// The image, with its lock; `None` for a disk that the other server opens itself.
    #[must_use]
    pub fn file(&self) -> Option<&Arc<File>> {
        self.opened.file_with_lock()
    }

    /// The descriptor that claims a block device, so that the kernel does not use the device.
    #[must_use]
    pub fn claim(&self) -> Option<&OwnedFd> {
        self.opened.claim()
    }

    /// The socket to which front-ends connect.
    #[must_use]
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.export.socket.as_fd()
    }
}

/// The state of a disk without its sessions, for the new process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskState {
    /// Whether a guest has disabled its write cache.
    writethrough: bool,
    /// Whether a guest has chosen a cache mode. Only older servers need this field; newer ones use each ring's state,
    /// which is more precise.
    cache_chosen: bool,
    /// Whether a sync has failed.
    failed: bool,
    /// The capacity that was announced to the guest. It may have grown after the image was offered.
    capacity_sectors: u64,
    /// How much of the disk's limits was used. Omitted if there are no limits, so that a server without support for
    /// limits can read the other fields.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    throttle: Option<Box<ThrottleState>>,
}

/// Why a live upgrade fails.
#[derive(Debug, thiserror::Error)]
pub enum LiveUpgradeError {
    /// Another change of workers or queues is in progress, or the server is stopping.
    #[error(transparent)]
    Busy(#[from] AdminError),
    /// A session cannot be handed over.
    #[error("disk `{disk}`: {why}", disk = disk.escape_debug())]
    Stays {
        /** The disk's name. */
        disk: String,
        /** The reason, for people. */
        why: String,
    },
    /// A disk's sessions do not end in time.
    #[error(
        "disk `{disk}`: its front-ends were disconnected, but not all sessions have ended after {} s, because its \
         storage hangs: repair the storage, or restart the server",
        timeout.as_secs_f64(),
        disk = disk.escape_debug()
    )]
    NotCutOff {
        /** The disk's name. */
        disk: String,
        /** The time limit that has passed. */
        timeout: Duration,
    },
    /// The received state describes no valid session.
    #[error("disk `{disk}`: cannot continue a session: {why}", disk = disk.escape_debug())]
    Session {
        /** The disk's name. */
        disk: String,
        /** The reason, for people. */
        why: String,
    },
}

impl LiveUpgradeError {
    fn session(disk: &str, why: String) -> Self {
        Self::Session { disk: disk.to_owned(), why }
    }
}

fn facts(disk: &Disk) -> Vec<Fact> {
    let image = disk.image();
    let wce = if disk.wce() == crate::Wce::Fixed { "fixed" } else { "guest" };
    let on = |on: bool| if on { "on" } else { "off" }.to_owned();
    let serial = disk.serial().iter().take_while(|&&byte| byte != 0).map(|&byte| char::from(byte)).collect();
    let known = [
        ("readonly", image.read_only().to_string()),
        ("cache", image.cache().to_string()),
        ("wce", wce.to_owned()),
        ("queues", disk.queues().to_string()),
        ("queue-size", disk.queue_size().to_string()),
        ("block-size", image.block_size().to_string()),
        ("discard", on(image.discard_limits().is_some())),
        ("serial", serial),
        (FEATURES, format!("{:#x}", disk.device_features())),
    ];
    // Servers that know no formats report none.
    let format = image.backing().volume().map(|_| ("format", "qcow2".to_owned()));
    known.into_iter().chain(format).map(|(key, value)| Fact { key: key.to_owned(), value }).collect()
}

impl Server {
    /// All disks, in the order in which they were added.
    #[must_use]
    pub fn offers(&self) -> Vec<Offer> {
        let (exports, _) = self.parts();
        let offers = exports.all().into_iter().map(|export| {
            let opened = export.disk.image();
            Offer {
                name: export.disk.name().to_owned(),
                image: opened.path().to_owned(),
                socket: export.socket.path().to_owned(),
                socket_is_managed: export.socket.is_managed(),
                facts: facts(&export.disk),
                capacity_sectors: opened.capacity_sectors(),
                opened,
                export,
            }
        });
        offers.collect()
    }

    /// Ends all sessions of these disks. Front-ends that connect later must wait. [`Server::freeze`] must follow: the
    /// other process then accepts these front-ends, or this process does if the upgrade fails.
    ///
    /// # Errors
    /// [`LiveUpgradeError`]. Front-ends may then connect again.
    pub fn cut_off(&self, disks: &[String], timeout: Duration) -> Result<(), LiveUpgradeError> {
        let (exports, workers) = self.parts();
        let cut: Result<Vec<_>, _> = disks.iter().map(|name| exports.find(name)).collect();
        let cut = cut?;
        exports.pause_accepting_for(&cut);
        let deadline = deadline_in(timeout);
        // All sessions are ended together, so that they end in parallel.
        let told: Vec<_> = cut.iter().map(|export| (export, export.sessions.all())).collect();
        for (export, sessions) in &told {
            let (disk, count) = (export.disk.name(), sessions.len());
            info!(disk, count, "sessions disconnected, as the operator of the new server requested");
            tell_to_end(export, sessions);
        }
        let stays =
            told.iter().find(|(export, sessions)| wait_ended(export, workers, sessions, deadline).is_err());
        let Some((export, _)) = stays else { return Ok(()) };
        resume(exports);
        Err(LiveUpgradeError::NotCutOff { disk: export.disk.name().to_owned(), timeout })
    }

    /// Pauses all disks: the server accepts no front-ends, reads no messages, accesses no rings, and has no
    /// request in an engine.
    ///
    /// # Errors
    /// [`LiveUpgradeError`]. All disks then continue.
    pub fn freeze(&self, timeout: Duration) -> Result<Frozen<'_>, LiveUpgradeError> {
        let deadline = deadline_in(timeout);
        let (exports, workers) = self.parts();
        let changes = workers.hold_changes(timeout).inspect_err(|_| resume(exports))?;
        let disks = exports.pause_accepting();
        let frozen = freeze(exports, changes, disks, deadline)?;
        // Also the tables of a disk that no guest has used.
        for export in &frozen.disks {
            order_tables(&export.disk.image(), Use::Closes, deadline + LAST_ANSWERS)
                .map_err(|why| LiveUpgradeError::Stays { disk: export.disk.name().to_owned(), why })?;
        }
        Ok(frozen)
    }

    /// The same for some disks. The others continue, and cannot be changed meanwhile.
    pub(crate) fn freeze_these(
        &self,
        disks: Vec<Arc<Export>>,
        timeout: Duration,
    ) -> Result<Frozen<'_>, LiveUpgradeError> {
        let deadline = deadline_in(timeout);
        let (exports, workers) = self.parts();
        let changes = workers.hold_changes(timeout)?;
        exports.pause_accepting_for(&disks);
        freeze(exports, changes, disks, deadline)
    }
}

fn freeze<'a>(
    exports: &'a Exports,
    changes: Changes<'a>,
    disks: Vec<Arc<Export>>,
    deadline: Instant,
) -> Result<Frozen<'a>, LiveUpgradeError> {
    let mut frozen = Frozen {
        exports,
        disks,
        parts: Vec::new(),
        asked: Vec::new(),
        given_up: false,
        changes: Some(changes),
    };
    let left = deadline.saturating_duration_since(Instant::now());
    for (at, export) in frozen.disks.iter().enumerate() {
        for session in export.sessions.all() {
            let (answer, answered) = sync_channel(1);
            let (verdict, told) = sync_channel(1);
            session.order(Order { timeout: left, frozen: answer, verdict: told });
            frozen.asked.push(Asked { disk: at, session, verdict: Some(verdict), answered });
        }
    }
    let mut sessions: Vec<Vec<Handed>> = frozen.disks.iter().map(|_| Vec::new()).collect();
    for asked in &frozen.asked {
        match asked.answer(deadline + LAST_ANSWERS) {
            Ok(Some(handed)) => sessions[asked.disk].push(handed),
            Ok(None) => {}
            Err(why) => {
                let disk = frozen.disks[asked.disk].disk.name().to_owned();
                return Err(LiveUpgradeError::Stays { disk, why });
            }
        }
    }
    for export in &frozen.disks {
        wait_for_tables(&export.disk.image(), deadline + LAST_ANSWERS)
            .map_err(|why| LiveUpgradeError::Stays { disk: export.disk.name().to_owned(), why })?;
    }
    frozen.parts = frozen
        .disks
        .iter()
        .zip(sessions)
        .map(|(export, handed)| part(exports, &export.disk, handed))
        .collect();
    Ok(frozen)
}

/// Waits until the metadata thread has carried out all orders: a session that has ended may not have waited until it closed
/// the tables.
pub(crate) fn wait_for_tables(image: &Image, deadline: Instant) -> Result<(), String> {
    order_tables(image, Use::Continues, deadline)
}

/// Gives the metadata thread an order, and waits until it has carried it out.
fn order_tables(image: &Image, what: Use, deadline: Instant) -> Result<(), String> {
    let answer = image.backing().volume().and_then(|volume| volume.order(what));
    let left = deadline.saturating_duration_since(Instant::now());
    match answer.map(|answer| answer.recv_timeout(left)) {
        Some(Err(RecvTimeoutError::Timeout)) => {
            Err("its image's tables are still being read or closed: check whether its storage hangs"
                .to_owned())
        }
        Some(Err(RecvTimeoutError::Disconnected)) => {
            Err("its metadata thread has ended: restart the server".to_owned())
        }
        Some(Ok(outcome)) => outcome,
        None => Ok(()),
    }
}

/// A session that was ordered to freeze.
#[derive(Debug)]
struct Asked {
    /// Index of the session's disk.
    disk: usize,
    session: Arc<SessionShared>,
    /// Dropping the sender, which leaves `None`, makes the session continue.
    verdict: Option<SyncSender<Theirs>>,
    /// Closes when the session has continued or ended.
    answered: Receiver<Result<Handed, NotHanded>>,
}

impl Asked {
    /// Returns `None` if the session has ended.
    fn answer(&self, deadline: Instant) -> Result<Option<Handed>, String> {
        match self.answered.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Ok(handed)) => Ok(Some(handed)),
            Ok(Err(why)) => Err(why.to_string()),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => {
                let session = self.session.id();
                Err(format!(
                    "session {session} is still busy with a message from its front-end, or is waiting for a worker that does not answer: try again"
                ))
            }
        }
    }

    fn wait_going_on(&self, deadline: Instant) {
        // The answer of a frozen session may still be in the channel.
        while let Ok(answer) = self.answered.recv_timeout(deadline.saturating_duration_since(Instant::now()))
        {
            drop(answer);
        }
    }
}

fn part(exports: &Exports, disk: &Disk, sessions: Vec<Handed>) -> (String, DiskState, Vec<Handed>) {
    let writethrough = disk.guest_cache().is_writethrough();
    let capacity_sectors = disk.image().capacity_sectors();
    let (failed, throttle) = (disk.sync_has_failed(), exports.throttling.state(disk.name()).map(Box::new));
    let state = DiskState { writethrough, cache_chosen: false, failed, capacity_sectors, throttle };
    (disk.name().to_owned(), state, sessions)
}

/// A server with paused disks. Dropping this value resumes all of them.
#[derive(Debug)]
pub struct Frozen<'a> {
    exports: &'a Exports,
    disks: Vec<Arc<Export>>,
    parts: Vec<(String, DiskState, Vec<Handed>)>,
    asked: Vec<Asked>,
    given_up: bool,
    changes: Option<Changes<'a>>,
}

impl<'a> Frozen<'a> {
    /// Returns everything to hand over: each disk's name and state, and its front-ends. Can be called once.
    pub fn take_parts(&mut self) -> Vec<(String, DiskState, Vec<Handed>)> {
        std::mem::take(&mut self.parts)
    }

    /// Returns each disk's name with its totals, which no longer change.
    pub fn totals(&self) -> impl Iterator<Item = (&str, DiskTotals)> {
        self.disks.iter().map(|export| (export.disk.name(), export.disk.totals().read()))
    }

    /// Gives the disks to the other process. This process never accesses them again and must end. The caller keeps the
    /// returned value until then, because the value prevents all changes.
    #[must_use]
    pub fn give_up(mut self) -> GivenUp<'a> {
        self.given_up = true;
        let (exports, disks) = (self.exports, std::mem::take(&mut self.disks));
        disks.iter().for_each(|export| export.socket.leave_file(true));
        for verdict in self.asked.iter().filter_map(|asked| asked.verdict.as_ref()) {
            let _ = verdict.send(Theirs);
        }
        GivenUp { exports, disks, _changes: self.changes.take() }
    }
}

/// While this value exists, no disk that was given up can change.
#[derive(Debug)]
pub struct GivenUp<'a> {
    exports: &'a Exports,
    disks: Vec<Arc<Export>>,
    _changes: Option<Changes<'a>>,
}

impl GivenUp<'_> {
    /// Closes the disks on other machines. Without this, their storage waits for this process until it notices that the
    /// process has ended.
    pub fn close_remote(&mut self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let remote = self.disks.drain(..).filter(|export| export.disk.image().backing().is_remote());
        let images: Vec<WeakBacking> = remote
            .map(|export| {
                // The session's thread has the verdict, and ends.
                let _ = all_ended(&export.sessions.all(), deadline);
                self.exports.take_out(&export);
                export.disk.image().backing().downgrade()
            })
            .collect();
        while images.iter().any(WeakBacking::is_open) && Instant::now() < deadline {
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        if self.given_up {
            return;
        }
        // A session that has not received its order yet never will. The other sessions see their channels close and
        // return their queues to the workers.
        for asked in &mut self.asked {
            drop((asked.session.take_order(), asked.verdict.take()));
        }
        // Changes are still locked, so that no worker is removed while a queue returns to it.
        let deadline = Instant::now() + GOING_ON;
        self.asked.iter().for_each(|asked| asked.wait_going_on(deadline));
        resume(self.exports);
    }
}

fn resume(exports: &Exports) {
    if let Err(error) = exports.resume_accepting() {
        error!("cannot listen again on all sockets; some disks may accept no new front-ends: {error}");
    }
}

impl Server {
    /// The properties on which a guest of this disk relies.
    #[must_use]
    pub fn facts(&self, disk: &str) -> Vec<Fact> {
        let (exports, _) = self.parts();
        exports.find(disk).map(|export| facts(&export.disk)).unwrap_or_default()
    }

    /// Returns the disk's capacity in sectors of 512 bytes.
    #[must_use]
    pub fn capacity_sectors(&self, disk: &str) -> u64 {
        let (exports, _) = self.parts();
        exports.find(disk).map_or(0, |export| export.disk.image().capacity_sectors())
    }

    /// Applies the disk's state from the old process.
    ///
    /// # Errors
    /// [`LiveUpgradeError::Busy`]: the disk does not exist.
    pub fn restore_disk(&self, disk: &str, state: &DiskState) -> Result<(), LiveUpgradeError> {
        let export = self.parts().0.find(disk)?;
        let image = export.disk.image();
        let there = state.capacity_sectors;
        if image.capacity_sectors() < there {
            let _ = image.refresh_capacity();
        }
        let here = image.capacity_sectors();
        if here < there {
            let why = format!(
                "its guest sees {there} sectors but the image has only {here}: a disk must not shrink under its guest"
            );
            return Err(LiveUpgradeError::Stays { disk: disk.to_owned(), why });
        }
        export.disk.guest_cache().restore(state.writethrough);
        if state.failed {
            export.disk.was_failed();
        }
        if let Some(throttle) = &state.throttle {
            self.parts().0.throttling.restore(disk, throttle);
        }
        Ok(())
    }

    /// Adds the old process's totals to the disk's totals.
    ///
    /// # Errors
    /// [`LiveUpgradeError::Busy`]: the disk does not exist.
    pub fn restore_totals(&self, disk: &str, totals: &DiskTotals) -> Result<(), LiveUpgradeError> {
        self.parts().0.find(disk)?.disk.totals().restore(totals);
        Ok(())
    }

    /// Makes a session from the old process's data, on the session's own thread. It starts no ring before
    /// [`Rebuilt::go`].
    ///
    /// # Errors
    /// [`LiveUpgradeError`]: the session's thread cannot be started. [`Rebuilt::wait_prepared`] returns mistakes in the
    /// data.
    pub fn rebuild(
        &self,
        disk: &str,
        state: SessionState,
        fds: Vec<OwnedFd>,
    ) -> Result<Rebuilt, LiveUpgradeError> {
        let (exports, workers) = self.parts();
        let export = exports.find(disk)?;
        let failed = |why: String| LiveUpgradeError::session(disk, why);
        let shared = export.sessions.add().map_err(|error| failed(error.to_string()))?;
        let made = begin(&export, workers, &shared, state, fds).map_err(|error| failed(error.to_string()));
        made.inspect_err(|_| export.sessions.forget(&shared))
    }
}

fn begin(
    export: &Export,
    workers: &Arc<WorkerSet>,
    shared: &Arc<SessionShared>,
    state: SessionState,
    fds: Vec<OwnedFd>,
) -> std::io::Result<Rebuilt> {
    let (disk, workers) = (Arc::clone(&export.disk), Arc::clone(workers));
    let (go, told) = sync_channel(1);
    let (running, started) = sync_channel(1);
    let (ready, prepared) = sync_channel(1);
    let (list, shared) = (Arc::clone(&export.sessions), Arc::clone(shared));
    let name = disk.name().to_owned();
    let thread = std::thread::Builder::new().name(format!("bareblk-sess-{}", shared.id()));
    thread.stack_size(SESSION_STACK_BYTES).spawn(move || {
        let _guard = AbortOnPanic;
        let storage = StorageThread::start(&disk).map_err(|error| error_line(&error));
        let entered = sandbox::enter(Role::Session).map_err(|error| error_line(&error));
        let session = storage.and_then(|storage| entered.map(|()| storage)).and_then(|storage| {
            Session::rebuilt(disk, workers, Arc::clone(&shared), state, fds, storage)
                .map_err(|error| error_line(&error))
        });
        let answer = session.map(|session| {
            let _ = ready.send(Ok(()));
            session.go_on(&told, &running);
        });
        shared.ended();
        list.forget(&shared);
        if let Err(why) = answer {
            let _ = ready.send(Err(why));
        }
    })?;
    Ok(Rebuilt { disk: name, prepared, go, started })
}

/// A session that is ready to continue. Dropping this value ends the session without accessing a ring.
#[derive(Debug)]
pub struct Rebuilt {
    disk: String,
    prepared: Receiver<Result<(), String>>,
    go: SyncSender<Go>,
    started: Receiver<Result<u64, String>>,
}

impl Rebuilt {
    /// Waits until the session is complete. To be called once, before [`Rebuilt::go`].
    ///
    /// # Errors
    /// [`LiveUpgradeError::Session`]: the old process's data describes no valid session.
    pub fn wait_prepared(&self) -> Result<(), LiveUpgradeError> {
        let prepared = self.prepared.recv().unwrap_or_else(|_| Err("its thread has ended".to_owned()));
        prepared.map_err(|why| LiveUpgradeError::session(&self.disk, why))
    }

    /// Makes the session start its rings. Does not wait for them.
    pub fn go(&self) {
        let _ = self.go.send(Go);
    }

    /// Waits until its last ring has started, and returns that time on the host's monotonic clock.
    ///
    /// # Errors
    /// The reason why the session did not start, for the operator.
    pub fn wait_started(&self) -> Result<u64, String> {
        match self.started.recv_timeout(STARTING) {
            Ok(started) => started,
            Err(RecvTimeoutError::Timeout) => Err(format!(
                "its queues did not start within {} s, because a worker hangs",
                STARTING.as_secs()
            )),
            Err(RecvTimeoutError::Disconnected) => Err("its session has ended".to_owned()),
        }
    }
}

impl Server {
    /// Announces the disk's size to its guests. Only needed if the old process had announced a different size.
    pub fn announce_size(&self, disk: &str) {
        let Ok(export) = self.parts().0.find(disk) else { return };
        info!(
            disk,
            capacity_sectors = export.disk.image().capacity_sectors(),
            "image grew during the live upgrade (sectors of 512 bytes)"
        );
        export.sessions.all().iter().for_each(|session| session.announce_config_change());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fact(key: &str, value: &str) -> Fact {
        Fact { key: key.to_owned(), value: value.to_owned() }
    }

    #[test]
    fn newer_server_may_offer_more_features_but_not_fewer() {
        let theirs = fact(FEATURES, "0x130");
        assert!(theirs.holds_with("0x130"));
        assert!(theirs.holds_with("0x1000000000000130"));
        assert!(!theirs.holds_with("0x120"));
        assert!(!theirs.holds_with("0x8000"));
        assert!(!theirs.holds_with("not known"));
        assert!(!theirs.holds_with(""));
    }

    #[test]
    fn other_facts_must_be_equal() {
        assert!(fact("serial", "0x1").holds_with("0x1"));
        assert!(!fact("serial", "0x1").holds_with("0x3"));
        assert!(!fact("queues", "2").holds_with("4"));
    }
}
