//! The system calls of Linux AIO, and what their errors mean.
//!
//! `io_setup → io_submit … io_getevents → io_destroy`
//!
//! - A context is a mapping of this process: any thread may use it, but not a child after `fork`.
//! - `io_submit` reads the blocks and writes their `key` before it returns.
//! - `io_destroy` returns only when every call has ended, so it may wait forever on a device that hangs. Even without
//!   calls it waits for an RCU grace period, so a separate thread calls it.
//!
//! Layout: linux/aio_abi.h; behaviour: io_setup(2), io_submit(2), io_getevents(2), io_destroy(2).

use std::io;
use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sandbox::{Entry, Role};

/// `IOCB_CMD_*` of linux/aio_abi.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Command {
    Pread = 0,
    Pwrite = 1,
    Fdsync = 3,
    Poll = 5,
    Preadv = 7,
    Pwritev = 8,
}

/// One call: `struct iocb` of linux/aio_abi.h.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Iocb {
    /// The kernel returns it in [`IoEvent::data`].
    pub data: u64,
    /// The kernel writes this field.
    pub key: u32,
    pub rw_flags: i32,
    pub command: u16,
    pub priority: i16,
    pub fd: u32,
    pub buffer: u64,
    pub len: u64,
    pub offset_bytes: i64,
    pub reserved: u64,
    pub flags: u32,
    pub resfd: u32,
}

const _: () = assert!(cfg!(target_endian = "little"), "`key` and `rw_flags` change places");
const _: () = assert!(size_of::<Iocb>() == size_of::<libc::iocb>());
const _: () = assert!(offset_of!(Iocb, rw_flags) == offset_of!(libc::iocb, aio_rw_flags));
const _: () = assert!(offset_of!(Iocb, offset_bytes) == offset_of!(libc::iocb, aio_offset));
const _: () = assert!(offset_of!(Iocb, resfd) == offset_of!(libc::iocb, aio_resfd));

/// One result: `struct io_event` of linux/aio_abi.h.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct IoEvent {
    pub data: u64,
    /// The address of the [`Iocb`].
    pub iocb: u64,
    /// Bytes, 0, or a negated errno.
    pub result: i64,
    pub result2: i64,
}

/// Number of contexts that a thread is about to destroy. Their calls still count against `fs.aio-max-nr`.
static ENDING: AtomicUsize = AtomicUsize::new(0);
/// How long the creation of a context waits until those contexts are destroyed.
const ENDING_PATIENCE: Duration = Duration::from_secs(1);
/// Stack size of the thread that destroys a context: it makes one system call.
const STACK_BYTES: usize = 64 << 10;

/// A kernel context for calls in flight.
#[derive(Debug)]
pub(super) struct Context {
    id: libc::c_ulong,
    abandoned: bool,
}

impl Context {
    /// Makes a context for at least `calls` calls in flight.
    pub fn new(calls: u32) -> io::Result<Self> {
        let deadline = Instant::now() + ENDING_PATIENCE;
        loop {
            // Read before the attempt: a context that is destroyed after this read frees its calls for the next
            // attempt.
            let ending = ENDING.load(Ordering::SeqCst) > 0;
            match set_up(calls) {
                Ok(id) => return Ok(Self { id, abandoned: false }),
                Err(Errno::AGAIN) if ending && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(errno) => return Err(cannot_set_up(errno, calls)),
            }
        }
    }

    /// Like [`Context::new`], but returns the kernel's error at once.
    pub fn without_waiting(calls: u32) -> Result<Self, Errno> {
        set_up(calls).map(|id| Self { id, abandoned: false })
    }

    #[cfg(test)]
    pub fn of_id(id: usize) -> Self {
        Self { id: id as libc::c_ulong, abandoned: false }
    }

    /// Address of the completion ring.
    pub fn address(&self) -> usize {
        // On Linux the id is as wide as a pointer.
        #[allow(clippy::cast_possible_truncation)]
        let address = self.id as usize;
        address
    }

