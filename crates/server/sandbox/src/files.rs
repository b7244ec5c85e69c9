//! The server's remaining access to the file system: it can open only the kernel's own file systems.
//!
//! Images, sockets and the configuration file come from the helper as open descriptors; these rules do not
//! affect them.
//!
//! Source: landlock(7). An older kernel enforces the rules that it knows; the result says whether these are all rules.

use std::fmt;
use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus, Scope, path_beneath_rules,
};

use crate::SandboxError;

/// The newest landlock interface to ask for.
const NEWEST: ABI = ABI::V6;
/// The kernel's own file systems, which describe I/O features, CPUs, NUMA nodes, limits and thread counters.
const KERNELS_OWN: [&str; 2] = ["/proc", "/sys"];

/// Additional paths that may be opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileRules {
    /// Writable files, and directories whose contents are writable: control groups that workers join.
    pub writable: Vec<PathBuf>,
    /// Readable files, and directories whose contents are readable.
    pub readable: Vec<PathBuf>,
    /// Whether TCP connections are allowed.
    pub connects: bool,
}

/// How many of the rules the kernel enforces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enforcement {
    /// All rules.
    Full,
    /// The kernel enforces only the rules that its version knows.
    Partial,
    /// No rules: the kernel has no landlock, or landlock is disabled.
    None,
}

impl fmt::Display for Enforcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "full",
            Self::Partial => "partial: the kernel is too old for some rules",
            Self::None => "none: the kernel has no landlock, or its lsm= parameter leaves it out",
        })
    }
}

/// Applies the rules to the calling thread and to all threads that it starts from now on.
///
/// # Errors
/// [`SandboxError::System`]. A kernel without landlock is not an error.
pub fn restrict_files(rules: &FileRules) -> Result<Enforcement, SandboxError> {
    match restrict(rules) {
        Ok(RulesetStatus::FullyEnforced) => Ok(Enforcement::Full),
        Ok(RulesetStatus::PartiallyEnforced) => Ok(Enforcement::Partial),
        Ok(RulesetStatus::NotEnforced) => Ok(Enforcement::None),
        Err(error) => {
            Err(SandboxError::system("restrict file access (landlock)", std::io::Error::other(error)))
        }
    }
}

fn restrict(rules: &FileRules) -> Result<RulesetStatus, RulesetError> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let refused = if rules.connects { AccessNet::BindTcp.into() } else { AccessNet::from_all(NEWEST) };
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(refused)?
        .scope(Scope::from_all(NEWEST))?
        .create()?
        .add_rules(path_beneath_rules(KERNELS_OWN, read))?
        .add_rules(path_beneath_rules(&rules.readable, read))?
        .add_rules(path_beneath_rules(&rules.writable, read | AccessFs::WriteFile))?;
    Ok(ruleset.restrict_self()?.ruleset)
}
