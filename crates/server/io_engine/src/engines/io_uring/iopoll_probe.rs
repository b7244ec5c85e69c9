//! Tests whether the kernel can poll for the completions of a file.
//!
//! `O_DIRECT? → does its device have poll queues? → a polled read of its first block, on a ring of its own`
//!
//! The test refuses a device without poll queues. Older kernels accept polled calls to such a device but complete them
//! by interrupt, so polling would only waste processor time.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::time::{Duration, Instant};

use disk_image::Alignment;
use io_uring::types::Fd;
use io_uring::{EnterFlags, IoUring, opcode};
use rustix::fs::{OFlags, fcntl_getfl, major, minor};
use rustix::io::Errno;

use crate::core::bounce::Bounce;
use crate::engine::{FileId, FileSpec};

/// Time limit of the test read. A slower device is not polled.
const PATIENCE: Duration = Duration::from_secs(1);
/// The smallest read that every block device accepts.
const LEAST_BYTES: u32 = 512;

/// # Errors
/// Why the file cannot be polled.
pub(super) fn check(spec: &FileSpec) -> Result<(), String> {
    let file = spec.file().map_err(|error| error.to_string())?;
    let flags = fcntl_getfl(file).map_err(|errno| errno.to_string())?;
    if !flags.contains(OFlags::DIRECT) {
        return Err("the image is open through the page cache (without O_DIRECT)".to_owned());
    }
    if device_polls(file) == Some(false) {
        return Err("the image's device has no poll queues (queue/io_poll in sysfs is 0)".to_owned());
    }
    polled_read(file, spec.alignment)
}

/// Whether sysfs reports poll queues for the device of `file`; `None` without an entry, as for a file system over
/// several devices.
fn device_polls(file: &File) -> Option<bool> {
    let metadata = file.metadata().ok()?;
    let is_device = metadata.file_type().is_block_device();
    let device = if is_device { metadata.rdev() } else { metadata.dev() };
    let folder = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    // A partition uses the queue of its disk, one directory up.
    let attribute = ["queue/io_poll", "../queue/io_poll"]
        .iter()
        .find_map(|name| std::fs::read_to_string(format!("{folder}/{name}")).ok())?;
    Some(attribute.trim() != "0")
}

fn polled_read(file: &File, alignment: Alignment) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot create a ring for a test read: {error}");
    let mut ring: IoUring = IoUring::builder().setup_iopoll().build(1).map_err(failed)?;
    let mut bounce = Bounce::default();
    bounce.shares.attach(FileId(0));
    let buffer = bounce.take(FileId(0)).ok_or("no buffer")?;
    let len_bytes = alignment.offset_bytes.max(LEAST_BYTES);
    let read = opcode::Read::new(Fd(file.as_raw_fd()), bounce.base(buffer), len_bytes).build();
    // SAFETY: 1. the buffer is longer than a block, and leaked below if the kernel does not release it; 2. the file
    // stays open while the kernel looks it up at submission.
    unsafe { ring.submission().push(&read) }.map_err(|error| error.to_string())?;
    ring.submit().map_err(failed)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(cqe) = ring.completion().next() {
            return judge(cqe.result());
        }
        if Instant::now() > deadline {
            std::mem::forget(bounce);
            return Err(format!("a polled read of the image did not end within {PATIENCE:?}"));
        }
        // SAFETY: 1. nothing is submitted, and there is no argument.
        let _ = unsafe { ring.submitter().enter::<libc::sigset_t>(0, 0, EnterFlags::GETEVENTS.bits(), None) };
    }
}

/// Judges the result of the test read. Only a refusal counts: other failures do not show whether the file can be
/// polled, and the first request reports them.
fn judge(result: i32) -> Result<(), String> {
    match result {
        refused if refused == -libc::EOPNOTSUPP || refused == -libc::EINVAL => {
            Err(format!("a polled read of the image was refused: {}", Errno::from_raw_os_error(-refused)))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use disk_image::Alignment;

    use super::*;

    fn reason(file: File) -> String {
        check(&FileSpec::of_file(Arc::new(file), Alignment::BUFFERED)).unwrap_err()
    }

    #[test]
    fn buffered_file_is_not_polled_and_the_reason_says_so() {
        assert!(reason(tempfile::tempfile().unwrap()).contains("O_DIRECT"));
    }

    #[test]
    fn file_on_tmpfs_is_not_polled() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        // tmpfs has O_DIRECT since Linux 6.6. Without O_DIRECT, the check fails for that reason.
        let has_direct = rustix::fs::fcntl_setfl(&file, OFlags::DIRECT).is_ok();
        let why = reason(file);
        assert!(why.contains(if has_direct { "refused" } else { "O_DIRECT" }), "{why}");
    }

    #[test]
    fn only_refusals_of_polling_count_against_a_file() {
        assert!(judge(-libc::EOPNOTSUPP).is_err());
        assert!([0, 4096, -libc::EIO, -libc::EAGAIN].iter().all(|&result| judge(result).is_ok()));
    }
}
