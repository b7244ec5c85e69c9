//! Creates the rings with the newest features that the running kernel has.
//!
//! `newest flags → EINVAL → flags of the previous release → …`, then tables of files and buffers, then restrictions
//!
//! | Linux | what it adds |
//! |---|---|
//! | 5.13 | multishot poll, the minimum that works (the oldest supported release is 5.15) |
//! | 5.18 | a batch continues after a call that cannot be started |
//! | 5.19 | completions without interrupts (cooperative task-run), sparse file tables |
//! | 6.1 | completions run only on request (deferred task-run), for a single issuer |
//! | 6.15 | idle waiting is not counted as I/O wait |
//!
//! A kernel thread that submits (SQPOLL) excludes both kinds of task-run: the kernel returns EINVAL.
//!
//! Source: io_uring_setup(2), io_uring_register(2) of liburing 2.9. The process tests once which flags work.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use io_uring::register::Restriction;
use io_uring::{Builder, IoUring, Probe, cqueue, opcode, squeue};

use super::pinned::MAX_PIECES;
use crate::config::EngineConfig;

/// `IORING_REGISTER_EVENTFD`.
const REGISTER_EVENTFD: u8 = 4;
/// `io_uring_register` opcodes used to enable the ring or afterwards (linux/io_uring.h).
const REGISTER_FILES_UPDATE: u8 = 6;
const REGISTER_ENABLE_RINGS: u8 = 12;
const REGISTER_BUFFERS_UPDATE: u8 = 16;
const REGISTER_IOWQ_MAX_WORKERS: u8 = 19;

/// Reads and writes: the only opcodes that a polled ring accepts.
const TRANSFERS: [u8; 4] =
    [opcode::Readv::CODE, opcode::Writev::CODE, opcode::Read::CODE, opcode::Write::CODE];
/// Reads and writes on registered buffers.
const FIXED_TRANSFERS: [u8; 2] = [opcode::ReadFixed::CODE, opcode::WriteFixed::CODE];
/// The other opcodes that the engine uses.
const CONTROL: [u8; 4] =
    [opcode::Fsync::CODE, opcode::Fallocate::CODE, opcode::PollAdd::CODE, opcode::AsyncCancel::CODE];

/// Space in the completion ring for kicks, beyond one completion per op.
const SPARE_COMPLETIONS: u32 = 1024;
/// `IORING_MAX_ENTRIES` (io_uring/io_uring.h).
const MAX_DEPTH: u32 = 32768;

/// The newest kernel release whose features are used. The newest variant comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KernelAge {
    /// Every feature that works.
    Newest,
    /// No deferred task-run.
    Before6_1,
    /// No cooperative task-run, no sparse file table.
    Before5_19,
    /// The oldest supported kernel; files are not registered either.
    Linux5_15,
}

impl KernelAge {
    const ALL: [Self; 4] = [Self::Newest, Self::Before6_1, Self::Before5_19, Self::Linux5_15];
}

/// The way in which the ring refers to files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileTableKind {
    /// A table of registered files.
    Registered,
    /// Descriptors, which the kernel looks up at each call.
    Plain,
}

