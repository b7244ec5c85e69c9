//! Error codes, and the text of a thread's last error.
//!
//! - A code tells a program what to do; the text tells people what happened, with values and limits.
//! - The text is kept per thread, not in a buffer of the caller. Calls therefore need no parameter for the error text,
//!   and calls without a handle (connecting) can report a text too.
//! - The text is cut to [`TEXT_BYTES`], so that no error allocates: a full queue is an error on the request path.

use std::cell::RefCell;
use std::error::Error;
use std::ffi::c_char;
use std::fmt::{self, Write};

use blk_driver::{BlockingError, ConnectError, MemoryError, PushError, QueueError, RequestError};

/// The result of a function or of a request. Values below 0 are errors.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum bareblk_code {
    /// Success.
    BAREBLK_OK = 0,
    /// Only in completions: the device no longer uses the buffers of a request that had ended with BAREBLK_ERR_DEADLINE
    /// or BAREBLK_ERR_CANCELLED. The request does not end a second time.
    BAREBLK_RETURNED = 1,
    /// An argument is invalid: NULL, misaligned, out of range, or with undefined flags. Or the request is one that no
    /// device accepts: its data is not a multiple of 512 bytes, a buffer is empty, or there are too many buffers or
    /// segments.
    BAREBLK_ERR_INVALID = -1,
    /// The queue is full. Take completions, then push the request again.
    BAREBLK_ERR_FULL = -2,
    /// A buffer is neither in the pool nor in registered memory. For bareblk_unregister: no memory is registered at
    /// this address.
    BAREBLK_ERR_NOT_REGISTERED = -3,
    /// The device does not offer this type of request (bareblk_info says so).
    BAREBLK_ERR_NOT_OFFERED = -4,
    /// The device is read-only.
    BAREBLK_ERR_READ_ONLY = -5,
    /// Connecting to the back-end, or negotiating with it, failed.
    BAREBLK_ERR_CONNECT = -6,
    /// The pool has no contiguous free memory of this size; the kernel or the back-end refused the memory; or the
    /// back-end disconnected before it accepted the memory.
    BAREBLK_ERR_MEMORY = -7,
    /// The back-end disconnected, and the driver no longer tries to reconnect. The queue accepts no more requests.
    BAREBLK_ERR_DISCONNECTED = -8,
    /// The device broke the rules of the virtqueue. The queue accepts no more requests.
    BAREBLK_ERR_DEVICE = -9,
    /// A system call failed.
    BAREBLK_ERR_SYSTEM = -10,
    /// A blocking function was called on a queue with requests in flight.
    BAREBLK_ERR_BUSY = -11,
    /// No request in flight has this token.
    BAREBLK_ERR_NOT_FOUND = -12,
    /// The device reported an I/O error (VIRTIO_BLK_S_IOERR).
    BAREBLK_ERR_IO = -20,
    /// The device does not support the request (VIRTIO_BLK_S_UNSUPP).
    BAREBLK_ERR_UNSUPPORTED = -21,
    /// The device returned a status byte that virtio-blk does not define; bareblk_completion.detail has the byte.
    BAREBLK_ERR_BAD_STATUS = -22,
    /// The device reported success, but stored fewer bytes than the read requested (only after
    /// bareblk_queue_refuse_short_reads).
    BAREBLK_ERR_SHORT_READ = -23,
    /// The device did not complete the request before its deadline. It may still use the buffers.
    BAREBLK_ERR_DEADLINE = -24,
    /// The program cancelled the request. The device may still use the buffers.
    BAREBLK_ERR_CANCELLED = -25,
    /// The back-end disconnected, or the device broke the rules of the virtqueue. It is unknown whether the device
    /// carried out the request.
    BAREBLK_ERR_LOST = -26,
    /// A bug in this library; standard error has a description. If the call was on a queue, all later calls on it fail
    /// with this code, and only bareblk_queue_free remains.
    BAREBLK_ERR_BUG = -99,
}

