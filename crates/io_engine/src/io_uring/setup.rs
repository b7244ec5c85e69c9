//! Making a ring with whatever the running kernel has.
//!
//! `newest flags → EINVAL → the flags of the release before → …`, then a file table, then restrictions
//!
//! | Linux | what it adds |
//! |---|---|
//! | 5.13 | multishot poll: the least that works (5.15 is the oldest aimed at) |
//! | 5.18 | a batch goes on after a call that cannot be started |
//! | 5.19 | no interrupts to run completions (cooperative task-run), sparse file tables |
//! | 6.1 | completions run only when we ask (deferred task-run), for a single issuer |
//! | 6.15 | idle waiting is not counted as I/O wait |
//!
//! Source: io_uring_setup(2), io_uring_register(2) of liburing 2.9. Which flags work is found out once per
//! process. Not here: using the ring (`io_uring.rs`).

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

use io_uring::register::Restriction;
use io_uring::{Builder, IoUring, Probe, cqueue, opcode, squeue};

use crate::contract::EngineConfig;

/// `io_uring_register` opcodes that are used after the ring was enabled or enable it (linux/io_uring.h).
const REGISTER_FILES_UPDATE: u8 = 6;
const REGISTER_ENABLE_RINGS: u8 = 12;

/// What the engine queues.
const OPCODES: [u8; 8] = [
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
];

/// Room in the completion ring for kicks, beyond one completion per op.
const SPARE_COMPLETIONS: u32 = 1024;
/// `IORING_MAX_ENTRIES` (io_uring/io_uring.h).
const MAX_DEPTH: u32 = 32768;

/// How new a kernel to make use of, newest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KernelAge {
    /// Whatever there is.
    Newest,
    /// No deferred task-run.
    Before6_1,
    /// No cooperative task-run, no sparse file table.
    Before5_19,
    /// What the oldest kernel aimed at has; files are not registered either.
    Linux5_15,
}

impl KernelAge {
    const ALL: [Self; 4] = [Self::Newest, Self::Before6_1, Self::Before5_19, Self::Linux5_15];
}

/// How the ring knows files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileTableKind {
    /// A table of registered files.
    Registered,
    /// By their numbers, looked up at each call.
    Plain,
}

/// What the kernel has of what the engine would like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// The flags that were accepted are those of this age.
    pub age: KernelAge,
    /// Completions run only when the worker asks; it is the only issuer.
    pub deferred_task_run: bool,
    /// Whether opcodes other than those in use are refused from now on.
    pub restricted: bool,
    /// How files are known.
    pub files: FileTableKind,
    /// Places in the file table.
    pub registered_files: u32,
    /// Idle waiting is not counted as I/O wait.
    pub no_iowait: bool,
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let task_run = match self.age {
            KernelAge::Newest => "deferred",
            KernelAge::Before6_1 => "cooperative",
            KernelAge::Before5_19 | KernelAge::Linux5_15 => "interrupting",
        };
        let yes_no = |yes| if yes { "yes" } else { "no" };
        write!(f, "task run {task_run}, ")?;
        match self.files {
            FileTableKind::Registered => write!(f, "{} registered files", self.registered_files)?,
            FileTableKind::Plain => f.write_str("files by number")?,
        }
        write!(f, ", opcodes restricted: {}, ", yes_no(self.restricted))?;
        write!(f, "idle without iowait: {}", yes_no(self.no_iowait))
    }
}

/// The first age whose flags this kernel accepted, as an index; what it refused once is not tried again.
static ACCEPTED: AtomicU8 = AtomicU8::new(0);

pub(super) fn make_ring(age: KernelAge, config: &EngineConfig) -> io::Result<(IoUring, Features)> {
    if config.depth == 0 || config.depth > MAX_DEPTH {
        let text = format!("io_uring depth {} is not between 1 and {MAX_DEPTH}", config.depth);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let (ring, age) = newest_accepted(age, config.depth)?;
    if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
        return Err(too_old("IORING_FEAT_EXT_ARG and IORING_FEAT_NODROP"));
    }
    check_opcodes(&ring)?;
    let registered_files = register_files(&ring, age, config.registered_files);
    let files = if registered_files > 0 { FileTableKind::Registered } else { FileTableKind::Plain };
    let features = Features {
        age,
        deferred_task_run: age == KernelAge::Newest,
        restricted: restrict(&ring),
        files,
        registered_files,
        no_iowait: ring.params().is_feature_no_iowait(),
    };
    Ok((ring, features))
}

fn too_old(missing: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        format!("this kernel's io_uring lacks {missing}: it is too old"),
    )
}

fn newest_accepted(wanted: KernelAge, depth: u32) -> io::Result<(IoUring, KernelAge)> {
    let known = usize::from(ACCEPTED.load(Ordering::Relaxed));
    let mut last = io::Error::from(io::ErrorKind::Unsupported);
    for (index, age) in (0_u8..).zip(KernelAge::ALL).skip(known).filter(|(_, age)| *age >= wanted) {
        match builder(age, depth).build(depth.next_power_of_two()) {
            Ok(ring) => return Ok((ring, age)),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                ACCEPTED.fetch_max(index + 1, Ordering::Relaxed);
                last = error;
            }
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

fn builder(age: KernelAge, depth: u32) -> Builder<squeue::Entry, cqueue::Entry> {
    let mut builder = IoUring::builder();
    let completions = (depth + SPARE_COMPLETIONS).next_power_of_two();
    builder.setup_r_disabled().setup_cqsize(completions).setup_clamp();
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
    builder
}

fn check_opcodes(ring: &IoUring) -> io::Result<()> {
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    match OPCODES.iter().find(|code| !probe.is_supported(**code)) {
        Some(code) => Err(too_old(&format!("opcode {code}"))),
        None => Ok(()),
    }
}

/// Returns how many places the table has; 0: none, files go by their numbers.
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
            tracing::debug!(%error, wanted, "no file table in io_uring: files are used by their numbers");
            0
        }
    }
}

/// From now on the ring does what the engine needs and nothing else: a server that was taken over cannot
/// use it to open files or sockets.
fn restrict(ring: &IoUring) -> bool {
    let mut rules = Vec::from(OPCODES.map(Restriction::sqe_op));
    rules.push(Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits()));
    rules.push(Restriction::register_op(REGISTER_FILES_UPDATE));
    rules.push(Restriction::register_op(REGISTER_ENABLE_RINGS));
    let restricted = ring.submitter().register_restrictions(&mut rules);
    if let Err(error) = &restricted {
        tracing::debug!(%error, "io_uring takes no restrictions");
    }
    restricted.is_ok()
}
