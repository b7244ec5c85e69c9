//! One open image, which all workers of its disk share.
//!
//! `open: connect → pool → image → exclusive lock → size, kept current by a watch … drop: closed by a thread`
//!
//! Two handles on one image would take the exclusive lock from each other, even in one process. So there is one.

use std::ffi::c_void;
use std::io;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use crate::cluster::{Cluster, ClusterOptions, check, text};
use crate::error::RbdError;
use crate::library::{Handle, Library};
use crate::spec::RbdSpec;

/// `RBD_FEATURE_EXCLUSIVE_LOCK`.
const EXCLUSIVE_LOCK: u64 = 1 << 2;
/// `RBD_LOCK_MODE_EXCLUSIVE`.
const LOCK_MODE: i32 = 0;
/// The pause between two attempts to get the lock.
const LOCK_RETRY: Duration = Duration::from_millis(500);
/// How long closing an image may take before it is left to the end of the process.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of bytes that requests to one image may have in flight: librbd copies every write, and queues without
/// limit while the cluster does not answer.
const MAX_IN_FLIGHT_BYTES: u64 = 64 << 20;

/// How to open an image.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Its cluster.
    pub cluster: ClusterOptions,
    /// Writes are refused.
    pub read_only: bool,
    /// Take the exclusive lock. Without it, nothing keeps a second client from writing.
    pub lock: bool,
    /// How long to wait for a lock that another client has.
    pub lock_timeout: Duration,
}

/// The state that the watch's callback updates.
#[derive(Debug)]
struct Watched {
    library: &'static Library,
    image: Handle,
    size_bytes: AtomicU64,
}

/// An open image.
#[derive(Debug)]
pub struct RbdImage {
    spec: RbdSpec,
    cluster: Arc<Cluster>,
    pool: Handle,
    image: Handle,
    /// Leaked if the image cannot be closed, because the watch's callback uses it.
    watched: Box<Watched>,
    /// The watch's number; `None` for a read-only image, which has none.
    watch: Option<u64>,
    in_flight_bytes: AtomicU64,
    lock_was_lost: AtomicBool,
}

// SAFETY: 1. librbd's handles may be used by any thread; 2. `watched` has only atomics and a handle.
unsafe impl Send for RbdImage {}
// SAFETY: as above.
unsafe impl Sync for RbdImage {}

impl RbdImage {
    /// Opens the image. Blocks for seconds if the cluster does not answer, and for `lock_timeout` if another client holds
    /// the lock.
    ///
    /// # Errors
    /// [`RbdError`].
    pub fn open(spec: &RbdSpec, options: &OpenOptions) -> Result<Arc<Self>, RbdError> {
        let name = || spec.to_string();
        if spec.snapshot.is_some() && !options.read_only {
            return Err(RbdError::Snapshot { image: name() });
        }
        let other = |action| move |source| RbdError::Other { image: spec.to_string(), action, source };
        let cluster = Cluster::connect(&options.cluster)?;
        let pool =
            cluster.pool(&spec.pool, &spec.namespace).map_err(|source| match source.raw_os_error() {
                Some(libc::ENOENT | libc::EPERM | libc::EACCES) => {
                    RbdError::NoPool { pool: spec.pool.clone(), id: options.cluster.id.clone() }
                }
                _ => other("open its pool")(source),
            })?;
        let image = match open_handle(&cluster, pool, spec, options.read_only) {
            Ok(image) => image,
            Err(source) => {
                // SAFETY: 1. the context is valid, and nothing else uses it.
                unsafe { (cluster.library().rados_ioctx_destroy)(pool) };
                return Err(match source.raw_os_error() {
                    Some(libc::ENOENT) => RbdError::NoImage { image: name() },
                    _ => other("open it")(source),
                });
            }
        };
        let library = cluster.library();
        let watched = Box::new(Watched { library, image, size_bytes: AtomicU64::new(0) });
        // From here on, the drop closes the image.
        let mut opened = Self {
            spec: spec.clone(),
            cluster,
            pool,
            image,
            watched,
            watch: None,
            in_flight_bytes: AtomicU64::new(0),
            lock_was_lost: AtomicBool::new(false),
        };
        if !options.read_only {
            opened.watch = Some(opened.start_watch().map_err(other("watch it"))?);
            if options.lock {
                opened.take_lock(options.lock_timeout)?;
            }
        }
        opened.watched.refresh().map_err(other("read its size"))?;
        Ok(Arc::new(opened))
    }

