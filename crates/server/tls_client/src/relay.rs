//! Copies between the caller's socket and the TLS session until one side ends the connection.
//!
//! ```text
//! caller → plain ─ upward: encrypt ─ wire.outgoing → net → server
//! caller ← plain ← down ─ downward: decrypt ─ wire.incoming ← net ← server
//! ```
//!
//! - The directions are independent: one that cannot continue does not stop the other. Each has a bounded queue and
//!   stops reading when it is full.
//! - *The server ends the connection*: the caller gets all that was decrypted, then the end of the stream.
//! - *The caller closes its socket*: the server gets all that the caller wrote, and `close_notify`, within [`LINGER`].
//!   The relay then waits for the server to close the connection, and discards what it still sends: if a TCP socket is
//!   closed with unread bytes, the kernel drops those that are still to be sent.
//! - *The caller only shuts down writing*: the server gets `close_notify`, and the caller still gets the replies.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::error::TlsError;
use crate::handshake::time;
use crate::queue::Queue;
use crate::session::{Decrypted, RECORD_BYTES, Session};
use crate::wire::{receive_some, send_some};

/// How many bytes of the caller are encrypted at once.
const UP_BYTES: usize = 64 << 10;
/// While the server has not taken this many encrypted bytes, the relay reads nothing from the caller.
const OUTGOING_BYTES: usize = 64 << 10;
/// Decrypted bytes that the caller has not taken yet.
const DOWN_BYTES: usize = 128 << 10;
/// How long a server may take to accept the rest and to close the connection after the caller has closed its socket.
const LINGER: Duration = Duration::from_secs(2);

pub(crate) struct Relay {
    session: Session,
    net: OwnedFd,
    plain: OwnedFd,
    up: Box<[u8]>,
    down: Queue,
    /// What `poll` said last.
    plain_readable: bool,
    net_readable: bool,
    /// The caller may still write.
    caller_writes: bool,
    /// The server accepts bytes.
    server_reads: bool,
    /// The server sends nothing more, or nothing usable: the relay ends when `down` is empty.
    server_ended: bool,
    /// Why.
    fault: Option<TlsError>,
    /// The caller has closed its socket: the relay ends at this time at the latest.
    gone: Option<Instant>,
}

impl Relay {
    pub fn new(session: Session, net: OwnedFd, plain: OwnedFd) -> Self {
        Self {
            session,
            net,
            plain,
            up: vec![0; UP_BYTES].into_boxed_slice(),
            down: Queue::with_capacity(DOWN_BYTES),
            // The server's first bytes may have arrived with the end of the handshake.
            plain_readable: true,
            net_readable: true,
            caller_writes: true,
            server_reads: true,
            server_ended: false,
            fault: None,
            gone: None,
        }
    }

    /// Returns when the connection has ended. The sockets close when the relay is dropped.
    pub fn run(&mut self) -> Result<(), TlsError> {
        loop {
            self.upward()?;
            self.downward();
            if self.has_ended() {
                return self.fault.take().map_or(Ok(()), Err);
            }
            self.wait()?;
        }
    }

    fn has_ended(&self) -> bool {
        match self.gone {
            None => self.server_ended && self.down.is_empty(),
            Some(end) => !self.server_reads || self.session.wire().ended || Instant::now() >= end,
        }
    }

    /// Takes one portion from the caller, if it fits, and sends.
    fn upward(&mut self) -> Result<(), TlsError> {
        if self.plain_readable && self.wants_from_caller() {
            // `poll` is not asked again after the caller has gone.
            self.plain_readable = self.gone.is_some();
            match receive_some(&self.plain, &mut self.up) {
                Ok(Some(0)) | Err(_) => {
                    self.caller_writes = false;
                    self.session.close();
                }
                Ok(Some(count)) => self.session.encrypt(&self.up[..count])?,
                Ok(None) => {}
            }
        }
        self.send();
        Ok(())
    }

    fn wants_from_caller(&self) -> bool {
        self.caller_writes && self.server_reads && self.session.wire().outgoing.len() < OUTGOING_BYTES
    }

