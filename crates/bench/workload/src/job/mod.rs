//! A job: its requests, their concurrency, and its duration, in fio's terms.
//!
//! `options.rs sets fields one by one → Job → check() (valid combinations) → offsets.rs, worker.rs`
//!
//! See also: names of options (`options.rs`), job files (`file.rs`), where the requests go (`target/mod.rs`).

pub(crate) mod file;

pub(crate) mod options;

pub(crate) mod units;

use std::time::Duration;

use disk_image::SECTOR_BYTES;
use io_engine::EngineKind;

use self::units::short;

/// Limit of requests that one job keeps in flight: the largest ring of fio's common engines.
pub const MAX_DEPTH: u32 = 4096;
/// Limit of threads per job. In fio, memory is the practical limit.
pub const MAX_JOBS: u32 = 1024;
/// Largest block: each request has one buffer.
pub const MAX_BLOCK_BYTES: u64 = 64 << 20;
/// Limit of buffer memory of all threads together.
pub const MAX_BUFFER_BYTES: u64 = 8 << 30;

/// The order of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// One block after the other.
    Sequential,
    /// Any block, aligned to the block size. Keeps no map of blocks already used.
    Random,
}

/// Reads, writes, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Only reads.
    Read,
    /// Only writes.
    Write,
    /// Reads and writes; `rwmixread` sets their shares.
    Both,
}

/// `rw=`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// The order of blocks.
    pub order: Order,
    /// Reads, writes, or both.
    pub mix: Mix,
}

impl Pattern {
    /// The option's value in fio.
    #[must_use]
    pub fn word(self) -> &'static str {
        match (self.order, self.mix) {
            (Order::Sequential, Mix::Read) => "read",
            (Order::Sequential, Mix::Write) => "write",
            (Order::Sequential, Mix::Both) => "rw",
            (Order::Random, Mix::Read) => "randread",
            (Order::Random, Mix::Write) => "randwrite",
            (Order::Random, Mix::Both) => "randrw",
        }
    }

    /// Whether the pattern includes writes.
    #[must_use]
    pub fn writes(self) -> bool {
        self.mix != Mix::Read
    }
}

/// Highest rate in each direction; zero means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// `rate=`.
    pub bytes: u64,
    /// `rate_iops=`.
    pub iops: u64,
}

/// One job, and its `numjobs` clones. The comment of each field names its fio option.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// `name=`, or the section's name.
    pub name: String,
    /// `rw=`.
    pub pattern: Pattern,
    /// `rwmixread=`: percentage of reads if the pattern has both directions.
    pub read_percent: u32,
    /// `bs=`.
    pub block_bytes: u32,
    /// `iodepth=`.
    pub depth: u32,
    /// `iodepth_batch=`: requests per submission; `None` means one for files, and all ready requests for sockets.
    pub batch: Option<u32>,
    /// `numjobs=`.
    pub jobs: u32,
    /// `offset=`.
    pub offset_bytes: u64,
    /// `size=`; `None` means up to the device's end.
    pub size_bytes: Option<u64>,
    /// `loops=`.
    pub loops: u32,
    /// `runtime=`.
    pub runtime: Option<Duration>,
    /// `time_based`: starts over until the time is up.
    pub time_based: bool,
    /// `verify=crc32c`.
    pub verify: bool,
    /// `fsync=`: a flush after this many writes; 0 means none.
    pub fsync: u32,
    /// `rate=`, `rate_iops=`.
    pub rate: Rate,
    /// `randseed=`.
    pub seed: u64,
    /// `group_reporting`: reports the clones as one.
    pub group_reporting: bool,
    /// `direct=`: bypasses the page cache. For files only.
    pub direct: bool,
    /// `ioengine=`. For files only.
    pub engine: EngineKind,
    /// `ioscheduler=`: reported, never set.
    pub io_scheduler: Option<String>,
    /// `filename=`.
    pub filename: Option<String>,
    /// Before the run, reads a small part of each region, uncounted (`touch.rs`). Not a fio option.
    pub touch: bool,
    /// `stonewall`: starts only after the previous job has ended.
    pub stonewall: bool,
    /// All options that were set, in fio's words and order, for reports.
    pub options: Vec<(String, String)>,
    /// The options that came from `[global]`.
    pub global_options: Vec<(String, String)>,
}

