//! The limits of all disks and groups, as the operator set them, and their effect on running queues.
//!
//! `set → checked → buckets (an unchanged rate keeps its bucket) → DiskThrottle of each disk → Command::Limits`
//!
//! - Limits belong to the name of a disk: they are set before the disk exists, and outlive its sessions. A guest that
//!   reboots therefore gets no new credit.
//! - Changes are made one at a time: each of them holds the lock of the table.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::data_path::report::{DiskThrottling, GroupReport};
use crate::data_path::throttle::bucket::virtual_time;
use crate::data_path::throttle::disk_throttle::{BucketSet, DiskThrottle, KINDS, Membership, ThrottleState};
use crate::data_path::throttle::limits::{DiskLimits, LimitSettings, MAX_WEIGHT};
use crate::data_path::throttle::usage::Usage;
use crate::error::AdminError;
use crate::host::clock::monotonic_ns;

/// A disk's limits and what follows from them.
#[derive(Debug, Default)]
struct Entry {
    limits: DiskLimits,
    own: BucketSet,
    usage: Arc<Usage>,
    /// The sources from which `throttle` was built.
    made_of: Option<Source>,
    throttle: Option<Arc<DiskThrottle>>,
}

/// Everything that determines a disk's throttle.
#[derive(Debug, PartialEq, Eq)]
struct Source {
    own: LimitSettings,
    group: Option<(String, LimitSettings, u64, u64)>,
    weight: u32,
}

#[derive(Debug, Default)]
struct Table {
    groups: BTreeMap<String, BucketSet>,
    /// The disks that have limits, or had some since they were added.
    disks: BTreeMap<String, Box<Entry>>,
}

/// The limits of all disks and groups. See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Throttling {
    table: Mutex<Table>,
}

impl Throttling {
    /// Replaces all limits. Returns the names of disks whose limits are now different.
    pub(crate) fn set_all(
        &self,
        groups: &[(String, LimitSettings)],
        disks: &[(String, DiskLimits)],
    ) -> Result<Vec<String>, AdminError> {
        groups.iter().try_for_each(|(name, settings)| check("group", name, settings))?;
        let is_known = |name: &str| groups.iter().any(|(known, _)| known == name);
        for (name, limits) in disks {
            check_disk(name, limits, is_known)?;
        }
        let mut table = self.lock();
        table.groups.retain(|name, _| is_known(name));
        table.disks.retain(|name, _| disks.iter().any(|(known, _)| known == name));
        groups.iter().for_each(|(name, settings)| table.set_group(name, *settings));
        disks.iter().for_each(|(name, limits)| table.set_disk(name, limits.clone()));
        Ok(table.make())
    }

    /// Sets the limits of a disk, which need not exist yet. Returns the names of disks whose limits are now different,
    /// which may include other disks of its group.
    pub(crate) fn set_disk(&self, name: &str, limits: DiskLimits) -> Result<Vec<String>, AdminError> {
        let mut table = self.lock();
        check_disk(name, &limits, |group| table.groups.contains_key(group))?;
        table.set_disk(name, limits);
        Ok(table.make())
    }

    /// As [`Throttling::set_disk`], for a group that exists.
    pub(crate) fn set_group(&self, name: &str, settings: LimitSettings) -> Result<Vec<String>, AdminError> {
        check("group", name, &settings)?;
        let mut table = self.lock();
        if !table.groups.contains_key(name) {
            return Err(AdminError::NoGroup { group: name.to_owned() });
        }
        table.set_group(name, settings);
        Ok(table.make())
    }

    /// Forgets the limits of a disk that is removed. Returns the names of disks whose limits are now different.
    pub(crate) fn forget(&self, name: &str) -> Vec<String> {
        let mut table = self.lock();
        table.disks.remove(name);
        table.make()
    }

    /// The disk's limits in effect.
    pub(crate) fn throttle(&self, disk: &str) -> Option<Arc<DiskThrottle>> {
        self.lock().disks.get(disk)?.throttle.clone()
    }

    pub(crate) fn report(&self, disk: &str) -> DiskThrottling {
        let table = self.lock();
        let Some(entry) = table.disks.get(disk) else { return DiskThrottling::default() };
        let now = virtual_time(monotonic_ns());
        let (throttled_requests, ns) = entry.usage.waits(now);
        DiskThrottling {
            limits: entry.limits.clone(),
            rates: entry.own.reports(&entry.usage.used(), now),
            throttled_requests,
            throttled_time: Duration::from_nanos(ns),
        }
    }

