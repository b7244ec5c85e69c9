//! One answer of a server, including the fields that older servers lack.
//!
//! `JSON → Reading`; only this file escapes the characters in names that a terminal would interpret.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use bareblk::client::{DiskStats, Worker, WorkerStats, plain};
use serde::Deserialize;
use serde_json::Value;

use super::latency::Counted;
use crate::limit::Limit;

/// A server's answer to `stats`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Reading {
    /// The time of the reading, on the server's monotonic clock.
    pub at_ns: u64,
    /// Processor time of the whole process.
    pub process_cpu_ns: u64,
    /// The workers.
    pub workers: Vec<WorkerStats>,
    /// The disks.
    pub disks: Vec<Disk>,
    /// The groups with limits, from the answer to `limit`.
    #[serde(skip)]
    pub groups: Vec<Group>,
}

/// A disk in the answer.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Disk {
    /// The fields that all servers report.
    #[serde(flatten)]
    pub stats: DiskStats,
    /// Latencies by kind of request. Older servers do not send them.
    pub latency: Option<BTreeMap<String, Counted>>,
    /// The disk's limits, and how long its queues waited. Older servers do not send this field.
    pub throttling: Option<Throttling>,
}

/// The limits of a disk, and how long requests waited for them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Throttling {
    /// The disk's own limits.
    pub limits: Vec<Limit>,
    /// The group whose limits the disk shares.
    pub group: Option<String>,
    /// How long queues waited, in total.
    pub throttled_ns: u64,
}

/// Disks that share limits.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Group {
    /// The group's name.
    pub group: String,
    /// The group's limits.
    pub limits: Vec<Limit>,
    /// The names of the group's disks.
    pub disks: Vec<String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Limits {
    groups: Vec<Group>,
}

impl Reading {
    /// Reads the answer to `stats`.
    ///
    /// # Errors
    /// The value is not such an answer.
    pub fn new(stats: Value) -> Result<Self> {
        let mut reading: Self =
            serde_json::from_value(stats).context("cannot read the server's answer to `stats`")?;
        reading.make_plain();
        Ok(reading)
    }

    /// Reads the answer to `limit`.
    ///
    /// # Errors
    /// The value is not such an answer.
    pub fn add_limits(&mut self, limits: Value) -> Result<()> {
        let limits: Limits =
            serde_json::from_value(limits).context("cannot read the server's answer to `limit`")?;
        self.groups = limits.groups;
        self.groups.iter_mut().for_each(Group::make_plain);
        Ok(())
    }

    /// Escapes characters that a terminal would interpret.
    fn make_plain(&mut self) {
        for Disk { stats, throttling, .. } in &mut self.disks {
            let disk = &mut stats.disk;
            for text in
                [&mut disk.name, &mut disk.image, &mut disk.socket, &mut disk.engine, &mut disk.on_error]
            {
                *text = plain(text);
            }
            for text in throttling.iter_mut().flat_map(|throttling| &mut throttling.group) {
                *text = plain(text);
            }
            throttling.iter_mut().flat_map(|throttling| &mut throttling.limits).for_each(Limit::make_plain);
        }
        for WorkerStats { worker: Worker { settings, .. }, .. } in &mut self.workers {
            for text in [&mut settings.class, &mut settings.cgroup].into_iter().flatten() {
                *text = plain(text);
            }
        }
    }

    /// Whether a disk has limits, of its own or of a group.
    pub fn has_limits(&self) -> bool {
        let mut throttling = self.disks.iter().filter_map(|disk| disk.throttling.as_ref());
        throttling.any(|throttling| !throttling.limits.is_empty() || throttling.group.is_some())
    }
}

impl Group {
    fn make_plain(&mut self) {
        self.group = plain(&self.group);
        self.disks.iter_mut().for_each(|disk| *disk = plain(disk));
        self.limits.iter_mut().for_each(Limit::make_plain);
    }
}

impl Limit {
    fn make_plain(&mut self) {
        self.limit = plain(&self.limit);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_that_older_servers_lack_may_be_missing() {
        let reading = Reading::new(json!({"disks": [{"name": "a"}, {}]})).unwrap();
        assert_eq!(reading.disks[0].stats.disk.name, "a");
        assert!(reading.disks[0].latency.is_none() && reading.disks[1].throttling.is_none());
        assert!(!reading.has_limits());
        assert!(Reading::new(json!({})).unwrap().disks.is_empty());
    }

    #[test]
    fn newer_fields_are_read_beside_the_older_ones() {
        let disk = json!({
            "name": "a", "queues": [{"queue": 3, "reads": 7}], "new": [1],
            "latency": {"read": {"count": 1, "max_ns": 5, "buckets": [[6, 1]]}},
            "throttling": {"limits": [{"limit": "iops", "rate": 5, "max": null}], "group": null, "throttled_ns": 9},
        });
        let groups = json!({"at_ns": 1, "groups": [{"group": "g", "disks": ["a"], "limits": []}]});
        let mut reading = Reading::new(json!({"disks": [disk]})).unwrap();
        reading.add_limits(groups).unwrap();
        let disk = &reading.disks[0];
        assert_eq!((disk.stats.queues[0].queue, disk.stats.queues[0].counters.reads), (3, 7));
        assert!(disk.latency.as_ref().unwrap()["read"].since(None).unwrap().percentiles().is_some());
        assert_eq!(disk.throttling.as_ref().unwrap().throttled_ns, 9);
        assert!(reading.has_limits() && reading.groups[0].group == "g");
    }

    #[test]
    fn names_do_not_command_the_terminal() {
        let evil = "\u{1b}]0;x\u{7}\n\u{202e}";
        let disk = json!({"name": evil, "image": evil, "engine": evil, "socket": evil, "on_error": evil,
            "throttling": {"group": evil, "limits": [{"limit": evil}]}});
        let worker = json!({"worker": 1, "settings": {"class": evil, "cgroup": evil}});
        let groups = json!({"groups": [{"group": evil, "disks": [evil], "limits": [{"limit": evil}]}]});
        let mut reading = Reading::new(json!({"disks": [disk], "workers": [worker]})).unwrap();
        reading.add_limits(groups).unwrap();
        let shown = format!("{reading:?}");
        assert!(shown.contains("]0;x"), "{shown}");
        // Debug output escapes these characters, so look for their escaped form with only one backslash.
        let harmless = shown.replace("\\\\", "");
        assert!(
            !harmless.contains("\\u{1b}") && !harmless.contains("\\n") && !harmless.contains("\\u{202e}"),
            "{shown}"
        );
    }

    #[test]
    fn answer_of_another_program_is_an_error() {
        for wrong in [json!(5), json!({"disks": 5}), json!({"disks": [{"size_bytes": -1}]})] {
            let error = format!("{:#}", Reading::new(wrong.clone()).unwrap_err());
            assert!(error.contains("cannot read the server's answer to `stats`"), "{wrong}: {error}");
        }
    }
}
