//! Which engine serves a file: the one that was named, or the best that works here.
//!
//! `probe the file → candidates, best first → try each out (make, start, attach) → the first that takes the file`
//!
//! | file | first choice | why |
//! |---|---|---|
//! | in memory (tmpfs, memfd) or DAX | `sync` | nothing to wait for: a call in the worker is the shortest way |
//! | anything else | `io_uring` | one call per batch for everything, inline where the page cache has it |
//! | … where io_uring is off, past the page cache | `linux-aio` | the other way to leave the waiting to the kernel |
//! | … where both are off | `threads` | works everywhere |
//!
//! - Everything is found out by trying: nothing is concluded from a kernel's version or a file system's name.
//! - An engine asked for by name is that engine or an error; only `auto` falls back, and says so.
//!
//! Not here: what a file is like (`storage.rs`), the engines.

pub(crate) mod capability;
pub(crate) mod kind;
pub(crate) mod storage;

use std::io;
use std::str::FromStr;

use crate::choose::kind::EngineKind;
use crate::choose::storage::Storage;
use crate::engine::{Engine, EngineConfig, FileSpec};
use crate::{IoUringEngine, LinuxAioEngine, MmapEngine, PosixAioEngine, SyncEngine, ThreadsEngine};

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineChoice {
    /// The best that works.
    Auto,
    /// This one or none.
    Named(EngineKind),
}

/// A word that is no engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("engine '{value}' is unknown: use auto, io_uring, linux-aio, posix-aio, threads, sync or mmap")]
pub struct ParseEngineError {
    /** As given. */
    pub value: String,
}

impl FromStr for EngineChoice {
    type Err = ParseEngineError;

    fn from_str(value: &str) -> Result<Self, Self::Err> {
        if value == "auto" {
            return Ok(Self::Auto);
        }
        let known = EngineKind::ALL.into_iter().find(|kind| kind.name() == value);
        known.map(Self::Named).ok_or_else(|| ParseEngineError { value: value.to_owned() })
    }
}

impl std::fmt::Display for EngineChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Named(kind) => kind.fmt(f),
        }
    }
}

/// Why there is no engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The one that was named does not work here, or not on this file.
    #[error("engine {kind} cannot be used")]
    Named {
        /// Which.
        kind: EngineKind,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Not even the last resort works: out of descriptors or threads, most likely.
    #[error("no engine works here; the last one tried was {kind}")]
    None {
        /// The last resort.
        kind: EngineKind,
        /// Why it does not work.
        #[source]
        source: io::Error,
    },
    /// An option that another engine has.
    #[error("{option} is an option of engine {owner}, and the engine is {kind}: add --engine {owner}")]
    Option {
        /// As on the command line.
        option: &'static str,
        /// Whose it is.
        owner: EngineKind,
        /// The engine asked for.
        kind: EngineChoice,
    },
}

/// An engine that `auto` would have preferred, and why it is not used.
#[derive(Debug)]
pub struct PassedOver {
    /// Which.
    pub kind: EngineKind,
    /// Why.
    pub error: io::Error,
}

/// An engine that was tried out on the file, to be made once per worker.
#[derive(Debug)]
pub struct Chosen {
    /// Which.
    pub kind: EngineKind,
    /// Why this one: half a sentence for the log.
    pub why: &'static str,
    /// What would have been better.
    pub passed_over: Vec<PassedOver>,
    config: EngineConfig,
}

impl Chosen {
    /// Makes one.
    ///
    /// # Errors
    /// The kernel's; it worked a moment ago.
    pub fn make(&self) -> io::Result<Box<dyn Engine>> {
        make(self.kind, &self.config)
    }
}

/// Chooses the engine for `file` and tries it out.
///
/// # Errors
/// [`EngineError`].
pub fn choose(wanted: EngineChoice, file: &FileSpec, config: &EngineConfig) -> Result<Chosen, EngineError> {
    check_options(wanted, config)?;
    match wanted {
        EngineChoice::Named(kind) => {
            try_out(kind, file, config).map_err(|source| EngineError::Named { kind, source })?;
            let (why, passed_over) = ("it was asked for", Vec::new());
            Ok(Chosen { kind, why, passed_over, config: config.clone() })
        }
        EngineChoice::Auto => choose_best(file, config),
    }
}

fn choose_best(file: &FileSpec, config: &EngineConfig) -> Result<Chosen, EngineError> {
    let mut passed_over = Vec::new();
    for (kind, why) in candidates(Storage::probe(&file.file).ok()) {
        match try_out(kind, file, config) {
            Ok(()) => return Ok(Chosen { kind, why, passed_over, config: config.clone() }),
            Err(error) => passed_over.push(PassedOver { kind, error }),
        }
    }
    Err(last_resort_failed(passed_over))
}

fn last_resort_failed(passed_over: Vec<PassedOver>) -> EngineError {
    let last = passed_over.into_iter().next_back();
    let last = last.unwrap_or(PassedOver { kind: EngineKind::Threads, error: io::ErrorKind::Other.into() });
    EngineError::None { kind: last.kind, source: last.error }
}

/// Best first. A file that cannot be probed is taken for an ordinary one.
fn candidates(storage: Option<Storage>) -> Vec<(EngineKind, &'static str)> {
    let in_memory = storage.as_ref().is_some_and(|storage| storage.ram_backed || storage.dax);
    let direct = storage.as_ref().is_some_and(|storage| storage.direct);
    let mut candidates = Vec::new();
    if in_memory {
        candidates.push((EngineKind::Sync, "the image is in memory: there is nothing to wait for"));
    }
    candidates.push((EngineKind::IoUring, "one system call per batch for everything"));
    if direct {
        candidates.push((EngineKind::LinuxAio, "the image is opened past the page cache"));
    }
    candidates.push((EngineKind::Threads, "works everywhere"));
    candidates
}

