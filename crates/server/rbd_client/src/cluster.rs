//! Connections to a cluster. Each image has its own, unless several share one.
//!
//! - One connection per image is the default: the cluster blocklists a whole connection when another client breaks the
//!   lock of one of its images.
//! - That is final, although the cluster forgets its blocklist after an hour: until then, another client may have written.

use std::collections::HashMap;
use std::ffi::{CString, c_int};
use std::io;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::error::RbdError;
use crate::library::{Handle, Library};

/// How long connecting may take, in seconds.
const CONNECT_TIMEOUT_S: &str = "10";

/// How to reach a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ClusterOptions {
    /// Its configuration file.
    pub conf: PathBuf,
    /// The user, without `client.`.
    pub id: String,
    /// Whether images with the same options share one connection.
    pub share: bool,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self { conf: "/etc/ceph/ceph.conf".into(), id: "admin".to_owned(), share: false }
    }
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Cluster {
    library: &'static Library,
    handle: Handle,
    /// The cluster has blocklisted the connection.
    is_refused: AtomicBool,
    /// The names of the open images.
    images: Mutex<Vec<String>>,
}

// SAFETY: 1. librados' handles may be used by any thread (librados.h).
unsafe impl Send for Cluster {}
// SAFETY: as above.
unsafe impl Sync for Cluster {}

/// Settings that this program depends on, whatever the configuration file says.
const FORCED: [(&str, &str); 4] = [
    // A write-back cache in this process would be lost with it although the guest's kernel has its own.
    ("rbd_cache", "false"),
    // Otherwise a guest that changes a buffer during a write breaks the connection's checksums for good.
    ("rbd_disable_zero_copy_writes", "true"),
    ("client_mount_timeout", CONNECT_TIMEOUT_S),
    // Otherwise a discard of less than 64 KiB frees nothing.
    ("rbd_discard_granularity_bytes", "4096"),
];

impl Cluster {
    /// Connects. Blocks for up to ten seconds if no monitor answers.
    pub fn connect(options: &ClusterOptions) -> Result<Arc<Self>, RbdError> {
        static SHARED: Mutex<Option<HashMap<ClusterOptions, Weak<Cluster>>>> = Mutex::new(None);
        if !options.share {
            return Self::new(options).map(Arc::new);
        }
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = shared.get_or_insert_default();
        let usable = shared.get(options).and_then(Weak::upgrade).filter(|cluster| !cluster.is_refused());
        if let Some(cluster) = usable {
            return Ok(cluster);
        }
        let cluster = Arc::new(Self::new(options)?);
        shared.insert(options.clone(), Arc::downgrade(&cluster));
        Ok(cluster)
    }

    fn new(options: &ClusterOptions) -> Result<Self, RbdError> {
        let library = Library::load()?;
        let ClusterOptions { conf, id, .. } = options;
        let configuration = |source| RbdError::Configuration { path: conf.clone(), source };
        let refused = |source| RbdError::Refused { id: id.clone(), source };
        let (name, path) =
            (text(id).map_err(refused)?, text(&conf.to_string_lossy()).map_err(configuration)?);
        let mut handle = null_mut();
        // SAFETY: 1. both arguments live until the call returns.
        check(unsafe { (library.rados_create)(&raw mut handle, name.as_ptr()) }).map_err(refused)?;
        // From here on the handle is released by the drop.
        let (is_refused, images) = (AtomicBool::new(false), Mutex::new(Vec::new()));
        let cluster = Self { library, handle, is_refused, images };
        // SAFETY: 1. the handle is valid, and `path` lives until the call returns.
        check(unsafe { (library.rados_conf_read_file)(handle, path.as_ptr()) }).map_err(configuration)?;
        for (key, value) in FORCED {
            cluster.set(key, value).map_err(configuration)?;
        }
        // SAFETY: 1. the handle is valid.
        check(unsafe { (library.rados_connect)(handle) }).map_err(|source| match source.raw_os_error() {
            Some(libc::ETIMEDOUT) => RbdError::Away { conf: conf.clone(), source },
            _ => refused(source),
        })?;
        Ok(cluster)
    }

    fn set(&self, key: &str, value: &str) -> io::Result<()> {
        let (key, value) = (text(key)?, text(value)?);
        // SAFETY: 1. the handle is valid, and both texts live until the call returns.
        check(unsafe { (self.library.rados_conf_set)(self.handle, key.as_ptr(), value.as_ptr()) })
    }

    pub fn library(&self) -> &'static Library {
        self.library
    }

    /// Whether the cluster has blocklisted this connection.
    #[inline]
    pub fn is_refused(&self) -> bool {
        // Relaxed: a flag that is only set, and orders nothing.
        self.is_refused.load(Ordering::Relaxed)
    }

    /// Records that the cluster has blocklisted this connection. Logs it once for each of its images.
    #[cold]
    pub fn note_refused(&self) {
        let images = self.images();
        if !self.is_refused.swap(true, Ordering::Relaxed) {
            images.iter().for_each(|image| log_refused(image));
        }
    }

    /// Adds an open image.
    pub fn add(&self, image: String) {
        let mut images = self.images();
        if self.is_refused() {
            log_refused(&image);
        }
        images.push(image);
    }

    /// Removes an image.
    pub fn remove(&self, image: &str) {
        let mut images = self.images();
        if let Some(at) = images.iter().position(|other| other == image) {
            images.swap_remove(at);
        }
    }

    fn images(&self) -> MutexGuard<'_, Vec<String>> {
        self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A context for a pool and a namespace, which the caller destroys.
    pub fn pool(&self, pool: &str, namespace: &str) -> io::Result<Handle> {
        let (pool, namespace) = (text(pool)?, text(namespace)?);
        let mut context = null_mut();
        // SAFETY: 1. the handle is valid, and the arguments live until the call returns.
        check(unsafe { (self.library.rados_ioctx_create)(self.handle, pool.as_ptr(), &raw mut context) })?;
        // SAFETY: 1. the context is valid, and `namespace` lives until the call returns.
        unsafe { (self.library.rados_ioctx_set_namespace)(context, namespace.as_ptr()) };
        // Writes to a full pool then fail, so that they can be parked. Otherwise they would hang.
        // SAFETY: 1. the context is valid.
        unsafe { (self.library.rados_set_pool_full_try)(context) };
        Ok(context)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // SAFETY: 1. nothing uses the handle any more: images hold their cluster.
        unsafe { (self.library.rados_shutdown)(self.handle) };
    }
}

fn log_refused(image: &str) {
    tracing::error!(
        image,
        "the cluster refuses this server, because another client has broken the lock of this image or of another one on the \
         same connection: every request fails until the disk is removed and added again"
    );
}

pub(crate) fn text(text: &str) -> io::Result<CString> {
    CString::new(text).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// Turns a negated errno into an error.
pub(crate) fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) }
}
