//! A client's pause of a disk: from its answer to the client's next request, or the end of its connection.
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
use crate::control::protocol::{ErrorKind, Fault, Pause, Verb, ns};

/// A pause that is over.
#[derive(Clone, Copy, Debug)]
pub struct Pausing {
    paused: Duration,
    /// The limit ended it, before the client did.
    timed_out: bool,
}

impl Pausing {
    /// The answer to `unpause`.
    pub fn answer(self) -> Result<Value, Fault> {
        if self.timed_out {
            let limit_s = MAX_PAUSE.as_secs();
            let text =
                format!("the disk has continued by itself after {limit_s} s: it was not paused to the end");
            return Err(Fault::new(ErrorKind::NotPaused, text));
        }
        Ok(json!({"paused_ns": ns(self.paused)}))
    }
}

/// Pauses the disk. `answer` tells the client that it is paused; `has_more`: the client has sent its next request.
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
        return Err(Fault::new(ErrorKind::BadRequest, "pause: no disk"));
    };
    let mut timed_out = false;
    let paused = control.pause(&disk, timeout_ms.into(), &mut || {
        // A client that does not take the answer does not know that the disk is paused.
        timed_out = answer().is_ok() && !has_more && !wait_for_client(stream);
    })?;
    Ok(Pausing { paused, timed_out })
}

/// False if the limit passes without a byte from the client and without its end.
fn wait_for_client(stream: &UnixStream) -> bool {
    let end = Instant::now() + MAX_PAUSE;
    let interest = PollFlags::IN | PollFlags::RDHUP;
    // After an error the client cannot end the pause, so it ends now.
    !matches!(vhost_user::wait(&mut [PollFd::new(stream, interest)], Some(end)), Ok(0))
}
