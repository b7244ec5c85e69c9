//! Moves a thread into a control group (version 2, threaded).
//!
//! `mountinfo → mount point of the hierarchy → directory → this thread's id into cgroup.threads`
//!
//! - The kernel decides whether a thread may join. After a refusal, the group's own files show the reason.
//! - A frozen group is refused in advance, because a thread that joins one stops silently.
//!
//! Operators create groups and set their limits (docs/how-to/workers.md).

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// `CGROUP2_SUPER_MAGIC`
const CGROUP2_MAGIC: i64 = 0x6367_7270;
/// Mount point of the control group hierarchy on most hosts.
const USUAL_MOUNT: &str = "/sys/fs/cgroup";

const THREADS: &str = "cgroup.threads";

/// Why a thread did not join its control group.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No version 2 hierarchy is mounted.
    #[error("cgroup {}: this host has no cgroup v2 mounted (mount -t cgroup2 none /sys/fs/cgroup)", path.display())]
    NoHierarchy {
        /** The group's path. */
        path: PathBuf,
    },
    /// The directory belongs to another hierarchy, such as version 1.
    #[error("{} is not in a cgroup v2 hierarchy: only cgroup v2 can hold single threads of a process", path.display())]
    NotVersion2 {
        /** The group's path. */
        path: PathBuf,
    },
    /// The group does not exist.
    #[error(
        "cgroup {} does not exist: create it with mkdir, then run echo threaded > {}",
        path.display(),
        path.join("cgroup.type").display()
    )]
    Missing {
        /** The group's directory, which does not exist. */
        path: PathBuf,
    },
    /// The group accepts only whole processes.
    #[error("cgroup {} is not threaded, its type is `{kind}`: {advice}", path.display())]
    NotThreaded {
        /** The group's directory. */
        path: PathBuf,
        /** The group's `cgroup.type`. */
        kind: String,
        /** Advice for the operator. */
        advice: String,
    },
    /// All threads of one process must be in the same threaded domain.
    #[error(
        "cgroup {} is in a different threaded domain from this process, which is in {}: create a group below the group of the process, or start the process in the topmost group of the other domain",
        path.display(),
        own.display()
    )]
    OtherDomain {
        /** The group's directory. */
        path: PathBuf,
        /** The group of this process. */
        own: PathBuf,
    },
    /// The user may not move this process's threads into the group.
    #[error(
        "no permission to join cgroup {}: this user must be able to write cgroup.threads of the group, and cgroup.procs of the closest group that contains both this group and the group of the process (chown, or Delegate=yes in a systemd unit); a sandboxed server can join only groups that were named at its start and groups below its own",
        path.display()
    )]
    Denied {
        /** The group's directory. */
        path: PathBuf,
    },
    /// The group enables controllers for its children.
    #[error(
        "cgroup {} accepts no threads: it enables controllers for its children (cgroup.subtree_control); join one of its children instead",
        path.display()
    )]
    HasChildren {
        /** The group's directory. */
        path: PathBuf,
    },
    /// The group is frozen: a thread that joins it stops.
    #[error("cgroup {} is frozen and would freeze the worker: write 0 to cgroup.freeze of this group or of its frozen parent", path.display())]
    Frozen {
        /** The group's directory. */
        path: PathBuf,
    },
    /// Another error.
    #[error("cannot join cgroup {}", path.display())]
    System {
        /** The group's directory. */
        path: PathBuf,
        /** The kernel's error. */
        #[source]
        source: io::Error,
    },
}

/// The file through which threads join `group` ([`crate::WorkerOptions::cgroup`]); `None` if there is no such group.
pub fn threads_file(group: &Path) -> Option<PathBuf> {
    Some(folder_of(group).ok()?.join(THREADS))
}

/// The directory of the topmost group that this process's threads may join: its own group or, if that is threaded, the
/// nearest group above it that is not. `None` at the root of the hierarchy, or without a hierarchy.
pub fn own_domain() -> Option<PathBuf> {
    let mount = mount_point(&std::fs::read_to_string("/proc/self/mountinfo").ok()?)?;
    let own = mount.join(below_root(&own_group()));
    domain_of(&own, &mount)
}

