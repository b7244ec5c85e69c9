//! Finds which CPUs share a last-level cache, in `/sys/devices/system/cpu/cpu*/cache/index*`.
//!
//! - The files are only read. A host that hides its topology (a virtual machine, no sysfs) has no known caches; this is
//!   not an error.

use std::fs;
use std::path::Path;

use crate::host::cpu_list::parse_kernel_list;

/// Linux's folder of CPUs.
const CPUS: &str = "/sys/devices/system/cpu";

/// The last-level caches of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Caches {
    /// The CPUs of each cache.
    sharers: Vec<Vec<u32>>,
}

impl Caches {
    /// The caches of this host's online CPUs.
    pub(crate) fn here() -> Self {
        Self::in_folder(Path::new(CPUS))
    }

    fn in_folder(folder: &Path) -> Self {
        let online = fs::read_to_string(folder.join("online")).ok();
        let online = online.and_then(|text| parse_kernel_list(&text)).unwrap_or_default();
        let mut caches = Self::default();
        for cpu in online {
            if caches.of(&[cpu]).is_none() {
                caches.sharers.extend(last_level(&folder.join(format!("cpu{cpu}/cache"))));
            }
        }
        caches
    }

    /// The index of the cache that all `cpus` share. `None` if the CPUs use several caches or an unknown cache, or if
    /// there are no CPUs.
    pub(crate) fn of(&self, cpus: &[u32]) -> Option<usize> {
        if cpus.is_empty() {
            return None;
        }
        self.sharers.iter().position(|sharers| cpus.iter().all(|cpu| sharers.contains(cpu)))
    }
}

/// The CPUs that share one CPU's highest-level cache.
fn last_level(indexes: &Path) -> Option<Vec<u32>> {
    let read = |index: &Path, name: &str| fs::read_to_string(index.join(name)).ok();
    let level = |index: &Path| read(index, "level")?.trim().parse::<u32>().ok();
    let indexes = fs::read_dir(indexes).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let (_, last) = indexes.filter_map(|index| Some((level(&index)?, index))).max()?;
    parse_kernel_list(&read(&last, "shared_cpu_list")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a folder of CPUs with these files, given as `(path, content)`.
    fn files(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        folder
    }

    #[test]
    fn cpus_that_share_the_cache_of_the_highest_level_have_the_same_one() {
        let host = files(&[
            ("online", "0-5\n"),
            ("cpu0/cache/index0/level", "1\n"),
            ("cpu0/cache/index0/shared_cpu_list", "0\n"),
            ("cpu0/cache/index3/level", "3\n"),
            ("cpu0/cache/index3/shared_cpu_list", "0-1,4\n"),
            ("cpu0/cache/uevent", ""),
            ("cpu2/cache/index0/level", "2\n"),
            ("cpu2/cache/index0/shared_cpu_list", "2-3\n"),
        ]);
        let caches = Caches::in_folder(host.path());
        assert_eq!((caches.of(&[0, 4]), caches.of(&[1]), caches.of(&[3, 2])), (Some(0), Some(0), Some(1)));
        assert_eq!((caches.of(&[1, 2]), caches.of(&[5]), caches.of(&[])), (None, None, None));
    }

    #[test]
    fn files_that_are_absent_or_nonsense_are_no_cache() {
        let without = files(&[]);
        let hidden = files(&[("online", "0-1\n"), ("cpu0/online", "1\n")]);
        let nonsense = files(&[
            ("online", "0-1\n"),
            ("cpu0/cache/index0/level", "high\n"),
            ("cpu1/cache/index0/level", "1\n"),
            ("cpu1/cache/index0/shared_cpu_list", "1-\u{0}\n"),
        ]);
        for host in [without, hidden, nonsense] {
            assert_eq!(Caches::in_folder(host.path()), Caches::default());
        }
    }
}