impl bareblk_code {
    /// How a request ended.
    pub(crate) fn of_request(result: Result<(), RequestError>) -> Self {
        match result {
            Ok(()) => Self::BAREBLK_OK,
            Err(RequestError::Returned) => Self::BAREBLK_RETURNED,
            Err(RequestError::IoErr) => Self::BAREBLK_ERR_IO,
            Err(RequestError::Unsupported) => Self::BAREBLK_ERR_UNSUPPORTED,
            Err(RequestError::BadStatus { .. }) => Self::BAREBLK_ERR_BAD_STATUS,
            Err(RequestError::ShortRead { .. }) => Self::BAREBLK_ERR_SHORT_READ,
            Err(RequestError::DeadlinePassed) => Self::BAREBLK_ERR_DEADLINE,
            Err(RequestError::Cancelled) => Self::BAREBLK_ERR_CANCELLED,
            Err(RequestError::Lost) => Self::BAREBLK_ERR_LOST,
        }
    }

    fn of_queue(error: &QueueError) -> Self {
        match error {
            QueueError::Device { .. } => Self::BAREBLK_ERR_DEVICE,
            QueueError::Disconnected { .. } => Self::BAREBLK_ERR_DISCONNECTED,
            QueueError::Wait { .. } => Self::BAREBLK_ERR_SYSTEM,
        }
    }

    fn of_push(error: &PushError) -> Self {
        match error {
            PushError::Full { .. } => Self::BAREBLK_ERR_FULL,
            PushError::NotRegistered { .. } => Self::BAREBLK_ERR_NOT_REGISTERED,
            PushError::NotOffered { .. } => Self::BAREBLK_ERR_NOT_OFFERED,
            PushError::ReadOnly => Self::BAREBLK_ERR_READ_ONLY,
            PushError::Dead(error) => Self::of_queue(error),
            PushError::Ring(_)
            | PushError::EmptyBuffer { .. }
            | PushError::TooManyBuffers { .. }
            | PushError::DataLength { .. }
            | PushError::IdLength { .. }
            | PushError::SegmentCount { .. }
            | PushError::SegmentLength { .. } => Self::BAREBLK_ERR_INVALID,
        }
    }

    fn of_memory(error: &MemoryError) -> Self {
        match error {
            MemoryError::NotRegistered { .. } => Self::BAREBLK_ERR_NOT_REGISTERED,
            MemoryError::Unaligned { .. } => Self::BAREBLK_ERR_INVALID,
            _ => Self::BAREBLK_ERR_MEMORY,
        }
    }

    fn of_blocking(error: &BlockingError) -> Self {
        match error {
            BlockingError::Push(error) => Self::of_push(error),
            BlockingError::Queue(error) => Self::of_queue(error),
            BlockingError::Request(error) => Self::of_request(Err(*error)),
            BlockingError::Memory(error) => Self::of_memory(error),
            BlockingError::Busy { .. } => Self::BAREBLK_ERR_BUSY,
        }
    }

    const ALL: [Self; 22] = [
        Self::BAREBLK_OK,
        Self::BAREBLK_RETURNED,
        Self::BAREBLK_ERR_INVALID,
        Self::BAREBLK_ERR_FULL,
        Self::BAREBLK_ERR_NOT_REGISTERED,
        Self::BAREBLK_ERR_NOT_OFFERED,
        Self::BAREBLK_ERR_READ_ONLY,
        Self::BAREBLK_ERR_CONNECT,
        Self::BAREBLK_ERR_MEMORY,
        Self::BAREBLK_ERR_DISCONNECTED,
        Self::BAREBLK_ERR_DEVICE,
        Self::BAREBLK_ERR_SYSTEM,
        Self::BAREBLK_ERR_BUSY,
        Self::BAREBLK_ERR_NOT_FOUND,
        Self::BAREBLK_ERR_IO,
        Self::BAREBLK_ERR_UNSUPPORTED,
        Self::BAREBLK_ERR_BAD_STATUS,
        Self::BAREBLK_ERR_SHORT_READ,
        Self::BAREBLK_ERR_DEADLINE,
        Self::BAREBLK_ERR_CANCELLED,
        Self::BAREBLK_ERR_LOST,
        Self::BAREBLK_ERR_BUG,
    ];