    fn start_watch(&self) -> io::Result<u64> {
        let (mut number, argument) = (0, (&raw const *self.watched).cast_mut().cast());
        // SAFETY: 1. the image is open; 2. the argument lives until the watch has ended or for ever.
        check(unsafe {
            (self.library().rbd_update_watch)(self.image, &raw mut number, on_update, argument)
        })?;
        Ok(number)
    }

    fn take_lock(&self, timeout: Duration) -> Result<(), RbdError> {
        let name = || self.spec.to_string();
        let mut features = 0;
        // SAFETY: 1. the image is open, and `features` lives until the call returns.
        let read = check(unsafe { (self.library().rbd_get_features)(self.image, &raw mut features) });
        let other = |source| RbdError::Other { image: name(), action: "take its exclusive lock", source };
        read.map_err(other)?;
        if features & EXCLUSIVE_LOCK == 0 {
            return Err(RbdError::NoLock { image: name() });
        }
        let end = Instant::now() + timeout;
        loop {
            // SAFETY: 1. the image is open.
            let taken = check(unsafe { (self.library().rbd_lock_acquire)(self.image, LOCK_MODE) });
            match taken {
                Ok(()) => return Ok(()),
                Err(error) if matches!(error.raw_os_error(), Some(libc::EROFS | libc::EBUSY)) => {
                    if Instant::now() >= end {
                        return Err(RbdError::Locked { image: name() });
                    }
                    std::thread::sleep(LOCK_RETRY);
                }
                Err(error) => return Err(other(error)),
            }
        }
    }

    /// The image's name.
    #[must_use]
    pub fn spec(&self) -> &RbdSpec {
        &self.spec
    }

    /// The size now: a change by another client is known within a tenth of a second.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.watched.size_bytes.load(Ordering::Relaxed)
    }

    /// Reads the size again. Blocks only for librbd's own locks.
    ///
    /// # Errors
    /// librbd's.
    pub fn refresh_size(&self) -> io::Result<u64> {
        self.watched.refresh()?;
        Ok(self.size_bytes())
    }

    /// Sets the size. Blocks until the cluster has answered.
    ///
    /// # Errors
    /// librbd's.
    pub fn resize(&self, size_bytes: u64) -> io::Result<()> {
        // SAFETY: 1. the image is open.
        check(unsafe { (self.library().rbd_resize)(self.image, size_bytes) })?;
        self.watched.refresh()
    }

    /// Makes all completed writes durable. Blocks until the cluster has answered.
    ///
    /// # Errors
    /// librbd's.
    pub fn flush(&self) -> io::Result<()> {
        // SAFETY: 1. the image is open.
        check(unsafe { (self.library().rbd_flush)(self.image) })
    }

    /// Whether a request of this length must wait, because too many bytes are in flight.
    #[must_use]
    pub fn is_full(&self, len_bytes: u64) -> bool {
        // Relaxed: an estimate is enough.
        let in_flight = self.in_flight_bytes.load(Ordering::Relaxed);
        in_flight > 0 && in_flight + len_bytes > MAX_IN_FLIGHT_BYTES
    }

    /// Records that the cluster has refused a write because the lock was taken away. Logs it once: no write succeeds again.
    pub fn note_lock_lost(&self) {
        if !self.lock_was_lost.swap(true, Ordering::Relaxed) {
            tracing::error!(
                image = %self.spec,
                "another client has broken this image's lock, and the cluster refuses this server: every request fails until \
                 the disk is removed and added again"
            );
        }
    }

    pub(crate) fn began(&self, len_bytes: u64) {
        self.in_flight_bytes.fetch_add(len_bytes, Ordering::Relaxed);
    }

    pub(crate) fn ended(&self, len_bytes: u64) {
        self.in_flight_bytes.fetch_sub(len_bytes, Ordering::Relaxed);
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.cluster.library()
    }

    pub(crate) fn handle(&self) -> Handle {
        self.image
    }
}

