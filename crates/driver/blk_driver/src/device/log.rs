//! The memory of the in-flight log: the driver gets it from the back-end once, keeps it, and passes it to the next
//! back-end.
//!
//! `GET_INFLIGHT_FD → checked → kept (a descriptor) … the back-end dies … SET_INFLIGHT_FD → its successor
//! continues`
//!
//! - The driver never maps the log: only back-ends read the contents and decide whether to trust them.
//! - A log belongs to the rings that were started with it. Other rings get another log.
//!
//! Spec: vhost-user, "Inflight I/O tracking".

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::error::ConnectError;

/// Two 64-bit and two 16-bit values (vhost-user, "Inflight description").
pub(super) const FIELDS_BYTES: usize = 20;
/// The size with the padding that C adds and that some back-ends send.
pub(super) const PADDED_BYTES: usize = 24;

/// The requested number of queues and of descriptors per queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub queues: u16,
    pub queue_size: u16,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Log {
    fd: OwnedFd,
    /// The description received with the log; it is sent back unchanged.
    description: [u8; PADDED_BYTES],
}

impl Wanted {
    /// The body of GET_INFLIGHT_FD.
    pub(super) fn description(self) -> [u8; PADDED_BYTES] {
        let mut body = [0; PADDED_BYTES];
        body[16..18].copy_from_slice(&self.queues.to_ne_bytes());
        body[18..20].copy_from_slice(&self.queue_size.to_ne_bytes());
        body
    }

    /// Checks the back-end's answer. `None` if the length is 0: the back-end has no log (QEMU interprets it the same
    /// way).
    pub(super) fn log(
        self,
        description: [u8; PADDED_BYTES],
        fd: Option<OwnedFd>,
    ) -> Result<Option<Log>, ConnectError> {
        let u64_at = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| description[at + byte]));
        let u16_at = |at: usize| u16::from_ne_bytes([description[at], description[at + 1]]);
        let (len_bytes, offset_bytes) = (u64_at(0), u64_at(8));
        if len_bytes == 0 {
            return Ok(None);
        }
        let counts =
            [("queues", u16_at(16), self.queues), ("descriptors per queue", u16_at(18), self.queue_size)];
        if let Some(&(what, is, wanted)) = counts.iter().find(|(_, is, wanted)| is != wanted) {
            return Err(ConnectError::LogOfOthers { what, is, wanted });
        }
        let fd = fd.ok_or(ConnectError::LogWithoutMemory { len_bytes })?;
        let file_bytes = file_bytes(&fd)?;
        if offset_bytes.checked_add(len_bytes).is_none_or(|end| end > file_bytes) {
            return Err(ConnectError::LogOutside { offset_bytes, len_bytes, file_bytes });
        }
        Ok(Some(Log { fd, description }))
    }
}

fn file_bytes(fd: &OwnedFd) -> Result<u64, ConnectError> {
    let stat = rustix::fs::fstat(fd).map_err(|errno| ConnectError::Resources(errno.into()))?;
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

impl Log {
    /// The body of SET_INFLIGHT_FD.
    pub(super) fn description(&self) -> &[u8] {
        &self.description
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    const WANTED: Wanted = Wanted { queues: 2, queue_size: 64 };

    fn memory(bytes: u64) -> OwnedFd {
        let fd = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fd
    }

    fn answer(len_bytes: u64, offset_bytes: u64, wanted: Wanted) -> [u8; PADDED_BYTES] {
        let mut answer = wanted.description();
        answer[..8].copy_from_slice(&len_bytes.to_ne_bytes());
        answer[8..16].copy_from_slice(&offset_bytes.to_ne_bytes());
        answer
    }

    fn refusal(len_bytes: u64, offset_bytes: u64, wanted: Wanted) -> String {
        WANTED.log(answer(len_bytes, offset_bytes, wanted), Some(memory(8192))).unwrap_err().to_string()
    }

    #[test]
    fn log_goes_back_as_it_came() {
        let came = answer(4096, 4096, WANTED);
        let log = WANTED.log(came, Some(memory(8192))).unwrap().unwrap();
        assert_eq!(log.description(), came);
    }

    #[test]
    fn log_of_no_bytes_is_none() {
        assert!(WANTED.log(answer(0, 0, WANTED), Some(memory(8192))).unwrap().is_none());
        assert!(WANTED.log(answer(0, 0, WANTED), None).unwrap().is_none());
    }

    #[test]
    fn log_that_its_memory_does_not_hold_is_refused_with_all_three_sizes() {
        let line = refusal(4096, 8192, WANTED);
        assert!(
            line.contains("4096") && line.contains("from byte 8192") && line.contains("has 8192"),
            "{line}"
        );
        refusal(u64::MAX, 8, WANTED);
        refusal(8193, 0, WANTED);
        refusal(8, u64::MAX, WANTED);
    }

    #[test]
    fn log_for_other_queues_than_were_asked_for_is_refused_with_both_numbers() {
        let line = refusal(4096, 0, Wanted { queues: 3, ..WANTED });
        assert!(line.contains("3 queues") && line.contains("requested one for 2"), "{line}");
        let line = refusal(4096, 0, Wanted { queue_size: 65535, ..WANTED });
        assert!(line.contains("65535 descriptors per queue"), "{line}");
    }

    #[test]
    fn log_without_memory_is_refused() {
        let line = WANTED.log(answer(4096, 0, WANTED), None).unwrap_err().to_string();
        assert!(line.contains("without a file descriptor"), "{line}");
    }
}
