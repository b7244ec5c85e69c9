//! Limits each thread of a serving server to the system calls that its work needs.
//!
//! `drop_privileges → restrict_files → confine (the process's list of system calls) → enter(role), on each
//! thread`
//!
//! - All steps are permanent: none can be undone, and every thread inherits them from the thread that starts
//!   it.
//! - Without [`confine`], [`enter`] only leaves the process's signals to its other threads. So libraries can call
//!   `enter` on each of their threads without affecting programs that are not servers.
//! - With `confine`, no thread runs without its role's list: if the list cannot be installed, the thread does
//!   not start, or the process ends.
//! - A call that is not on a thread's list is not executed; the process reports the call and ends (`report.rs`).
//!
//! See also: the helper process, which opens images and binds sockets (`bareblk/src/helper`); restrictions of an
//! io_uring ring (`io_engine/src/engines/io_uring/setup.rs`).

mod privileges;

mod files;

mod role;

mod calls;

mod names;

mod filter;

mod report;

use std::cell::Cell;
use std::io;
use std::sync::OnceLock;

pub use files::{Enforcement, FileRules, restrict_files};
use nix::sys::signal::{SigSet, Signal};
pub use privileges::{Identity, Kept, drop_privileges, keep_out_of_core_files};
pub use report::EXIT_CODE;
pub use role::{EngineCalls, Role};
use seccompiler::BpfProgram;

/// Why the sandbox cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// A system call failed.
    #[error("cannot {action}")]
    System {
        /** The attempted action. */
        action: String,
        /** The kernel's error. */
        #[source]
        source: io::Error,
    },
    /// The filter cannot be built or installed.
    #[error("the kernel does not accept the system-call filter (seccomp): {reason}")]
    Filter {
        /** The message of seccompiler. */
        reason: String,
    },
    /// There is no list for this processor architecture.
    #[error("there is no list of system calls for this processor architecture ({arch})")]
    Processor {
        /** Rust's name for the processor's architecture. */
        arch: &'static str,
    },
}

impl SandboxError {
    fn system(action: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::System { action: action.into(), source: source.into() }
    }
}

/// Set while the process is confined.
static CONFINED: OnceLock<()> = OnceLock::new();
static ENGINES: OnceLock<EngineCalls> = OnceLock::new();
/// Filters of each role, in the order of installation; built when the first thread needs them.
static SESSION: OnceLock<Vec<BpfProgram>> = OnceLock::new();
static WORKER: OnceLock<Vec<BpfProgram>> = OnceLock::new();
static ENGINE_THREAD: OnceLock<Vec<BpfProgram>> = OnceLock::new();
static METADATA: OnceLock<Vec<BpfProgram>> = OnceLock::new();
static TLS_RELAY: OnceLock<Vec<BpfProgram>> = OnceLock::new();

thread_local! {
    /// The calling thread's role; the threads that it starts inherit its filters.
    static ROLE: Cell<Role> = const { Cell::new(Role::Control) };
}

/// Installs the process's list of system calls on the calling thread and all threads that it starts from now
/// on.
///
/// # Errors
/// [`SandboxError`]: the process should then not continue, because part of the sandbox may be in force.
pub fn confine() -> Result<(), SandboxError> {
    let control = filter::program(Role::Control, EngineCalls::ALL)?;
    report::install().map_err(|source| SandboxError::system("catch SIGSYS", source))?;
    filter::install(&filter::no_processes()?)?;
    filter::install(&control)?;
    // Set once; a second call installs both filters again.
    let _ = CONFINED.set(());
    Ok(())
}

/// Permanently limits the calling thread to its role's calls and files. For a thread that needs more than the process's
/// list allows: it must start before [`confine`]. The threads that it starts inherit the limits.
///
/// # Errors
/// [`SandboxError`]: the thread must then not continue.
pub fn enter_apart(role: Role, rules: &FileRules) -> Result<Enforcement, SandboxError> {
    leave_signals()?;
    let files = restrict_files(rules)?;
    let own = filter::program(role, EngineCalls::ALL)?;
    report::install().map_err(|source| SandboxError::system("catch SIGSYS", source))?;
    filter::install(&filter::no_processes()?)?;
    filter::install(&filter::no_writing()?)?;
    filter::install(&own)?;
    ROLE.set(role);
    Ok(files)
}

/// Limits workers to these engines' calls from now on. Only the first call has an effect, and only before the first
/// worker starts.
pub fn limit_workers(engines: EngineCalls) {
    let _ = ENGINES.set(engines);
}

/// Permanently limits the calling thread to its role's calls. Without [`confine`] it only leaves signals to
/// other threads.
///
/// # Errors
/// [`SandboxError`]: the thread must then not continue, because it could do more than its role needs.
pub fn enter(role: Role) -> Result<(), SandboxError> {
    if role != Role::Control {
        leave_signals()?;
    }
    if CONFINED.get().is_some() {
        filters(role)?.iter().try_for_each(filter::install)?;
    }
    ROLE.set(role);
    Ok(())
}

/// The role of a thread about to be started, without which the process cannot go on.
///
/// A thread inherits the filters of the thread that starts it, and the kernel limits their number. So if a thread
/// starts another thread of its own role, the new thread adds no filters.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    role: Role,
    inherited: bool,
}

impl Entry {
    /// Called by the starting thread.
    #[must_use]
    pub fn of(role: Role) -> Self {
        Self { role, inherited: ROLE.get() == role }
    }

    /// Calls [`enter`] on the started thread; on an error, prints a line and ends the process.
    pub fn enter_or_end(self) {
        if self.inherited {
            return ROLE.set(self.role);
        }
        if let Err(error) = enter(self.role) {
            report::end(self.role, &error);
        }
    }
}

/// Blocks the process's signals on this thread; other threads wait for them. A signal handler makes calls (`sendto`)
/// that are not on every list, and must not run between a guest's requests.
fn leave_signals() -> Result<(), SandboxError> {
    let signals = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM, Signal::SIGUSR1];
    let left = SigSet::from_iter(signals).thread_block();
    left.map_err(|errno| SandboxError::system("block signals", errno))
}

fn filters(role: Role) -> Result<&'static [BpfProgram], SandboxError> {
    let (made, opens_files) = match role {
        Role::Control | Role::Network => return Ok(&[]),
        Role::Session => (&SESSION, false),
        Role::Worker => (&WORKER, true),
        Role::EngineThread => (&ENGINE_THREAD, false),
        Role::Metadata => (&METADATA, false),
        Role::TlsRelay => (&TLS_RELAY, false),
    };
    if let Some(filters) = made.get() {
        return Ok(filters);
    }
    let own = filter::program(role, ENGINES.get().copied().unwrap_or(EngineCalls::ALL))?;
    let filters = if opens_files { vec![own] } else { vec![filter::no_files()?, own] };
    Ok(made.get_or_init(|| filters))
}