/// Which optional features the kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// The age whose flags the kernel accepted.
    pub age: KernelAge,
    /// Completions run only when the worker requests them. The worker is the only issuer.
    pub deferred_task_run: bool,
    /// Whether the ring refuses opcodes that the engine does not use.
    pub restricted: bool,
    /// The way in which the ring refers to files.
    pub files: FileTableKind,
    /// Entries in the file table.
    pub registered_files: u32,
    /// Idle waiting is not counted as I/O wait.
    pub no_iowait: bool,
    /// A kernel thread submits queued calls (`sqpoll_idle`).
    pub sqpoll: bool,
    /// A second ring exists whose completions are polled for (`iopoll`). Attaching a file decides whether it uses that
    /// ring.
    pub iopoll: bool,
    /// Guest memory is registered (`pin_guest_memory`). False if this kernel has no table of registered memory.
    pub pinned: bool,
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let task_run = match self.age {
            _ if self.sqpoll => "by the kernel's thread",
            KernelAge::Newest => "deferred",
            KernelAge::Before6_1 => "cooperative",
            KernelAge::Before5_19 | KernelAge::Linux5_15 => "interrupting",
        };
        let yes_no = |yes| if yes { "yes" } else { "no" };
        write!(f, "task run {task_run}, ")?;
        match self.files {
            FileTableKind::Registered => write!(f, "{} registered files", self.registered_files)?,
            FileTableKind::Plain => f.write_str("files by descriptor")?,
        }
        write!(f, ", opcodes restricted: {}, ", yes_no(self.restricted))?;
        write!(f, "idle without iowait: {}", yes_no(self.no_iowait))?;
        let options = [
            (self.sqpoll, "submissions polled (SQPOLL)"),
            (self.iopoll, "completions polled (IOPOLL)"),
            (self.pinned, "guest memory pinned"),
        ];
        options.iter().filter(|(on, _)| *on).try_for_each(|(_, name)| write!(f, ", {name}"))
    }
}

/// The role of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// All calls; its worker submits.
    Plain,
    /// All calls; a kernel thread submits, and sleeps after this long without work.
    SubmissionPolled(Duration),
    /// Reads and writes whose completions are polled for.
    CompletionPolled,
    /// Like `CompletionPolled`, but completed by interrupts: for tests without a device that supports polling.
    Pretended,
}

/// The options of `io_uring`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IoUringOptions {
    /// A kernel thread submits queued calls, and sleeps after this long without work.
    pub sqpoll_idle: Option<Duration>,
    /// The engine polls for completions of `O_DIRECT` reads and writes.
    pub iopoll: bool,
    /// Guest memory is registered with the kernel and thereby pinned.
    pub pin_guest_memory: bool,
}

/// The two rings of an engine, not yet enabled.
pub(super) struct Rings {
    pub first: IoUring,
    /// The polled ring for `iopoll`.
    pub second: Option<IoUring>,
    pub features: Features,
}

/// Index of the first age whose flags this kernel accepted, so that the process does not try refused flags again.
static ACCEPTED: AtomicU8 = AtomicU8::new(0);

pub(super) fn make_rings(
    age: KernelAge,
    options: &IoUringOptions,
    config: &EngineConfig,
    second: Option<Kind>,
) -> io::Result<Rings> {
    if config.depth == 0 || config.depth > MAX_DEPTH {
        let text = format!("io_uring depth {} is not between 1 and {MAX_DEPTH}", config.depth);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let kind = options.sqpoll_idle.map_or(Kind::Plain, Kind::SubmissionPolled);
    let (first, age) = newest_accepted(age, config.depth, kind)?;
    if !first.params().is_feature_ext_arg() || !first.params().is_feature_nodrop() {
        return Err(too_old("IORING_FEAT_EXT_ARG and IORING_FEAT_NODROP"));
    }
    check_opcodes(&first)?;
    let second =
        second.map(|kind| newest_accepted(age, config.depth, kind)).transpose()?.map(|(ring, _)| ring);
    let rings = || [&first].into_iter().chain(&second);
    let registered_files = register_files(&first, age, config.registered_files);
    if let Some(second) = &second {
        register_files(second, age, registered_files);
    }
    let pinned = options.pin_guest_memory && rings().all(|ring| register_buffer_table(ring, age));
    let features = Features {
        age,
        deferred_task_run: age == KernelAge::Newest && kind == Kind::Plain,
        restricted: restrict(&first, &[&TRANSFERS, &CONTROL], pinned),
        files: if registered_files > 0 { FileTableKind::Registered } else { FileTableKind::Plain },
        registered_files,
        no_iowait: first.params().is_feature_no_iowait(),
        sqpoll: first.params().is_setup_sqpoll(),
        iopoll: second.is_some(),
        pinned,
    };
    if let Some(second) = &second {
        restrict(second, &[&TRANSFERS], pinned);
    }
    Ok(Rings { first, second, features })
}

fn too_old(missing: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        format!("this kernel's io_uring lacks {missing}: it is too old"),
    )
}

