//! An image's handles in librbd, from opening to closing.
//!
//! `open: connect → pool → image → watch → size, kept current by the watch … drop: closed by a thread`
//!
//! Not here: what a disk does with the image (`image.rs`), and its exclusive lock (`lock.rs`).

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use crate::cluster::{Cluster, ClusterOptions, check, text};
use crate::error::RbdError;
use crate::host::Host;
use crate::library::{Handle, Library, Watcher};
use crate::spec::RbdSpec;

/// How long closing an image may take before it is left to the end of the process.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The same, if the image closed before was not closed in time.
const NEXT_CLOSE_TIMEOUT: Duration = Duration::from_millis(100);

/// Maximum number of clients of one image.
const MAX_WATCHERS: usize = 64;

/// The cluster refuses this client (`EBLOCKLISTED`).
const BLOCKLISTED: isize = 108;

/// How to open an image.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Its cluster.
    pub cluster: ClusterOptions,
    /// Writes are refused.
    pub read_only: bool,
    /// Take the exclusive lock while the image is used ([`RbdImage::take_lock`](crate::RbdImage::take_lock)). Without it, nothing keeps a second
    /// client from writing.
    pub lock: bool,
    /// How long to wait for a lock that another client has.
    pub lock_timeout: Duration,
    /// The process; `None`: it has no sandbox, and the lock of a killed one is waited for.
    pub host: Option<Arc<dyn Host>>,
}

/// The state that the watch's callback updates.
#[derive(Debug)]
struct Watched {
    library: &'static Library,
    image: Handle,
    size_bytes: AtomicU64,
}

/// An open image. Dropping it closes it.
#[derive(Debug)]
pub(crate) struct OpenImage {
    spec: RbdSpec,
    cluster: Arc<Cluster>,
    pool: Handle,
    image: Handle,
    /// Leaked if the image cannot be closed, because the watch's callback uses it.
    watched: Box<Watched>,
    /// The watch's number; `None` for a read-only image, which has none.
    watch: Option<u64>,
    host: Option<Arc<dyn Host>>,
    /// The image's lock was taken from this client without a blocklist.
    has_lost_lock: AtomicBool,
}

// SAFETY: 1. librbd's handles may be used by any thread; 2. `watched` has only atomics and a handle.
unsafe impl Send for OpenImage {}
// SAFETY: as above.
unsafe impl Sync for OpenImage {}

impl OpenImage {
    /// Opens the image. Blocks for seconds if the cluster does not answer.
    ///
    /// # Errors
    /// [`RbdError`].
    pub fn open(spec: &RbdSpec, options: &OpenOptions) -> Result<Self, RbdError> {
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
        cluster.add(name());
        // From here on, the drop closes the image.
        let host = options.host.clone();
        let (spec, has_lost_lock) = (spec.clone(), AtomicBool::new(false));
        let mut opened = Self { spec, cluster, pool, image, watched, watch: None, host, has_lost_lock };
        if !options.read_only {
            opened.watch = Some(opened.start_watch().map_err(other("watch it"))?);
        }
        opened.watched.refresh().map_err(other("read its size"))?;
        Ok(opened)
    }

    fn start_watch(&self) -> io::Result<u64> {
        let (mut number, argument) = (0, (&raw const *self.watched).cast_mut().cast());
        // SAFETY: 1. the image is open; 2. the argument lives until the watch has ended or for ever.
        check(unsafe {
            (self.library().rbd_update_watch)(self.image, &raw mut number, on_update, argument)
        })?;
        Ok(number)
    }

    /// Runs `call` on a new thread that may do all that librbd does.
    pub fn start_thread(&self, call: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        match &self.host {
            Some(host) => host.start_thread(call),
            None => std::thread::Builder::new().name("bareblk-rbd".into()).spawn(call).map(drop),
        }
    }

    pub fn spec(&self) -> &RbdSpec {
        &self.spec
    }

    pub fn host(&self) -> Option<&dyn Host> {
        self.host.as_deref()
    }

    pub fn size_bytes(&self) -> u64 {
        self.watched.size_bytes.load(Ordering::Relaxed)
    }