/// Options that would be ignored are mistakes; `auto` takes none, because it may end up with any engine. [`choose`]
/// asks too; this is for whoever wants to know before there is a file.
///
/// # Errors
/// [`EngineError::Option`].
pub fn check_options(wanted: EngineChoice, config: &EngineConfig) -> Result<(), EngineError> {
    let defaults = EngineConfig::default();
    let given = [
        ("--sqpoll-ms", EngineKind::IoUring, config.sqpoll_idle.is_some()),
        ("--iopoll", EngineKind::IoUring, config.iopoll),
        ("--pin-guest-memory", EngineKind::IoUring, config.pin_guest_memory),
        ("--fd-pool", EngineKind::PosixAio, config.fd_pool != defaults.fd_pool),
    ];
    let foreign = given.iter().find(|(_, owner, given)| *given && wanted != EngineChoice::Named(*owner));
    match *foreign.unwrap_or(&("", EngineKind::Sync, false)) {
        (option, owner, true) => Err(EngineError::Option { option, owner, kind: wanted }),
        _ => Ok(()),
    }
}

/// Makes an engine, starts it and gives it the file: what a worker will do.
fn try_out(kind: EngineKind, file: &FileSpec, config: &EngineConfig) -> io::Result<()> {
    let mut engine = make(kind, config)?;
    engine.start()?;
    let id = engine.attach_file(file.clone())?;
    engine.detach_file(id);
    Ok(())
}

/// Makes an engine of `kind`, whatever the file.
///
/// # Errors
/// The engine's own; see each `new`.
pub fn make(kind: EngineKind, config: &EngineConfig) -> io::Result<Box<dyn Engine>> {
    let config = config.clone();
    Ok(match kind {
        EngineKind::IoUring => Box::new(IoUringEngine::new(config)?),
        EngineKind::LinuxAio => Box::new(LinuxAioEngine::new(config)?),
        EngineKind::PosixAio => Box::new(PosixAioEngine::new(config)?),
        EngineKind::Threads => Box::new(ThreadsEngine::new(config)?),
        EngineKind::Sync => Box::new(SyncEngine::new(config)?),
        EngineKind::Mmap => Box::new(MmapEngine::new(config)?),
    })
}

#[cfg(test)]
mod tests {
    use disk_image::Alignment;

    use super::*;

    fn storage(direct: bool, ram_backed: bool) -> Storage {
        Storage {
            direct,
            ram_backed,
            dax: false,
            nowait_reads: false,
            nowait_writes: None,
            block_device: false,
        }
    }

    fn kinds(storage: Option<Storage>) -> Vec<EngineKind> {
        candidates(storage).into_iter().map(|(kind, _)| kind).collect()
    }

    #[test]
    fn file_in_memory_is_served_in_the_worker_and_a_direct_one_falls_back_to_linux_aio() {
        use EngineKind::{IoUring, LinuxAio, Sync, Threads};
        assert_eq!(kinds(Some(storage(false, true))), [Sync, IoUring, Threads]);
        assert_eq!(kinds(Some(storage(true, false))), [IoUring, LinuxAio, Threads]);
        assert_eq!(kinds(Some(storage(false, false))), [IoUring, Threads]);
        assert_eq!(kinds(None), [IoUring, Threads]);
    }

    #[test]
    fn every_engine_is_found_by_its_name() {
        let read = EngineKind::ALL.map(|kind| kind.to_string().parse());
        assert_eq!(read, EngineKind::ALL.map(|kind| Ok(EngineChoice::Named(kind))));
        assert_eq!("auto".parse(), Ok(EngineChoice::Auto));
    }

    #[test]
    fn unknown_engine_is_named_with_the_known_ones() {
        let error = "aio".parse::<EngineChoice>().unwrap_err().to_string();
        assert!(error.starts_with("engine 'aio' is unknown: use auto, io_uring, linux-aio"), "{error}");
    }

    /// A file that every machine has; where it lies does not matter here. Nothing is read or written.
    fn some_file() -> FileSpec {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        FileSpec { file: std::sync::Arc::new(file), alignment: Alignment::BUFFERED }
    }

    #[test]
    fn option_of_another_engine_is_refused_by_name() {
        let config = EngineConfig { iopoll: true, ..EngineConfig::default() };
        for wanted in [EngineChoice::Auto, EngineChoice::Named(EngineKind::Threads)] {
            let error = choose(wanted, &some_file(), &config).unwrap_err().to_string();
            let expected = format!("the engine is {wanted}: add --engine io_uring");
            assert!(error.starts_with("--iopoll is") && error.ends_with(&expected), "{error}");
        }
    }

    #[test]
    fn engine_asked_for_by_name_that_refuses_the_file_is_an_error() {
        let named = EngineChoice::Named(EngineKind::LinuxAio);
        let error = choose(named, &some_file(), &EngineConfig::default()).unwrap_err();
        assert!(matches!(error, EngineError::Named { kind: EngineKind::LinuxAio, .. }), "{error}");
    }

    #[test]
    fn depth_that_io_uring_refuses_is_passed_over_by_auto_with_the_reason() {
        let config = EngineConfig { depth: 40_000, ..EngineConfig::default() };
        let chosen = choose(EngineChoice::Auto, &some_file(), &config).unwrap();
        let passed_over: Vec<_> = chosen.passed_over.iter().map(|over| over.kind).collect();
        assert_eq!((chosen.kind, passed_over), (EngineKind::Threads, vec![EngineKind::IoUring]));
    }
}
