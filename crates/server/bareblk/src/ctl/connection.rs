//! The client's end of the control socket, and the errors about a missing, foreign or stopped server.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::output::ServerError;
use super::tables::plain;
use crate::args::ctl_args::SOCKET_VARIABLE;
use crate::control::protocol::answer::Answer;
use crate::control::protocol::request::line;
use crate::control::protocol::verbs::Verb;
use crate::control::protocol::{Greeting, PROTOCOL};

/// A server greets at once, so a longer wait means that another program listens.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a greeting.
const MAX_GREETING_BYTES: u64 = 4096;
/// Maximum length of an answer: the statistics of 1,000 disks with 256 running queues each take 80 MB.
const MAX_ANSWER_BYTES: u64 = 256 << 20;

/// There is no server, or it cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0:#}")]
pub struct Unreachable(anyhow::Error);

/// A connection to a server that speaks our protocol.
#[derive(Debug)]
pub struct Connection {
    path: PathBuf,
    stream: BufReader<UnixStream>,
    version: String,
    next_id: u64,
}

/// An answer, with its line.
#[derive(Debug)]
pub struct Reply {
    /// As the server sent it, without its line break.
    pub line: String,
    /// The parsed line.
    pub answer: Answer,
}

impl Connection {
    /// Connects, and checks the greeting.
    ///
    /// # Errors
    /// There is no server, or it speaks another protocol.
    pub fn open(path: &Path) -> Result<Self> {
        Self::try_open(path).map_err(|error| Unreachable(error).into())
    }

    fn try_open(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path).map_err(|error| unreachable(path, error))?;
        stream.set_read_timeout(Some(GREETING_TIMEOUT))?;
        let mut server = Self {
            path: path.to_owned(),
            stream: BufReader::new(stream),
            version: String::new(),
            next_id: 1,
        };
        server.version = server.check_greeting()?;
        server.stream.get_ref().set_read_timeout(None)?;
        Ok(server)
    }

    /// Returns the server's version.
    fn check_greeting(&mut self) -> Result<String> {
        let path = self.path.clone();
        let path = path.display();
        let stranger = || {
            format!(
                "{path} does not greet as a bareblk server: is it a disk's socket? Give the path of a control socket"
            )
        };
        let line = match self.read_line(MAX_GREETING_BYTES) {
            Ok(Some(line)) => line,
            Ok(None) => bail!("the server at {path} ended the connection: try again"),
            Err(_) => bail!(stranger()),
        };
        let greeting: Greeting = serde_json::from_str(&line).map_err(|_| anyhow!(stranger()))?;
        if greeting.protocol != PROTOCOL {
            let Greeting { bareblk, protocol } = greeting;
            let ours = env!("CARGO_PKG_VERSION");
            bail!(
                "the server at {path} is bareblk {} and speaks protocol {protocol}; this is bareblk {ours}, which speaks {PROTOCOL}: use the server's version of bareblk",
                plain(&bareblk)
            );
        }
        Ok(greeting.bareblk)
    }

    /// The server's process id, if the kernel reports it.
    pub fn pid(&self) -> Option<i32> {
        getsockopt(self.stream.get_ref(), PeerCredentials).ok().map(|peer| peer.pid()).filter(|pid| *pid > 0)
    }

    /// The server's version, from its greeting.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// From now on, a request fails if the server neither reads nor sends anything for this long.
    ///
    /// # Errors
    /// The kernel refuses the limit.
    pub fn limit_wait(&self, limit: Duration) -> io::Result<()> {
        self.stream.get_ref().set_read_timeout(Some(limit))?;
        self.stream.get_ref().set_write_timeout(Some(limit))
    }

    /// Sends a request and waits for the answer, without a time limit unless [`Self::limit_wait`] set one.
    ///
    /// # Errors
    /// The connection ended before the answer, or the answer cannot be read.
    pub fn ask(&mut self, verb: &Verb) -> Result<Reply> {
        self.exchange(verb, what_now(verb))
    }

    /// Like [`Self::ask`], for a request that not every version of the server knows. Changes nothing on the server.
    ///
    /// # Errors
    /// As for [`Self::ask`].
    pub fn ask_json(&mut self, request: &Value) -> Result<Reply> {
        self.exchange(request, what_now(&Verb::List))
    }

    /// Like [`Self::ask_json`], for a long answer of which only some fields are needed.
    ///
    /// # Errors
    /// As for [`Self::ask`] and [`Reply::into_ok`].
    pub fn ask_for<T: DeserializeOwned>(&mut self, request: &Value) -> Result<T> {
        let line = self.exchange_lines(request, what_now(&Verb::List))?;
        let answer: Answer<T> = self.parse(&line)?;
        ok(answer)
    }

    fn exchange(&mut self, request: &impl Serialize, what_now: &str) -> Result<Reply> {
        let line = self.exchange_lines(request, what_now)?;
        let answer = self.parse(&line)?;
        Ok(Reply { line, answer })
    }

    fn parse<T: DeserializeOwned>(&self, line: &str) -> Result<Answer<T>> {
        serde_json::from_str(line)
            .with_context(|| format!("cannot read the answer of the server at {}", self.path.display()))
    }

    fn exchange_lines(&mut self, request: &impl Serialize, what_now: &str) -> Result<String> {
        let id = self.next_id;
        self.next_id += 1;
        let line = line(id, request)?;
        // A server that refuses this client writes the reason before it closes the connection: it is read even if the
        // write failed.
        let sent = self.stream.get_mut().write_all(&line);
        let answer = self.read_line(MAX_ANSWER_BYTES);
        let path = self.path.display();
        match answer {
            Ok(Some(line)) => Ok(line),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                bail!("the server at {path} does not answer: {what_now}");
            }
            answer => {
                let cause = sent.err().or(answer.err());
                let cause = cause.map(|error| format!(" ({error})")).unwrap_or_default();
                bail!("the server at {path} closed the connection before it answered{cause}: {what_now}");
            }
        }
    }

    /// `None` at the end of the connection, even in the middle of a line.
    fn read_line(&mut self, max_bytes: u64) -> io::Result<Option<String>> {
        let mut line = Vec::new();
        (&mut self.stream).take(max_bytes).read_until(b'\n', &mut line)?;
        if line.pop() != Some(b'\n') {
            let too_long = u64::try_from(line.len()).unwrap_or(u64::MAX) >= max_bytes.saturating_sub(1);
            return if too_long { Err(io::ErrorKind::InvalidData.into()) } else { Ok(None) };
        }
        String::from_utf8(line).map(Some).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// The connection, for a protocol that does not consist of lines.
    ///
    /// # Errors
    /// The server has already sent more.
    pub fn into_stream(self) -> Result<UnixStream> {
        if !self.stream.buffer().is_empty() {
            bail!("the server at {} sent more than one answer", self.path.display());
        }
        Ok(self.stream.into_inner())
    }

    /// Waits until the server has stopped and thereby closed the connection.
    ///
    /// # Errors
    /// The connection fails in any other way.
    pub fn wait_gone(mut self) -> Result<()> {
        let end = io::copy(&mut self.stream, &mut io::sink());
        match end {
            Err(error) if error.kind() != io::ErrorKind::ConnectionReset => {
                Err(anyhow!(error).context("the server is stopping, but this connection failed, so it is unknown whether the server has stopped"))
            }
            _ => Ok(()),
        }
    }
}