    fn text(self) -> &'static std::ffi::CStr {
        match self {
            Self::BAREBLK_OK => c"success",
            Self::BAREBLK_RETURNED => c"the device released the buffers of a request that had already ended",
            Self::BAREBLK_ERR_INVALID => c"an argument is invalid",
            Self::BAREBLK_ERR_FULL => c"the queue is full",
            Self::BAREBLK_ERR_NOT_REGISTERED => c"the memory is not registered",
            Self::BAREBLK_ERR_NOT_OFFERED => c"the device does not offer the request",
            Self::BAREBLK_ERR_READ_ONLY => c"the device is read-only",
            Self::BAREBLK_ERR_CONNECT => c"the connection could not be set up",
            Self::BAREBLK_ERR_MEMORY => c"memory could not be allocated or registered",
            Self::BAREBLK_ERR_DISCONNECTED => c"the back-end has disconnected",
            Self::BAREBLK_ERR_DEVICE => c"the device broke the ring",
            Self::BAREBLK_ERR_SYSTEM => c"a system call failed",
            Self::BAREBLK_ERR_BUSY => c"the queue has requests in flight",
            Self::BAREBLK_ERR_NOT_FOUND => c"no request in flight has the token",
            Self::BAREBLK_ERR_IO => c"the device reports an I/O error",
            Self::BAREBLK_ERR_UNSUPPORTED => c"the device does not support the request",
            Self::BAREBLK_ERR_BAD_STATUS => {
                c"the device answered with a status that virtio-blk does not define"
            }
            Self::BAREBLK_ERR_SHORT_READ => c"the device stored fewer bytes than the read requested",
            Self::BAREBLK_ERR_DEADLINE => c"the device did not answer before the deadline",
            Self::BAREBLK_ERR_CANCELLED => c"the request was cancelled",
            Self::BAREBLK_ERR_LOST => {
                c"the device is no longer available; it is unknown whether it carried out the request"
            }
            Self::BAREBLK_ERR_BUG => c"a bug in the driver library",
        }
    }
}

/// Returns a short description of a bareblk_code, for example of bareblk_completion.status. The result is never NULL,
/// not even for unknown codes. The string is static. After a call that failed, bareblk_last_error has more detail.
#[unsafe(no_mangle)]
pub extern "C" fn bareblk_code_text(code: i32) -> *const c_char {
    let known = bareblk_code::ALL.into_iter().find(|known| *known as i32 == code);
    known.map_or(c"not a code of this library", bareblk_code::text).as_ptr()
}

/// Why a call returns an error.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error("{argument} is NULL")]
    Null { argument: &'static str },
    #[error("{argument} is {value}, but it must be from {min} to {max}")]
    OutOfRange { argument: &'static str, value: i128, min: i128, max: i128 },
    #[error("{argument} is not aligned to {align_bytes} bytes")]
    Misaligned { argument: &'static str, align_bytes: usize },
    #[error("{argument} {value:#x} has unknown bits; the known bits are {known:#x}")]
    UnknownFlags { argument: &'static str, value: u32, known: u32 },
    #[error(
        "byte {at_bytes} of {argument} is not 0, but this library knows only its first {known_bytes} bytes"
    )]
    UnknownFields { argument: &'static str, at_bytes: usize, known_bytes: usize },
    #[error(
        "{count} bytes from byte {offset_bytes} on are not entirely inside a buffer of {len_bytes} bytes"
    )]
    OutsideBuffer { offset_bytes: u32, count: usize, len_bytes: u32 },
    #[error("no request in flight has the token {token}")]
    NoSuchToken { token: u64 },
    #[error("file descriptor {fd} cannot be duplicated")]
    Descriptor { fd: i32, source: std::io::Error },
    #[error("the driver library has a bug: a call panicked; standard error has a description")]
    Panic,
    #[error(
        "an earlier call on this queue met a bug in the driver library, so the queue accepts no more calls"
    )]
    Poisoned,
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Push(#[from] PushError),
    #[error(transparent)]
    Queue(#[from] QueueError),
    #[error(transparent)]
    Blocking(#[from] BlockingError),
}

impl Failure {
    /// Stores the text for this thread; returns the code.
    pub(crate) fn report(&self) -> i32 {
        LAST.with_borrow_mut(|text| text.set(self));
        self.code() as i32
    }

    fn code(&self) -> bareblk_code {
        match self {
            Self::Null { .. }
            | Self::OutOfRange { .. }
            | Self::Misaligned { .. }
            | Self::UnknownFlags { .. }
            | Self::UnknownFields { .. }
            | Self::OutsideBuffer { .. } => bareblk_code::BAREBLK_ERR_INVALID,
            Self::NoSuchToken { .. } => bareblk_code::BAREBLK_ERR_NOT_FOUND,
            Self::Descriptor { .. } => bareblk_code::BAREBLK_ERR_SYSTEM,
            Self::Panic | Self::Poisoned => bareblk_code::BAREBLK_ERR_BUG,
            Self::Connect(_) => bareblk_code::BAREBLK_ERR_CONNECT,
            Self::Memory(error) => bareblk_code::of_memory(error),
            Self::Push(error) => bareblk_code::of_push(error),
            Self::Queue(error) => bareblk_code::of_queue(error),
            Self::Blocking(error) => bareblk_code::of_blocking(error),
        }
    }
}

/// Limit of the text's length, including its final NUL.
const TEXT_BYTES: usize = 512;

thread_local! {
    /// Has no destructor, so it works until the thread has run its last code.
    static LAST: RefCell<Text<TEXT_BYTES>> = const { RefCell::new(Text::new()) };
}

/// Returns one line of text about this thread's last call that failed; an empty string if none has failed. Calls that
/// succeed do not change the text. The string is UTF-8 of at most 511 bytes with a NUL at its end, and belongs to the
/// library: it is valid until the next failing call of the same thread, or until the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn bareblk_last_error() -> *const c_char {
    // The array is the first field of a `repr(C)` struct.
    LAST.with(|text| text.as_ptr()).cast_const().cast()
}

/// A text of limited length that ends with NUL.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Text<const N: usize> {
    bytes: [u8; N],
    /// Without the NUL, so it is smaller than `N`.
    len: usize,
}

