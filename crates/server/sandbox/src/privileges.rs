//! Reduces the process's identity and privileges: another user, no capabilities, no new privileges by starting
//! programs.
//!
//! Call these functions while the process has only one thread, because they change capabilities and other properties of
//! a single thread.
//!
//! Source: capabilities(7), prctl(2).

use nix::unistd::{Gid, Uid, getresgid, getresuid, setgroups, setresgid, setresuid};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_keep_capabilities, set_no_new_privs,
};

use crate::SandboxError;

/// Capability numbers have six bits.
const CAPABILITY_BITS: u32 = 64;

/// The user and group that the process switches to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Identity {
    /// `None`: unchanged.
    pub user: Option<u32>,
    /// `None`: unchanged.
    pub group: Option<u32>,
}

impl Identity {
    /// Whether the user or group differs from the process's current one.
    fn differs(self) -> nix::Result<bool> {
        let (users, groups) = (getresuid()?, getresgid()?);
        let other_user = self
            .user
            .map(Uid::from_raw)
            .is_some_and(|user| [users.real, users.effective, users.saved].iter().any(|now| *now != user));
        let other_group = self.group.map(Gid::from_raw).is_some_and(|group| {
            [groups.real, groups.effective, groups.saved].iter().any(|now| *now != group)
        });
        Ok(other_user || other_group)
    }
}

/// Which of the process's capabilities to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// The capabilities for serving.
    Server {
        /// `CAP_SYS_NICE`: the server sets workers' scheduling classes and nice values while it runs.
        scheduling: bool,
        /// `CAP_IPC_LOCK`: kept if the limit of locked memory still applies and the process was exempt from it
        /// at its start.
        locked_memory: bool,
    },
    /// The capabilities for opening files and sockets as an administrator, for the helper.
    Files,
}

impl Kept {
    fn set(self) -> CapabilitySet {
        match self {
            Self::Server { scheduling, locked_memory } => {
                let mut set = CapabilitySet::empty();
                set.set(CapabilitySet::SYS_NICE, scheduling);
                set.set(CapabilitySet::IPC_LOCK, locked_memory);
                set
            }
            Self::Files => {
                CapabilitySet::CHOWN
                    | CapabilitySet::DAC_OVERRIDE
                    | CapabilitySet::DAC_READ_SEARCH
                    | CapabilitySet::FOWNER
                    // To find out which process holds an image's lock.
                    | CapabilitySet::SYS_PTRACE
            }
        }
    }
}

/// Switches to `identity` and permanently drops all capabilities except `kept`.
///
/// # Errors
/// [`SandboxError::System`]: the process may not switch to that identity.
pub fn drop_privileges(identity: Identity, kept: Kept) -> Result<(), SandboxError> {
    let kept = kept.set();
    drop_bounds(kept);
    if identity.differs().map_err(|errno| SandboxError::system("read the process's user and group", errno))? {
        become_identity(identity, kept)?;
    }
    let failed = |errno: Errno| SandboxError::system("give up capabilities", errno);
    let now = capabilities(None).map_err(failed)?;
    let left = now.permitted & kept;
    let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).map_err(failed)?;
    set_no_new_privs(true).map_err(|errno| SandboxError::system("forbid new privileges", errno))
}

/// Best effort: a process that may not change its bounding set cannot regain capabilities either, once new
/// privileges are forbidden.
fn drop_bounds(kept: CapabilitySet) {
    let _ = clear_ambient_capability_set();
    for bit in 0..CAPABILITY_BITS {
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        if !kept.contains(capability) && remove_capability_from_bounding_set(capability).is_err() {
            return;
        }
    }
}

fn become_identity(identity: Identity, kept: CapabilitySet) -> Result<(), SandboxError> {
    let Identity { user, group } = identity;
    let keep = set_keep_capabilities(!kept.is_empty());
    keep.map_err(|errno| SandboxError::system("keep capabilities", errno))?;
    let failed = |what: String| {
        move |errno: nix::errno::Errno| {
            SandboxError::system(format!("{what} (only root can switch to another user or group)"), errno)
        }
    };
    setgroups(&[]).map_err(failed("drop the groups of root".into()))?;
    if let Some(group) = group {
        let id = Gid::from_raw(group);
        setresgid(id, id, id).map_err(failed(format!("become group {group}")))?;
    }
    if let Some(user) = user {
        let id = Uid::from_raw(user);
        setresuid(id, id, id).map_err(failed(format!("become user {user}")))?;
    }
    Ok(())
}

/// Keeps a guest's data out of core files, and from other processes of the same user.
///
/// # Errors
/// [`SandboxError::System`].
pub fn keep_out_of_core_files() -> Result<(), SandboxError> {
    let failed = |errno: Errno| SandboxError::system("disable core files", errno);
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }).map_err(failed)?;
    // The limit does not apply if the kernel pipes core files to a program.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed)
}
