//! The image's exclusive lock, which this client has while a guest uses the image.
//!
//! `take_lock: acquire → record who has it | another client has it → wait, or break it if its recorded owner has ended`
//!
//! - An attribute of the image names the process that has the lock ([`Host`](crate::Host)). A server that is started again after
//!   SIGKILL thereby recognizes the lock of its predecessor and breaks it; the cluster then refuses everything that may
//!   still be on its way from there. Any other client's lock is waited for.
//! - The attribute is emptied before the lock is released. A client that it names without having the lock has lost it
//!   to an administrator, and may still write: it is waited for as long as it watches the image.
//! - A lock that was broken or removed is never taken again.

use std::ffi::{CStr, CString, c_char};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cluster::{check, text};
use crate::error::RbdError;
use crate::host::Host;
use crate::open_image::OpenImage;

/// `RBD_FEATURE_EXCLUSIVE_LOCK`.
const EXCLUSIVE_LOCK: u64 = 1 << 2;
/// `RBD_LOCK_MODE_EXCLUSIVE`.
const LOCK_MODE: i32 = 0;
/// The pause between two attempts to get the lock.
const RETRY: Duration = Duration::from_millis(100);
/// The attribute of the image's header object that names the lock's owner: librbd's name for it, a space, and the process's
/// record. librbd's own metadata would do, but setting it waits for every client that watches the image.
const RECORD: &CStr = c"bareblk.lock-owner";
/// The record of a process that cannot be named. Its lock is never broken.
const UNKNOWN: &str = "unknown";
/// Maximum length of that attribute.
const MAX_RECORD_BYTES: usize = 1024;
/// Maximum length of an image's id (`RBD_MAX_IMAGE_ID_LENGTH` of librbd), with the terminator.
const MAX_ID_BYTES: usize = 129;

/// What an image that is used under its lock knows about it.
#[derive(Debug)]
pub(crate) struct Lock {
    timeout: Duration,
    is_held: AtomicBool,
    /// Serializes the calls that take and release the lock.
    users: Mutex<Users>,
}

#[derive(Debug, Default)]
struct Users {
    /// How often the lock was taken and not yet released.
    count: u32,
    /// How often the cluster has given the lock to this client.
    acquired: u64,
    /// A thread asks for the lock (`lock_check.rs`).
    is_checked: bool,
}

/// Whether this client still has the lock that it has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It has the lock, or the cluster does not say.
    Yes,
    /// The lock is another client's, or no client's, or the image is gone.
    No,
    /// This client has released the lock, or has noticed the loss. The question is over.
    Released,
}

impl Lock {
    pub fn new(timeout: Duration) -> Self {
        Self { timeout, is_held: AtomicBool::new(false), users: Mutex::default() }
    }

    /// As `RbdImage::take_lock`. Returns whether the caller has to start the thread that asks for the lock.
    pub fn take(&self, image: &OpenImage, is_wanted: &dyn Fn() -> bool) -> Result<bool, RbdError> {
        let mut users = self.users();
        let name = || image.spec().to_string();
        let other = |source| RbdError::Other { image: name(), action: "take its exclusive lock", source };
        if image.is_refused() {
            return Err(other(io::Error::from_raw_os_error(libc::ESHUTDOWN)));
        }
        let end = Instant::now() + self.timeout;
        while !self.is_held() {
            match acquire(image) {
                Ok(()) => {
                    self.is_held.store(true, Ordering::Relaxed);
                    users.acquired += 1;
                    record_owner(image);
                }
                Err(error) if matches!(error.raw_os_error(), Some(libc::EROFS | libc::EBUSY)) => {
                    if Instant::now() >= end || !is_wanted() {
                        return Err(RbdError::Locked { image: name() });
                    }
                    std::thread::sleep(RETRY);
                }
                Err(error) => return Err(other(error)),
            }
        }
        users.count += 1;
        Ok(!std::mem::replace(&mut users.is_checked, true))
    }