impl Default for Job {
    fn default() -> Self {
        Self {
            name: "bench".to_owned(),
            pattern: Pattern { order: Order::Sequential, mix: Mix::Read },
            read_percent: 50,
            block_bytes: 4096,
            depth: 1,
            batch: None,
            jobs: 1,
            offset_bytes: 0,
            size_bytes: None,
            loops: 1,
            runtime: None,
            time_based: false,
            verify: false,
            fsync: 0,
            rate: Rate::default(),
            seed: 0x9e37_79b9_7f4a_7c15,
            group_reporting: false,
            direct: true,
            engine: EngineKind::IoUring,
            io_scheduler: None,
            filename: None,
            touch: false,
            stonewall: false,
            options: Vec::new(),
            global_options: Vec::new(),
        }
    }
}

/// Options that exclude each other or do not suit the device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// The block size is not a multiple of the sector size.
    #[error("bs={bs} is not a multiple of {SECTOR_BYTES}, the sector size of virtio-blk")]
    BlockInSectors {
        /** The value of `bs=`. */
        bs: u32,
    },
    /// The block size is not a multiple of the logical block size.
    #[error("bs={bs} is not a multiple of the device's block size, {device_bytes}: give a multiple of that")]
    BlockOfDevice {
        /** The value of `bs=`. */
        bs: u32,
        /** The device's block size. */
        device_bytes: u32,
    },
    /// Requests would not be aligned.
    #[error("offset={} is not a multiple of bs={}", short(*offset_bytes), short(u64::from(*bs)))]
    Offset {
        /** The value of `offset=`. */
        offset_bytes: u64,
        /** The value of `bs=`. */
        bs: u32,
    },
    /// The size is less than a block.
    #[error("size={} is less than one block of bs={}", short(*size_bytes), short(u64::from(*bs)))]
    SizeBelowBlock {
        /** The value of `size=`, or the size of the device. */
        size_bytes: u64,
        /** The value of `bs=`. */
        bs: u32,
    },
    /// The job goes beyond the device's end.
    #[error(
        "offset={} and size={} go beyond the device, which has {}: give a smaller size, or leave size out to use all of it",
        short(*offset_bytes),
        short(*size_bytes),
        short(*device_bytes)
    )]
    BeyondDevice {
        /** The value of `offset=`. */
        offset_bytes: u64,
        /** The value of `size=`. */
        size_bytes: u64,
        /** The device's capacity. */
        device_bytes: u64,
    },
    /// There is no room for a block after the offset.
    #[error(
        "offset={} leaves less than one block of bs={} of the device, which has {}: give a smaller offset",
        short(*offset_bytes),
        short(u64::from(*bs)),
        short(*device_bytes)
    )]
    OffsetBeyondDevice {
        /** The value of `offset=`. */
        offset_bytes: u64,
        /** The value of `bs=`. */
        bs: u32,
        /** The device's capacity. */
        device_bytes: u64,
    },
    /// The slice of each clone is less than a block.
    #[error(
        "verify gives each of {jobs} jobs its own part of the size, but the size has only {blocks} blocks: \
         raise size, or lower numjobs"
    )]
    SlicesBelowBlock {
        /** The value of `numjobs=`. */
        jobs: u32,
        /** Number of blocks in `size=`. */
        blocks: u64,
    },
    /// The job would never end.
    #[error("time_based needs a runtime: add runtime=SECONDS")]
    TimeWithoutRuntime,
    /// The buffers need too much memory.
    #[error(
        "buffers of bs={} × iodepth={depth} × numjobs={jobs} need {needed_bytes} bytes, but at most \
         {MAX_BUFFER_BYTES} are allowed: lower one of these options",
        short(u64::from(*bs))
    )]
    Buffers {
        /** The value of `bs=`. */
        bs: u32,
        /** The value of `iodepth=`. */
        depth: u32,
        /** The value of `numjobs=`. */
        jobs: u32,
        /** The product of the three. */
        needed_bytes: u64,
    },
    /// The device accepts no writes.
    #[error("rw={pattern} writes, but the device is read-only: use read or randread")]
    ReadOnly {
        /** The value of `rw=`. */
        pattern: &'static str,
    },
    /// The device has no cache to flush.
    #[error("fsync={fsync} needs flushes, which the device does not offer: leave fsync out")]
    NoFlush {
        /** The value of `fsync=`. */
        fsync: u32,
    },
}

