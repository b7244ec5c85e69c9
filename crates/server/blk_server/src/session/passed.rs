//! Checks the descriptors that a front-end passes for a queue or for its back-end channel.
//!
//! The disk's quota (`guest_mem`) is charged for each descriptor from arrival to close. The session keeps a queue's
//! descriptor until the queue has released it.
//!
//! Spec: vhost-user, SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR, SET_BACKEND_REQ_FD.

use std::io;
use std::sync::Arc;

use guest_mem::PassedFd;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType, getpeername};

use super::Session;
use super::answer::{Answer, Result, SessionError};
use super::body::{expect_fds, u64_body};
use super::wire::Message;

/// The message's low byte is the queue's index; this bit means that no descriptor follows.
const VRING_NO_FD: u64 = 1 << 8;

impl Session {
    pub(super) fn set_vring_kick(&mut self, message: Message) -> Result<Answer> {
        let (at, fd) = self.vring_fd(message)?;
        #[allow(clippy::cast_possible_truncation)] // fewer than 65,536 queues
        let kick = fd.ok_or(SessionError::NoKick { index: at as u16 })?;
        self.stop(at);
        self.vrings[at].kick = Some(kick);
        self.vrings[at].failed = false;
        self.reconcile(at)
    }

    /// Signals the new descriptor once. The worker may have signalled earlier completions on a descriptor that the
    /// front-end had already dropped, and the guest would wait for them forever.
    pub(super) fn set_vring_call(&mut self, message: Message) -> Result<Answer> {
        let (at, fd) = self.vring_fd(message)?;
        let call = fd.as_ref().map(|fd| Arc::clone(fd.shared()));
        if let Some(queue) = &self.vrings[at].running {
            queue.set_call(call.clone())?;
        }
        self.vrings[at].call = fd;
        if let Some(call) = call {
            io_engine::signal_shared(&call);
        }
        Ok(Answer::Ack)
    }

    pub(super) fn set_vring_err(&mut self, message: Message) -> Result<Answer> {
        let (at, fd) = self.vring_fd(message)?;
        if let Some(queue) = &self.vrings[at].running {
            queue.set_err(fd.as_ref().map(|fd| Arc::clone(fd.shared())))?;
        }
        self.vrings[at].err = fd;
        Ok(Answer::Ack)
    }

    pub(super) fn set_backend_channel(&mut self, mut message: Message) -> Result<Answer> {
        expect_fds(&message, 1)?;
        self.adopt_backend_channel(message.fds.pop())?;
        Ok(Answer::Ack)
    }

    pub(super) fn adopt_backend_channel(&self, channel: Option<PassedFd>) -> Result<()> {
        channel.as_ref().map_or(Ok(()), check_channel)?;
        self.shared.set_backend_channel(channel);
        Ok(())
    }

    /// Reads SET_VRING_KICK, _CALL or _ERR: the index of a queue, and one descriptor or none.
    fn vring_fd(&self, mut message: Message) -> Result<(usize, Option<PassedFd>)> {
        let word = u64_body(&message)?;
        let at = self.vring_index(message.request, word & 0xff)?;
        expect_fds(&message, usize::from(word & VRING_NO_FD == 0))?;
        let fd = message.fds.pop().map(crate::host::signal::adopt_passed).transpose();
        let request = message.request;
        Ok((at, fd.map_err(|source| SessionError::NotAnEventfd { request, source })?))
    }
}

/// Accepts only a connected Unix stream socket. Sending on anything else may block or reach another program, and
/// closing it may linger.
fn check_channel(channel: &PassedFd) -> Result<()> {
    let kind = socket_domain(channel).and_then(|domain| Ok((domain, socket_type(channel)?)));
    let source = match kind.map_err(io::Error::from) {
        Ok((AddressFamily::UNIX, SocketType::STREAM)) => match getpeername(channel) {
            Ok(_) => return Ok(()),
            Err(errno) => errno.into(),
        },
        Ok((domain, kind)) => {
            let what = format!(
                "a Unix stream socket is needed, but this descriptor has domain {domain:?} and type {kind:?}"
            );
            io::Error::new(io::ErrorKind::InvalidInput, what)
        }
        Err(error) => error,
    };
    Err(SessionError::NotAChannel { source })
}
