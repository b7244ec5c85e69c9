//! Small real file systems, mounted for one test.
#![allow(dead_code, missing_docs, missing_debug_implementations, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use xtask::skip::{Reason, skip};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Tmpfs,
    /// In a file, on a loop device.
    Ext4,
    /// In a file, on a loop device, with at least 300 MiB. It supports reflinks.
    Xfs,
}

pub struct SmallFs {
    folder: PathBuf,
    /// The folder of a file system in a file.
    backing: Option<tempfile::TempDir>,
}

impl SmallFs {
    /// Mounts a file system of `mib` MiB. `None`, with a line of explanation, if the test may not mount.
    pub fn mount(kind: Kind, mib: u64) -> Option<Self> {
        let folder = tempfile::Builder::new().prefix("small-fs-").tempdir().unwrap().keep();
        let (mounted, backing) = match kind {
            Kind::Tmpfs => {
                let size = format!("size={mib}m");
                (run(Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&folder)), None)
            }
            Kind::Ext4 | Kind::Xfs => {
                let backing = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
                let file = backing.path().join("fs");
                std::fs::File::create(&file).unwrap().set_len(mib << 20).unwrap();
                let (program, options) = match kind {
                    Kind::Xfs => ("mkfs.xfs", &["-q", "-m", "reflink=1"][..]),
                    _ => ("mkfs.ext4", &["-q", "-O", "^has_journal"][..]),
                };
                let made = run(Command::new(program).args(options).arg(&file));
                let mounted = made
                    .and_then(|()| run(Command::new("mount").args(["-o", "loop"]).arg(&file).arg(&folder)));
                (mounted, Some(backing))
            }
        };
        if let Err(why) = mounted {
            let reason = match kind {
                Kind::Tmpfs => Reason::NoTmpfs,
                Kind::Ext4 => Reason::NoExt4,
                Kind::Xfs => Reason::NoXfs,
            };
            skip(reason, why);
            std::fs::remove_dir(&folder).unwrap();
            return None;
        }
        Some(Self { folder, backing })
    }

    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Grows a tmpfs.
    pub fn grow(&self, mib: u64) {
        let size = format!("remount,size={mib}m");
        run(Command::new("mount").args(["-o", &size]).arg(&self.folder)).unwrap();
    }

    /// Makes a file that takes space until it is removed.
    pub fn ballast(&self, bytes: usize) -> PathBuf {
        let path = self.folder.join("ballast");
        std::fs::write(&path, vec![1; bytes]).unwrap();
        path
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

impl Drop for SmallFs {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("--lazy").arg(&self.folder).status();
        if unmounted.is_ok_and(|status| status.success()) {
            let _ = std::fs::remove_dir(&self.folder);
        }
    }
}