impl<const N: usize> Text<N> {
    pub(crate) const fn new() -> Self {
        Self { bytes: [0; N], len: 0 }
    }

    /// `error` and its causes on one line, as far as it fits.
    fn set(&mut self, error: &dyn Error) {
        self.len = 0;
        self.append(format_args!("{error}"));
        let mut source = error.source();
        while let Some(cause) = source {
            self.append(format_args!(": {cause}"));
            source = cause.source();
        }
    }

    /// Appends as much of `text` as fits.
    pub(crate) fn append(&mut self, text: fmt::Arguments<'_>) {
        // The only possible error is a full buffer.
        let _ = self.write_fmt(text);
        self.bytes[self.len] = 0;
    }

    pub(crate) fn bytes(&self) -> &[u8; N] {
        &self.bytes
    }
}

impl<const N: usize> Write for Text<N> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = N - 1 - self.len;
        let count = fitting(text, room);
        for (to, &from) in self.bytes[self.len..].iter_mut().zip(&text.as_bytes()[..count]) {
            // A NUL would end the text for C, and a line feed would look like another message.
            *to = if from < b' ' { b' ' } else { from };
        }
        self.len += count;
        if count < text.len() { Err(fmt::Error) } else { Ok(()) }
    }
}

/// The largest number of bytes, at most `limit`, after which `text` can be cut without splitting a character.
fn fitting(text: &str, limit: usize) -> usize {
    if text.len() <= limit {
        return text.len();
    }
    (0..=limit).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown<const N: usize>(text: &Text<N>) -> &str {
        std::str::from_utf8(&text.bytes[..text.len]).unwrap()
    }

    #[test]
    fn text_that_does_not_fit_is_cut_before_a_character_and_ends_with_nul() {
        let mut text = Text::<8>::new();
        text.append(format_args!("sechs ä"));
        assert_eq!((shown(&text), text.bytes), ("sechs ", *b"sechs \0\0"));
    }

    #[test]
    fn line_feeds_and_nuls_become_spaces() {
        let mut text = Text::<8>::new();
        text.append(format_args!("a\nb\0c"));
        assert_eq!(shown(&text), "a b c");
    }

    #[test]
    fn shorter_error_after_a_longer_one_leaves_nothing_of_it() {
        let mut text = Text::<512>::new();
        text.set(&Failure::NoSuchToken { token: u64::MAX });
        text.set(&Failure::Null { argument: "queue" });
        assert_eq!(shown(&text), "queue is NULL");
        assert_eq!(text.bytes[text.len], 0);
    }

    #[test]
    fn causes_follow_the_error() {
        let source = std::io::Error::from_raw_os_error(9);
        let mut text = Text::<512>::new();
        text.set(&Failure::Descriptor { fd: 77, source });
        assert_eq!(shown(&text), "file descriptor 77 cannot be duplicated: Bad file descriptor (os error 9)");
    }

    #[test]
    fn every_code_has_a_text_of_its_own() {
        let mut texts: Vec<_> = bareblk_code::ALL.into_iter().map(bareblk_code::text).collect();
        texts.sort_unstable();
        texts.dedup();
        assert_eq!(texts.len(), bareblk_code::ALL.len());
    }
}
