//! The limits of disks and groups: from the configuration, and changed by `bareblk ctl limit`.
//!
//! A reload restores the limits of the configuration, even where a control client has changed them.

use anyhow::{Result, bail};
use blk_server::{AdminError, DiskLimits, GroupReport, LimitSettings};
use serde_json::{Map, Value};

use super::Serving;
use crate::args::limit_args::{GROUP, WEIGHT};
use crate::config::difference::{Applied, NamedDisk};
use crate::control::refused::Refused;

type Groups = Vec<(String, LimitSettings)>;

fn settings_of(groups: Vec<GroupReport>) -> Groups {
    groups.into_iter().map(|group| (group.name, group.limits)).collect()
}

impl Serving {
    /// Adds groups; existing groups stay as they are.
    pub(super) fn add_groups(&self, wanted: &Groups) -> Result<()> {
        let report = self.with_server(|server| server.report())?;
        let disks: Vec<_> =
            report.disks.into_iter().map(|disk| (disk.name, disk.throttling.limits)).collect();
        let mut groups = settings_of(report.groups);
        groups.extend(
            wanted
                .iter()
                .filter(|(name, _)| !groups.iter().any(|(known, _)| known == name))
                .cloned()
                .collect::<Vec<_>>(),
        );
        self.with_server(|server| server.limit_all(&groups, &disks))??;
        Ok(())
    }

    /// Applies the limits of the configuration. A group that a disk in use still needs stays.
    pub(super) fn limit_as_configured(&self, mut groups: Groups, applied: &mut Applied) -> Result<()> {
        let disks: Vec<(String, DiskLimits)> = self.disks().iter().map(NamedDisk::limits).collect();
        let known = settings_of(self.with_server(|server| server.report().groups)?);
        for (disk, limits) in &disks {
            let Some(group) = &limits.group else { continue };
            if groups.iter().any(|(name, _)| name == group) {
                continue;
            }
            groups.extend(known.iter().find(|(name, _)| name == group).cloned());
            applied.refuse(
                disk,
                format!("the disk still belongs to group {group}, so the group stays, although the file no longer has it"),
            );
        }
        for disk in self.with_server(|server| server.limit_all(&groups, &disks))?? {
            let mut listed = applied.added.iter().chain(&applied.replaced).chain(&applied.changed);
            if !listed.any(|known| *known == disk) {
                applied.changed.push(disk);
            }
        }
        Ok(())
    }

    /// Changes limits of a disk at once, until the next reload.
    pub fn limit_disk(&self, name: &str, set: &Map<String, Value>) -> Result<(), Refused> {
        let _change = self.begin_change()?;
        let report = self.with_server(|server| server.report())?;
        let disk = report.disks.into_iter().find(|disk| disk.name == name);
        let mut limits = disk.ok_or_else(|| AdminError::NoDisk { name: name.to_owned() })?.throttling.limits;
        for (key, value) in set {
            match (key.as_str(), value) {
                (GROUP, Value::Null) => limits.group = None,
                (GROUP, Value::String(group)) => limits.group = Some(group.clone()),
                (WEIGHT, value) => limits.weight = weight(value)?,
                _ => set_one(&mut limits.own, key, value)?,
            }
        }
        Ok(self.with_server(|server| server.limit_disk(name, limits))??)
    }

    /// Like [`Serving::limit_disk`], for a group.
    pub fn limit_group(&self, name: &str, set: &Map<String, Value>) -> Result<(), Refused> {
        let _change = self.begin_change()?;
        let groups = self.with_server(|server| server.report().groups)?;
        let group = groups.into_iter().find(|group| group.name == name);
        let mut settings = group.ok_or_else(|| AdminError::NoGroup { group: name.to_owned() })?.limits;
        set.iter().try_for_each(|(key, value)| set_one(&mut settings, key, value))?;
        Ok(self.with_server(|server| server.limit_group(name, settings))??)
    }
}

fn weight(value: &Value) -> Result<u32> {
    let weight = value.as_u64().and_then(|weight| u32::try_from(weight).ok());
    match weight {
        Some(weight @ 1..=blk_server::MAX_WEIGHT) => Ok(weight),
        _ => bail!("weight = {value} is invalid: give a whole number from 1 to {}", blk_server::MAX_WEIGHT),
    }
}

/// Sets one limit. Null removes it.
fn set_one(settings: &mut LimitSettings, key: &str, value: &Value) -> Result<(), Refused> {
    let number = match value {
        Value::Null => None,
        value => Some(value.as_u64().ok_or_else(|| {
            Refused::Settings(format!(
                "{key} = {value} is invalid: give a whole number, or null for no limit"
            ))
        })?),
    };
    if settings.set(key, number) {
        return Ok(());
    }
    let keys: Vec<String> = LimitSettings::keys().collect();
    let key: String = key.chars().take(80).collect();
    Err(Refused::Settings(format!("there is no limit `{key}`: give one of {}", keys.join(", "))))
}