fn newest_accepted(wanted: KernelAge, depth: u32, kind: Kind) -> io::Result<(IoUring, KernelAge)> {
    let known = usize::from(ACCEPTED.load(Ordering::Relaxed));
    let mut last = io::Error::from(io::ErrorKind::Unsupported);
    for (index, age) in (0_u8..).zip(KernelAge::ALL).skip(known).filter(|(_, age)| *age >= wanted) {
        match builder(age, depth, kind).build(entries(depth, kind)) {
            Ok(ring) => return Ok((ring, age)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                // The kernel may refuse the other kinds for other reasons.
                if kind == Kind::Plain {
                    ACCEPTED.fetch_max(index + 1, Ordering::Relaxed);
                }
                last = error;
            }
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// The kernel thread frees entries batch by batch, possibly after their calls have ended. With space for two batches, a
/// worker that fills one does not wait for the thread.
fn entries(depth: u32, kind: Kind) -> u32 {
    let spare = u32::from(matches!(kind, Kind::SubmissionPolled(_)));
    depth.next_power_of_two() << spare
}

fn builder(age: KernelAge, depth: u32, kind: Kind) -> Builder<squeue::Entry, cqueue::Entry> {
    let mut builder = IoUring::builder();
    // Twice the depth: with several disks, more ops than the depth may be in flight, and they end together when a hung
    // disk continues.
    let completions = (2 * depth + SPARE_COMPLETIONS).next_power_of_two();
    builder.setup_r_disabled().setup_cqsize(completions).setup_clamp();
    match kind {
        Kind::SubmissionPolled(idle) => set_submission_polled(&mut builder, age, idle),
        Kind::CompletionPolled => set_task_run(builder.setup_iopoll(), age),
        Kind::Plain | Kind::Pretended => set_task_run(&mut builder, age),
    }
    builder
}

fn set_task_run(builder: &mut Builder<squeue::Entry, cqueue::Entry>, age: KernelAge) {
    match age {
        KernelAge::Newest => {
            builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_submit_all();
        }
        KernelAge::Before6_1 => {
            builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
        }
        KernelAge::Before5_19 => {
            builder.setup_submit_all();
        }
        KernelAge::Linux5_15 => {}
    }
}

fn set_submission_polled(
    builder: &mut Builder<squeue::Entry, cqueue::Entry>,
    age: KernelAge,
    idle: Duration,
) {
    // 0 would select the kernel's default of one second.
    let idle_ms = u32::try_from(idle.as_millis()).unwrap_or(u32::MAX).max(1);
    builder.setup_sqpoll(idle_ms);
    if age < KernelAge::Linux5_15 {
        builder.setup_submit_all();
    }
    if age == KernelAge::Newest {
        builder.setup_single_issuer();
    }
}

fn check_opcodes(ring: &IoUring) -> io::Result<()> {
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    match TRANSFERS.iter().chain(&CONTROL).find(|code| !probe.is_supported(**code)) {
        Some(code) => Err(too_old(&format!("opcode {code}"))),
        None => Ok(()),
    }
}

/// Returns the number of table entries. With 0, calls refer to files by descriptor.
fn register_files(ring: &IoUring, age: KernelAge, wanted: u32) -> u32 {
    let submitter = ring.submitter();
    let registered = match age {
        KernelAge::Linux5_15 => return 0,
        KernelAge::Before5_19 => Err(io::ErrorKind::Unsupported.into()),
        _ => submitter.register_files_sparse(wanted),
    };
    let registered = registered.or_else(|_| submitter.register_files(&vec![-1; wanted as usize]));
    match registered {
        Ok(()) => wanted,
        Err(error) => {
            tracing::debug!(%error, wanted, "this kernel's io_uring has no file table, so calls use descriptors");
            0
        }
    }
}

/// Creates an empty table for guest memory.
fn register_buffer_table(ring: &IoUring, age: KernelAge) -> bool {
    let registered = match age {
        KernelAge::Before5_19 | KernelAge::Linux5_15 => Err(io::ErrorKind::Unsupported.into()),
        _ => ring.submitter().register_buffers_sparse(MAX_PIECES.into()),
    };
    if let Err(error) = &registered {
        tracing::warn!(%error, "guest memory is not pinned: this kernel's io_uring has no table for it (Linux 5.19 has \
        one)");
    }
    registered.is_ok()
}

/// Restricts the ring to what the engine needs, so that an attacker who controls the server cannot open files or
/// sockets with it.
fn restrict(ring: &IoUring, opcodes: &[&[u8]], pinned: bool) -> bool {
    let mut rules = rules_for(opcodes, pinned, true);
    let mut restricted = ring.submitter().register_restrictions(&mut rules);
    if restricted.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL)) {
        // The kernel refuses the whole list if it does not know one operation.
        rules = rules_for(opcodes, pinned, false);
        restricted = ring.submitter().register_restrictions(&mut rules);
    }
    if let Err(error) = &restricted {
        tracing::debug!(%error, "this kernel's io_uring does not support restrictions");
    }
    restricted.is_ok()
}

/// `limits_workers`: whether to permit the call that `workers.rs` makes, which kernels before 5.15 do not know.
fn rules_for(opcodes: &[&[u8]], pinned: bool, limits_workers: bool) -> Vec<Restriction> {
    let opcodes = opcodes.iter().copied().flatten();
    let mut rules: Vec<Restriction> = opcodes.map(|&code| Restriction::sqe_op(code)).collect();
    rules.push(Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits()));
    rules.push(Restriction::register_op(REGISTER_FILES_UPDATE));
    rules.push(Restriction::register_op(REGISTER_ENABLE_RINGS));
    rules.push(Restriction::register_op(REGISTER_EVENTFD));
    if limits_workers {
        rules.push(Restriction::register_op(REGISTER_IOWQ_MAX_WORKERS));
    }
    if pinned {
        rules.extend(FIXED_TRANSFERS.map(Restriction::sqe_op));
        rules.push(Restriction::register_op(REGISTER_BUFFERS_UPDATE));
    }
    rules
}

