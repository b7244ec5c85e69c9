//! Looks up users and groups of the host by their names.
//!
//! `args/values.rs` also accepts numbers, and inside the sandbox asks the helper to call these functions.

use anyhow::{Context, Result, anyhow};
use nix::unistd::{Group, User};

pub fn user_id(name: &str) -> Result<u32> {
    let user = User::from_name(name).with_context(|| format!("user '{name}' cannot be looked up"))?;
    user.map(|user| user.uid.as_raw())
        .ok_or_else(|| anyhow!("user '{name}' does not exist: give an existing name, or a number"))
}

pub fn group_id(name: &str) -> Result<u32> {
    let group = Group::from_name(name).with_context(|| format!("group '{name}' cannot be looked up"))?;
    group
        .map(|group| group.gid.as_raw())
        .ok_or_else(|| anyhow!("group '{name}' does not exist: give an existing name, or a number"))
}
