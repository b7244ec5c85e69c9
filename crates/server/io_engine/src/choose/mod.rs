//! Chooses the engine for a file: the engine requested by name, or the best one that works on this host.
//!
//! `probe the file → candidates, best first → try each (make, start, attach) → the first that accepts the file`
//!
//! | file | first choice | why |
//! |---|---|---|
//! | on tmpfs or a memfd, writable | `mmap` | a copy without a system call is fastest, and holes stay holes |
//! | otherwise in memory, or on DAX | `sync` | calls do not wait, so a direct call is fastest |
//! | anything else | `io_uring` | one system call per batch; data in the page cache completes inline |
//! | `O_DIRECT`, io_uring unavailable | `linux-aio` | the kernel waits for the device |
//! | both unavailable | `threads` | works everywhere |
//! | an export of an NBD server | `nbd` | no other engine can serve it |
//! | an image in a Ceph cluster | `rbd` | the same |
//!
//! - The server tries engines to choose one, and never goes by kernel version or file system name.
//! - An engine requested by name is used, or an error is returned. Only `auto` falls back, and it reports that.
//!
//! `storage.rs` probes a file.

pub(crate) mod capability;
pub(crate) mod kind;
pub(crate) mod storage;

use std::io;
use std::str::FromStr;

use disk_image::Backing;

use crate::choose::kind::EngineKind;
use crate::choose::storage::Storage;
use crate::config::EngineConfig;
use crate::engine::{Engine, FileSpec};
use crate::engine_options::EngineOptions;
use crate::{
    IoUringEngine, LinuxAioEngine, MappedEngine, MmapEngine, NbdEngine, PosixAioEngine, RbdEngine,
    SyncEngine, ThreadsEngine,
};

/// The engine option of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineChoice {
    /// The best engine that works on this host.
    Auto,
    /// The server uses only this engine.
    Named(EngineKind),
}

/// The text names no engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("engine '{value}' is unknown: use auto, io_uring, linux-aio, posix-aio, threads, sync or mmap")]
pub struct ParseEngineError {
    /** The unknown word. */
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

/// Why no engine was chosen.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The named engine does not work on this host, or not with this file.
    #[error("engine {kind} cannot be used")]
    Named {
        /// The engine.
        kind: EngineKind,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// Even the last candidate fails, most likely for lack of descriptors or threads.
    #[error("no I/O engine works on this host; the last one tried was {kind}")]
    None {
        /// The last candidate.
        kind: EngineKind,
        /// Why the last candidate does not work.
        #[source]
        source: io::Error,
    },
}

/// An engine that `auto` would have preferred, and why it was not used.
#[derive(Debug)]
pub struct PassedOver {
    /// The engine.
    pub kind: EngineKind,
    /// The reason.
    pub error: io::Error,
}

/// An engine that was tried on the file. Each worker makes its own.
#[derive(Debug)]
pub struct Chosen {
    /// The engine and its options.
    pub options: EngineOptions,
    /// The reason for the choice: a clause for the log.
    pub why: &'static str,
    /// Preferred engines that do not work.
    pub passed_over: Vec<PassedOver>,
    /// The disk is mapped through tables, so its engine is one over the chosen one.
    pub is_mapped: bool,
    config: EngineConfig,
}

impl Chosen {
    /// An engine with default options, which was not tried on a file.
    #[must_use]
    pub fn untried(kind: EngineKind, config: &EngineConfig) -> Self {
        let (options, why) = (EngineOptions::from(kind), "no other engine serves such disks");
        Self { options, why, passed_over: Vec::new(), is_mapped: false, config: config.clone() }
    }

    /// Which engine.
    #[must_use]
    pub fn kind(&self) -> EngineKind {
        self.options.kind()
    }

