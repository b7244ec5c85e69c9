//! Notifies the service manager (systemd or a compatible one): ready, reloading, stopping, alive, and a line of status.
//!
//! `READY=1 → (RELOADING=1 → READY=1)* → STOPPING=1`; `WATCHDOG=1` in between, only if the manager requests it
//!
//! - The server creates and connects the socket once, at the start, because in its sandbox it cannot create sockets.
//! - Without `NOTIFY_SOCKET` there are no notifications. If a notification fails, the server logs this and continues.
//! - It reads the environment and never changes it: `LISTEN_PID` and `WATCHDOG_PID` say for which process the variables
//!   are.
//!
//! Source: sd_notify(3), sd_watchdog_enabled(3).

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tracing::{debug, warn};

/// Maximum time for which the server waits if the manager does not read.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// The service manager, if there is one.
#[derive(Debug, Default)]
pub struct ServiceManager {
    socket: Option<UnixDatagram>,
    watchdog: Option<Duration>,
}

impl ServiceManager {
    /// Reads the service manager's variables.
    pub fn from_environment() -> Self {
        let Some(address) = std::env::var_os("NOTIFY_SOCKET").filter(|address| !address.is_empty()) else {
            return Self::default();
        };
        match connect(&address) {
            Ok(socket) => Self { socket: Some(socket), watchdog: watchdog() },
            Err(error) => {
                warn!("cannot notify the service manager: NOTIFY_SOCKET={}: {error}", address.display());
                Self::default()
            }
        }
    }

    /// A manager, and the socket that receives its messages.
    #[cfg(test)]
    pub fn for_tests() -> (Self, UnixDatagram) {
        let (socket, messages) = UnixDatagram::pair().unwrap();
        (Self { socket: Some(socket), watchdog: None }, messages)
    }

    /// The longest time between two signs of life that the manager accepts; `None`: it expects none.
    pub fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }

    /// Notifies that all sockets accept connections.
    pub fn ready(&self, status: &str) {
        self.tell(&format!("READY=1\nSTATUS={}", one_line(status)));
    }

    /// Notifies that a reload begins; [`ServiceManager::ready`] ends it.
    pub fn reloading(&self) {
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={}\nSTATUS=reloading", monotonic_us()));
    }

    /// Notifies that the stop has begun.
    pub fn stopping(&self) {
        self.tell("STOPPING=1\nSTATUS=stopping: waiting for requests in flight");
    }

    /// Notifies that process `pid` replaces this one. The new process has no watchdog, so the manager must stop
    /// expecting signs of life.
    pub fn main_process(&self, pid: i32) {
        let watchdog = if self.watchdog.is_some() { "\nWATCHDOG_USEC=0" } else { "" };
        self.tell(&format!("MAINPID={pid}{watchdog}\nSTATUS=taken over by process {pid}"));
    }

    /// Sets the status line.
    pub fn status(&self, status: &str) {
        self.tell(&format!("STATUS={}", one_line(status)));
    }

    /// Notifies that workers and main loop have answered.
    pub fn alive(&self) {
        self.tell("WATCHDOG=1");
    }

    fn tell(&self, message: &str) {
        let Some(socket) = &self.socket else { return };
        match socket.send(message.as_bytes()) {
            Ok(_) => debug!("service manager notified: {}", message.replace('\n', ", ")),
            Err(error) => warn!("cannot send {} to the service manager: {error}", one_line(message)),
        }
    }
}

/// Connects to a path or, with a leading `@`, to an abstract name.
fn connect(address: &OsStr) -> io::Result<UnixDatagram> {
    let address = match address.as_bytes() {
        [b'/', ..] => SocketAddr::from_pathname(address)?,
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => return Err(io::Error::other("it is neither an absolute path nor a name after an @")),
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    socket.set_write_timeout(Some(SEND_TIMEOUT))?;
    Ok(socket)
}

fn watchdog() -> Option<Duration> {
    let variable = |name| std::env::var(name).ok();
    watchdog_of(variable("WATCHDOG_USEC"), variable("WATCHDOG_PID"), std::process::id())
}

/// The watchdog's time, if `pid` is this process or missing.
fn watchdog_of(usec: Option<String>, pid: Option<String>, own_pid: u32) -> Option<Duration> {
    if pid.is_some_and(|pid| pid.parse() != Ok(own_pid)) {
        return None;
    }
    let usec = usec?;
    match usec.parse() {
        Ok(0) => None,
        Ok(usec) => Some(Duration::from_micros(usec)),
        Err(_) => {
            warn!("the watchdog is off, because WATCHDOG_USEC={usec} is not a number of microseconds");
            None
        }
    }
}

fn monotonic_us() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.saturating_mul(1_000_000).saturating_add(now.tv_nsec / 1000)
}

/// A line break would begin another message.
fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(usec: &str, pid: Option<&str>) -> Option<Duration> {
        watchdog_of(Some(usec.into()), pid.map(str::to_owned), 7)
    }

    #[test]
    fn watchdog_is_for_the_process_that_it_names_or_for_any() {
        assert_eq!(of("1500", Some("7")), Some(Duration::from_micros(1500)));
        assert_eq!(of("1500", None), Some(Duration::from_micros(1500)));
        assert_eq!(of("1500", Some("8")), None);
        assert_eq!(of("1500", Some("x")), None);
    }

    #[test]
    fn watchdog_without_a_time_is_none() {
        assert_eq!(watchdog_of(None, None, 7), None);
        assert_eq!(of("0", None), None);
        assert_eq!(of("-1", None), None);
    }

    #[test]
    fn address_is_a_path_or_an_abstract_name() {
        let name = format!("@bareblk-test-{}", std::process::id());
        let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name[1..]).unwrap()).unwrap();
        let told = ServiceManager { socket: Some(connect(name.as_ref()).unwrap()), watchdog: None };
        told.status("two\nlines");
        let mut message = [0; 100];
        let length = manager.recv(&mut message).unwrap();
        assert_eq!(&message[..length], b"STATUS=two lines");
        assert!(connect("vsock:2:1234".as_ref()).is_err());
    }
}
