//! What is served against what is wanted: which disks come, go, change in place, or have to wait for their guests.
//!
//! `running, wanted → Difference → refuse (who is in use, and whoever needs what they keep) → what is carried out`
//!
//! Not here: carrying it out (`serving.rs`), why it is so (docs/decisions/0025).

use std::fmt;

use disk_image::Opener;
use serde::Serialize;

use crate::disk_settings::DiskSettings;

/// Only looked at when a disk is opened: nothing to do for one that is.
const FOR_OPENING: [&str; 3] = ["create", "lock-timeout", "name"];
/// Changed on the running disk.
const IN_PLACE: [&str; 4] = ["socket-group", "socket-mode", "socket-owner", "workers"];

/// A disk by the name that the server knows it by.
#[derive(Clone, Debug)]
pub struct NamedDisk {
    pub name: String,
    pub settings: DiskSettings,
}

impl NamedDisk {
    pub fn new(settings: DiskSettings, opener: &dyn Opener) -> Self {
        Self { name: settings.name(opener), settings }
    }
}

/// A disk that stays by its name, with other settings.
#[derive(Clone, Debug)]
pub struct Changed {
    pub disk: NamedDisk,
    pub keys: Vec<String>,
}

/// What to do.
#[derive(Debug, Default)]
pub struct Difference {
    pub removed: Vec<String>,
    /// Can only be changed by taking the disk away and serving it anew.
    pub replaced: Vec<Changed>,
    pub in_place: Vec<Changed>,
    pub added: Vec<NamedDisk>,
}

/// A change that was not made, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refused {
    pub disk: String,
    pub why: String,
}

/// What became of a wish to change what is served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Applied {
    pub added: Vec<String>,
    pub removed: Vec<String>,
    /// Taken away and served anew.
    pub replaced: Vec<String>,
    pub changed: Vec<String>,
    pub refused: Vec<Refused>,
    /// Settings of the process that it only takes when it starts.
    pub needs_restart: Vec<&'static str>,
}

impl Applied {
    pub fn refuse(&mut self, disk: &str, why: impl Into<String>) {
        self.refused.push(Refused { disk: disk.to_owned(), why: why.into() });
    }
}

/// For the log: one line, and nothing about what did not happen.
impl fmt::Display for Applied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        let lists = [
            ("added", &self.added),
            ("removed", &self.removed),
            ("replaced", &self.replaced),
            ("changed", &self.changed),
        ];
        for (verb, disks) in lists.into_iter().filter(|(_, disks)| !disks.is_empty()) {
            parts.push(format!("{verb} {}", disks.join(", ")));
        }
        parts.extend(
            self.refused.iter().map(|refused| format!("not changed: {}: {}", refused.disk, refused.why)),
        );
        if !self.needs_restart.is_empty() {
            parts.push(format!("only a new start changes {}", self.needs_restart.join(", ")));
        }
        if parts.is_empty() { f.write_str("nothing to change") } else { f.write_str(&parts.join("; ")) }
    }
}

impl Difference {
    pub fn between(running: &[NamedDisk], wanted: &[NamedDisk]) -> Self {
        let find = |disks: &[NamedDisk], name: &str| disks.iter().position(|disk| disk.name == name);
        let mut difference = Self::default();
        let gone = running.iter().filter(|disk| find(wanted, &disk.name).is_none());
        difference.removed = gone.map(|disk| disk.name.clone()).collect();
        for disk in wanted {
            let Some(known) = find(running, &disk.name).and_then(|at| running.get(at)) else {
                difference.added.push(disk.clone());
                continue;
            };
            let keys = changed_keys(&known.settings, &disk.settings);
            let changed = Changed { disk: disk.clone(), keys };
            if changed.keys.iter().any(|key| !IN_PLACE.contains(&key.as_str())) {
                difference.replaced.push(changed);
            } else if !changed.keys.is_empty() {
                difference.in_place.push(changed);
            }
        }
        difference
    }

    /// Takes out what cannot be done now: disks in use stay as they are, and so does whoever would need their
    /// sockets or images.
    pub fn refuse(&mut self, running: &[NamedDisk], in_use: &[String], opener: &dyn Opener) -> Vec<Refused> {
        let mut refused = Vec::new();
        let busy = |name: &String| in_use.contains(name);
        for name in self.removed.extract_if(.., |name| busy(name)) {
            refused.push(Refused {
                disk: name,
                why: "it is to go, and a front-end is connected: stop its guest first".into(),
            });
        }
        for changed in self.replaced.extract_if(.., |changed| busy(&changed.disk.name)) {
            let why = format!(
                "{} cannot change while a front-end is connected: stop its guest first",
                changed.keys.join(", ")
            );
            refused.push(Refused { disk: changed.disk.name, why });
        }
        while let Some(next) = self.refuse_one_that_clashes(running, opener) {
            refused.push(next);
        }
        refused
    }

    fn refuse_one_that_clashes(&mut self, running: &[NamedDisk], opener: &dyn Opener) -> Option<Refused> {
        let goes = |name: &String| {
            self.removed.contains(name) || self.replaced.iter().any(|changed| changed.disk.name == *name)
        };
        let stays: Vec<_> = running.iter().filter(|disk| !goes(&disk.name)).collect();
        let clash = |disk: &NamedDisk| {
            let others = stays.iter().filter(|other| other.name != disk.name);
            others.into_iter().find_map(|other| {
                let shared = disk.settings.conflict(&other.settings, opener)?;
                let why = format!("its {shared} is still that of disk {}, which stays for now", other.name);
                Some(Refused { disk: disk.name.clone(), why })
            })
        };
        let added = self.added.iter().enumerate().find_map(|(at, disk)| Some((at, clash(disk)?)));
        let replaced =
            self.replaced.iter().enumerate().find_map(|(at, changed)| Some((at, clash(&changed.disk)?)));
        if let Some((at, refused)) = added {
            self.added.remove(at);
            return Some(refused);
        }
        let (at, refused) = replaced?;
        self.replaced.remove(at);
        Some(refused)
    }
}

/// Which settings differ in effect.
fn changed_keys(before: &DiskSettings, after: &DiskSettings) -> Vec<String> {
    let keys = before.words.keys().chain(after.words.keys().filter(|key| !before.words.contains_key(*key)));
    let changed = keys.filter(|key| before.words.get(*key) != after.words.get(*key));
    changed.filter(|key| !FOR_OPENING.contains(&key.as_str())).cloned().collect()
}
