//! The TLS handshake, within a deadline however slowly the server sends.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::error::TlsError;
use crate::session::Session;
use crate::wire::{receive_some, send_some};

/// Returns the session once both sides have agreed. `timeout` is only for the error's text.
pub(crate) fn perform(
    mut session: Session,
    net: &OwnedFd,
    deadline: Instant,
    timeout: Duration,
) -> Result<Session, TlsError> {
    loop {
        let progress = session.handshake();
        // Also after a failure: the alert tells the server why.
        let sent = send_queued(&session, net);
        if progress.map_err(|error| closed(&session, error))? {
            return Ok(session);
        }
        let wants_to_send = !sent?;
        wait(net, wants_to_send, deadline)
            .map_err(|error| error.unwrap_or(TlsError::Deadline { timeout }))?;
        receive(&session, net)?;
    }
}

/// During the handshake, the end of the stream is the server's answer.
fn closed(session: &Session, error: TlsError) -> TlsError {
    match error {
        TlsError::Cut => TlsError::Closed { check: session.advice() },
        other => other,
    }
}

/// True: everything has been sent.
fn send_queued(session: &Session, net: &OwnedFd) -> Result<bool, TlsError> {
    let mut wire = session.wire();
    while !wire.outgoing.is_empty() {
        match send_some(net, wire.outgoing.filled()) {
            Ok(Some(count)) => wire.outgoing.consume(count),
            Ok(None) => return Ok(false),
            // The server may have sent the reason before it closed the connection.
            Err(Errno::PIPE | Errno::CONNRESET) => wire.outgoing.clear(),
            Err(errno) => return Err(TlsError::system("send to the TLS server", errno)),
        }
    }
    Ok(true)
}

fn receive(session: &Session, net: &OwnedFd) -> Result<(), TlsError> {
    let mut wire = session.wire();
    match receive_some(net, wire.incoming.room()) {
        Ok(Some(0)) | Err(Errno::CONNRESET) => wire.ended = true,
        Ok(Some(count)) => wire.incoming.fill(count),
        Ok(None) => {}
        Err(errno) => return Err(TlsError::system("receive from the TLS server", errno)),
    }
    Ok(())
}

/// Waits for the server. `Err(None)`: the deadline has passed.
fn wait(net: &OwnedFd, wants_to_send: bool, deadline: Instant) -> Result<(), Option<TlsError>> {
    let events = if wants_to_send { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(None);
        }
        match poll(&mut [PollFd::new(net, events)], Some(&time(left))) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => {
                return Err(Some(TlsError::system("wait for the TLS server", io::Error::from(errno))));
            }
        }
    }
}

/// Longer than any deadline if the duration does not fit.
pub(crate) fn time(duration: Duration) -> Timespec {
    let seconds = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    Timespec { tv_sec: seconds, tv_nsec: duration.subsec_nanos().into() }
}