    fn send(&mut self) {
        let mut wire = self.session.wire();
        while self.server_reads && !wire.outgoing.is_empty() {
            match send_some(&self.net, wire.outgoing.filled()) {
                Ok(Some(count)) => wire.outgoing.consume(count),
                Ok(None) => return,
                // What the server sent before is still to be read: an alert may be among it.
                Err(_) => self.server_reads = false,
            }
        }
    }

    /// Decrypts what has arrived, takes one portion from the server, and passes both on. Discards the portion if the
    /// caller has closed its socket.
    fn downward(&mut self) {
        while self.gone.is_none() {
            let is_drained = self.decrypt();
            if !self.pass_on() || self.server_ended {
                return;
            }
            if !is_drained {
                continue;
            }
            if !self.net_readable {
                return;
            }
            self.receive();
        }
        if self.net_readable {
            self.receive();
            self.session.wire().incoming.clear();
        }
    }

    fn receive(&mut self) {
        self.net_readable = false;
        let mut wire = self.session.wire();
        match receive_some(&self.net, wire.incoming.room()) {
            Ok(Some(0)) | Err(_) => wire.ended = true,
            Ok(Some(count)) => wire.incoming.fill(count),
            Ok(None) => {}
        }
    }

    /// Decrypts the records that have arrived. False: there may be more, but no room for them.
    fn decrypt(&mut self) -> bool {
        while !self.server_ended && self.down.room_len() >= RECORD_BYTES {
            match self.session.decrypt(self.down.room()) {
                Ok(Decrypted::Bytes(count)) => self.down.fill(count),
                Ok(Decrypted::NeedsMore) => return true,
                Ok(Decrypted::Closed) => self.server_ended = true,
                Err(error) => {
                    self.fault = Some(error);
                    self.server_ended = true;
                }
            }
        }
        self.server_ended
    }

    /// Gives the caller what was decrypted. False: the caller has not taken all.
    fn pass_on(&mut self) -> bool {
        while !self.down.is_empty() {
            match send_some(&self.plain, self.down.filled()) {
                Ok(Some(count)) => self.down.consume(count),
                Ok(None) => return false,
                Err(_) => {
                    self.caller_is_gone();
                    return false;
                }
            }
        }
        true
    }

    fn caller_is_gone(&mut self) {
        self.gone.get_or_insert_with(|| Instant::now() + LINGER);
        self.down.clear();
        // What the caller wrote before is still to be read.
        self.plain_readable = true;
    }

    /// Sleeps until one of the sockets can continue.
    fn wait(&mut self) -> Result<(), TlsError> {
        if self.gone.is_some() && self.wants_from_caller() {
            return Ok(());
        }
        let (plain, net) = (self.plain_events(), self.net_events());
        let socket = |fd, events: Option<PollFlags>| PollFd::new(fd, events.unwrap_or(PollFlags::empty()));
        let mut sockets = [socket(&self.plain, plain), socket(&self.net, net)];
        let asked = usize::from(plain.is_none())..1 + usize::from(net.is_some());
        let left: Option<Timespec> = self.gone.map(|end| time(end.saturating_duration_since(Instant::now())));
        match poll(&mut sockets[asked], left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(TlsError::system("wait for the TLS server", errno)),
        }
        let [plain, net] = [sockets[0].revents(), sockets[1].revents()];
        self.plain_readable |= plain.contains(PollFlags::IN);
        self.net_readable |= net.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR);
        if plain.intersects(PollFlags::HUP | PollFlags::ERR) {
            self.caller_is_gone();
        }
        Ok(())
    }

    /// Even without a wish, `poll` reports that the caller has closed its socket. `None`: it has.
    fn plain_events(&self) -> Option<PollFlags> {
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, self.wants_from_caller());
        events.set(PollFlags::OUT, !self.down.is_empty());
        self.gone.is_none().then_some(events)
    }

    /// `None`: nothing can be done with it now. `poll` would report a closed connection again and again.
    fn net_events(&self) -> Option<PollFlags> {
        let mut events = PollFlags::empty();
        let is_read = self.gone.is_some() || self.down.is_empty() && !self.server_ended;
        events.set(PollFlags::IN, is_read);
        events.set(PollFlags::OUT, self.server_reads && !self.session.wire().outgoing.is_empty());
        (!events.is_empty()).then_some(events)
    }
}