    pub fn refresh_size(&self) -> io::Result<u64> {
        self.watched.refresh()?;
        Ok(self.size_bytes())
    }

    /// Whether the client with this address watches the image: it lives, or the cluster has not noticed its end.
    pub fn is_watched_by(&self, address: &str) -> io::Result<bool> {
        let mut watchers = [const { Watcher::NONE }; MAX_WATCHERS];
        let mut count = watchers.len();
        // SAFETY: 1. the image is open; 2. `watchers` has room for `count` elements.
        check(unsafe {
            (self.library().rbd_watchers_list)(self.image, watchers.as_mut_ptr(), &raw mut count)
        })?;
        let found = watchers.iter().take(count).any(|watcher| {
            // SAFETY: 1. librbd has stored a terminated text in each of the `count` elements.
            unsafe { CStr::from_ptr(watcher.address) }.to_bytes() == address.as_bytes()
        });
        // SAFETY: 1. librbd allocated the texts of `count` elements, and nothing uses them any more.
        unsafe { (self.library().rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), count) };
        Ok(found)
    }

    /// Makes all completed writes durable. Blocks until the cluster has answered.
    pub fn flush(&self) -> io::Result<()> {
        // SAFETY: 1. the image is open.
        self.check(unsafe { (self.library().rbd_flush)(self.image) })
    }

    /// Whether the cluster has blocklisted the connection, or this client has lost the image's lock.
    #[inline]
    pub fn is_refused(&self) -> bool {
        // Relaxed: a flag that is only set, and orders nothing.
        self.cluster.is_refused() || self.has_lost_lock.load(Ordering::Relaxed)
    }

    /// Records that this client has lost the lock, and logs it once.
    #[cold]
    pub fn note_lock_lost(&self) {
        if !self.is_refused() && !self.has_lost_lock.swap(true, Ordering::Relaxed) {
            tracing::error!(
                image = %self.spec,
                "another client has removed this image's lock, or the image itself: every request fails until the disk is \
                 removed and added again"
            );
        }
    }

    /// As [`check`]; notes that the cluster refuses this client.
    pub fn check(&self, result: c_int) -> io::Result<()> {
        self.look(result as isize);
        check(result)
    }

    /// Looks at a result of librbd for a sign that the cluster refuses this client.
    #[inline]
    pub fn look(&self, result: isize) {
        if result == -BLOCKLISTED && !self.is_refused() {
            self.cluster.note_refused();
        }
    }

    pub fn library(&self) -> &'static Library {
        self.cluster.library()
    }

    pub fn handle(&self) -> Handle {
        self.image
    }

    pub fn pool(&self) -> Handle {
        self.pool
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

impl Drop for OpenImage {
    /// Closes the image on a thread of its own. If the cluster does not answer, the thread goes on until the process ends.
    fn drop(&mut self) {
        self.cluster.remove(&self.spec.to_string());
        let library = self.library();
        let unwatched = Watched { library, image: null_mut(), size_bytes: AtomicU64::new(0) };
        // If no thread can be started, the image stays open, and its watch uses `watched`.
        let closing = ManuallyDrop::new(Closing {
            cluster: Arc::clone(&self.cluster),
            pool: self.pool,
            image: self.image,
            watched: std::mem::replace(&mut self.watched, Box::new(unwatched)),
            watch: self.watch,
        });
        let (done, closed) = sync_channel(1);
        let thread = self.start_thread(Box::new(move || {
            ManuallyDrop::into_inner(closing).close();
            let _ = done.send(());
        }));
        // Many images of a cluster that does not answer are closed one after another.
        static NO_ANSWER: AtomicBool = AtomicBool::new(false);
        let timeout = if NO_ANSWER.load(Ordering::Relaxed) { NEXT_CLOSE_TIMEOUT } else { CLOSE_TIMEOUT };
        let is_closed = thread.is_ok() && closed.recv_timeout(timeout).is_ok();
        NO_ANSWER.store(!is_closed, Ordering::Relaxed);
        if !is_closed {
            tracing::warn!(image = %self.spec, "the cluster does not answer, so the image stays open until this process ends");
        }
    }
}
