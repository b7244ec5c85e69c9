//! The image's exclusive lock, which this client has while a guest uses the image.
//!
//! `take_lock: acquire → record who has it | another client has it → wait, or break it if its recorded owner has ended`
//!
//! - An attribute of the image names the process that has the lock ([`Host`](crate::Host)). A server that is started again after
//!   SIGKILL thereby recognizes the lock of its predecessor and breaks it; the cluster then refuses everything that may
//!   still be on its way from there. Any other client's lock is waited for.
//! - A lock that was broken is never taken again.

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
/// Maximum length of that attribute.
const MAX_RECORD_BYTES: usize = 1024;
/// Maximum length of an image's id (`RBD_MAX_IMAGE_ID_LENGTH` of librbd), with the terminator.
const MAX_ID_BYTES: usize = 129;

/// What an image that is used under its lock knows about it.
#[derive(Debug)]
pub(crate) struct Lock {
    timeout: Duration,
    is_held: AtomicBool,
    /// How often the lock was taken and not yet released. Serializes the calls that take and release it.
    users: Mutex<u32>,
}

impl Lock {
    pub fn new(timeout: Duration) -> Self {
        Self { timeout, is_held: AtomicBool::new(false), users: Mutex::new(0) }
    }

    /// As `RbdImage::take_lock`.
    pub fn take(&self, image: &OpenImage, is_wanted: &dyn Fn() -> bool) -> Result<(), RbdError> {
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
        *users += 1;
        Ok(())
    }

    /// As `RbdImage::release_lock`.
    pub fn release(&self, image: &OpenImage) -> io::Result<()> {
        let mut users = self.users();
        *users = users.saturating_sub(1);
        if *users > 0 || !self.is_held() {
            return Ok(());
        }
        // From here on, librbd refuses flushes, and the release may wait for other clients.
        self.is_held.store(false, Ordering::Relaxed);
        // SAFETY: 1. the image is open.
        let released = image.check(unsafe { (image.library().rbd_lock_release)(image.handle()) });
        released.inspect_err(|_| self.is_held.store(true, Ordering::Relaxed))
    }

    fn users(&self) -> MutexGuard<'_, u32> {
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
    if owner(image)?.is_some_and(|owner| image.is_watched_by(&owner).unwrap_or(true)) {
        return Err(io::Error::from_raw_os_error(libc::EBUSY));
    }
    // SAFETY: 1. the image is open.
    image.check(unsafe { (image.library().rbd_lock_acquire)(image.handle(), LOCK_MODE) })
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
    let Some(record) = image.host().and_then(Host::own_record) else { return };
    let recorded = owner(image).and_then(|owner| {
        let owner = owner.ok_or(io::ErrorKind::NotFound)?;
        let (object, value) = (header(image)?, format!("{owner} {record}"));
        // SAFETY: 1. the context is valid, and all arguments live until the call returns.
        check(unsafe {
            (image.library().rados_setxattr)(
                image.pool(),
                object.as_ptr(),
                RECORD.as_ptr(),
                value.as_ptr().cast(),
                value.len(),
            )
        })
    });
    if let Err(error) = recorded {
        tracing::warn!(
            image = %image.spec(),
            "the image's lock cannot be marked as this server's: if the server is killed, the next one waits until the \
             cluster has noticed: {error}"
        );
    }
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
            Ok(())
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
