//! One file's connection to its export: requests to send, requests without a reply, and what happens when the
//! connection is lost.
//!
//! ```text
//! queue → outgoing → send (a batch per system call) → replies → receive → result
//!            ▲                                          │
//!            └── connection lost: everything without a reply, in its old order ──┘
//! ```
//!
//! - A request is sent again on the next connection until it has a reply or has waited too long.
//! - A request that was sent is never cancelled: the server could carry out a write after newer ones.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;

use nbd_client::{Command, FlushRequest, HEADER_BYTES, Link, Replies, Request, Requests, Step};
use rustix::io::Errno;

use super::{pieces, socket};
use crate::backend::{Buffers, Call, RawResult, Verb};
use crate::engines::epoll::EpollWatcher;

/// Requests at first. The table grows with the load and never shrinks.
const FIRST_REQUESTS: u32 = 64;
/// Maximum number of requests in one system call.
const BATCH: usize = 64;
/// Maximum number of `recvmsg` in a row, so that one busy export does not delay the worker's other disks.
const MAX_RECEIVES: usize = 8;

/// Memory that all connections of an engine use in turn.
pub(super) struct Scratch {
    headers: Vec<[u8; HEADER_BYTES]>,
    pieces: Vec<libc::iovec>,
    received: Vec<u8>,
}

// SAFETY: 1. the addresses in `pieces` are only used during the call that fills them.
unsafe impl Send for Scratch {}

impl Scratch {
    pub fn new() -> Self {
        Self {
            headers: Vec::with_capacity(BATCH),
            pieces: Vec::with_capacity(socket::MAX_PIECES + 1),
            received: vec![0; 128 << 10],
        }
    }
}

/// Who waits for a request.
#[derive(Debug)]
enum Waiter {
    /// The core, under this name.
    Core(u64),
    /// Another thread, for a flush.
    Thread(FlushRequest),
}

/// What the engine knows of a request besides its bytes.
#[derive(Debug)]
struct Pending {
    waiter: Waiter,
    buffers: Buffers,
    /// Length of the payload of a write.
    payload_bytes: usize,
    /// The order in which requests were queued.
    order: u64,
    /// The tick at which the request was queued.
    since: u64,
}

/// The connection of one file.
pub(super) struct Connection {
    link: Link,
    socket: Option<OwnedFd>,
    structured: bool,
    replies: Replies,
    requests: Requests,
    /// By slot.
    pending: Vec<Option<Pending>>,
    /// Slots to send. The first may have been sent in part.
    outgoing: VecDeque<u32>,
    /// Bytes of the first outgoing request that were sent.
    sent_bytes: usize,
    /// A read's data is next in the stream.
    payload: Option<Payload>,
    /// The socket had no room: the set of descriptors waits for room.
    is_full: bool,
    /// The socket may have more bytes.
    has_more: bool,
    in_flight: usize,
    next_order: u64,
    tick: u64,
    timeout_ticks: u64,
}

// SAFETY: 1. `IoBackend::queue` promises that the buffers stay until the result was popped, for every thread.
unsafe impl Send for Connection {}

#[derive(Clone, Copy, Debug)]
struct Payload {
    slot: u32,
    at_bytes: u32,
    len_bytes: u32,
}

impl Connection {
    /// `timeout_ticks`: how long a request may stay without a reply.
    pub fn new(link: Link, timeout_ticks: u64) -> Self {
        let requests = Requests::new(FIRST_REQUESTS);
        let pending = (0..FIRST_REQUESTS).map(|_| None).collect();
        Self {
            link,
            socket: None,
            structured: false,
            replies: Replies::new(false),
            requests,
            pending,
            outgoing: VecDeque::with_capacity(FIRST_REQUESTS as usize),
            sent_bytes: 0,
            payload: None,
            is_full: false,
            has_more: false,
            in_flight: 0,
            next_order: 0,
            tick: 0,
            timeout_ticks,
        }
    }

    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Requests without a reply.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether the next pass finds work although no event has arrived.
    pub fn has_work(&self) -> bool {
        self.socket.is_some()
            && (self.has_more && self.in_flight > 0 || !self.outgoing.is_empty() && !self.is_full)
    }

