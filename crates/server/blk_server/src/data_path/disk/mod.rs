//! A disk: its image and the configuration that guests see. Sessions and queues share it.
//!
//! - A disk outlives its sessions, and may have several while one front-end replaces another.
//! - Only the session with the [`RingLease`](ring_lease::RingLease) starts rings.
//! - A session counts as a user of the disk from its first lease until it ends. A retired disk grants no leases.

pub(crate) mod engine_source;
pub(crate) mod flush;
pub(crate) mod flush_turns;
pub(crate) mod log_limit;
pub(crate) mod ring_lease;
pub(crate) mod session_link;
pub(crate) mod slow_requests;
pub(crate) mod storage_answer;
pub(crate) mod storage_thread;
pub(crate) mod totals;
pub(crate) mod write_cache;

use std::io;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use disk_image::volume::metadata::MetadataThread;
use disk_image::{Backing, CacheMode, Image, Opener};
use guest_mem::{Budget, Quota};
use io_engine::Durability;
use sandbox::Role;
use tracing::{error, warn};
use virtio_blk::{DEVICE_ID_BYTES, DeviceConfig, DeviceId, Offer, WriteCache, device_features};
use virtqueue::{MAX_QUEUE_SIZE, MIN_QUEUE_SIZE};

use crate::data_path::disk::engine_source::EngineSource;
use crate::data_path::disk::flush_turns::FlushTurns;
use crate::data_path::disk::log_limit::{Allowed, LogLimit};
use crate::data_path::disk::session_link::SessionLink;
use crate::data_path::disk::slow_requests::SlowRequests;
use crate::data_path::disk::totals::Totals;
use crate::data_path::disk::write_cache::{GuestChoice, Wce};
use crate::data_path::queue::coalescing::Coalescing;
use crate::data_path::queue::parked::ParkPolicy;
use crate::data_path::throttle::disk_throttle::DiskThrottle;
use crate::data_path::worker::worker_options::WorkerId;
use crate::host::error_line::error_line;

/// Maximum length of a serial, which GET_ID returns (virtio 1.3 §5.2.6).
pub const SERIAL_BYTES: usize = DEVICE_ID_BYTES;
/// Maximum number of queues per disk: QEMU passes the queue index in eight bits with SET_VRING_KICK.
pub const MAX_QUEUES: u16 = 256;
/// Minimum time for the metadata thread to close an image, even if the deadline is earlier.
const CLOSE_AT_LEAST: Duration = Duration::from_secs(5);
/// The configuration of a disk.
#[derive(Debug)]
pub struct DiskConfig {
    /// Name of the disk, also in logs.
    pub name: String,
    /// The image, open and locked.
    pub image: Image,
    /// Printable ASCII, at most [`SERIAL_BYTES`] bytes.
    pub serial: String,
    /// Number of queues offered, 1 to [`MAX_QUEUES`]. A queue that the guest never enables costs nothing.
    pub queues: u16,
    /// Largest accepted queue size: a power of two from 2 to 1024 descriptors.
    pub queue_size: u16,
    /// Whether the guest may change the write-cache mode. The image's cache mode is the initial mode.
    pub wce: Wce,
    /// The disk's engine; `None`: the server's engine.
    pub engine: Option<Arc<EngineSource>>,
    /// Maximum number of workers that serve the disk unless the operator attaches its queues; `None`: all workers.
    pub workers: Option<NonZeroUsize>,
    /// How several completions share one interrupt; `None`: interrupts are not coalesced.
    pub coalescing: Option<Coalescing>,
    /// Which failed requests are parked; `None`: all are answered with an error.
    pub park: Option<ParkPolicy>,
}

impl DiskConfig {
    /// Checks the settings before the image is opened or created.
    ///
    /// # Errors
    /// [`InvalidDisk`].
    pub fn check_settings(serial: &str, queues: u16, queue_size: u16) -> Result<(), InvalidDisk> {
        let printable = serial.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
        if serial.is_empty() || serial.len() > SERIAL_BYTES || !printable {
            return Err(InvalidDisk::Serial { serial: serial.to_owned(), max: SERIAL_BYTES });
        }
        if !(1..=MAX_QUEUES).contains(&queues) {
            return Err(InvalidDisk::Queues { queues, max: MAX_QUEUES });
        }
        let max = MAX_QUEUE_SIZE;
        if !queue_size.is_power_of_two() || !(MIN_QUEUE_SIZE..=max).contains(&queue_size) {
            return Err(InvalidDisk::QueueSize { queue_size, max });
        }
        Ok(())
    }

