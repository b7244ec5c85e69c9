//! Prometheus's side: `bareblk exporter` for one server, scraped at regular intervals.
//!
//! `exporter → its port answers → (scrape, pause) … → durations`

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::process::{Keeper, here};
use crate::experiment::SampleError;

/// Time between two scrapes. The exporter repeats its figures for 250 ms before it asks the server again.
const EVERY: Duration = Duration::from_millis(300);
/// How long to wait for the exporter's port, and for an answer.
const PATIENCE: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(5);
/// The program that `bareblk exporter` runs.
const MONITOR: &str = "bareblk-monitor";
/// How an answer with figures begins.
const FINE: &[u8] = b"HTTP/1.1 200";

/// A running exporter. Dropping it ends the exporter.
pub(crate) struct Scraper {
    exporter: Child,
    /// Dropped before the exporter is waited for.
    keeper: Option<Keeper>,
    address: SocketAddr,
}

impl Scraper {
    /// Starts an exporter for the server with this monitor socket. `program` is `bareblk`.
    pub fn start(program: Option<&Path>, monitor: &Path) -> Result<Self, SampleError> {
        let failed = |error| SampleError::because("the exporter", &error);
        // The exporter binds the port after this listener is closed.
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|port| port.local_addr());
        let address = address.map_err(failed)?;
        let program = here(program)?;
        check_installed(program)?;
        let mut command = Command::new(program);
        command.arg("exporter").arg("--monitor").arg(monitor).args(["--listen", &address.to_string()]);
        let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut scraper = Self { exporter: command.spawn().map_err(failed)?, keeper: None, address };
        scraper.keeper = Some(Keeper::of(scraper.exporter.id()).map_err(failed)?);
        scraper.wait().map_err(failed)?;
        Ok(scraper)
    }

    fn wait(&mut self) -> io::Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.scrape() {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > end => return Err(error),
                Err(_) => std::thread::sleep(LOOK),
            }
            if let Some(status) = self.exporter.try_wait()? {
                return Err(io::Error::other(format!("it ended with {status}")));
            }
        }
    }

    /// Scrapes once. Returns how long it took.
    fn scrape(&self) -> io::Result<Duration> {
        let began = Instant::now();
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        match answer.starts_with(FINE) {
            true => Ok(began.elapsed()),
            false => Err(io::Error::other("the exporter answered with an error")),
        }
    }

    /// Scrapes until `ended` is set. Returns the longest duration.
    pub fn run(&self, ended: &AtomicBool) -> io::Result<Duration> {
        let mut longest = Duration::ZERO;
        while !ended.load(Relaxed) {
            longest = longest.max(self.scrape()?);
            let next = Instant::now() + EVERY;
            while Instant::now() < next && !ended.load(Relaxed) {
                std::thread::sleep(LOOK);
            }
        }
        Ok(longest)
    }
}

/// `bareblk` looks for the program beside itself and in PATH.
fn check_installed(bareblk: &Path) -> Result<(), SampleError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = bareblk.parent().map(Path::to_path_buf).into_iter().chain(std::env::split_paths(&path));
    match folders.into_iter().any(|folder| folder.join(MONITOR).exists()) {
        true => Ok(()),
        false => Err(SampleError::Unavailable(format!(
            "{MONITOR} is not installed: apt install bareblk, or cargo build --release -p bareblk_monitor"
        ))),
    }
}

impl Drop for Scraper {
    fn drop(&mut self) {
        self.keeper = None;
        let _ = self.exporter.kill();
        let _ = self.exporter.wait();
    }
}
