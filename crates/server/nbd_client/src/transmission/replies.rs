//! Parses the stream of replies, byte by byte. No I/O, no allocation.
//!
//! `bytes → header → Step: payload of a read (the caller moves it), zeroes, or the end of a request`
//!
//! - Each number is checked against the request that it belongs to, so a payload never goes outside the request's
//!   range.
//! - After an error the stream has no meaning any more: the caller ends the connection.
//!
//! Source: proto.md, "Simple reply message" and "Structured reply chunk message".

use crate::protocol::{
    ESHUTDOWN, REPLY_ERROR_BIT, REPLY_FLAG_DONE, REPLY_NONE, REPLY_OFFSET_DATA, REPLY_OFFSET_HOLE,
    SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, u16_at, u32_at, u64_at,
};
use crate::transmission::requests::coverage::{MAX_PARTS, Refused};
use crate::transmission::requests::{Command, Requests};

const SIMPLE_BYTES: usize = 16;
const STRUCTURED_BYTES: usize = 20;
/// A structured header and the offset and length of a hole: the longest header.
const LONGEST_HEADER: usize = STRUCTURED_BYTES + 12;
/// Maximum length of an error chunk: a message has at most 4096 bytes.
const MAX_ERROR_BYTES: u32 = 4096 + 14;
/// Maximum number of error chunks of one request.
const MAX_ERROR_CHUNKS: u8 = 8;

/// How the server broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyError {
    /// Not the start of a reply.
    #[error("a reply begins with {magic:#010x}")]
    Magic {
        /** The first four bytes. */
        magic: u32,
    },
    /// A structured reply although the server did not agree to them, or a simple reply with data although it did.
    #[error("a reply has the wrong form")]
    Form,
    /// No request that was sent has this handle.
    #[error("a reply has handle {handle:#x}, which no request has")]
    Handle {
        /** The handle. */
        handle: u64,
    },
    /// A chunk of this type cannot belong to this request.
    #[error("a chunk of type {kind} answers a request that is no read, or the type is unknown")]
    Type {
        /** The type. */
        kind: u16,
    },
    /// A chunk's length does not fit its type.
    #[error("a chunk of type {kind} has {length} bytes")]
    Length {
        /** The type. */
        kind: u16,
        /** The length. */
        length: u32,
    },
    /// A chunk lies outside its request.
    #[error("a chunk covers {length} bytes at {offset}, outside its request or twice")]
    Range {
        /** The chunk's offset in the export. */
        offset: u64,
        /** The chunk's length. */
        length: u32,
    },
    /// The chunks of a read have too many gaps between them.
    #[error("the data of a read arrives in more than {MAX_PARTS} separate parts")]
    Scattered,
    /// The end of a read whose data has not all arrived.
    #[error("a read of {wanted} bytes ended after {covered} bytes")]
    Short {
        /** The length of the read. */
        wanted: u32,
        /** What has arrived. */
        covered: u32,
    },
    /// A request has too many error chunks.
    #[error("a request has more than {MAX_ERROR_CHUNKS} errors")]
    TooManyErrors,
}

/// What the caller has to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing until more bytes arrive.
    NeedsBytes,
    /// The next `len_bytes` of the stream belong into the request's buffers at `at_bytes`. The caller takes them from the
    /// stream and calls [`Replies::took`].
    Payload {
        /** The request. */
        slot: u32,
        /** Where in its buffers. */
        at_bytes: u32,
        /** How much. */
        len_bytes: u32,
    },
    /// This part of the request's buffers is zeroes.
    Zeroes {
        /** The request. */
        slot: u32,
        /** Where in its buffers. */
        at_bytes: u32,
        /** How much. */
        len_bytes: u32,
    },
    /// The request has ended. `error`: 0, or the protocol's error number.
    Done {
        /** The request. */
        slot: u32,
        /** 0, or the protocol's error number. */
        error: u32,
    },
    /// The server is about to end, and has not carried out a request.
    ShuttingDown,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// Collecting a header.
    Header,
    /// A read's data is next in the stream.
    Payload { slot: u32, at_bytes: u32, left_bytes: u32, last: bool },
    /// Bytes that mean nothing to this client are next.
    Skip { slot: u32, left_bytes: u32, last: bool },
    /// The request ends with the next call.
    Ending { slot: u32 },
}

/// The parser of one connection.
#[derive(Debug)]
pub struct Replies {
    structured: bool,
    header: [u8; LONGEST_HEADER],
    filled: usize,
    state: State,
}

impl Replies {
    /// `structured`: what was negotiated.
    #[must_use]
    pub fn new(structured: bool) -> Self {
        Self { structured, header: [0; LONGEST_HEADER], filled: 0, state: State::Header }
    }