    /// Queues the call, or returns the result of a call that needs no request.
    ///
    /// # Safety
    /// As for [`crate::IoBackend::queue`].
    pub unsafe fn queue(&mut self, user_data: u64, call: &Call) -> Option<i32> {
        let info = self.link.export().info();
        let unsupported = Some(-Errno::OPNOTSUPP.raw_os_error());
        // SAFETY: 1. the caller guarantees that the array is valid.
        let buffer_bytes = unsafe { pieces::len_bytes(&call.buffers) };
        let (command, len_bytes) = match call.verb {
            Verb::Read => (Command::Read, buffer_bytes as u64),
            Verb::Write => {
                let fua = call.flags & libc::RWF_DSYNC != 0;
                (Command::Write { fua }, buffer_bytes as u64)
            }
            // Without this flag, the server has nothing to flush: proto.md, "Transmission flags".
            Verb::Sync if !info.can_flush() => return Some(0),
            Verb::Sync => (Command::Flush, 0),
            Verb::Discard if info.can_trim() => (Command::Trim, call.len_bytes),
            Verb::Allocate if info.can_write_zeroes() => {
                let no_hole = call.flags & libc::FALLOC_FL_PUNCH_HOLE == 0;
                (Command::WriteZeroes { no_hole }, call.len_bytes)
            }
            Verb::Discard | Verb::Allocate => return unsupported,
        };
        let Ok(len_bytes) = u32::try_from(len_bytes) else { return Some(-Errno::INVAL.raw_os_error()) };
        let payload_bytes = if call.verb == Verb::Write { buffer_bytes } else { 0 };
        let request = Request { command, offset_bytes: call.offset_bytes, len_bytes };
        self.insert(request, Waiter::Core(user_data), call.buffers, payload_bytes);
        None
    }

    fn insert(&mut self, request: Request, waiter: Waiter, buffers: Buffers, payload_bytes: usize) {
        let slot = self.requests.insert(request).unwrap_or_else(|| self.insert_in_larger(request));
        let (order, since) = (self.next_order, self.tick);
        self.next_order += 1;
        self.in_flight += 1;
        self.pending[slot as usize] = Some(Pending { waiter, buffers, payload_bytes, order, since });
        self.outgoing.push_back(slot);
    }

    #[cold]
    fn insert_in_larger(&mut self, request: Request) -> u32 {
        let places = self.requests.places() * 2;
        self.requests.grow(u32::try_from(places).unwrap_or(u32::MAX));
        self.pending.resize_with(places, || None);
        let Some(slot) = self.requests.insert(request) else { unreachable!("the table has just grown") };
        slot
    }

