//! One image on a FUSE file system that records the server's calls and fails them on request.
//!
//! `server → kernel → /dev/fuse → read, write, fsync, fallocate → (fault?) → bytes in memory, Event`
//!
//! - One thread serves all calls, one after the other: the order of events is the order in time.
//! - A call ends when its answer is sent; the time is taken just before.
#![allow(
    dead_code,
    missing_docs,
    missing_debug_implementations,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    clippy::too_many_arguments
)]

use std::ffi::OsStr;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation,
    INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyStatfs,
    ReplyWrite, Request, TimeOrNow, WriteFlags,
};

/// Only this process changes the file system.
const TTL: Duration = Duration::from_secs(3600);
const IMAGE: INodeNo = INodeNo(2);
const NAME: &str = "disk.raw";
/// `FALLOC_FL_PUNCH_HOLE`, `FALLOC_FL_ZERO_RANGE` (linux/falloc.h).
const ZEROING: i32 = 0x02 | 0x10;

/// What a call did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deed {
    Write { offset_bytes: u64, bytes: Vec<u8> },
    Zero(Range<u64>),
    Sync,
}

/// One call that succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub deed: Deed,
    /// The time at which the call arrived, and the time at which it ended.
    pub begun: u64,
    pub done: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Read,
    Write,
    Sync,
}

/// Makes calls of one type fail if they touch a range.
#[derive(Clone, Debug)]
pub struct Failing {
    pub call: Call,
    pub range: Range<u64>,
    pub errno: Errno,
}

#[derive(Default)]
struct State {
    bytes: Vec<u8>,
    events: Vec<Event>,
    failing: Vec<Failing>,
    drops_syncs: bool,
    failed: u64,
    hangs: bool,
    hangs_syncs: bool,
    hanging: Vec<Box<dyn FnOnce() + Send>>,
}

pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

struct Shared {
    state: Mutex<State>,
    clock: Clock,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

/// A mounted file system with one file; unmounted when dropped.
pub struct FuseDisk {
    session: Option<BackgroundSession>,
    folder: PathBuf,
    shared: Arc<Shared>,
}

impl FuseDisk {
    /// `None` if the test may not mount, or the kernel has no FUSE.
    pub fn mount(bytes: usize, clock: Clock) -> Option<Self> {
        let state = State { bytes: vec![0; bytes], ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), clock });
        let folder = tempfile::Builder::new().prefix("fuse-disk-").tempdir().unwrap().keep();
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("bareblk-test".into())];
        let session = fuser::spawn_mount2(Host(Arc::clone(&shared)), &folder, &config);
        match session {
            Ok(session) => Some(Self { session: Some(session), folder, shared }),
            Err(error) => {
                xtask::skip::skip(xtask::skip::Reason::NoFuse, error);
                std::fs::remove_dir(&folder).unwrap();
                None
            }
        }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.join(NAME)
    }

    pub fn events(&self) -> Vec<Event> {
        self.shared.state().events.clone()
    }

    pub fn bytes(&self, range: Range<usize>) -> Vec<u8> {
        self.shared.state().bytes[range].to_vec()
    }

    /// Number of calls that were made to fail so far.
    pub fn failed(&self) -> u64 {
        self.shared.state().failed
    }

    pub fn fail(&self, call: Call, range: Range<u64>, errno: Errno) {
        self.shared.state().failing.push(Failing { call, range, errno });
    }

    pub fn heal(&self) {
        self.shared.state().failing.clear();
    }

    /// From now on the host answers syncs without syncing, like a broken host. A server that omits its syncs looks the
    /// same.
    pub fn drop_syncs(&self) {
        self.shared.state().drops_syncs = true;
    }
}

impl FuseDisk {
    /// From now on, a close of the file and a statfs get no answer before this value is dropped.
    pub fn hang(&self) {
        self.shared.state().hangs = true;
    }

    /// From now on, a sync gets no answer before this value is dropped. Closes are answered, because other tests start
    /// programs, which close this file.
    pub fn hang_syncs(&self) {
        self.shared.state().hangs_syncs = true;
    }

    /// Calls without an answer.
    pub fn hanging(&self) -> usize {
        self.shared.state().hanging.len()
    }

    /// Answers the calls that hang, and all later ones.
    pub fn let_go(&self) {
        let mut state = self.shared.state();
        (state.hangs, state.hangs_syncs) = (false, false);
        let hanging = std::mem::take(&mut state.hanging);
        drop(state);
        hanging.into_iter().for_each(|answer| answer());
    }
}

