//! What the server's threads may still ask of the kernel once it serves: as little as their work needs.
//!
//! `drop_privileges → restrict_files → confine (the process's list of system calls) → enter(role), on each thread`
//!
//! - One way only: nothing here can be taken back, and what a thread starts inherits all of it.
//! - Without [`confine`], [`enter`] leaves the signals of the process to its other threads, and does no more: libraries
//!   call it on each of their threads, and programs that are no server do not notice.
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

use std::io;
use std::sync::OnceLock;

pub use files::{Enforcement, FileRules, restrict_files};
use nix::sys::signal::{SigSet, Signal};
pub use privileges::{Identity, Kept, drop_privileges, keep_out_of_core_files};
pub use report::EXIT_CODE;
pub use role::{EngineCalls, Role};
use seccompiler::BpfProgram;
use tracing::warn;

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

/// One for each role but the process's own.
#[derive(Debug)]
struct Programs {
    session: Vec<BpfProgram>,
    worker: Vec<BpfProgram>,
    engine_thread: Vec<BpfProgram>,
}

/// Set while the process is confined.
static CONFINED: OnceLock<()> = OnceLock::new();
static ENGINES: OnceLock<EngineCalls> = OnceLock::new();
static PROGRAMS: OnceLock<Option<Programs>> = OnceLock::new();

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

/// Workers need no more than this from now on. Only the first word counts, and only before the first [`enter`].
pub fn limit_workers(engines: EngineCalls) {
    let _ = ENGINES.set(engines);
}

/// Narrows what the calling thread may do to what its role needs, for good. Without [`confine`] it only leaves signals to
/// other threads.
pub fn enter(role: Role) {
    if role != Role::Control {
        leave_signals(role);
    }
    if CONFINED.get().is_none() {
        return;
    }
    let programs = PROGRAMS.get_or_init(|| {
        let made = programs(ENGINES.get().copied().unwrap_or(EngineCalls::ALL));
        made.inspect_err(|error| warn!("threads keep the whole process's list of system calls: {error}")).ok()
    });
    let Some(programs) = programs else { return };
    let list = match role {
        Role::Control => return,
        Role::Session => &programs.session,
        Role::Worker => &programs.worker,
        Role::EngineThread => &programs.engine_thread,
    };
    if let Err(error) = list.iter().try_for_each(filter::install) {
        warn!("a {role} thread keeps the whole process's list of system calls: {error}");
    }
}

/// Signals to the process go to threads that wait for them: a handler makes calls (`sendto`) which are on no short list,
/// and has no business between a guest's requests.
fn leave_signals(role: Role) {
    let signals = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM, Signal::SIGUSR1];
    if let Err(error) = SigSet::from_iter(signals).thread_block() {
        warn!("a {role} thread may be the one that a signal to the process interrupts: {error}");
    }
}

fn programs(engines: EngineCalls) -> Result<Programs, SandboxError> {
    let program = |role| filter::program(role, engines);
    Ok(Programs {
        session: vec![filter::no_files()?, program(Role::Session)?],
        worker: vec![program(Role::Worker)?],
        engine_thread: vec![filter::no_files()?, program(Role::EngineThread)?],
    })
}
