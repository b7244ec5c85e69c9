//! The machine a result was measured on, as far as a reader must know it.
//!
//! Not here: what was measured.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::statfs;
use serde::{Deserialize, Serialize};

/// A folder that test files lay in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoragePlace {
    /// As in the workloads' labels.
    pub label: String,
    /// The folder.
    pub path: PathBuf,
    /// Type and device, from the mount table.
    pub file_system: String,
}

impl StoragePlace {
    /// Looks `path` up.
    #[must_use]
    pub fn of(label: &str, path: &Path) -> Self {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        let file_system = mount_of(&path, &read("/proc/self/mountinfo")).unwrap_or_else(|| magic(&path));
        Self { label: label.to_owned(), path, file_system }
    }
}

/// Processor, memory, kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Model.
    pub cpu: String,
    /// That this process may use.
    pub cores: usize,
    /// In MiB.
    pub memory_mib: u64,
    /// Release and architecture.
    pub kernel: String,
    /// Where test files lay.
    pub storages: Vec<StoragePlace>,
}

impl Machine {
    /// This one.
    #[must_use]
    pub fn here(storages: Vec<StoragePlace>) -> Self {
        let uname = rustix::system::uname();
        let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
        Self {
            cpu: cpu_model(&read("/proc/cpuinfo")).unwrap_or_else(|| text(uname.machine())),
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            memory_mib: memory_mib(&read("/proc/meminfo")).unwrap_or(0),
            kernel: format!("{} {} {}", text(uname.sysname()), text(uname.release()), text(uname.machine())),
            storages,
        }
    }
}

/// The moment, UTC, as ISO 8601 has it.
#[must_use]
pub fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    iso_8601(since.as_secs())
}

/// Days to a date: the calendar repeats every 400 years (146,097 days), and counting years from March puts the
/// leap day last.
fn iso_8601(unix_s: u64) -> String {
    let (days, s) = (unix_s / 86_400 + 719_468, unix_s % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", s / 3600, s / 60 % 60, s % 60)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn cpu_model(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn memory_mib(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find(|line| line.starts_with("MemTotal:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? / 1024)
}

/// The longest mount point above `path`: "ext4 on /dev/vda".
///
/// Format: proc(5), `/proc/pid/mountinfo`: the fifth field is the mount point; after " - " come type and source.
fn mount_of(path: &Path, mountinfo: &str) -> Option<String> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let point = Path::new(before.split(' ').nth(4)?);
        let mut after = after.split(' ');
        let what = format!("{} on {}", after.next()?, after.next()?);
        path.starts_with(point).then(|| (point.components().count(), what))
    });
    // The last of equally long ones: it hides the others.
    mounts.max_by_key(|(length, _)| *length).map(|(_, what)| what)
}

fn magic(path: &Path) -> String {
    statfs(path).map_or_else(|_| "unknown".to_owned(), |found| format!("type {:#x}", found.f_type))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_since_1970_become_a_date() {
        assert_eq!(iso_8601(0), "1970-01-01T00:00:00Z");
        assert_eq!(iso_8601(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(iso_8601(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(iso_8601(1_795_219_546), "2026-11-21T00:05:46Z");
    }

    #[test]
    fn deepest_mount_point_names_the_file_system() {
        let mounts = "\
            25 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
            30 25 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw\n";
        assert_eq!(mount_of(Path::new("/dev/shm/x"), mounts).unwrap(), "tmpfs on tmpfs");
        assert_eq!(mount_of(Path::new("/dev/shmoo"), mounts).unwrap(), "ext4 on /dev/vda");
    }

    #[test]
    fn this_machine_has_cores_memory_and_a_kernel() {
        let machine = Machine::here(vec![StoragePlace::of("here", Path::new("."))]);
        assert!(machine.cores > 0 && machine.memory_mib > 0, "{machine:?}");
        assert!(machine.kernel.starts_with("Linux "), "{machine:?}");
        assert!(machine.storages[0].file_system.contains(" on "), "{machine:?}");
    }
}
