//! The properties of the machine that readers of a result need.

use std::path::{Path, PathBuf};

use rustix::fs::statfs;
use serde::{Deserialize, Serialize};

/// A directory that contained test files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoragePlace {
    /// Name in the workloads' labels.
    pub label: String,
    /// Path of the folder.
    pub path: PathBuf,
    /// Type and device of the file system, from the mount table.
    pub file_system: String,
}

impl StoragePlace {
    /// Finds the file system of `path`.
    #[must_use]
    pub fn of(label: &str, path: &Path) -> Self {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        let file_system = mount_of(&path, &read("/proc/self/mountinfo")).unwrap_or_else(|| magic(&path));
        Self { label: label.to_owned(), path, file_system }
    }
}

/// The machine: CPU, memory, kernel and storage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Model of the CPU.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Kernel release and architecture.
    pub kernel: String,
    /// Folders that held test files.
    pub storages: Vec<StoragePlace>,
}

impl Machine {
    /// Describes the machine that this process runs on.
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

/// The file system with the longest mount point above `path`, for example "ext4 on /dev/vda".
///
/// Format: proc(5), `/proc/pid/mountinfo`: the fifth field is the mount point; type and source follow " - ".
fn mount_of(path: &Path, mountinfo: &str) -> Option<String> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let point = Path::new(before.split(' ').nth(4)?);
        let mut after = after.split(' ');
        let what = format!("{} on {}", after.next()?, after.next()?);
        path.starts_with(point).then(|| (point.components().count(), what))
    });
    // Of several mounts with this mount point, the last one hides the others.
    mounts.max_by_key(|(length, _)| *length).map(|(_, what)| what)
}

fn magic(path: &Path) -> String {
    statfs(path).map_or_else(|_| "unknown".to_owned(), |found| format!("type {:#x}", found.f_type))
}

#[cfg(test)]
mod tests {
    use super::*;

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
