//! The file system as the server still sees it: nothing to open but what the kernel tells about itself.
//!
//! Images, sockets and the configuration file come as open descriptors from the helper; those are not concerned.
//!
//! Source: landlock(7). An older kernel enforces what it knows; what it lacks is said.

use std::fmt;
use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetError, RulesetStatus, Scope, path_beneath_rules,
};

use crate::SandboxError;

/// The newest interface asked for.
const NEWEST: ABI = ABI::V6;
/// What the kernel tells: engines, CPUs, nodes, limits, counters of threads.
const KERNELS_OWN: [&str; 2] = ["/proc", "/sys"];

/// What may be opened besides.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileRules {
    /// Files that may be written, and folders below which all may: of control groups that workers join.
    pub writable: Vec<PathBuf>,
}

/// How much of it the kernel keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Enforcement {
    /// All.
    Full,
    /// As much as an older kernel knows.
    Partial,
    /// Nothing: it has no landlock, or does not use it.
    None,
}

impl fmt::Display for Enforcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "full",
            Self::Partial => "partial: an older kernel",
            Self::None => "none: the kernel has no landlock, or lsm= leaves it out",
        })
    }
}

/// From now on the calling thread, and all that it starts, opens files by these rules.
///
/// # Errors
/// [`SandboxError::System`]. A kernel without landlock is no error.
pub fn restrict_files(rules: &FileRules) -> Result<Enforcement, SandboxError> {
    match restrict(rules) {
        Ok(RulesetStatus::FullyEnforced) => Ok(Enforcement::Full),
        Ok(RulesetStatus::PartiallyEnforced) => Ok(Enforcement::Partial),
        Ok(RulesetStatus::NotEnforced) => Ok(Enforcement::None),
        Err(error) => {
            Err(SandboxError::system("restrict what may be opened (landlock)", std::io::Error::other(error)))
        }
    }
}

fn restrict(rules: &FileRules) -> Result<RulesetStatus, RulesetError> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?
        .add_rules(path_beneath_rules(KERNELS_OWN, read))?
        .add_rules(path_beneath_rules(&rules.writable, read | AccessFs::WriteFile))?;
    Ok(ruleset.restrict_self()?.ruleset)
}
