//! What the process may do by who it is: another user, no capabilities, nothing gained by starting programs.
//!
//! Only while the process has one thread: capabilities and most of the rest belong to threads.
//!
//! Source: capabilities(7), prctl(2). Not here: system calls (`calls.rs`), files (`files.rs`).

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

/// Who the process becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Identity {
    /// `None`: stays.
    pub user: Option<u32>,
    /// `None`: stays.
    pub group: Option<u32>,
}

impl Identity {
    /// Whether it is somebody else than now.
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

/// Which capabilities stay, of those that the process has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// What serving needs.
    Server {
        /// `CAP_SYS_NICE`: workers are given scheduling classes and nice values while the server runs.
        scheduling: bool,
        /// `CAP_IPC_LOCK`: the limit of locked memory stands, and who started the server had none.
        locked_memory: bool,
    },
    /// What opening files and sockets as an administrator needs: for the helper.
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
                    // To tell who holds an image's lock.
                    | CapabilitySet::SYS_PTRACE
            }
        }
    }
}

/// Becomes `identity`, with no more than `kept` of its capabilities, for good.
///
/// # Errors
/// [`SandboxError::System`]: not allowed to become somebody else.
pub fn drop_privileges(identity: Identity, kept: Kept) -> Result<(), SandboxError> {
    let kept = kept.set();
    drop_bounds(kept);
    if identity.differs().map_err(|errno| SandboxError::system("see who the process is", errno))? {
        become_identity(identity, kept)?;
    }
    let failed = |errno: Errno| SandboxError::system("give up capabilities", errno);
    let now = capabilities(None).map_err(failed)?;
    let left = now.permitted & kept;
    let sets = CapabilitySets { effective: left, permitted: left, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).map_err(failed)?;
    set_no_new_privs(true).map_err(|errno| SandboxError::system("forbid new privileges", errno))
}

/// Best effort: who may not change the bounds cannot regain anything either, once new privileges are forbidden.
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
            SandboxError::system(format!("{what} (only root can serve as somebody else)"), errno)
        }
    };
    setgroups(&[]).map_err(failed("leave the groups of root".into()))?;
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

/// A guest's data must not land in core files, nor be read by other processes of the same user.
///
/// # Errors
/// [`SandboxError::System`].
pub fn keep_out_of_core_files() -> Result<(), SandboxError> {
    let failed = |errno: Errno| SandboxError::system("switch core files off", errno);
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }).map_err(failed)?;
    // Programs that core files are piped to are not bound by the limit.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed)
}
