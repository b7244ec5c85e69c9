//! The lock on an image: byte-range locks that are compatible with QEMU's raw driver.
//!
//! `take our bytes (shared) -> does another opener hold an opposite byte? -> keep, or release and try again`
//!
//! There are four permissions. Locks on two bytes of the file represent each one: a lock on byte `100 + i` means
//! "permission i is in use", and a lock on byte `200 + i` means "no other opener may use permission i". The contents of
//! these bytes do not matter. Every opener takes only shared locks, on the bytes that apply, and then tests the
//! opposite bytes with a lock query.
//!
//! - Locks belong to the open file description (OFD): two opens conflict even in one process, and the lock lives until
//!   the last duplicate of the descriptor is closed, including the kernel's references for requests in flight.
//!
//! Facts: QEMU 2.10 and later, `file-posix` (as observed with strace and lslocks); fcntl(2), "Open file
//! description locks".

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use crate::file::{Access, FileId, LockHolder};

const IN_USE_BASE: i64 = 100;
const NOT_SHARED_BASE: i64 = 200;
/// One past the last byte that carries a lock.
const LOCK_BYTES_END: i64 = NOT_SHARED_BASE + 4;

const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
// 2 is "write unchanged", which this program never needs.
const RESIZE: i64 = 3;

/// Interval between attempts to take a lock that another opener holds.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// Upper limit of a random extra delay, so that two servers that compete for the lock do not retry in step.
const RETRY_JITTER_MS: u32 = 50;

/// The permissions that an opener of the image uses, and those that it denies to others.
struct Permissions {
    used: &'static [i64],
    not_shared: &'static [i64],
}

impl Permissions {
    /// A reader denies writing too: the guest's file system does not expect its disk to change.
    fn of(access: Access) -> Self {
        let used: &[i64] = match access {
            Access::ReadWrite => &[CONSISTENT_READ, WRITE, RESIZE],
            Access::ReadOnly => &[CONSISTENT_READ],
        };
        Self { used, not_shared: &[WRITE, RESIZE] }
    }

    fn own_bytes(&self) -> impl Iterator<Item = i64> {
        let used = self.used.iter().map(|i| IN_USE_BASE + i);
        used.chain(self.not_shared.iter().map(|i| NOT_SHARED_BASE + i))
    }

    fn opposite_bytes(&self) -> impl Iterator<Item = i64> {
        let used = self.used.iter().map(|i| NOT_SHARED_BASE + i);
        used.chain(self.not_shared.iter().map(|i| IN_USE_BASE + i))
    }
}

/// Takes the lock, and waits up to `timeout` for other holders to release it. `Ok(false)`: another opener still holds
/// the lock. `on_wait` runs once, before the first wait.
///
/// # Errors
/// The file system has no such locks.
pub fn acquire(file: &File, access: Access, timeout: Duration, on_wait: impl FnOnce()) -> io::Result<bool> {
    let start = Instant::now();
    let mut on_wait = Some(on_wait);
    loop {
        if try_acquire(file, &Permissions::of(access))? {
            return Ok(true);
        }
        let left = timeout.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Ok(false);
        }
        if let Some(on_wait) = on_wait.take() {
            on_wait();
        }
        std::thread::sleep(left.min(RETRY_INTERVAL + jitter()));
    }
}

/// Takes the lock for another open file description of a file that this process has locked already, so no conflict is
/// possible.
pub(crate) fn join(file: &File, access: Access) -> io::Result<()> {
    for byte in Permissions::of(access).own_bytes() {
        set(file, libc::F_RDLCK, byte, 1)?;
    }
    Ok(())
}

