//! Compares the running disks with the wanted ones: which are added, removed, changed in place or refused.
//!
//! `running, wanted → Difference → refuse (disks in use, and disks that need their sockets or images) → changes to make`

use std::fmt;

use blk_server::DiskLimits;
use disk_image::Opener;
use serde::Serialize;

use crate::args::limit_args::is_limit_key;
use crate::args::worker_args::WorkersArgs;
use crate::config::config_words::Schema;
use crate::config::configuration::ServerSettings;
use crate::config::disk_settings::DiskSettings;

/// Keys that matter only while a disk is opened.
const FOR_OPENING: [&str; 6] = ["backing", "backing-format", "create", "format", "lock-timeout", "name"];
/// Keys that the server changes on the running disk, besides its limits.
const IN_PLACE: [&str; 5] = ["slow-ms", "socket-group", "socket-mode", "socket-owner", "workers"];
/// Keys of the process that a running server can change (`ServerSettings::follow`).
const SERVER_IN_PLACE: [&str; 1] = ["stop-timeout"];

/// A disk, with the name that the server uses for it.
#[derive(Clone, Debug)]
pub struct NamedDisk {
    pub name: String,
    pub settings: DiskSettings,
}

impl NamedDisk {
    pub fn new(settings: DiskSettings, opener: &dyn Opener) -> Self {
        Self { name: settings.name(opener), settings }
    }

    /// The disk's name and its configured limits.
    pub fn limits(&self) -> (String, DiskLimits) {
        (self.name.clone(), self.settings.limits.clone())
    }
}

/// A disk that keeps its name and gets other settings.
#[derive(Clone, Debug)]
pub struct Changed {
    pub disk: NamedDisk,
    pub keys: Vec<String>,
}

/// The changes to make.
#[derive(Debug, Default)]
pub struct Difference {
    pub removed: Vec<String>,
    /// Disks whose settings change only if they are removed and added again.
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

/// The outcome of a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Applied {
    pub added: Vec<String>,
    pub removed: Vec<String>,
    /// Removed and added again.
    pub replaced: Vec<String>,
    pub changed: Vec<String>,
    pub refused: Vec<Refused>,
    /// Keys of the process that apply at the next start.
    pub needs_restart: Vec<String>,
}

/// When changed keys of the process apply. A live upgrade starts a new server with the new values, but it hands over
/// the control socket, which must stay.
pub fn when_applied(keys: &[String]) -> &'static str {
    if keys.iter().any(|key| key == "control") {
        "applied only at the next start"
    } else {
        "applied only at the next start or live upgrade (--take-over)"
    }
}

impl Applied {
    pub fn refuse(&mut self, disk: &str, why: impl Into<String>) {
        self.refused.push(Refused { disk: disk.to_owned(), why: why.into() });
    }
}