impl Reply {
    /// # Errors
    /// The server answered with an error, or with neither a result nor an error.
    pub fn into_ok(self) -> Result<Value> {
        ok(self.answer)
    }
}

fn ok<T>(answer: Answer<T>) -> Result<T> {
    match (answer.ok, answer.error) {
        (_, Some(fault)) => Err(ServerError(plain(&fault.message)).into()),
        (Some(ok), None) => Ok(ok),
        (None, None) => bail!("the server's answer is neither `ok` nor `error`"),
    }
}

fn what_now(verb: &Verb) -> &'static str {
    match verb {
        Verb::List | Verb::Stats(_) | Verb::Slow(_) | Verb::Workers | Verb::Show(_) | Verb::Health(_) => {
            "see its log"
        }
        Verb::Shutdown => "it may have stopped before it could answer; see its log",
        _ => "it may have carried out the request; see its log, and `bareblk ctl list` once it runs again",
    }
}

fn unreachable(path: &Path, error: io::Error) -> anyhow::Error {
    let shown = path.display();
    let advice = format!("name the server's control socket with --control or {SOCKET_VARIABLE}");
    match error.kind() {
        io::ErrorKind::NotFound => {
            anyhow!("there is no server at {shown}: start one with --control {shown}, or {advice}")
        }
        io::ErrorKind::ConnectionRefused if is_socket(path) => {
            anyhow!(
                "no server listens at {shown}, although the socket exists: start the server again, or {advice}"
            )
        }
        io::ErrorKind::ConnectionRefused => anyhow!("{shown} is not a socket: {advice}"),
        io::ErrorKind::PermissionDenied => {
            anyhow!("you may not connect to {shown}: connect as root, or as the user who runs the server")
        }
        _ => anyhow!("cannot connect to {shown}: {error}: {advice}"),
    }
}

fn is_socket(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}