/// Makes the lock of a reader that of a writer, and waits up to `timeout` for other users of the file. `Ok(false)`: another
/// opener still uses it, and the lock is as before.
///
/// # Errors
/// The file system has no such locks.
pub(crate) fn raise(file: &File, timeout: Duration) -> io::Result<bool> {
    let start = Instant::now();
    loop {
        let outcome = take_and_test(file, &Permissions::of(Access::ReadWrite));
        if matches!(outcome, Ok(true)) {
            return Ok(true);
        }
        lower(file)?;
        if !outcome? && start.elapsed() >= timeout {
            return Ok(false);
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
}

/// Undoes [`raise`].
pub(crate) fn lower(file: &File) -> io::Result<()> {
    let kept = Permissions::of(Access::ReadOnly);
    let used = Permissions::of(Access::ReadWrite).used.iter();
    for permission in used.filter(|permission| !kept.used.contains(permission)) {
        set(file, libc::F_UNLCK, IN_USE_BASE + permission, 1)?;
    }
    Ok(())
}

fn try_acquire(file: &File, permissions: &Permissions) -> io::Result<bool> {
    let outcome = take_and_test(file, permissions);
    if !matches!(outcome, Ok(true)) {
        set(file, libc::F_UNLCK, IN_USE_BASE, LOCK_BYTES_END - IN_USE_BASE)?;
    }
    Ok(outcome?)
}

fn take_and_test(file: &File, permissions: &Permissions) -> nix::Result<bool> {
    for byte in permissions.own_bytes() {
        match set(file, libc::F_RDLCK, byte, 1) {
            Ok(()) => {}
            // A program that does not know this scheme holds an exclusive lock.
            Err(Errno::EAGAIN | Errno::EACCES) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    for byte in permissions.opposite_bytes() {
        if held_by_others(file, byte)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn set(file: &File, lock_type: i32, start_bytes: i64, len_bytes: i64) -> nix::Result<()> {
    fcntl(file, FcntlArg::F_OFD_SETLK(&flock(lock_type, start_bytes, len_bytes))).map(drop)
}

/// Whether an exclusive lock on this byte would have to wait. Our own locks do not count.
fn held_by_others(file: &File, byte: i64) -> nix::Result<bool> {
    let mut query = flock(libc::F_WRLCK, byte, 1);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut query))?;
    Ok(i32::from(query.l_type) != libc::F_UNLCK)
}

// The constants are 0, 1 and 2; Linux declares them wider than the field that they are stored in.
#[allow(clippy::cast_possible_truncation)]
fn flock(lock_type: i32, start_bytes: i64, len_bytes: i64) -> libc::flock {
    libc::flock {
        l_type: lock_type as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start_bytes,
        l_len: len_bytes,
        l_pid: 0, // must be 0 for OFD locks
    }
}

fn jitter() -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Duration::from_millis(u64::from((now.subsec_micros() ^ std::process::id()) % RETRY_JITTER_MS))
}

/// Formats as "a (pid 1), process 2", for use in a sentence.
pub(crate) struct HolderList<'a>(pub &'a [LockHolder]);

impl std::fmt::Display for HolderList<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some((first, others)) = self.0.split_first() else {
            return f.write_str("a process that /proc does not show");
        };
        write!(f, "{first}")?;
        others.iter().try_for_each(|holder| write!(f, ", {holder}"))
    }
}

/// Searches `proc` for processes with a lock on the image's lock bytes. Skips entries that we may not read.
///
/// The device number in a `lock:` line is not `st_dev` on every file system (btrfs), so this compares the
/// open file itself.
pub(crate) fn find_holders(proc: &Path, file: FileId) -> Vec<LockHolder> {
    let pids = entries(proc).filter_map(|name| name.parse().ok());
    let mut holders: Vec<LockHolder> = pids
        .filter(|pid: &u32| holds_lock(&proc.join(pid.to_string()), file))
        .map(|pid| LockHolder { pid, command: command(&proc.join(pid.to_string())) })
        .collect();
    holders.sort_by_key(|holder| holder.pid);
    holders
}

fn holds_lock(process: &Path, file: FileId) -> bool {
    entries(&process.join("fd")).any(|fd| {
        let same_file = std::fs::metadata(process.join("fd").join(&fd))
            .is_ok_and(|metadata| FileId::from(&metadata) == file);
        same_file
            && std::fs::read_to_string(process.join("fdinfo").join(&fd))
                .is_ok_and(|text| text.lines().any(is_image_lock))
    })
}

/// Whether `line` is a lock on the image's lock bytes:
/// `lock: 1: OFDLCK  ADVISORY  READ -1 fe:00:131 100 101` (proc(5), `/proc/pid/fdinfo`): type, strictness,
/// access, pid, file, first byte, last byte or `EOF`.
fn is_image_lock(line: &str) -> bool {
    let Some(rest) = line.strip_prefix("lock:") else { return false };
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let [_, "OFDLCK" | "POSIX", _, _, _, _, first, last] = fields[..] else { return false };
    let first: i64 = first.parse().unwrap_or(i64::MAX);
    let last: i64 = last.parse().unwrap_or(i64::MAX);
    first < LOCK_BYTES_END && last >= IN_USE_BASE
}

fn command(process: &Path) -> String {
    std::fs::read_to_string(process.join("comm")).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// Names in a directory; none if it cannot be read.
fn entries(folder: &Path) -> impl Iterator<Item = String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

#[cfg(test)]
#[path = "lock_tests.rs"]
mod tests;