fn domain_of(own: &Path, mount: &Path) -> Option<PathBuf> {
    let groups = own.ancestors().take_while(|folder| folder.starts_with(mount));
    // The root group has no type.
    let mut typed = groups.map(|folder| (folder, read(folder, "cgroup.type")));
    let (folder, kind) = typed.find(|(_, kind)| kind.trim() != "threaded")?;
    (!kind.is_empty()).then(|| folder.to_path_buf())
}

/// Moves the calling thread into `group`. A path with a leading slash starts at the root of the hierarchy (the mount
/// point may precede it); any other path starts at the process's group.
pub(crate) fn join(group: &Path) -> Result<(), CgroupError> {
    let path = folder_of(group)?;
    if is_frozen(&read(&path, "cgroup.events")) {
        return Err(CgroupError::Frozen { path });
    }
    let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
    let open = std::fs::OpenOptions::new().write(true).open(path.join(THREADS));
    let written = open.and_then(|mut file| io::Write::write_all(&mut file, thread.as_bytes()));
    written.map_err(|error| explain(path, error))
}

/// The directory of the group on this host. Checks that it exists and is of version 2.
fn folder_of(group: &Path) -> Result<PathBuf, CgroupError> {
    let mountinfo = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let Some(mount) = mount_point(&mountinfo) else {
        return Err(CgroupError::NoHierarchy { path: group.into() });
    };
    let in_hierarchy = match group.strip_prefix("/") {
        Ok(_) if group.starts_with(&mount) => group.to_path_buf(),
        Ok(below_root) => mount.join(below_root),
        Err(_) => mount.join(below_root(&own_group())).join(group),
    };
    let path = if !in_hierarchy.is_dir() && group.is_absolute() && group.is_dir() {
        group.to_path_buf()
    } else {
        in_hierarchy
    };
    match rustix::fs::statfs(&path) {
        #[allow(clippy::unnecessary_cast)] // its width differs between targets
        Ok(system) if system.f_type as i64 == CGROUP2_MAGIC => Ok(path),
        Ok(_) => Err(CgroupError::NotVersion2 { path }),
        Err(Errno::NOENT | Errno::NOTDIR) => Err(CgroupError::Missing { path }),
        Err(errno) => Err(CgroupError::System { path, source: errno.into() }),
    }
}

/// The usual mount point, or the first one of version 2.
fn mount_point(mountinfo: &str) -> Option<PathBuf> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        after.starts_with("cgroup2 ").then(|| before.split(' ').nth(4).map(unescaped)).flatten()
    });
    let mounts: Vec<PathBuf> = mounts.collect();
    mounts.iter().find(|path| path.as_path() == Path::new(USUAL_MOUNT)).or(mounts.first()).cloned()
}

