//! Detects a second start of a server that is already running, before the start waits for the images' locks.
//!
//! A server that stops closes its control socket first. So a control socket that still answers after a moment belongs
//! to a server that is not stopping, and waiting for the locks would be in vain.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tracing::warn;

use crate::config::configuration::Configuration;
use crate::ctl::connection::Connection;
use crate::service::passed_sockets::PassedSocket;

/// How long a server that was just asked to stop may still answer.
const LEAVING: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(100);

/// Refuses to start beside a server that has the same control socket. To be called while the process may still connect
/// to sockets.
pub fn refuse_second(configuration: &Configuration, passed: &[PassedSocket]) -> Result<()> {
    let Some(control) = &configuration.server.options.control else { return Ok(()) };
    // If the service manager listens on the socket, nothing answers before this process does.
    if passed.iter().any(|socket| socket.path() == control) {
        return Ok(());
    }
    let Some(pid) = server_at(control) else { return Ok(()) };
    let shown = control.display();
    warn!(pid, control = %shown, "a running server has this control socket: waiting a moment for it to stop");
    let begin = Instant::now();
    while begin.elapsed() < LEAVING {
        std::thread::sleep(PAUSE);
        if server_at(control).is_none() {
            return Ok(());
        }
    }
    bail!(
        "control socket {shown} is in use by a running server (pid {pid}): change that server with `bareblk ctl reload`, \
         replace it with --take-over {shown}, or give this one another control socket"
    )
}

/// The process id of the server that answers at this control socket, if one does.
fn server_at(control: &Path) -> Option<i32> {
    Connection::open(control).ok()?.pid()
}
