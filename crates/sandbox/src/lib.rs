//! What the server's threads may still ask of the kernel once it serves: as little as their work needs.
//!
//! `drop_privileges → restrict_files → confine (the process's list of system calls) → enter(role), on each thread`
//!
//! - One way only: nothing here can be taken back, and what a thread starts inherits all of it.
//! - Without [`confine`], [`enter`] leaves the signals of the process to its other threads, and does no more: libraries
//!   call it on each of their threads, and programs that are no server do not notice.
//! - With it, no thread goes on without the list of its role: it does not start, or the process ends.
//! - A call that is not on a thread's list is not carried out; the process says which it was and ends (`report.rs`).
//!
//! Not here: what needs more than that (opening images, binding sockets), which another process does
//! (`bareblk/src/helper`); restrictions of a ring of io_uring (`io_engine/src/io_uring/setup.rs`).

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
    /// The kernel says no.
    #[error("cannot {action}")]
    System {
        /** What was tried. */
        action: String,
        /** From the kernel. */
        #[source]
        source: io::Error,
    },
    /// The list of calls cannot be made or installed.
    #[error("the kernel takes no filter of system calls (seccomp): {reason}")]
    Filter {
        /** In seccompiler's words. */
        reason: String,
    },
    /// A processor that there is no list for.
    #[error("there is no list of system calls for this processor ({arch})")]
    Processor {
        /** As Rust calls it. */
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
/// Filters of roles, one after the other, made when the first thread needs them.
static SESSION: OnceLock<Vec<BpfProgram>> = OnceLock::new();
static WORKER: OnceLock<Vec<BpfProgram>> = OnceLock::new();
static ENGINE_THREAD: OnceLock<Vec<BpfProgram>> = OnceLock::new();

thread_local! {
    /// What the thread has become, and what it starts is from the outset.
    static ROLE: Cell<Role> = const { Cell::new(Role::Control) };
}

/// Gives the calling thread, and all that it starts from now on, the process's list of system calls.
///
/// # Errors
/// [`SandboxError`]: then the process should not go on, as some of it may be in force.
pub fn confine() -> Result<(), SandboxError> {
    let control = filter::program(Role::Control, EngineCalls::ALL)?;
    report::install().map_err(|source| SandboxError::system("catch SIGSYS", source))?;
    filter::install(&filter::no_processes()?)?;
    filter::install(&control)?;
    // Set once: whoever confines twice has both filters.
    let _ = CONFINED.set(());
    Ok(())
}

/// Workers need no more than this from now on. Only the first word counts, and only before the first worker.
pub fn limit_workers(engines: EngineCalls) {
    let _ = ENGINES.set(engines);
}

/// Narrows what the calling thread may do to what its role needs, for good. Without [`confine`] it only leaves signals to
/// other threads.
///
/// # Errors
/// [`SandboxError`]: then the thread must not go on, as it may do more than its role needs.
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

/// The role of a thread that is about to be started by one that nobody else could replace, or that others wait for.
///
/// A thread inherits the filters of who starts it. The kernel takes so many and no more, so threads that start threads of
/// their own kind must not add theirs each time.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    role: Role,
    inherited: bool,
}

impl Entry {
    /// Made by the thread that starts it.
    #[must_use]
    pub fn of(role: Role) -> Self {
        Self { role, inherited: ROLE.get() == role }
    }

    /// [`enter`], on the thread that was started; the process ends, with a line, where that is an error.
    pub fn enter_or_end(self) {
        if self.inherited {
            return ROLE.set(self.role);
        }
        if let Err(error) = enter(self.role) {
            report::end(self.role, &error);
        }
    }
}

/// Signals to the process go to threads that wait for them: a handler makes calls (`sendto`) which are on no short list,
/// and has no business between a guest's requests.
fn leave_signals() -> Result<(), SandboxError> {
    let signals = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM, Signal::SIGUSR1];
    let left = SigSet::from_iter(signals).thread_block();
    left.map_err(|errno| SandboxError::system("leave signals to other threads", errno))
}

fn filters(role: Role) -> Result<&'static [BpfProgram], SandboxError> {
    let (made, opens_files) = match role {
        Role::Control => return Ok(&[]),
        Role::Session => (&SESSION, false),
        Role::Worker => (&WORKER, true),
        Role::EngineThread => (&ENGINE_THREAD, false),
    };
    if let Some(filters) = made.get() {
        return Ok(filters);
    }
    let own = filter::program(role, ENGINES.get().copied().unwrap_or(EngineCalls::ALL))?;
    let filters = if opens_files { vec![own] } else { vec![filter::no_files()?, own] };
    Ok(made.get_or_init(|| filters))
}
