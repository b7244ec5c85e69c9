//! The limits of disks and groups as `stats` and `limit` report them.

use blk_server::{
    AdminError, DiskReport, GroupReport, LimitReport, RateSettings, ServerReport, monotonic_ns,
};
use serde::{Deserialize, Serialize};

use super::super::protocol::answer::{Fault, ns};
use super::super::refused::Refused;

/// A limit and its use. Units are requests or bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rate {
    /// The key of the limit, such as `iops-read`.
    pub limit: String,
    /// Units per second.
    pub rate: u64,
    /// Units per second in a burst; null: no burst.
    pub max: Option<u64>,
    /// Length of a full burst in seconds; null: one second.
    pub max_length: Option<u64>,
    /// Units that may be used at once.
    pub credit: u64,
    /// The credit after a long pause.
    pub capacity: u64,
    /// Units used since the limit was set.
    pub used: u64,
}

impl Rate {
    fn new(report: &LimitReport) -> Self {
        let RateSettings { rate, max, max_length } = report.settings;
        let LimitReport { credit, capacity, used, .. } = *report;
        let (limit, rate) = (report.kind.key().to_owned(), rate.unwrap_or(0));
        Self { limit, rate, max, max_length, credit, capacity, used }
    }
}

fn rates(reports: &[LimitReport]) -> Vec<Rate> {
    reports.iter().map(Rate::new).collect()
}

/// The limits of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskThrottling {
    /// The disk's own limits.
    pub limits: Vec<Rate>,
    pub iops_size: Option<u64>,
    /// The group whose limits the disk shares.
    pub group: Option<String>,
    pub weight: u32,
    /// Requests that waited for a limit at the head of their queue, and how long queues waited in total.
    pub throttled_requests: u64,
    pub throttled_ns: u64,
}

impl DiskThrottling {
    pub fn new(disk: &DiskReport) -> Self {
        let report = &disk.throttling;
        Self {
            limits: rates(&report.rates),
            iops_size: report.limits.own.iops_size,
            group: report.limits.group.clone(),
            weight: report.limits.weight,
            throttled_requests: report.throttled_requests,
            throttled_ns: ns(report.throttled_time),
        }
    }
}

/// A disk in the answer to `limit`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitedDisk {
    pub disk: String,
    #[serde(flatten)]
    pub throttling: DiskThrottling,
}

/// A group in the answer to `limit`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Group {
    pub group: String,
    pub limits: Vec<Rate>,
    pub iops_size: Option<u64>,
    /// The names of its disks.
    pub disks: Vec<String>,
}

impl Group {
    fn new(group: &GroupReport) -> Self {
        Self {
            group: group.name.clone(),
            limits: rates(&group.rates),
            iops_size: group.limits.iops_size,
            disks: group.disks.clone(),
        }
    }
}

/// The answer to `limit`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitAnswer {
    /// The time of the reading, on the host's monotonic clock.
    pub at_ns: u64,
    pub disks: Vec<LimitedDisk>,
    pub groups: Vec<Group>,
}

impl LimitAnswer {
    /// The answer about one disk, one group, or all of them.
    pub fn of(disk: Option<&str>, group: Option<&str>, report: &ServerReport) -> Result<Self, Fault> {
        let wanted = |name: &str, this: Option<&str>, other: Option<&str>| match this {
            Some(this) => name == this,
            None => other.is_none(),
        };
        let disks = report.disks.iter().filter(|known| wanted(&known.name, disk, group));
        let disks: Vec<_> = disks
            .map(|disk| LimitedDisk { disk: disk.name.clone(), throttling: DiskThrottling::new(disk) })
            .collect();
        let groups = report.groups.iter().filter(|known| wanted(&known.name, group, disk));
        let groups: Vec<_> = groups.map(Group::new).collect();
        if let Some(name) = disk.filter(|_| disks.is_empty()) {
            return Err(Refused::Server(AdminError::NoDisk { name: name.to_owned() }).into());
        }
        if let Some(name) = group.filter(|_| groups.is_empty()) {
            return Err(Refused::Server(AdminError::NoGroup { group: name.to_owned() }).into());
        }
        Ok(Self { at_ns: monotonic_ns(), disks, groups })
    }
}