/// The limits that a job must fit: the device's properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The device's capacity.
    pub size_bytes: u64,
    /// The device's logical block size.
    pub block_bytes: u32,
    /// The device is read-only.
    pub read_only: bool,
    /// The device supports flushes.
    pub flush: bool,
}

/// The part of the device that a thread works on, in blocks of `bs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub offset_bytes: u64,
    /// Number of blocks, at least one.
    pub blocks: u64,
}

impl Job {
    /// Checks what can be known without a device.
    ///
    /// # Errors
    /// [`JobError`].
    pub fn check(&self) -> Result<(), JobError> {
        let bs = self.block_bytes;
        if bs == 0 || !u64::from(bs).is_multiple_of(SECTOR_BYTES) {
            return Err(JobError::BlockInSectors { bs });
        }
        if !self.offset_bytes.is_multiple_of(u64::from(bs)) {
            return Err(JobError::Offset { offset_bytes: self.offset_bytes, bs });
        }
        if let Some(size_bytes) = self.size_bytes.filter(|&size_bytes| size_bytes < u64::from(bs)) {
            return Err(JobError::SizeBelowBlock { size_bytes, bs });
        }
        if self.time_based && self.runtime.is_none() {
            return Err(JobError::TimeWithoutRuntime);
        }
        let needed_bytes = u64::from(bs) * u64::from(self.depth) * u64::from(self.jobs);
        if needed_bytes > MAX_BUFFER_BYTES {
            return Err(JobError::Buffers { bs, depth: self.depth, jobs: self.jobs, needed_bytes });
        }
        Ok(())
    }

    /// Checks whether the job fits the device.
    ///
    /// # Errors
    /// [`JobError`].
    pub fn check_on(&self, limits: &Limits) -> Result<(), JobError> {
        self.check()?;
        let (bs, device_bytes) = (self.block_bytes, limits.block_bytes.max(1));
        if !bs.is_multiple_of(device_bytes) {
            return Err(JobError::BlockOfDevice { bs, device_bytes });
        }
        if limits.read_only && self.pattern.writes() {
            return Err(JobError::ReadOnly { pattern: self.pattern.word() });
        }
        if self.fsync > 0 && !limits.flush {
            return Err(JobError::NoFlush { fsync: self.fsync });
        }
        let left_bytes = limits.size_bytes.saturating_sub(self.offset_bytes);
        let size_bytes = self.size_bytes.unwrap_or(left_bytes);
        if size_bytes > left_bytes {
            let (offset_bytes, device_bytes) = (self.offset_bytes, limits.size_bytes);
            return Err(JobError::BeyondDevice { offset_bytes, size_bytes, device_bytes });
        }
        if left_bytes < u64::from(bs) && self.offset_bytes > 0 {
            let (offset_bytes, device_bytes) = (self.offset_bytes, limits.size_bytes);
            return Err(JobError::OffsetBeyondDevice { offset_bytes, bs, device_bytes });
        }
        if size_bytes < u64::from(bs) {
            return Err(JobError::SizeBelowBlock { size_bytes, bs });
        }
        let blocks = size_bytes / u64::from(bs);
        if self.slices() && blocks < u64::from(self.jobs) {
            return Err(JobError::SlicesBelowBlock { jobs: self.jobs, blocks });
        }
        Ok(())
    }