    fn check(&self) -> Result<(), InvalidDisk> {
        Self::check_settings(&self.serial, self.queues, self.queue_size)
    }
}

/// Why a disk cannot be served as configured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDisk {
    /// The serial is too long or not printable ASCII.
    #[error("serial `{serial}` is invalid: use 1 to {max} printable ASCII characters")]
    Serial {
        /** The requested serial. */
        serial: String,
        /** [`SERIAL_BYTES`]. */
        max: usize,
    },
    /// There are no queues, or too many.
    #[error("a disk cannot have {queues} queues: choose a number from 1 to {max}")]
    Queues {
        /** The requested number of queues. */
        queues: u16,
        /** [`MAX_QUEUES`]. */
        max: u16,
    },
    /// The queue size is not a power of two in the allowed range.
    #[error("queue size {queue_size} is not a power of two from 2 to {max}")]
    QueueSize {
        /** The requested queue size, in descriptors. */
        queue_size: u16,
        /** The largest queue size, in descriptors. */
        max: u16,
    },
}

#[derive(Debug, Default)]
struct LeaseState {
    /// The session that may run rings.
    holder: Option<u64>,
    /// Sessions that have started rings and have not ended.
    users: Vec<u64>,
    retired: bool,
}

/// What holds a disk's data. An overlay replaces it while the queues are frozen (`control/overlay.rs`).
#[derive(Debug)]
pub(crate) struct Storage {
    pub(crate) image: Arc<Image>,
    /// `None`: the disk uses the server's engine.
    pub(crate) engine: Option<Arc<EngineSource>>,
    /// Only of a writable mapped disk.
    metadata: Option<Arc<MetadataThread>>,
}

impl Storage {
    fn new(image: Image, engine: Option<Arc<EngineSource>>) -> Self {
        Self { image: Arc::new(image), engine, metadata: None }
    }

    /// Storage that is ready for a guest's requests.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(crate) fn started(disk: &str, image: Image, engine: Option<Arc<EngineSource>>) -> io::Result<Self> {
        let mut storage = Self::new(image, engine);
        storage.start_metadata_thread(disk)?;
        Ok(storage)
    }

    /// Starts the thread that changes the tables of a writable mapped disk.
    fn start_metadata_thread(&mut self, disk: &str) -> io::Result<()> {
        let disk = disk.to_owned();
        let enter = move || {
            let entered = sandbox::enter(Role::Metadata);
            if let Err(error) = &entered {
                error!(
                    disk,
                    "the disk's metadata thread cannot run, and requests fail: {}",
                    error_line(error)
                );
            }
            entered.is_ok()
        };
        self.metadata = self.image.backing().start_metadata_thread(enter)?.map(Arc::new);
        Ok(())
    }
}

/// One disk.
#[derive(Debug)]
pub(crate) struct Disk {
    id: u64,
    name: String,
    storage: Mutex<Storage>,
    /// Never changes: a new image must have the same mode.
    cache: CacheMode,
    opener: Arc<dyn Opener>,
    serial: DeviceId,
    queues: u16,
    queue_size: u16,
    wce: Wce,
    guest_cache: GuestChoice,
    quota: Arc<Quota>,
    lease: Mutex<LeaseState>,
    lease_free: Condvar,
    log_limit: Mutex<LogLimit>,
    host_log_limit: Mutex<LogLimit>,
    slow_log_limit: Mutex<LogLimit>,
    failed: AtomicBool,
    flush_turns: Arc<FlushTurns>,
    /// 0: no limit.
    most_workers: AtomicUsize,
    coalescing: Option<Coalescing>,
    park: Option<ParkPolicy>,
    /// The limits in effect, set by `control/throttling.rs`; `None`: no limits.
    throttle: Mutex<Option<Arc<DiskThrottle>>>,
    /// The worker that uses the image's first file description.
    own_file: Mutex<Option<WorkerId>>,
    totals: Totals,
    slow: SlowRequests,
}