/// `\040` is a space in mountinfo.
fn unescaped(field: &str) -> PathBuf {
    PathBuf::from(field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
}

/// The group of the process's first thread, which stays in its group.
fn own_group() -> PathBuf {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    groups.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/").into()
}

fn below_root(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

fn is_frozen(events: &str) -> bool {
    events.lines().any(|line| line == "frozen 1")
}

/// The file's content; empty if it cannot be read.
fn read(folder: &Path, file: &str) -> String {
    std::fs::read_to_string(folder.join(file)).unwrap_or_default()
}

fn explain(path: PathBuf, source: io::Error) -> CgroupError {
    match Errno::from_io_error(&source) {
        Some(Errno::NOENT | Errno::NODEV) => CgroupError::Missing { path },
        Some(Errno::ACCESS | Errno::PERM | Errno::ROFS) => CgroupError::Denied { path },
        Some(Errno::BUSY) => CgroupError::HasChildren { path },
        Some(Errno::OPNOTSUPP) => {
            let kind = read(&path, "cgroup.type").trim().to_owned();
            let advice = match kind.as_str() {
                "domain" => format!("run echo threaded > {}", path.join("cgroup.type").display()),
                "domain invalid" => {
                    format!(
                        "its parent group has threaded children; run echo threaded > {}",
                        path.join("cgroup.type").display()
                    )
                }
                // A threaded group, or the top of a threaded domain.
                _ => return CgroupError::OtherDomain { path, own: own_group() },
            };
            CgroupError::NotThreaded { path, kind, advice }
        }
        _ => CgroupError::System { path, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
41 31 0:38 / /sys/fs/cgroup/my\\040groups rw,relatime shared:9 - cgroup2 cgroup2 rw\n";

    #[test]
    fn hierarchy_is_found_by_its_type_wherever_it_is_mounted() {
        assert_eq!(mount_point(HYBRID), Some("/sys/fs/cgroup/my groups".into()));
        let both = format!("{HYBRID}50 23 0:38 / /sys/fs/cgroup rw - cgroup2 none rw\n");
        assert_eq!(mount_point(&both), Some(USUAL_MOUNT.into()));
    }

    #[test]
    fn host_without_the_hierarchy_has_no_mount_point() {
        assert_eq!(mount_point(HYBRID.lines().next().unwrap()), None);
        assert_eq!(mount_point("1 2 - cgroup2"), None);
        assert_eq!(mount_point(""), None);
    }

    #[test]
    fn folder_of_another_file_system_is_refused_and_a_missing_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let elsewhere = join(folder.path()).unwrap_err();
        let missing = join(Path::new("/no/such/group")).unwrap_err();
        // On a host without version 2, the error says that.
        let known = |error: &CgroupError| matches!(error, CgroupError::NoHierarchy { .. });
        assert!(known(&elsewhere) || matches!(elsewhere, CgroupError::NotVersion2 { .. }), "{elsewhere}");
        assert!(
            known(&missing) || missing.to_string().contains("/no/such/group does not exist"),
            "{missing}"
        );
    }

    #[test]
    fn refusals_of_the_kernel_say_what_to_do() {
        let group = tempfile::tempdir().unwrap();
        let told = |errno: Errno| explain(group.path().into(), errno.into()).to_string();
        assert!(told(Errno::ACCESS).contains("Delegate=yes"));
        assert!(told(Errno::BUSY).contains("cgroup.subtree_control"));
        std::fs::write(group.path().join("cgroup.type"), "domain\n").unwrap();
        assert!(told(Errno::OPNOTSUPP).contains("type is `domain`: run echo threaded >"));
        std::fs::write(group.path().join("cgroup.type"), "threaded\n").unwrap();
        assert!(told(Errno::OPNOTSUPP).contains("different threaded domain"));
    }

    #[test]
    fn own_domain_is_the_next_group_above_that_is_not_threaded() {
        let mount = tempfile::tempdir().unwrap();
        let (own, top) = (mount.path().join("a/b/c"), mount.path().join("a"));
        std::fs::create_dir_all(&own).unwrap();
        let is = |group: &str, kind: &str| {
            std::fs::write(mount.path().join(group).join("cgroup.type"), format!("{kind}\n")).unwrap();
        };
        is("a", "domain threaded");
        is("a/b", "threaded");
        is("a/b/c", "threaded");
        assert_eq!(domain_of(&own, mount.path()), Some(top));
        is("a/b/c", "domain");
        assert_eq!(domain_of(&own, mount.path()), Some(own));
    }

    #[test]
    fn below_the_root_of_the_hierarchy_there_is_no_domain_to_name() {
        let mount = tempfile::tempdir().unwrap();
        std::fs::create_dir(mount.path().join("a")).unwrap();
        std::fs::write(mount.path().join("a/cgroup.type"), "threaded\n").unwrap();
        assert_eq!(domain_of(&mount.path().join("a"), mount.path()), None);
        assert_eq!(domain_of(mount.path(), mount.path()), None);
    }

    #[test]
    fn frozen_group_is_told_from_its_events() {
        assert!(is_frozen("populated 0\nfrozen 1\n"));
        assert!(!is_frozen("populated 1\nfrozen 0\n") && !is_frozen(""));
    }
}