/// Binds the kernel's threads for blocking calls (`iou-wrk`) to the CPUs of the caller, the ring's worker. By default
/// they run on any CPU. They belong to the thread that created the ring; the kernel refuses other callers.
pub(super) fn bind_kernel_workers(ring: &IoUring) {
    let bound = own_cpus().and_then(|cpus| ring.submitter().register_iowq_aff(&cpus));
    if let Err(error) = bound {
        tracing::debug!(%error, "cannot bind io_uring's threads for blocking calls: they run on any CPU");
    }
}

fn own_cpus() -> io::Result<libc::cpu_set_t> {
    let mut cpus = std::mem::MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: 1. `cpus` has the size that is passed; thread 0 is the caller.
    let result = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), cpus.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: 1. all zeroes is a valid, empty set, which the kernel overwrote.
    Ok(unsafe { cpus.assume_init() })
}

/// The kernel's error with a text that says what to do. The error keeps its kind, so that the caller can fall back.
pub(super) fn explain(error: &io::Error, options: &IoUringOptions) -> io::Error {
    use io::ErrorKind::{OutOfMemory, PermissionDenied, Unsupported, WouldBlock};
    let sqpoll = options.sqpoll_idle.is_some();
    let advice = match error.kind() {
        PermissionDenied if sqpoll && super::capabilities::is_allowed() => {
            "this process may use io_uring, but not with a kernel thread for submissions (SQPOLL): leave the option \
             out, or let the security module allow it"
        }
        PermissionDenied => {
            "io_uring is forbidden for this process: set kernel.io_uring_disabled=0, or let the container's seccomp \
             profile allow it"
        }
        Unsupported => "the kernel has no usable io_uring: Linux 5.15 or newer is needed",
        OutOfMemory => "no memory for io_uring: raise the limit on locked memory (ulimit -l)",
        WouldBlock if sqpoll => {
            "cannot start a kernel thread for submissions (SQPOLL): raise the limit on processes (ulimit -u)"
        }
        _ => return io::Error::new(error.kind(), error.to_string()),
    };
    io::Error::new(error.kind(), format!("{advice} ({error})"))
}