    /// Asks the cluster whether this client still has the lock. Blocks until it has answered.
    pub fn ask(&self, image: &OpenImage) -> Answer {
        let acquired = self.users().acquired;
        let is_owner = is_owner(image);
        let mut users = self.users();
        if !self.is_held() || image.is_refused() {
            users.is_checked = false;
            return Answer::Released;
        }
        // If the lock was released and taken again meanwhile, the answer is about the time between.
        if users.acquired == acquired && matches!(is_owner, Ok(false)) { Answer::No } else { Answer::Yes }
    }

    /// As `RbdImage::release_lock`.
    pub fn release(&self, image: &OpenImage) -> io::Result<()> {
        let mut users = self.users();
        users.count = users.count.saturating_sub(1);
        if users.count > 0 || !self.is_held() {
            return Ok(());
        }
        let forgotten = forget_owner(image);
        // From here on, librbd refuses flushes, and the release may wait for other clients.
        self.is_held.store(false, Ordering::Relaxed);
        let released = forgotten.and_then(|()| {
            // SAFETY: 1. the image is open.
            image.check(unsafe { (image.library().rbd_lock_release)(image.handle()) })
        });
        match released {
            // A lock that was lost need not be released. What this client has written is durable: librbd has no cache.
            Err(_) if image.is_refused() => Ok(()),
            released => released.inspect_err(|_| self.is_held.store(true, Ordering::Relaxed)),
        }
    }