/// One line for the log, which lists only the changes that were made or refused.
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
            parts.push(format!("{}: {}", when_applied(&self.needs_restart), self.needs_restart.join(", ")));
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
            if changed.keys.iter().any(|key| !IN_PLACE.contains(&key.as_str()) && !is_limit_key(key)) {
                difference.replaced.push(changed);
            } else if !changed.keys.is_empty() {
                difference.in_place.push(changed);
            }
        }
        difference
    }

    /// Removes the changes that are impossible now: disks in use stay as they are, and so do disks that need their
    /// sockets or images.
    pub fn refuse(&mut self, running: &[NamedDisk], in_use: &[String], opener: &dyn Opener) -> Vec<Refused> {
        let mut refused = Vec::new();
        let busy = |name: &String| in_use.contains(name);
        for name in self.removed.extract_if(.., |name| busy(name)) {
            refused.push(Refused {
                disk: name,
                why: "the file no longer has this disk, but a front-end is connected: stop its guest first"
                    .into(),
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
                let why =
                    format!("its {shared} still belongs to disk {}, which cannot be changed now", other.name);
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

/// The keys of a disk whose values differ.
pub fn changed_keys(before: &DiskSettings, after: &DiskSettings) -> Vec<String> {
    let changed = before.words.differing(&after.words);
    changed.filter(|key| !FOR_OPENING.contains(key)).map(str::to_owned).collect()
}

/// The keys of the process that differ and apply at the next start. Workers are compared by the options that result
/// from all their keys.
pub fn changed_server_keys(before: &ServerSettings, after: &ServerSettings) -> Vec<String> {
    let of_workers: Vec<String> = Schema::of::<WorkersArgs>(&[]).keys().map(str::to_owned).collect();
    let changed = before.words.differing(&after.words);
    let waits = |key: &&str| !SERVER_IN_PLACE.contains(key) && !of_workers.iter().any(|of| of == key);
    let workers = (before.workers != after.workers).then(|| "workers".to_owned());
    changed.filter(waits).map(str::to_owned).chain(workers).collect()
}

/// The disks whose changed `create` differs from their size: the key sets the size of a new image, and resizes no
/// existing one. `size_bytes` returns the size of a running disk.
pub fn sizes_not_followed(
    running: &[NamedDisk],
    wanted: &[NamedDisk],
    size_bytes: impl Fn(&str) -> Option<u64>,
) -> Vec<Refused> {
    let changed = wanted.iter().filter_map(|disk| {
        let known = running.iter().find(|known| known.name == disk.name)?;
        let create = disk.settings.options.create?;
        let is_new = known.settings.words.get("create") != disk.settings.words.get("create");
        let size_bytes = size_bytes(&disk.name).filter(|size_bytes| is_new && *size_bytes != create)?;
        let (name, word) = (&disk.name, disk.settings.words.get("create").unwrap_or_default());
        let why = format!(
            "create = {word} applies only to a new image, but this image exists and has {size_bytes} bytes: resize it \
             with bareblk ctl resize {name} {word}"
        );
        Some(Refused { disk: name.clone(), why })
    });
    changed.collect()
}

#[cfg(test)]
mod tests {
    use disk_image::HostOpener;

    use super::*;
    use crate::config::config_file;

    /// Disks from lines of the form "name image socket keys".
    fn disks(lines: &[&str]) -> Vec<NamedDisk> {
        let table = |line: &&str| {
            let words: Vec<_> = line.splitn(4, ' ').collect();
            let more = words.get(3).unwrap_or(&"").replace(';', "\n");
            let create = if more.contains("create") { "" } else { "create='1M'\n" };
            format!(
                "[[disk]]\nname='{}'\nimage='{}'\nsocket='/tmp/{}'\n{create}{more}\n",
                words[0], words[1], words[2]
            )
        };
        let text: String = lines.iter().map(table).collect();
        let configuration = config_file::parse(&text, &HostOpener, &[]).unwrap();
        configuration.disks.into_iter().map(|disk| NamedDisk::new(disk, &HostOpener)).collect()
    }

    fn names(disks: &[Changed]) -> Vec<&str> {
        disks.iter().map(|changed| changed.disk.name.as_str()).collect()
    }

    #[test]
    fn nothing_changes_if_the_same_is_written_in_other_words() {
        let running = disks(&["x /none/i1 s1", "y /none/i2 s2 queues=64"]);
        let wanted = disks(&["y /none/i2 s2", "x /none/i1 s1 cache='none';lock-timeout=3"]);
        let difference = Difference::between(&running, &wanted);
        assert!(difference.added.is_empty() && difference.removed.is_empty());
        assert!(difference.replaced.is_empty() && difference.in_place.is_empty());
    }

    #[test]
    fn disks_come_go_change_in_place_or_are_replaced() {
        let running = disks(&["stays /none/1 s1", "goes /none/2 s2", "mode /none/3 s3", "cache /none/4 s4"]);
        let wanted = disks(&[
            "stays /none/1 s1",
            "mode /none/3 s3 socket-mode=660",
            "cache /none/4 s4 cache='writeback';socket-mode=660",
            "new /none/5 s5",
        ]);
        let difference = Difference::between(&running, &wanted);
        assert_eq!(difference.removed, ["goes"]);
        assert_eq!((names(&difference.in_place), names(&difference.replaced)), (vec!["mode"], vec!["cache"]));
        assert_eq!(difference.replaced[0].keys, ["cache", "socket-mode"]);
        assert_eq!(difference.added[0].name, "new");
    }

    #[test]
    fn disk_in_use_is_refused_by_name_and_others_are_not() {
        let running = disks(&["a /none/1 s1", "b /none/2 s2", "c /none/3 s3"]);
        let wanted = disks(&["b /none/2 s2 queues=2", "c /none/3 s3 queues=2"]);
        let mut difference = Difference::between(&running, &wanted);
        let refused = difference.refuse(&running, &["a".into(), "b".into()], &HostOpener);
        let refused: Vec<_> = refused.iter().map(|refused| refused.disk.as_str()).collect();
        assert_eq!(refused, ["a", "b"]);
        assert_eq!((difference.removed.len(), names(&difference.replaced)), (0, vec!["c"]));
    }

    #[test]
    fn disk_that_needs_what_a_disk_in_use_keeps_is_refused_too() {
        let running = disks(&["a /none/1 s1", "b /none/2 s2"]);
        let wanted = disks(&["a /none/2 s1", "b /none/3 s2", "c /none/1 s3"]);
        let mut difference = Difference::between(&running, &wanted);
        let refused = difference.refuse(&running, &["b".into()], &HostOpener);
        // Disk b keeps its image. Disk a therefore keeps its own, and disk c cannot get a's image.
        assert_eq!(refused.len(), 3, "{refused:?}");
        assert!(refused[1].why.contains("image still belongs to disk"), "{refused:?}");
        assert!(difference.added.is_empty() && difference.replaced.is_empty());
    }

    #[test]
    fn keys_of_the_process_that_differ_are_named_and_those_in_place_are_not() {
        let server = |keys: &str| {
            let text = format!("{keys}\n[[disk]]\nimage='/none/i'\nsocket='/tmp/none.sock'\ncreate='1M'\n");
            config_file::parse(&text, &HostOpener, &[]).unwrap().server
        };
        let before = server("workers = 2");
        let changed = |keys| changed_server_keys(&before, &server(keys));
        assert_eq!(changed("worker-nice = 1\nworkers = 2"), ["workers"]);
        assert_eq!(
            changed("workers = 2\nallow-folders = '/x'\nstop-timeout = 1\npoll = 'busy'"),
            ["allow-folders", "poll"]
        );
        assert!(changed("[[worker]]\n[[worker]]").is_empty(), "the same workers in other words");
    }

    #[test]
    fn new_size_of_an_image_that_exists_is_told_with_the_command_that_sets_it() {
        let running = disks(&["a /none/1 s1 create='512M'", "b /none/2 s2 create='1G'", "c /none/3 s3"]);
        let wanted = disks(&[
            "a /none/1 s1 create='1G'",
            "b /none/2 s2 create='1G'",
            "c /none/3 s3 create='512M'",
            "new /none/4 s4 create='1G'",
        ]);
        let told = sizes_not_followed(&running, &wanted, |_| Some(512 << 20));
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].disk == "a" && told[0].why.ends_with("bareblk ctl resize a 1G"), "{told:?}");
        assert!(Difference::between(&running, &wanted).replaced.is_empty());
    }

    #[test]
    fn line_for_the_log_has_only_what_happened() {
        let mut applied = Applied { added: vec!["x".into(), "y".into()], ..Applied::default() };
        applied.refuse("z", "it is in use");
        applied.needs_restart = vec!["poll-us".into()];
        let line = "added x, y; not changed: z: it is in use; \
                    applied only at the next start or live upgrade (--take-over): poll-us";
        assert_eq!(
            (applied.to_string(), Applied::default().to_string()),
            (line.into(), "nothing to change".into())
        );
    }
}