impl Watched {
    fn refresh(&self) -> io::Result<()> {
        let mut size_bytes = 0;
        // SAFETY: 1. the image is open while the watch or the image's owner exists.
        check(unsafe { (self.library.rbd_get_size)(self.image, &raw mut size_bytes) })?;
        self.size_bytes.store(size_bytes, Ordering::Relaxed);
        Ok(())
    }
}

/// Called by a thread of librbd when the image's header has changed.
unsafe extern "C" fn on_update(watched: *mut c_void) {
    // SAFETY: 1. the argument lives until the watch has ended.
    let watched = unsafe { &*watched.cast::<Watched>() };
    if let Err(error) = watched.refresh() {
        tracing::warn!("the size of an RBD image cannot be read again: {error}");
    }
}

fn open_handle(cluster: &Cluster, pool: Handle, spec: &RbdSpec, read_only: bool) -> io::Result<Handle> {
    let name = text(&spec.image)?;
    let snapshot = spec.snapshot.as_deref().map(text).transpose()?;
    let snapshot = snapshot.as_ref().map_or(null(), |snapshot| snapshot.as_ptr());
    let library = cluster.library();
    let open = if read_only { library.rbd_open_read_only } else { library.rbd_open };
    let mut image = null_mut();
    // SAFETY: 1. the context is valid, and the texts live until the call returns.
    check(unsafe { open(pool, name.as_ptr(), &raw mut image, snapshot) })?;
    Ok(image)
}

/// What closing an image needs.
struct Closing {
    cluster: Arc<Cluster>,
    pool: Handle,
    image: Handle,
    watched: Box<Watched>,
    watch: Option<u64>,
}

// SAFETY: 1. librbd's handles may be used by any thread.
unsafe impl Send for Closing {}

impl Closing {
    fn close(self) {
        let library = self.cluster.library();
        if let Some(watch) = self.watch {
            // SAFETY: 1. the image is open, and the watch is its own.
            unsafe { (library.rbd_update_unwatch)(self.image, watch) };
            // SAFETY: 1. the image is open. Without the lock, this fails.
            unsafe { (library.rbd_lock_release)(self.image) };
        }
        // SAFETY: 1. nothing uses the image any more: requests in flight hold it.
        unsafe { (library.rbd_close)(self.image) };
        // SAFETY: 1. nothing uses the context any more.
        unsafe { (library.rados_ioctx_destroy)(self.pool) };
        drop(self.watched);
    }
}

impl Drop for RbdImage {
    /// Closes the image on a thread of its own. If the cluster does not answer, the thread goes on until the process ends.
    fn drop(&mut self) {
        let library = self.library();
        let unwatched = Watched { library, image: null_mut(), size_bytes: AtomicU64::new(0) };
        let closing = Closing {
            cluster: Arc::clone(&self.cluster),
            pool: self.pool,
            image: self.image,
            watched: std::mem::replace(&mut self.watched, Box::new(unwatched)),
            watch: self.watch,
        };
        let (done, closed) = sync_channel(1);
        let thread = std::thread::Builder::new().name("bareblk-rbd".into()).spawn(move || {
            closing.close();
            let _ = done.send(());
        });
        if thread.is_err() || closed.recv_timeout(CLOSE_TIMEOUT).is_err() {
            tracing::warn!(image = %self.spec, "the cluster does not answer, so the image stays open until this process ends");
        }
    }
}