    /// Whether each clone needs its own part of the size, because verify would take another clone's writes for damage.
    fn slices(&self) -> bool {
        self.verify && self.pattern.writes()
    }

    /// The part of a device of `device_bytes` on which clone `clone` works. The job must have passed [`Job::check_on`].
    #[must_use]
    pub fn span(&self, clone: u32, device_bytes: u64) -> Span {
        let bs = u64::from(self.block_bytes);
        let left_bytes = device_bytes.saturating_sub(self.offset_bytes);
        let blocks = (self.size_bytes.unwrap_or(left_bytes) / bs).max(1);
        if !self.slices() {
            return Span { offset_bytes: self.offset_bytes, blocks };
        }
        let part = (blocks / u64::from(self.jobs.max(1))).max(1);
        Span { offset_bytes: self.offset_bytes + u64::from(clone) * part * bs, blocks: part }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: Limits = Limits { size_bytes: 1 << 20, block_bytes: 512, read_only: false, flush: true };

    fn refusal(job: Job, limits: Limits) -> String {
        job.check_on(&limits).unwrap_err().to_string()
    }

    #[test]
    fn job_as_it_starts_out_fits_a_small_device() {
        assert_eq!(Job::default().check_on(&DEVICE), Ok(()));
    }

    #[test]
    fn blocks_that_do_not_fit_the_device_are_named_with_its_own() {
        let job = Job { block_bytes: 1000, ..Job::default() };
        assert!(refusal(job, DEVICE).starts_with("bs=1000 is not a multiple of 512"));
        let job = Job { block_bytes: 512, ..Job::default() };
        let line = refusal(job, Limits { block_bytes: 4096, ..DEVICE });
        assert!(line.contains("bs=512") && line.contains("4096"), "{line}");
    }

    #[test]
    fn size_beyond_the_device_is_named_with_its_capacity() {
        let job = Job { size_bytes: Some(2 << 20), ..Job::default() };
        let line = refusal(job, DEVICE);
        assert!(line.contains("size=2m") && line.contains("has 1m:") && line.contains("smaller"), "{line}");
        let job = Job { offset_bytes: 2 << 20, size_bytes: None, ..Job::default() };
        assert!(refusal(job, DEVICE).contains("offset=2m leaves less than one block"));
    }

    #[test]
    fn writes_to_a_read_only_device_are_refused() {
        let pattern = Pattern { order: Order::Random, mix: Mix::Both };
        let line = refusal(Job { pattern, ..Job::default() }, Limits { read_only: true, ..DEVICE });
        assert!(line.contains("rw=randrw") && line.contains("read-only"), "{line}");
    }

    #[test]
    fn buffers_beyond_the_limit_are_refused_with_both_figures() {
        let job = Job { block_bytes: 1 << 20, depth: 4096, jobs: 4, ..Job::default() };
        let line = refusal(job, DEVICE);
        assert!(line.contains("17179869184") && line.contains("8589934592"), "{line}");
    }

    #[test]
    fn clones_share_the_size_unless_they_verify_what_they_write() {
        let read = Job { jobs: 4, ..Job::default() };
        assert_eq!(read.span(3, 1 << 20), Span { offset_bytes: 0, blocks: 256 });
        let pattern = Pattern { order: Order::Random, mix: Mix::Write };
        let write = Job { jobs: 4, verify: true, pattern, ..Job::default() };
        assert_eq!(write.span(3, 1 << 20), Span { offset_bytes: 192 * 4096, blocks: 64 });
    }
}