impl Drop for FuseDisk {
    fn drop(&mut self) {
        self.let_go();
        // Lazy: after a failed test a process may still have the image open.
        let _ = Command::new("umount").arg("--lazy").arg(&self.folder).status();
        drop(self.session.take());
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// Serves the kernel's calls.
struct Host(Arc<Shared>);

impl Host {
    fn attr(&self, ino: INodeNo) -> FileAttr {
        let size = if ino == IMAGE { self.0.state().bytes.len() as u64 } else { 0 };
        let kind = if ino == IMAGE { FileType::RegularFile } else { FileType::Directory };
        let epoch = SystemTime::UNIX_EPOCH;
        FileAttr {
            ino,
            size,
            blocks: size / 512,
            atime: epoch,
            mtime: epoch,
            ctime: epoch,
            crtime: epoch,
            kind,
            perm: 0o700,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    /// Runs `answer` now, or once such calls no longer hang.
    fn answer(&self, hangs: fn(&State) -> bool, answer: impl FnOnce() + Send + 'static) {
        let mut state = self.0.state();
        if hangs(&state) {
            state.hanging.push(Box::new(answer));
            return;
        }
        drop(state);
        answer();
    }

    /// Whether the call is to fail.
    fn verdict(&self, call: Call, range: &Range<u64>) -> Result<(), Errno> {
        let mut state = self.0.state();
        let overlaps =
            |other: &Range<u64>| call == Call::Sync || range.start < other.end && other.start < range.end;
        let failing = state.failing.iter().find(|failing| failing.call == call && overlaps(&failing.range));
        match failing.map(|failing| failing.errno) {
            None => Ok(()),
            Some(errno) => {
                state.failed += 1;
                Err(errno)
            }
        }
    }

    fn note(&self, deed: Deed, begun: u64) {
        let done = (self.0.clock)();
        self.0.state().events.push(Event { deed, begun, done });
    }
}

impl Filesystem for Host {
    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == INodeNo::ROOT && Path::new(name) == Path::new(NAME) {
            reply.entry(&TTL, &self.attr(IMAGE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attr(ino));
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        match size {
            Some(_) => reply.error(Errno::EPERM),
            None => reply.attr(&TTL, &self.attr(ino)),
        }
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let range = offset..offset + u64::from(size);
        match self.verdict(Call::Read, &range) {
            Err(errno) => reply.error(errno),
            Ok(()) => {
                let state = self.0.state();
                let end = state.bytes.len();
                let (start, end) = ((offset as usize).min(end), (range.end as usize).min(end));
                reply.data(&state.bytes[start..end]);
            }
        }
    }

    fn write(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let begun = (self.0.clock)();
        let range = offset..offset + data.len() as u64;
        if let Err(errno) = self.verdict(Call::Write, &range) {
            return reply.error(errno);
        }
        if range.end > self.0.state().bytes.len() as u64 {
            return reply.error(Errno::EFBIG);
        }
        self.0.state().bytes[range.start as usize..range.end as usize].copy_from_slice(data);
        self.note(Deed::Write { offset_bytes: offset, bytes: data.to_vec() }, begun);
        reply.written(data.len() as u32);
    }

    fn fsync(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let begun = (self.0.clock)();
        let verdict = self.verdict(Call::Sync, &(0..0));
        if verdict.is_ok() && !self.0.state().drops_syncs {
            self.note(Deed::Sync, begun);
        }
        self.answer(
            |state| state.hangs_syncs,
            move || match verdict {
                Ok(()) => reply.ok(),
                Err(errno) => reply.error(errno),
            },
        );
    }

    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        self.answer(|state| state.hangs, move || reply.ok());
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        self.answer(|state| state.hangs, move || reply.statfs(0, 0, 0, 0, 0, 512, 255, 0));
    }

    fn fallocate(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let begun = (self.0.clock)();
        let range = offset..(offset + length).min(self.0.state().bytes.len() as u64);
        if mode & ZEROING == 0 {
            return reply.error(Errno::EOPNOTSUPP);
        }
        // A probe for support uses a range beyond the end.
        if range.start >= range.end {
            return reply.ok();
        }
        if let Err(errno) = self.verdict(Call::Write, &range) {
            return reply.error(errno);
        }
        self.0.state().bytes[range.start as usize..range.end as usize].fill(0);
        self.note(Deed::Zero(range), begun);
        reply.ok();
    }
}