    /// Sends as many requests as the socket has room for.
    pub fn send(
        &mut self,
        scratch: &mut Scratch,
        watcher: &mut EpollWatcher,
        results: &mut VecDeque<RawResult>,
    ) {
        while !self.outgoing.is_empty() {
            let Some(socket) = &self.socket else { return };
            fill(scratch, &self.outgoing, &self.requests, &self.pending, self.sent_bytes);
            let wanted: usize = scratch.pieces.iter().map(|piece| piece.iov_len).sum();
            // SAFETY: 1. the headers are in `scratch`, and the payloads belong to calls without a result.
            match unsafe { socket::send(socket, &mut scratch.pieces) } {
                Ok(sent) => {
                    self.note_sent(sent);
                    if sent < wanted {
                        continue;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::NOBUFS) => return self.wait_for_room(watcher, true),
                Err(Errno::FAULT) => self.lost_memory(results),
                Err(errno) => return self.lose(&errno.to_string()),
            }
        }
        if self.is_full {
            self.wait_for_room(watcher, false);
        }
    }

    fn wait_for_room(&mut self, watcher: &mut EpollWatcher, wants_room: bool) {
        let Some(socket) = self.socket.as_ref().filter(|_| self.is_full != wants_room) else { return };
        // A failure leaves the socket as it was; the next tick sends again.
        self.is_full = wants_room && watcher.set_wants_room(socket, true).is_ok();
        if !wants_room {
            let _ = watcher.set_wants_room(socket, false);
        }
    }

    /// Asks for a connection, if there is none yet.
    pub fn connect(&self) {
        if self.socket.is_none() {
            self.link.reconnect(None);
        }
    }

    fn note_sent(&mut self, mut sent: usize) {
        while let Some(&slot) = self.outgoing.front().filter(|_| sent > 0) {
            let whole = HEADER_BYTES + self.pending[slot as usize].as_ref().map_or(0, |it| it.payload_bytes);
            let left = whole - self.sent_bytes;
            if sent < left {
                self.sent_bytes += sent;
                return;
            }
            sent -= left;
            self.sent_bytes = 0;
            self.requests.mark_sent(slot);
            self.outgoing.pop_front();
        }
    }

    /// The memory of the first outgoing request is gone. The request fails; if its header was sent, the stream is broken.
    #[cold]
    fn lost_memory(&mut self, results: &mut VecDeque<RawResult>) {
        let Some(&slot) = self.outgoing.front() else { return };
        if self.sent_bytes > 0 {
            self.lose("the memory of a guest has disappeared");
        }
        self.outgoing.retain(|other| *other != slot);
        self.finish(slot, -Errno::FAULT.raw_os_error(), results);
    }

    /// Receives and handles replies until the socket is empty.
    pub fn receive(&mut self, scratch: &mut Scratch, results: &mut VecDeque<RawResult>) {
        self.has_more = false;
        for _ in 0..MAX_RECEIVES {
            match self.receive_once(scratch, results) {
                Ok(true) => {}
                Ok(false) => return,
                Err(why) => return self.lose(&why),
            }
        }
        self.has_more = true;
    }

    /// Returns whether there may be more.
    fn receive_once(
        &mut self,
        scratch: &mut Scratch,
        results: &mut VecDeque<RawResult>,
    ) -> Result<bool, String> {
        let Some(socket) = &self.socket else { return Ok(false) };
        let direct_bytes = self.direct_pieces(scratch);
        let scratch_bytes = scratch.received.len();
        let base = scratch.received.as_mut_ptr().cast();
        scratch.pieces.push(libc::iovec { iov_base: base, iov_len: scratch_bytes });
        // SAFETY: 1. the first pieces belong to a read without a result, the last is `scratch.received`.
        let received = match unsafe { socket::receive(socket, &mut scratch.pieces) } {
            Ok(0) => return Err("the server has ended the connection".to_owned()),
            Ok(received) => received,
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR) => return Ok(true),
            Err(Errno::FAULT) => return Err(self.lost_target(results)),
            Err(errno) => return Err(errno.to_string()),
        };
        let direct = received.min(direct_bytes);
        self.took_payload(direct);
        let bytes = scratch.received.get(..received - direct).unwrap_or_default();
        self.parse(bytes, results)?;
        // A socket that filled less than it was offered was empty; new bytes are a new event.
        Ok(received == direct_bytes + scratch_bytes)
    }

    /// Lists the buffers of the payload that is next in the stream. Returns their length.
    fn direct_pieces(&self, scratch: &mut Scratch) -> usize {
        scratch.pieces.clear();
        let Some(Payload { slot, at_bytes, len_bytes }) = self.payload else { return 0 };
        let Some(Pending { waiter: Waiter::Core(_), buffers, .. }) = &self.pending[slot as usize] else {
            return 0;
        };
        let mut total = 0;
        let put = |base: *mut u8, len_bytes| {
            if scratch.pieces.len() < socket::MAX_PIECES - 1 {
                scratch.pieces.push(libc::iovec { iov_base: base.cast(), iov_len: len_bytes });
                total += len_bytes;
            }
        };
        // SAFETY: 1. the call has no result yet, so its array of buffers is valid.
        unsafe { pieces::for_each_part(buffers, at_bytes as usize, len_bytes as usize, put) };
        total
    }

    fn took_payload(&mut self, bytes: usize) {
        #[allow(clippy::cast_possible_truncation)] // at most the payload
        let bytes = bytes as u32;
        if bytes == 0 {
            return;
        }
        self.replies.took(bytes);
        if let Some(payload) = &mut self.payload {
            payload.at_bytes += bytes;
            payload.len_bytes -= bytes;
        }
    }