    /// Starts `calls` in order, and returns how many were started. An error concerns only the first call.
    ///
    /// # Safety
    /// Each pointer must refer to a block that no other code uses during this function. The memory that the blocks
    /// point to must stay valid and unused until the call has ended.
    #[inline]
    pub unsafe fn submit(&self, calls: &[*mut Iocb]) -> Result<usize, Errno> {
        // SAFETY: 1. blocks and buffers: the caller guarantees them; 2. the array has `len` entries.
        let taken = unsafe { libc::syscall(libc::SYS_io_submit, self.id, calls.len(), calls.as_ptr()) };
        checked(taken)
    }

    /// Stores results in `events`. Sleeps until `at_least` results are available or the timeout expires.
    pub fn take(
        &self,
        at_least: u32,
        events: &mut [IoEvent],
        timeout: Option<Duration>,
    ) -> Result<usize, Errno> {
        let timeout = timeout.map(|timeout| libc::timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let (least, most) = (libc::c_long::from(at_least), events.len());
        let number = libc::SYS_io_getevents;
        // SAFETY: 1. the kernel writes up to `most` results, and `events` has room for them; 2. the timeout
        // is null or lives until the end.
        let taken = unsafe { libc::syscall(number, self.id, least, most, events.as_mut_ptr(), timeout) };
        checked(taken)
    }

    /// Leaks the context, because a call in it may never end.
    pub fn abandon(&mut self) {
        self.abandoned = true;
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.abandoned {
            return;
        }
        let id = self.id;
        let end = move || {
            destroy(id);
            ENDING.fetch_sub(1, Ordering::SeqCst);
        };
        ENDING.fetch_add(1, Ordering::SeqCst);
        let thread = std::thread::Builder::new().name("bareblk-aio-end".into()).stack_size(STACK_BYTES);
        let entry = Entry::of(Role::EngineThread);
        let started = thread.spawn(move || {
            entry.enter_or_end();
            end();
        });
        if started.is_err() {
            end();
        }
    }
}

fn set_up(calls: u32) -> Result<libc::c_ulong, Errno> {
    let mut id: libc::c_ulong = 0;
    // SAFETY: 1. the kernel writes one number, to `id`, which is zero as required.
    let made = unsafe { libc::syscall(libc::SYS_io_setup, libc::c_ulong::from(calls), &raw mut id) };
    checked(made).map(|_| id)
}

fn destroy(id: libc::c_ulong) {
    // SAFETY: 1. called once, with one of our contexts; 2. no code uses its ring any more: a user of the ring owned the
    // `Context`.
    unsafe { libc::syscall(libc::SYS_io_destroy, id) };
}

#[inline]
fn checked(returned: libc::c_long) -> Result<usize, Errno> {
    usize::try_from(returned).map_err(|_| {
        let errno = io::Error::last_os_error().raw_os_error();
        errno.map_or(Errno::IO, Errno::from_raw_os_error)
    })
}

pub(super) fn cannot_set_up(errno: Errno, calls: u32) -> io::Error {
    match errno {
        Errno::AGAIN => io::Error::new(io::ErrorKind::QuotaExceeded, exhausted(calls)),
        Errno::NOSYS => {
            io::Error::new(io::ErrorKind::Unsupported, "this kernel has no Linux AIO (CONFIG_AIO)")
        }
        Errno::PERM | Errno::ACCESS => io::Error::new(
            io::ErrorKind::PermissionDenied,
            "this process may not use Linux AIO: does a seccomp filter forbid it?",
        ),
        errno => errno.into(),
    }
}

fn exhausted(calls: u32) -> String {
    let value = |name: &str| {
        let read = std::fs::read_to_string(format!("/proc/sys/fs/{name}"));
        read.map_or_else(|_| "?".to_owned(), |text| text.trim().to_owned())
    };
    let (used, most) = (value("aio-nr"), value("aio-max-nr"));
    format!(
        "fs.aio-max-nr is exhausted: {used} of {most} are in use (/proc/sys/fs/aio-nr), {calls} more are needed: \
         raise it"
    )
}