    fn users(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_held(&self) -> bool {
        self.is_held.load(Ordering::Relaxed)
    }
}

/// Asks for the lock once. `EBUSY` or `EROFS`: another client has it.
fn acquire(image: &OpenImage) -> io::Result<()> {
    // librbd asks an owner that lives for the lock, and some owners give it up although they still write. For an owner that
    // has ended, librbd waits until the cluster has noticed.
    break_lock_of_ended(image)?;
    let lives = |client: &str| image.is_watched_by(client).unwrap_or(true);
    let recorded = recorded_owner(image)?;
    let recorded = recorded.as_deref().and_then(|text| text.split_once(' ')).map(|(client, _)| client);
    if owner(image)?.is_some_and(|owner| lives(&owner)) || recorded.is_some_and(lives) {
        return Err(io::Error::from_raw_os_error(libc::EBUSY));
    }
    // SAFETY: 1. the image is open.
    image.check(unsafe { (image.library().rbd_lock_acquire)(image.handle(), LOCK_MODE) })
}

/// Whether the cluster says that this client has the lock.
fn is_owner(image: &OpenImage) -> io::Result<bool> {
    let mut is_owner = 0;
    let function = image.library().rbd_is_exclusive_lock_owner;
    // SAFETY: 1. the image is open, and `is_owner` lives until the call returns.
    image.check(unsafe { function(image.handle(), &raw mut is_owner) })?;
    Ok(is_owner != 0)
}

/// Refuses an image that has no exclusive lock.
pub(crate) fn check_has_lock(image: &OpenImage) -> Result<(), RbdError> {
    let name = || image.spec().to_string();
    let mut features = 0;
    // SAFETY: 1. the image is open, and `features` lives until the call returns.
    let read = check(unsafe { (image.library().rbd_get_features)(image.handle(), &raw mut features) });
    read.map_err(|source| RbdError::Other { image: name(), action: "read its features", source })?;
    if features & EXCLUSIVE_LOCK == 0 {
        return Err(RbdError::NoLock { image: name() });
    }
    Ok(())
}

/// Records that this process has the lock. Without the record, a next server only waits longer.
fn record_owner(image: &OpenImage) {
    let record = image.host().and_then(Host::own_record).unwrap_or_else(|| UNKNOWN.to_owned());
    let recorded = owner(image).and_then(|owner| {
        let owner = owner.ok_or(io::ErrorKind::NotFound)?;
        store_record(image, &format!("{owner} {record}"))
    });
    if let Err(error) = recorded {
        tracing::warn!(
            image = %image.spec(),
            "the image's lock cannot be marked as this server's: if the server is killed, the next one waits until the \
             cluster has noticed: {error}"
        );
    }
}

/// Empties the record, if there is one.
fn forget_owner(image: &OpenImage) -> io::Result<()> {
    match recorded_owner(image)? {
        Some(record) if !record.is_empty() => store_record(image, ""),
        _ => Ok(()),
    }
}

fn store_record(image: &OpenImage, value: &str) -> io::Result<()> {
    let object = header(image)?;
    // SAFETY: 1. the context is valid, and all arguments live until the call returns.
    image.check(unsafe {
        (image.library().rados_setxattr)(
            image.pool(),
            object.as_ptr(),
            RECORD.as_ptr(),
            value.as_ptr().cast(),
            value.len(),
        )
    })
}

/// Breaks the lock if its owner is the recorded process, and that process has ended.
fn break_lock_of_ended(image: &OpenImage) -> io::Result<()> {
    let Some(host) = image.host() else { return Ok(()) };
    let (Some(owner), Some(recorded)) = (owner(image)?, recorded_owner(image)?) else { return Ok(()) };
    let Some(record) = recorded.strip_prefix(&owner).and_then(|rest| rest.strip_prefix(' ')) else {
        return Ok(());
    };
    if !host.has_ended(record) {
        return Ok(());
    }
    let named = text(&owner)?;
    // SAFETY: 1. the image is open, and `named` lives until the call returns.
    let broken =
        check(unsafe { (image.library().rbd_lock_break)(image.handle(), LOCK_MODE, named.as_ptr()) });
    match broken {
        Ok(()) => {
            tracing::info!(image = %image.spec(), owner, "broke the lock of a server of this host that has ended");
            forget_owner(image)
        }
        // The lock is free already.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

/// librbd's name for the client that has the lock.
fn owner(image: &OpenImage) -> io::Result<Option<String>> {
    let (mut mode, mut owner, mut count) = (LOCK_MODE, std::ptr::null_mut::<c_char>(), 1_usize);
    // SAFETY: 1. the image is open; 2. `owner` has room for `count` pointers.
    let read = check(unsafe {
        (image.library().rbd_lock_get_owners)(image.handle(), &raw mut mode, &raw mut owner, &raw mut count)
    });
    match read {
        Ok(()) if count == 1 && !owner.is_null() => {
            // SAFETY: 1. librbd has stored a terminated text.
            let name = unsafe { CStr::from_ptr(owner) }.to_string_lossy().into_owned();
            // SAFETY: 1. librbd allocated the text, and nothing uses it any more.
            unsafe { (image.library().rbd_lock_get_owners_cleanup)(&raw mut owner, 1) };
            Ok(Some(name))
        }
        Ok(()) => Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What the lock's last owner recorded.
fn recorded_owner(image: &OpenImage) -> io::Result<Option<String>> {
    let object = header(image)?;
    let mut value = [0_u8; MAX_RECORD_BYTES];
    // SAFETY: 1. the context is valid, and all arguments live until the call returns; 2. `value` has that many bytes.
    let read = unsafe {
        (image.library().rados_getxattr)(
            image.pool(),
            object.as_ptr(),
            RECORD.as_ptr(),
            value.as_mut_ptr().cast(),
            value.len(),
        )
    };
    match check(read) {
        Ok(()) => {
            let len = usize::try_from(read).unwrap_or_default().min(value.len());
            Ok(Some(String::from_utf8_lossy(&value[..len]).into_owned()))
        }
        // There is none, or it is too long to be ours.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENODATA | libc::ERANGE)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The object with the image's header.
fn header(image: &OpenImage) -> io::Result<CString> {
    let mut id = [0_u8; MAX_ID_BYTES];
    // SAFETY: 1. the image is open; 2. `id` has that many bytes.
    check(unsafe { (image.library().rbd_get_id)(image.handle(), id.as_mut_ptr().cast(), id.len()) })?;
    let id = CStr::from_bytes_until_nul(&id).map_err(|_| io::ErrorKind::InvalidData)?;
    text(&format!("rbd_header.{}", id.to_string_lossy()))
}