    /// Takes bytes from the front of `input` up to the next step, and returns their number with the step. After
    /// [`Step::Payload`] the caller moves the payload itself; otherwise it continues with the rest of `input`.
    ///
    /// # Errors
    /// [`ReplyError`]; the connection must end.
    #[inline]
    pub fn step(&mut self, requests: &mut Requests, input: &[u8]) -> Result<(usize, Step), ReplyError> {
        let mut taken = 0;
        loop {
            match self.state {
                State::Payload { slot, at_bytes, left_bytes, .. } if left_bytes > 0 => {
                    return Ok((taken, Step::Payload { slot, at_bytes, len_bytes: left_bytes }));
                }
                State::Payload { slot, last, .. } => self.chunk_ended(slot, last),
                State::Skip { slot, left_bytes, last } => {
                    let skipped = (input.len() - taken).min(left_bytes as usize);
                    taken += skipped;
                    #[allow(clippy::cast_possible_truncation)] // at most `left_bytes`
                    let left_bytes = left_bytes - skipped as u32;
                    if left_bytes > 0 {
                        self.state = State::Skip { slot, left_bytes, last };
                        return Ok((taken, Step::NeedsBytes));
                    }
                    self.chunk_ended(slot, last);
                }
                State::Ending { slot } => {
                    self.state = State::Header;
                    return Ok((taken, end(requests, slot)?));
                }
                State::Header => {
                    let Some(rest) = input.get(taken..).filter(|rest| !rest.is_empty()) else {
                        return Ok((taken, Step::NeedsBytes));
                    };
                    taken += self.collect(rest);
                    if let Some(step) = self.on_header(requests)? {
                        return Ok((taken, step));
                    }
                }
            }
        }
    }

    /// Records that the caller has moved this many bytes of the payload.
    #[inline]
    pub fn took(&mut self, bytes: u32) {
        if let State::Payload { at_bytes, left_bytes, .. } = &mut self.state {
            *at_bytes += bytes;
            *left_bytes = left_bytes.saturating_sub(bytes);
        }
    }

    fn chunk_ended(&mut self, slot: u32, last: bool) {
        self.state = if last { State::Ending { slot } } else { State::Header };
    }

    /// Copies bytes of the header; returns their number.
    #[inline]
    fn collect(&mut self, input: &[u8]) -> usize {
        let wanted = self.header_bytes().saturating_sub(self.filled).min(input.len());
        self.header[self.filled..self.filled + wanted].copy_from_slice(&input[..wanted]);
        self.filled += wanted;
        wanted
    }

    /// Length of the header, as far as it is known from the bytes that have arrived.
    #[inline]
    fn header_bytes(&self) -> usize {
        if self.filled < 4 {
            return 4;
        }
        if u32_at(&self.header, 0) == SIMPLE_REPLY_MAGIC {
            return SIMPLE_BYTES;
        }
        if self.filled < STRUCTURED_BYTES {
            return STRUCTURED_BYTES;
        }
        let more = match u16_at(&self.header, 6) {
            REPLY_OFFSET_DATA => 8,
            REPLY_OFFSET_HOLE => 12,
            kind if kind & REPLY_ERROR_BIT != 0 => 4,
            _ => 0,
        };
        // A chunk that is too short for its header is refused in `on_chunk`.
        STRUCTURED_BYTES + more.min(u32_at(&self.header, 16) as usize)
    }

    /// Handles the header if it is complete.
    #[inline]
    fn on_header(&mut self, requests: &mut Requests) -> Result<Option<Step>, ReplyError> {
        if self.filled >= 4 {
            let magic = u32_at(&self.header, 0);
            match magic {
                SIMPLE_REPLY_MAGIC => {}
                STRUCTURED_REPLY_MAGIC if self.structured => {}
                STRUCTURED_REPLY_MAGIC => return Err(ReplyError::Form),
                magic => return Err(ReplyError::Magic { magic }),
            }
        }
        if self.filled < self.header_bytes() {
            return Ok(None);
        }
        self.filled = 0;
        if u32_at(&self.header, 0) == SIMPLE_REPLY_MAGIC {
            self.on_simple(requests)
        } else {
            self.on_chunk(requests)
        }
    }

