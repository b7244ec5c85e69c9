//! A FUSE file system of one folder that answers until it is told to hang.
//!
//! `kernel → lookup, open → hanging: kept without an answer | otherwise: answered`
//!
//! - Every name is an empty image of [`IMAGE_BYTES`]. The kernel caches nothing, so this process sees each lookup.
//! - When the folder is dropped, calls that hang get an error.
#![allow(dead_code, missing_docs, missing_debug_implementations, clippy::unwrap_used)]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, MountOption, OpenFlags, ReplyAttr, ReplyEntry, ReplyOpen, Request,
};

pub const IMAGE_BYTES: u64 = 1 << 20;
const IMAGE: INodeNo = INodeNo(2);
const NOT_REMEMBERED: Duration = Duration::ZERO;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Lookup,
    Open,
}

#[derive(Default)]
struct State {
    hanging: Option<Call>,
    lookups: Vec<ReplyEntry>,
    opens: Vec<ReplyOpen>,
}

type Shared = Arc<Mutex<State>>;

/// The mounted folder, which is unmounted when dropped.
pub struct HangingFolder {
    session: Option<BackgroundSession>,
    folder: PathBuf,
    shared: Shared,
}

impl HangingFolder {
    /// `None` if the test may not mount or the kernel has no FUSE; a line on standard output gives the reason.
    pub fn mount() -> Option<Self> {
        let folder = tempfile::Builder::new().prefix("hanging-").tempdir().unwrap().keep();
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("bareblk-test".into())];
        let shared = Shared::default();
        match fuser::spawn_mount2(Host(Arc::clone(&shared)), &folder, &config) {
            Ok(session) => Some(Self { session: Some(session), folder, shared }),
            Err(error) => {
                xtask::skip::skip(xtask::skip::Reason::NoFuse, error);
                std::fs::remove_dir(&folder).unwrap();
                None
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Makes `call` hang from now on.
    pub fn hang(&self, call: Call) {
        self.shared.lock().unwrap().hanging = Some(call);
    }

    /// The number of calls that wait for an answer.
    pub fn hung(&self) -> usize {
        let state = self.shared.lock().unwrap();
        state.lookups.len() + state.opens.len()
    }

    /// Answers all hanging calls with an error.
    pub fn let_go(&self) {
        let mut state = self.shared.lock().unwrap();
        state.hanging = None;
        state.lookups.drain(..).for_each(|reply| reply.error(Errno::EIO));
        state.opens.drain(..).for_each(|reply| reply.error(Errno::EIO));
    }
}

impl Drop for HangingFolder {
    fn drop(&mut self) {
        self.let_go();
        let _ = Command::new("umount").arg("--lazy").arg(&self.folder).status();
        drop(self.session.take());
        let _ = std::fs::remove_dir(&self.folder);
    }
}

struct Host(Shared);

fn attr(ino: INodeNo) -> FileAttr {
    let image = ino == IMAGE;
    let epoch = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino,
        size: if image { IMAGE_BYTES } else { 0 },
        blocks: 0,
        atime: epoch,
        mtime: epoch,
        ctime: epoch,
        crtime: epoch,
        kind: if image { FileType::RegularFile } else { FileType::Directory },
        perm: 0o700,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Host {
    fn lookup(&self, _req: &Request, _parent: INodeNo, _name: &OsStr, reply: ReplyEntry) {
        let mut state = self.0.lock().unwrap();
        if state.hanging == Some(Call::Lookup) {
            state.lookups.push(reply);
        } else {
            reply.entry(&NOT_REMEMBERED, &attr(IMAGE), Generation(0));
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&NOT_REMEMBERED, &attr(ino));
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let mut state = self.0.lock().unwrap();
        if state.hanging == Some(Call::Open) {
            state.opens.push(reply);
        } else {
            reply.opened(FileHandle(0), FopenFlags::empty());
        }
    }
}