    pub(crate) fn groups(&self) -> Vec<GroupReport> {
        let table = self.lock();
        let now = virtual_time(monotonic_ns());
        let report = |(name, buckets): (&String, &BucketSet)| {
            let mut used = [0; KINDS];
            for (_, entry) in table.members(name) {
                let of_disk = entry.usage.used();
                used.iter_mut().zip(of_disk).for_each(|(sum, used)| *sum = used.saturating_add(*sum));
            }
            GroupReport {
                name: name.clone(),
                limits: *buckets.settings(),
                rates: buckets.reports(&used, now),
                disks: table.members(name).map(|(disk, _)| disk.clone()).collect(),
            }
        };
        table.groups.iter().map(report).collect()
    }

    /// The state for another process; `None` without limits. The disk's queues are paused.
    pub(crate) fn state(&self, disk: &str) -> Option<ThrottleState> {
        let table = self.lock();
        let entry = table.disks.get(disk)?;
        let throttle = entry.throttle.as_ref()?;
        let group = entry.limits.group.as_ref().and_then(|group| table.groups.get(group));
        Some(ThrottleState {
            own: throttle.own().paid_at(),
            group: group.map(BucketSet::paid_at).unwrap_or_default(),
            debts: throttle.debts(),
        })
    }

    /// Continues with the state from another process, before the disk's queues start.
    pub(crate) fn restore(&self, disk: &str, state: &ThrottleState) {
        let (table, now) = (self.lock(), virtual_time(monotonic_ns()));
        let Some(entry) = table.disks.get(disk) else { return };
        let Some(throttle) = &entry.throttle else { return };
        throttle.own().take_over(&state.own, now);
        throttle.take_over(&state.debts);
        if let Some(group) = entry.limits.group.as_ref().and_then(|group| table.groups.get(group)) {
            group.take_over(&state.group, now);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn set_group(&mut self, name: &str, settings: LimitSettings) {
        let now = virtual_time(monotonic_ns());
        let before = self.groups.entry(name.to_owned()).or_default();
        if *before.settings() != settings {
            *before = before.changed_to(settings, now);
        }
    }

    fn set_disk(&mut self, name: &str, limits: DiskLimits) {
        // A disk that never had limits needs no entry, which takes more than a kilobyte.
        if limits == DiskLimits::default() && !self.disks.contains_key(name) {
            return;
        }
        let now = virtual_time(monotonic_ns());
        let entry = self.disks.entry(name.to_owned()).or_default();
        if *entry.own.settings() != limits.own {
            entry.own = entry.own.changed_to(limits.own, now);
        }
        entry.limits = limits;
    }

    fn members<'t>(&'t self, group: &'t str) -> impl Iterator<Item = (&'t String, &'t Box<Entry>)> {
        self.disks.iter().filter(move |(_, entry)| entry.limits.group.as_deref() == Some(group))
    }

    fn membership(&self, entry: &Entry) -> Option<(String, Membership)> {
        let name = entry.limits.group.clone()?;
        let buckets = self.groups.get(&name)?.clone();
        let weights: Vec<u64> =
            self.members(&name).map(|(_, member)| u64::from(member.limits.weight)).collect();
        let (disks, least_weight) = (weights.len() as u64, weights.into_iter().min()?);
        Some((name, Membership { buckets, disks, weight: entry.limits.weight.into(), least_weight }))
    }

    /// Rebuilds the throttles whose sources have changed. Returns the names of their disks.
    fn make(&mut self) -> Vec<String> {
        let mut changed = Vec::new();
        for (name, entry) in &self.disks {
            let group = self.membership(entry);
            let known = group.as_ref().map(|(name, member)| {
                (name.clone(), *member.buckets.settings(), member.disks, member.least_weight)
            });
            let source = Source { own: entry.limits.own, group: known, weight: entry.limits.weight };
            if entry.made_of.as_ref() != Some(&source) {
                let member = group.as_ref().map(|(_, member)| member);
                let throttle = DiskThrottle::new(entry.own.clone(), member, &entry.usage).map(Arc::new);
                if let (Some(new), Some(old)) = (&throttle, &entry.throttle) {
                    new.replace(old);
                }
                changed.push((name.clone(), source, throttle));
            }
        }
        let mut names = Vec::new();
        for (name, source, throttle) in changed {
            let Some(entry) = self.disks.get_mut(&name) else { continue };
            (entry.made_of, entry.throttle) = (Some(source), throttle);
            names.push(name);
        }
        names
    }
}

fn check(what: &'static str, name: &str, settings: &LimitSettings) -> Result<(), AdminError> {
    settings.check().map_err(|source| AdminError::Limits { what, name: name.to_owned(), source })
}

fn check_disk(name: &str, limits: &DiskLimits, is_known: impl Fn(&str) -> bool) -> Result<(), AdminError> {
    check("disk", name, &limits.own)?;
    debug_assert!((1..=MAX_WEIGHT).contains(&limits.weight), "the caller has checked the weight");
    match &limits.group {
        Some(group) if !is_known(group) => Err(AdminError::NoGroup { group: group.clone() }),
        _ => Ok(()),
    }
}