    fn parse(&mut self, bytes: &[u8], results: &mut VecDeque<RawResult>) -> Result<(), String> {
        let mut rest = bytes;
        loop {
            self.payload = None;
            let (taken, step) =
                self.replies.step(&mut self.requests, rest).map_err(|error| error.to_string())?;
            rest = rest.get(taken..).unwrap_or_default();
            match step {
                Step::NeedsBytes => return Ok(()),
                Step::Payload { slot, at_bytes, len_bytes } if rest.is_empty() => {
                    self.payload = Some(Payload { slot, at_bytes, len_bytes });
                    return Ok(());
                }
                Step::Payload { slot, at_bytes, len_bytes } => {
                    let (part, after) = rest.split_at(rest.len().min(len_bytes as usize));
                    rest = after;
                    if let Some(buffers) = self.target(slot) {
                        // SAFETY: 1. the call has no result yet, so its buffers are valid; 2. no reference points to
                        // guest memory; 3. the parser keeps the part inside the request.
                        unsafe { pieces::store(buffers, at_bytes as usize, part) };
                    }
                    #[allow(clippy::cast_possible_truncation)] // at most `len_bytes`
                    self.replies.took(part.len() as u32);
                }
                Step::Zeroes { slot, at_bytes, len_bytes } => {
                    if let Some(buffers) = self.target(slot) {
                        // SAFETY: as above.
                        unsafe { pieces::clear(buffers, at_bytes as usize, len_bytes as usize) };
                    }
                }
                Step::Done { slot, error } => self.on_reply(slot, error, results),
                Step::ShuttingDown => return Err("the server is shutting down".to_owned()),
            }
        }
    }

    /// The buffers of a read that somebody waits for.
    fn target(&self, slot: u32) -> Option<&Buffers> {
        match self.pending.get(slot as usize)? {
            Some(Pending { waiter: Waiter::Core(_), buffers, .. }) => Some(buffers),
            _ => None,
        }
    }

    /// The kernel could not store a read's data.
    #[cold]
    fn lost_target(&mut self, results: &mut VecDeque<RawResult>) -> String {
        if let Some(Payload { slot, .. }) = self.payload.take() {
            self.finish(slot, -Errno::FAULT.raw_os_error(), results);
        }
        "the memory of a guest has disappeared".to_owned()
    }

    #[inline]
    fn on_reply(&mut self, slot: u32, error: u32, results: &mut VecDeque<RawResult>) {
        let bytes = self.requests.get(slot).map_or(0, |request| match request.command {
            Command::Read | Command::Write { .. } => request.len_bytes,
            _ => 0,
        });
        let result = if error == 0 { i32::try_from(bytes).unwrap_or(i32::MAX) } else { -errno_of(error) };
        self.finish(slot, result, results);
    }