    #[inline]
    fn on_simple(&mut self, requests: &mut Requests) -> Result<Option<Step>, ReplyError> {
        let (error, handle) = (u32_at(&self.header, 4), u64_at(&self.header, 8));
        let (slot, request, progress) = requests.find(handle).ok_or(ReplyError::Handle { handle })?;
        if error == ESHUTDOWN {
            return Ok(Some(Step::ShuttingDown));
        }
        progress.error = error;
        if request.command == Command::Read && error == 0 {
            if self.structured {
                return Err(ReplyError::Form);
            }
            progress.covered.add(0, request.len_bytes).map_err(|_| ReplyError::Form)?;
            self.state = State::Payload { slot, at_bytes: 0, left_bytes: request.len_bytes, last: true };
        } else {
            self.state = State::Ending { slot };
        }
        Ok(None)
    }

    #[inline]
    fn on_chunk(&mut self, requests: &mut Requests) -> Result<Option<Step>, ReplyError> {
        let (flags, kind, handle, length) = (
            u16_at(&self.header, 4),
            u16_at(&self.header, 6),
            u64_at(&self.header, 8),
            u32_at(&self.header, 16),
        );
        let last = flags & REPLY_FLAG_DONE != 0;
        let (slot, request, progress) = requests.find(handle).ok_or(ReplyError::Handle { handle })?;
        if kind & REPLY_ERROR_BIT != 0 {
            return self.on_error_chunk(requests, handle);
        }
        let wrong_length = ReplyError::Length { kind, length };
        let is_read = request.command == Command::Read;
        match kind {
            REPLY_NONE if length != 0 || !last => Err(wrong_length),
            REPLY_NONE => {
                self.state = State::Ending { slot };
                Ok(None)
            }
            REPLY_OFFSET_DATA | REPLY_OFFSET_HOLE if !is_read => Err(ReplyError::Type { kind }),
            REPLY_OFFSET_DATA if length <= 8 => Err(wrong_length),
            REPLY_OFFSET_HOLE if length != 12 => Err(wrong_length),
            REPLY_OFFSET_DATA | REPLY_OFFSET_HOLE => {
                let offset = u64_at(&self.header, STRUCTURED_BYTES);
                let covers = if kind == REPLY_OFFSET_DATA {
                    length - 8
                } else {
                    u32_at(&self.header, STRUCTURED_BYTES + 8)
                };
                let outside = ReplyError::Range { offset, length: covers };
                let at = offset.checked_sub(request.offset_bytes).and_then(|at| u32::try_from(at).ok());
                let at_bytes = at.ok_or(outside)?;
                let end = at_bytes.checked_add(covers).filter(|end| *end <= request.len_bytes && covers > 0);
                progress.covered.add(at_bytes, end.ok_or(outside)?).map_err(|refused| match refused {
                    Refused::Twice => outside,
                    Refused::Scattered => ReplyError::Scattered,
                })?;
                if kind == REPLY_OFFSET_DATA {
                    self.state = State::Payload { slot, at_bytes, left_bytes: covers, last };
                    return Ok(None);
                }
                self.chunk_ended(slot, last);
                Ok(Some(Step::Zeroes { slot, at_bytes, len_bytes: covers }))
            }
            kind => Err(ReplyError::Type { kind }),
        }
    }

    #[cold]
    fn on_error_chunk(&mut self, requests: &mut Requests, handle: u64) -> Result<Option<Step>, ReplyError> {
        let (flags, kind, length) =
            (u16_at(&self.header, 4), u16_at(&self.header, 6), u32_at(&self.header, 16));
        let (slot, _, progress) = requests.find(handle).ok_or(ReplyError::Handle { handle })?;
        if !(6..=MAX_ERROR_BYTES).contains(&length) {
            return Err(ReplyError::Length { kind, length });
        }
        let error = u32_at(&self.header, STRUCTURED_BYTES);
        if error == ESHUTDOWN {
            return Ok(Some(Step::ShuttingDown));
        }
        progress.error_chunks += 1;
        if progress.error_chunks > MAX_ERROR_CHUNKS {
            return Err(ReplyError::TooManyErrors);
        }
        // An error chunk without a number is an error all the same.
        progress.error = if progress.error == 0 { error.max(1) } else { progress.error };
        self.state = State::Skip { slot, left_bytes: length - 4, last: flags & REPLY_FLAG_DONE != 0 };
        Ok(None)
    }
}

/// A read must have been covered as a whole, unless it failed.
fn end(requests: &mut Requests, slot: u32) -> Result<Step, ReplyError> {
    let (request, progress) = requests.progress(slot);
    let (wanted, covered) = (request.len_bytes, progress.covered.bytes());
    if request.command == Command::Read && progress.error == 0 && covered < wanted {
        return Err(ReplyError::Short { wanted, covered });
    }
    Ok(Step::Done { slot, error: progress.error })
}

#[cfg(test)]
#[path = "replies_tests.rs"]
mod tests;