impl Disk {
    /// `opener` opens the image again for further workers. Front-ends of all disks share `budget`.
    pub(crate) fn new(
        config: DiskConfig,
        opener: &Arc<dyn Opener>,
        budget: &Arc<Budget>,
    ) -> Result<Self, InvalidDisk> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        config.check()?;
        let DiskConfig { name, image, serial, queues, queue_size, wce, engine, workers, coalescing, park } =
            config;
        let start = start_mode(image.cache());
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            name,
            cache: image.cache(),
            storage: Mutex::new(Storage::new(image, engine)),
            opener: Arc::clone(opener),
            serial: DeviceId::new(&serial),
            queues,
            queue_size,
            wce,
            guest_cache: GuestChoice::new(start, queues),
            quota: Quota::of(budget),
            lease: Mutex::default(),
            lease_free: Condvar::new(),
            log_limit: Mutex::new(LogLimit::new(Instant::now())),
            host_log_limit: Mutex::new(LogLimit::new(Instant::now())),
            slow_log_limit: Mutex::new(LogLimit::new(Instant::now())),
            failed: AtomicBool::new(false),
            flush_turns: Arc::default(),
            most_workers: AtomicUsize::new(workers.map_or(0, NonZeroUsize::get)),
            coalescing,
            park,
            throttle: Mutex::new(None),
            own_file: Mutex::new(None),
            totals: Totals::default(),
            slow: SlowRequests::default(),
        })
    }

    /// Starts the threads that the disk's storage needs. To be called before the first session.
    pub(crate) fn start_storage(&mut self) -> io::Result<()> {
        let storage = self.storage.get_mut().unwrap_or_else(PoisonError::into_inner);
        storage.start_metadata_thread(&self.name)
    }

    fn storage(&self) -> MutexGuard<'_, Storage> {
        self.storage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the storage, and returns the old one. To be called only while no worker runs a queue of the disk.
    pub(crate) fn replace_storage(&self, storage: Storage) -> Storage {
        std::mem::replace(&mut self.storage(), storage)
    }

    /// After the last request: waits until the metadata thread has returned the space that it reserved, at least
    /// [`CLOSE_AT_LEAST`]. Without it, as after a kill, the image has leaked clusters.
    pub(crate) fn close_tables(&self, deadline: Instant) {
        let Some(metadata) = self.storage().metadata.clone() else { return };
        let timeout = deadline.saturating_duration_since(Instant::now()).max(CLOSE_AT_LEAST);
        if let Err(error) = metadata.close(timeout) {
            warn!(
                disk = self.name,
                "the image's tables were not closed, so the image may have leaked clusters: `bareblk image check --repair leaks` \
                 frees them: {}",
                error_line(&error)
            );
        }
    }

    /// Unique in this process.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The present image. A running queue has its own reference.
    pub(crate) fn image(&self) -> Arc<Image> {
        Arc::clone(&self.storage().image)
    }

    /// `None`: the disk uses the server's engine.
    pub(crate) fn engine(&self) -> Option<Arc<EngineSource>> {
        self.storage().engine.clone()
    }

    /// How the queues coalesce interrupts.
    pub(crate) fn coalescing(&self) -> Option<Coalescing> {
        self.coalescing
    }

    /// Which failed requests the queues park.
    pub(crate) fn park_policy(&self) -> Option<ParkPolicy> {
        self.park
    }

    /// The limits in effect. A queue reads them when it starts, when it moves, and on `Command::Limits`.
    pub(crate) fn throttle(&self) -> Option<Arc<DiskThrottle>> {
        self.throttle.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Running queues apply the new limits when they get
    /// [`Command::Limits`](crate::data_path::worker::command::Command::Limits).
    pub(crate) fn set_throttle(&self, throttle: Option<Arc<DiskThrottle>>) {
        *self.throttle.lock().unwrap_or_else(PoisonError::into_inner) = throttle;
    }

    /// Maximum number of workers that may serve the disk's queues.
    pub(crate) fn most_workers(&self) -> Option<usize> {
        // Relaxed: no other data depends on it.
        let most = Some(self.most_workers.load(Ordering::Relaxed)).filter(|most| *most > 0);
        let placed = self.engine().and_then(|source| source.most_workers());
        most.into_iter().chain(placed).chain(self.image().backing().most_workers()).min()
    }

    /// Applies to queues that start from now on. The caller moves running queues.
    pub(crate) fn set_most_workers(&self, most: Option<NonZeroUsize>) {
        self.most_workers.store(most.map_or(0, NonZeroUsize::get), Ordering::Relaxed);
    }

    /// The image for one worker, with a separate file description. The kernel reports lost pages once to each
    /// description. If workers shared a description, the first sync would get the report, and another worker's sync
    /// would succeed although data was lost. All descriptions share the locks.
    pub(crate) fn backing_for(&self, worker: WorkerId) -> Backing {
        if self.takes_own_file(worker) {
            return self.image().backing().clone();
        }
        self.reopen_image().unwrap_or_else(|error| {
            let disk = &self.name;
            warn!(
                disk,
                worker = worker.0,
                "cannot open the image again, so its workers share one file description: {}",
                error_line(&error)
            );
            self.image().backing().clone()
        })
    }

    /// Opens the image again, with a file description of its own.
    pub(crate) fn reopen_image(&self) -> io::Result<Backing> {
        self.image().reopen(self.opener.as_ref())
    }

    /// Whether this worker uses the first file description, which belongs to the first worker that calls this. No file
    /// is opened while the lock is held.
    fn takes_own_file(&self, worker: WorkerId) -> bool {
        let mut owner = self.own_file.lock().unwrap_or_else(PoisonError::into_inner);
        *owner.get_or_insert(worker) == worker
    }

    /// Records that the worker no longer uses the file from `backing_for`.
    pub(crate) fn file_not_used(&self, worker: WorkerId) {
        let mut owner = self.own_file.lock().unwrap_or_else(PoisonError::into_inner);
        if *owner == Some(worker) {
            *owner = None;
        }
    }

    /// The serial, padded with zeroes.
    pub(crate) fn serial(&self) -> &[u8; SERIAL_BYTES] {
        self.serial.as_bytes()
    }

    /// The counters and latencies of all the disk's queues.
    pub(crate) fn totals(&self) -> &Totals {
        &self.totals
    }

    /// The disk's slow requests, and the time from which a request counts as slow.
    #[inline]
    pub(crate) fn slow(&self) -> &SlowRequests {
        &self.slow
    }

    pub(crate) fn queues(&self) -> u16 {
        self.queues
    }

    pub(crate) fn queue_size(&self) -> u16 {
        self.queue_size
    }

    /// How much of the process's resources the disk's front-ends may use.
    pub(crate) fn quota(&self) -> &Arc<Quota> {
        &self.quota
    }

    /// The guest's own choice of write-cache mode.
    pub(crate) fn guest_cache(&self) -> &GuestChoice {
        &self.guest_cache
    }

    /// How durable a write must be when it completes, for a guest in this cache mode.
    #[inline]
    pub(crate) fn durability(&self, cache: WriteCache) -> Durability {
        match cache {
            WriteCache::Writethrough if !self.ignores_flushes() => Durability::Durable,
            _ => Durability::Cached,
        }
    }

    /// Whether flushes do nothing: `--cache unsafe`.
    pub(crate) fn ignores_flushes(&self) -> bool {
        self.cache.ignores_flushes()
    }

    pub(crate) fn wce(&self) -> Wce {
        self.wce
    }

    pub(crate) fn device_features(&self) -> u64 {
        self.device_features_with(&self.image())
    }

    /// The features that the disk offers if this is its image.
    pub(crate) fn device_features_with(&self, image: &Image) -> u64 {
        device_features(&Offer {
            read_only: image.read_only(),
            discard: image.discard_limits().is_some(),
            write_zeroes: image.write_zeroes_limits().is_some(),
            write_cache: start_mode(image.cache()),
            cache_is_settable: self.wce == Wce::Guest,
            num_queues: self.queues,
        })
    }

    /// The current configuration space.
    pub(crate) fn device_config(&self, cache: WriteCache) -> DeviceConfig {
        let image = self.image();
        let topology = image.topology();
        let discard = image.discard_limits();
        let zeroes = image.write_zeroes_limits();
        DeviceConfig {
            capacity_sectors: image.capacity_sectors(),
            seg_max: virtio_blk::seg_max(self.queue_size),
            blk_size: image.block_size(),
            physical_block_exp: topology.physical_block_exp,
            alignment_offset: topology.alignment_offset,
            min_io_size_blocks: topology.min_io_blocks,
            opt_io_size_blocks: topology.opt_io_blocks,
            writeback: cache,
            num_queues: self.queues,
            max_discard_sectors: discard.map_or(0, |limits| limits.max_sectors),
            max_discard_seg: discard.map_or(0, |limits| limits.max_segments),
            discard_sector_alignment: discard.map_or(0, |limits| limits.sector_alignment),
            max_write_zeroes_sectors: zeroes.map_or(0, |limits| limits.max_sectors),
            max_write_zeroes_seg: zeroes.map_or(0, |limits| limits.max_segments),
            write_zeroes_may_unmap: zeroes.is_some_and(|limits| limits.may_unmap),
        }
    }

    /// Wakes sessions that wait for the lease, so that they notice that they must end.
    pub(crate) fn wake_waiters(&self) {
        // While this thread holds the lock, a session either has not checked yet or already sleeps.
        let _lease = self.lease();
        self.lease_free.notify_all();
    }

    fn lease(&self) -> MutexGuard<'_, LeaseState> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prevents sessions from starting rings. Returns `false` and changes nothing if a session uses the disk and
    /// `force` is not set.
    pub(crate) fn retire(&self, force: bool) -> bool {
        let mut lease = self.lease();
        lease.retired |= force || lease.users.is_empty();
        lease.retired
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.lease().retired
    }

    /// Records that the session has ended.
    pub(crate) fn not_used_by(&self, session: &SessionLink) {
        self.lease().users.retain(|&user| user != session.id());
    }

    /// Whether to log a line that a guest or a front-end caused. The limit applies to the disk, because a hostile guest
    /// can open any number of sessions and rings.
    pub(crate) fn log_allowed(&self, now: Instant) -> Option<Allowed> {
        self.log_limit.lock().unwrap_or_else(PoisonError::into_inner).allow(now)
    }

    /// Like [`Disk::log_allowed`], for a line that a front-end can repeat forever: identical lines once an hour.
    pub(crate) fn log_allowed_once(&self, words: &str, now: Instant) -> Option<Allowed> {
        self.log_limit.lock().unwrap_or_else(PoisonError::into_inner).allow_once(words, now)
    }

    /// Like [`Disk::log_allowed`], with a separate limit for failures of the host, so that a guest cannot suppress
    /// them.
    pub(crate) fn host_log_allowed(&self, now: Instant) -> Option<Allowed> {
        self.host_log_limit.lock().unwrap_or_else(PoisonError::into_inner).allow(now)
    }

    /// As [`Disk::log_allowed`], with a separate limit for slow requests.
    pub(crate) fn slow_log_allowed(&self, now: Instant) -> Option<Allowed> {
        self.slow_log_limit.lock().unwrap_or_else(PoisonError::into_inner).allow(now)
    }

    /// Whether EIO from a durable write may refer to the data of other writes: whichever sync comes first gets the
    /// kernel's report of all pages that the page cache has lost.
    pub(crate) fn shares_errors(&self) -> bool {
        !self.cache.is_direct()
    }

    /// Records a failed sync. Kernel and device forget which data they lost, so a later successful sync proves nothing.
    /// The disk refuses all writes until an operator restarts the server (docs/decisions/0012).
    #[cold]
    pub(crate) fn mark_failed(&self) {
        self.tell_volume();
        // Storage that refuses this server has logged that, and the remedy is another one.
        if !self.is_refused() && !self.failed.swap(true, Ordering::Relaxed) {
            error!(
                disk = self.name,
                "the image could not be synced, and acknowledged writes may be lost: from now on every \
                 write, discard and flush fails, and reads continue; check the host's storage, restart the \
                 server, then check the guest's file systems"
            );
        }
    }

    /// Jobs of a mapped disk then free nothing.
    fn tell_volume(&self) {
        if let Some(volume) = self.image().backing().volume() {
            volume.note_failed_sync();
        }
    }

    /// Records that a sync of the previous server failed; see [`Disk::mark_failed`].
    pub(crate) fn was_failed(&self) {
        self.tell_volume();
        self.failed.store(true, Ordering::Relaxed);
        warn!(
            disk = self.name,
            "the previous server could not sync this disk's image: the disk accepts only reads"
        );
    }

    /// Whether the disk accepts no more writes: a sync failed, or its storage refuses this server.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed_with(&self.image())
    }

    /// The same for a running queue, which has a reference to the disk's image.
    #[inline]
    pub(crate) fn has_failed_with(&self, image: &Image) -> bool {
        self.sync_has_failed() || image.backing().is_refused()
    }

    /// Makes the writes of `backing`, one of this disk's, durable. Records if writes may be lost.
    pub(crate) fn sync_of(&self, backing: &Backing) -> io::Result<()> {
        backing.sync().inspect_err(|error| {
            if backing.may_have_lost_writes(error) {
                self.mark_failed();
            }
        })
    }

    /// Makes all writes durable and visible to other clients of the storage.
    pub(crate) fn sync_for_others(&self) -> io::Result<()> {
        let image = self.image();
        if image.read_only() { Ok(()) } else { self.sync_of(image.backing()) }
    }

    /// Whether a sync failed, so that acknowledged writes may be lost.
    #[inline]
    pub(crate) fn sync_has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Whether the disk's storage refuses this server for good.
    pub(crate) fn is_refused(&self) -> bool {
        self.image().backing().is_refused()
    }

    pub(crate) fn flush_turns(&self) -> &Arc<FlushTurns> {
        &self.flush_turns
    }
}

/// The initial cache mode of a guest.
fn start_mode(cache: CacheMode) -> WriteCache {
    if cache.starts_writethrough() { WriteCache::Writethrough } else { WriteCache::Writeback }
}
