//! What a service manager (systemd, or one that speaks like it) is told: ready, reloading, stopping, alive, and a line of status.
//!
//! `READY=1 → (RELOADING=1 → READY=1)* → STOPPING=1`; `WATCHDOG=1` in between, only if it asks for that
//!
//! - The socket is made and connected once, at the start: a server in its sandbox makes no sockets any more.
//! - Nobody is told if `NOTIFY_SOCKET` is not set. What cannot be told is told in the log, and the server goes on.
//! - The environment is read, never changed: other processes know by `LISTEN_PID` and `WATCHDOG_PID` that it is not for them.
//!
//! Source: sd_notify(3), sd_watchdog_enabled(3). Not here: sockets that it passes (`passed_sockets.rs`), who is alive
//! (`watchdog.rs`).

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tracing::{debug, warn};

/// A manager that takes nothing any more must not keep the server from serving.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Who is told, if anybody.
#[derive(Debug, Default)]
pub struct ServiceManager {
    socket: Option<UnixDatagram>,
    watchdog: Option<Duration>,
}

impl ServiceManager {
    /// As the environment says.
    pub fn from_environment() -> Self {
        let Some(address) = std::env::var_os("NOTIFY_SOCKET").filter(|address| !address.is_empty()) else {
            return Self::default();
        };
        match connect(&address) {
            Ok(socket) => Self { socket: Some(socket), watchdog: watchdog() },
            Err(error) => {
                warn!("the service manager is told nothing: NOTIFY_SOCKET={}: {error}", address.display());
                Self::default()
            }
        }
    }

    /// One that is told, and what it hears.
    #[cfg(test)]
    pub fn for_tests() -> (Self, UnixDatagram) {
        let (socket, messages) = UnixDatagram::pair().unwrap();
        (Self { socket: Some(socket), watchdog: None }, messages)
    }

    /// Within which time it wants to hear of the server again and again; `None`: never.
    pub fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }

    /// Everything can be connected to, as it is configured.
    pub fn ready(&self, status: &str) {
        self.tell(&format!("READY=1\nSTATUS={}", one_line(status)));
    }

    /// The configuration is being read again; ended by [`ServiceManager::ready`].
    pub fn reloading(&self) {
        self.tell(&format!("RELOADING=1\nMONOTONIC_USEC={}\nSTATUS=reloading", monotonic_us()));
    }

    /// The stop has begun.
    pub fn stopping(&self) {
        self.tell("STOPPING=1\nSTATUS=stopping: waiting for requests in flight");
    }

    /// This process ends, and that one goes on for it. It was not told of a watchdog, so there is none any more: a manager
    /// that went on to wait for its word would end it.
    pub fn main_process(&self, pid: i32) {
        let watchdog = if self.watchdog.is_some() { "\nWATCHDOG_USEC=0" } else { "" };
        self.tell(&format!("MAINPID={pid}{watchdog}\nSTATUS=taken over by process {pid}"));
    }

    /// For whoever looks at the service.
    pub fn status(&self, status: &str) {
        self.tell(&format!("STATUS={}", one_line(status)));
    }

    /// All that should be alive is.
    pub fn alive(&self) {
        self.tell("WATCHDOG=1");
    }

    fn tell(&self, message: &str) {
        let Some(socket) = &self.socket else { return };
        match socket.send(message.as_bytes()) {
            Ok(_) => debug!("service manager told: {}", message.replace('\n', ", ")),
            Err(error) => warn!("the service manager could not be told {}: {error}", one_line(message)),
        }
    }
}

/// A path, or with `@` before it a name in the kernel's own list.
fn connect(address: &OsStr) -> io::Result<UnixDatagram> {
    let address = match address.as_bytes() {
        [b'/', ..] => SocketAddr::from_pathname(address)?,
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => return Err(io::Error::other("neither an absolute path nor a name with @ before it")),
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

/// Of a process that it is meant for: without a number, of whoever reads it.
fn watchdog_of(usec: Option<String>, pid: Option<String>, own_pid: u32) -> Option<Duration> {
    if pid.is_some_and(|pid| pid.parse() != Ok(own_pid)) {
        return None;
    }
    let usec = usec?;
    match usec.parse() {
        Ok(0) => None,
        Ok(usec) => Some(Duration::from_micros(usec)),
        Err(_) => {
            warn!("no watchdog: WATCHDOG_USEC={usec} is not a number of microseconds");
            None
        }
    }
}

fn monotonic_us() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.saturating_mul(1_000_000).saturating_add(now.tv_nsec / 1000)
}

/// A further line would be a message of its own.
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