    /// Ends a request.
    #[inline]
    fn finish(&mut self, slot: u32, result: i32, results: &mut VecDeque<RawResult>) {
        let Some(pending) = self.pending[slot as usize].take() else { return };
        self.requests.remove(slot);
        self.in_flight -= 1;
        match pending.waiter {
            Waiter::Core(user_data) => results.push_back(RawResult { user_data, result }),
            Waiter::Thread(flush) => {
                flush.end(if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(()) });
            }
        }
    }

    /// Ends the connection. All requests without a reply are sent again on the next one.
    #[cold]
    pub fn lose(&mut self, why: &str) {
        if self.socket.take().is_none() {
            return;
        }
        (self.sent_bytes, self.payload) = (0, None);
        (self.is_full, self.has_more) = (false, false);
        let slots = 0..u32::try_from(self.pending.len()).unwrap_or(u32::MAX);
        let order = |slot: u32| self.pending[slot as usize].as_ref().map(|pending| (pending.order, slot));
        let mut unanswered: Vec<(u64, u32)> = slots.filter_map(order).collect();
        unanswered.sort_unstable();
        self.outgoing.clear();
        for (_, slot) in unanswered {
            self.requests.restart(slot);
            self.outgoing.push_back(slot);
        }
        self.link.reconnect(Some(why));
    }

    /// Takes a new connection, and the flushes that other threads wait for.
    pub fn take_news(&mut self, watcher: &mut EpollWatcher) -> io::Result<()> {
        if let Some((socket, structured)) = self.link.take_connection() {
            watcher.add_waker(&socket)?;
            (self.socket, self.structured) = (Some(socket), structured);
            self.replies = Replies::new(structured);
            self.has_more = true;
        }
        for flush in self.link.take_flushes() {
            let request = Request { command: Command::Flush, offset_bytes: 0, len_bytes: 0 };
            self.insert(request, Waiter::Thread(flush), Buffers::None, 0);
        }
        Ok(())
    }

    /// Counts time. A request that has waited too long fails, and ends the connection on which it had no reply.
    pub fn on_tick(&mut self, results: &mut VecDeque<RawResult>) {
        self.tick += 1;
        // The thread that connects could not be started, perhaps.
        self.connect();
        let (tick, timeout_ticks) = (self.tick, self.timeout_ticks);
        let is_late = |pending: &Option<Pending>| {
            pending.as_ref().is_some_and(|pending| tick - pending.since > timeout_ticks)
        };
        if !self.pending.iter().any(is_late) {
            return;
        }
        self.lose("a request had no reply in time (--nbd-timeout)");
        for slot in 0..u32::try_from(self.pending.len()).unwrap_or(u32::MAX) {
            if is_late(&self.pending[slot as usize]) {
                self.outgoing.retain(|other| *other != slot);
                self.finish(slot, -Errno::TIMEDOUT.raw_os_error(), results);
            }
        }
    }

    /// Cancels a request of this connection of which nothing was sent.
    pub fn cancel(&mut self, user_data: u64, results: &mut VecDeque<RawResult>) {
        let is_it = |slot: &u32| {
            let pending = self.pending[*slot as usize].as_ref();
            pending.is_some_and(|it| matches!(it.waiter, Waiter::Core(name) if name == user_data))
        };
        let being_sent = usize::from(self.sent_bytes > 0);
        let Some(at) = self.outgoing.iter().skip(being_sent).position(is_it) else { return };
        if let Some(slot) = self.outgoing.remove(being_sent + at) {
            self.finish(slot, -Errno::CANCELED.raw_os_error(), results);
        }
    }

    /// Ends the file's use of the export. A connection on which nothing is expected serves the next user.
    pub fn close(mut self, watcher: &mut EpollWatcher) {
        if let Some(socket) = self.socket.take().filter(|_| self.in_flight == 0) {
            watcher.remove_socket(&socket);
            self.link.give_back(socket, self.structured);
        }
    }
}

/// Lists the bytes of the first outgoing requests.
fn fill(
    scratch: &mut Scratch,
    outgoing: &VecDeque<u32>,
    requests: &Requests,
    pending: &[Option<Pending>],
    sent_bytes: usize,
) {
    scratch.headers.clear();
    scratch.pieces.clear();
    let mut skip_bytes = sent_bytes;
    for &slot in outgoing.iter().take(BATCH) {
        let Some(Pending { buffers, payload_bytes, .. }) = &pending[slot as usize] else { continue };
        // The headers never move: the list has room for all of them.
        scratch.headers.push(requests.header(slot));
        let header = scratch.headers.last().map_or(std::ptr::null(), |header| header.as_ptr());
        let skipped = skip_bytes.min(HEADER_BYTES);
        if skipped < HEADER_BYTES {
            let iov_base = header.wrapping_add(skipped).cast_mut().cast();
            scratch.pieces.push(libc::iovec { iov_base, iov_len: HEADER_BYTES - skipped });
        }
        if *payload_bytes > 0 {
            let put = |base: *mut u8, len_bytes| {
                scratch.pieces.push(libc::iovec { iov_base: base.cast(), iov_len: len_bytes });
            };
            // SAFETY: 1. the call has no result yet, so its array of buffers is valid.
            unsafe { pieces::for_each_part(buffers, skip_bytes - skipped, *payload_bytes, put) };
        }
        skip_bytes = 0;
        if scratch.pieces.len() >= socket::MAX_PIECES {
            break;
        }
    }
    scratch.pieces.truncate(socket::MAX_PIECES);
}

/// proto.md, "Error values".
fn errno_of(error: u32) -> i32 {
    match error {
        1 => libc::EPERM,
        12 => libc::ENOMEM,
        22 => libc::EINVAL,
        28 => libc::ENOSPC,
        75 => libc::EOVERFLOW,
        95 => libc::EOPNOTSUPP,
        _ => libc::EIO,
    }
}
