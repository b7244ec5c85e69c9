//! A client's pause of a disk: from the answer to `pause` until the client's next request, or the end of its
//! connection.
//!
//! `pause → drained, flushed → answer … the client works … → any byte, the end, or the limit → the disk continues`

use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use serde_json::{Value, json};

use crate::control::Control;
use crate::control::dispatch;
use crate::control::limits::MAX_PAUSE;
use crate::control::protocol::answer::{ErrorKind, Fault, ns};
use crate::control::protocol::verbs::{Pause, Verb};

/// A pause that is over.
#[derive(Clone, Copy, Debug)]
pub struct Pausing {
    paused: Duration,
    /// Whether the time limit ended the pause before the client did.
    timed_out: bool,
}

impl Pausing {
    /// The answer to `unpause`.
    pub fn answer(self) -> Result<Value, Fault> {
        if self.timed_out {
            let limit_s = MAX_PAUSE.as_secs();
            let text = format!(
                "the pause ended by itself after its limit of {limit_s} s, so the disk has served requests since then"
            );
            return Err(Fault::new(ErrorKind::NotPaused, text));
        }
        Ok(json!({"paused_ns": ns(self.paused)}))
    }
}

/// Pauses the disk. `answer` tells the client that the disk is paused. `has_more`: whether the client has already sent
/// its next request.
pub fn pause(
    pause: Pause,
    has_more: bool,
    stream: &UnixStream,
    control: &dyn Control,
    answer: &mut dyn FnMut() -> io::Result<()>,
) -> Result<Pausing, Fault> {
    let mut verb = Verb::Pause(pause);
    dispatch::name_disks(&mut verb, control)?;
    let Verb::Pause(Pause { disk, timeout_ms }) = verb else {
        return Err(Fault::new(ErrorKind::BadRequest, "pause: the request names no disk"));
    };
    let mut timed_out = false;
    let paused = control.pause(&disk, timeout_ms.into(), &mut || {
        // If the answer cannot be sent, the client does not know that the disk is paused, so the pause ends at once.
        timed_out = answer().is_ok() && !has_more && !wait_for_client(stream);
    })?;
    Ok(Pausing { paused, timed_out })
}

/// Returns false if the time limit passes before the client sends a byte or disconnects.
fn wait_for_client(stream: &UnixStream) -> bool {
    let end = Instant::now() + MAX_PAUSE;
    let interest = PollFlags::IN | PollFlags::RDHUP;
    // After an error the client cannot end the pause, so the pause ends now.
    !matches!(vhost_user::wait(&mut [PollFd::new(stream, interest)], Some(end)), Ok(0))
}
