//! A client of a server's control socket.
//!
//! `connect → greeting → one line of JSON per request → one line of JSON per answer`
//!
//! Answers are read as by any client (docs/reference/control.md).

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::process::once_it_listens;

/// Limit of the time for an answer, which normally takes microseconds. A move of a queue waits for its requests.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connection to a control socket.
pub(crate) struct Control(BufReader<UnixStream>);

impl Control {
    /// Connects and reads the greeting. A server greets its clients once its disks accept front-ends.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut control = Self(BufReader::new(stream));
        control.line()?;
        Ok(control)
    }

    /// As [`Control::connect`], but waits until the server listens.
    pub fn connect_when_ready(path: &Path) -> io::Result<Self> {
        once_it_listens(|| Self::connect(path))
    }

    /// Sends a request with this verb and these fields. Returns the answer's line.
    pub fn ask(&mut self, mut request: Value) -> io::Result<String> {
        request["id"] = 1.into();
        self.0.get_mut().write_all(format!("{request}\n").as_bytes())?;
        self.line()
    }

    /// As [`Control::ask`], for a request whose answer has no figures.
    pub fn tell(&mut self, request: Value) -> io::Result<()> {
        let answer: Value = serde_json::from_str(&self.ask(request)?).map_err(io::Error::other)?;
        match answer.get("ok") {
            Some(_) => Ok(()),
            None => Err(io::Error::other(answer["error"].to_string())),
        }
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        match self.0.read_line(&mut line)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line),
        }
    }
}