    /// Makes an engine.
    ///
    /// # Errors
    /// Errors of the kernel, although the same engine has worked before.
    pub fn make(&self) -> io::Result<Box<dyn Engine>> {
        make_for(self.is_mapped, &self.options, &self.config)
    }
}

/// Chooses an engine for `file` and tries it. `wanted`: the only engine to try; `None`: the best one that works.
///
/// # Errors
/// [`EngineError`].
pub fn choose(
    wanted: Option<&EngineOptions>,
    file: &FileSpec,
    config: &EngineConfig,
) -> Result<Chosen, EngineError> {
    let Some(options) = wanted else { return choose_best(file, config) };
    try_out(options, file, config).map_err(|source| EngineError::Named { kind: options.kind(), source })?;
    let (why, passed_over) = ("it was requested", Vec::new());
    let is_mapped = file.backing.volume().is_some();
    Ok(Chosen { options: options.clone(), why, passed_over, is_mapped, config: config.clone() })
}

fn choose_best(file: &FileSpec, config: &EngineConfig) -> Result<Chosen, EngineError> {
    let (mut passed_over, is_mapped) = (Vec::new(), file.backing.volume().is_some());
    for (kind, why) in candidates(&file.backing) {
        let options = EngineOptions::from(kind);
        match try_out(&options, file, config) {
            Ok(()) => return Ok(Chosen { options, why, passed_over, is_mapped, config: config.clone() }),
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

/// The candidates, best first.
fn candidates(backing: &Backing) -> Vec<(EngineKind, &'static str)> {
    match backing {
        Backing::File(file) => candidates_for_file(Storage::probe(file).ok()),
        Backing::Nbd(_) => vec![(EngineKind::Nbd, "the image is an export of an NBD server")],
        Backing::Rbd(_) => vec![(EngineKind::Rbd, "the image is in a Ceph cluster")],
        Backing::Mapped(volume) => {
            let top = volume.files().first();
            candidates_for_file(top.and_then(|top| Storage::probe(top.file()).ok()))
        }
    }
}

/// A file that cannot be probed counts as an ordinary one.
fn candidates_for_file(storage: Option<Storage>) -> Vec<(EngineKind, &'static str)> {
    let in_memory = storage.as_ref().is_some_and(|storage| storage.ram_backed || storage.dax);
    let direct = storage.as_ref().is_some_and(|storage| storage.direct);
    let mut candidates = Vec::new();
    if storage.as_ref().is_some_and(|storage| storage.tells_pages) {
        candidates.push((EngineKind::Mmap, "the image is on tmpfs: data is copied without system calls"));
    }
    if in_memory {
        candidates.push((EngineKind::Sync, "the image is in memory: calls do not wait for a device"));
    }
    candidates.push((EngineKind::IoUring, "it needs one system call per batch"));
    if direct {
        candidates.push((EngineKind::LinuxAio, "the image is open with O_DIRECT"));
    }
    candidates.push((EngineKind::Threads, "it works everywhere"));
    candidates
}

/// Makes and starts an engine and attaches the file, as a worker does.
fn try_out(options: &EngineOptions, file: &FileSpec, config: &EngineConfig) -> io::Result<()> {
    let mut engine = make_for(file.backing.volume().is_some(), options, config)?;
    engine.start()?;
    let id = engine.attach_file(file.clone())?;
    engine.detach_file(id);
    Ok(())
}

fn make_for(is_mapped: bool, options: &EngineOptions, config: &EngineConfig) -> io::Result<Box<dyn Engine>> {
    let engine = make(options.clone(), config)?;
    Ok(if is_mapped { Box::new(MappedEngine::new(engine, config.depth)) } else { engine })
}

/// Makes an engine without trying it on a file: with these options, or with the kind's default options.
///
/// # Errors
/// Errors of the chosen engine; see its `new`.
pub fn make(engine: impl Into<EngineOptions>, config: &EngineConfig) -> io::Result<Box<dyn Engine>> {
    Ok(match engine.into() {
        EngineOptions::IoUring(options) => Box::new(IoUringEngine::with(&options, config)?),
        EngineOptions::PosixAio(options) => Box::new(PosixAioEngine::with(&options, config)?),
        EngineOptions::LinuxAio => Box::new(LinuxAioEngine::new(config.clone())?),
        EngineOptions::Threads => Box::new(ThreadsEngine::new(config.clone())?),
        EngineOptions::Sync => Box::new(SyncEngine::new(config.clone())?),
        EngineOptions::Mmap => Box::new(MmapEngine::new(config.clone())?),
        EngineOptions::Nbd => Box::new(NbdEngine::new(config)?),
        EngineOptions::Rbd => Box::new(RbdEngine::new(config)?),
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
            tells_pages: false,
            dax: false,
            nowait_reads: false,
            nowait_writes: None,
            block_device: false,
        }
    }

    fn kinds(storage: Option<Storage>) -> Vec<EngineKind> {
        candidates_for_file(storage).into_iter().map(|(kind, _)| kind).collect()
    }

    #[test]
    fn file_in_memory_is_served_in_the_worker_and_a_direct_one_falls_back_to_linux_aio() {
        use EngineKind::{IoUring, LinuxAio, Mmap, Sync, Threads};
        let tmpfs = Storage { tells_pages: true, ..storage(false, true) };
        assert_eq!(kinds(Some(tmpfs)), [Mmap, Sync, IoUring, Threads]);
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

    /// A file that every machine has. These tests neither read nor write it, so its file system does not matter.
    fn some_file() -> FileSpec {
        let file = std::fs::File::open("/proc/self/status").unwrap();
        FileSpec::of_file(std::sync::Arc::new(file), Alignment::BUFFERED)
    }

    #[test]
    fn engine_asked_for_by_name_that_refuses_the_file_is_an_error() {
        let error =
            choose(Some(&EngineOptions::LinuxAio), &some_file(), &EngineConfig::default()).unwrap_err();
        assert!(matches!(error, EngineError::Named { kind: EngineKind::LinuxAio, .. }), "{error}");
    }

    #[test]
    fn depth_that_io_uring_refuses_is_passed_over_by_auto_with_the_reason() {
        let config = EngineConfig { depth: 40_000, ..EngineConfig::default() };
        let chosen = choose(None, &some_file(), &config).unwrap();
        let passed_over: Vec<_> = chosen.passed_over.iter().map(|over| over.kind).collect();
        assert_eq!((chosen.kind(), passed_over), (EngineKind::Threads, vec![EngineKind::IoUring]));
    }
}
