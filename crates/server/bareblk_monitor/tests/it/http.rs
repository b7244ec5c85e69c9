//! `bareblk exporter` as a process, and an HTTP client that reads one answer.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::rig::{DEADLINE, bareblk, monitor_program};

/// `bareblk exporter`; the caller adds options.
pub fn exporter() -> Command {
    monitor_program();
    let mut command = bareblk();
    command.arg("exporter");
    command
}

/// A running exporter; killed when dropped.
pub struct Exporter {
    child: Child,
    pub address: SocketAddr,
}

impl Exporter {
    /// Waits until the exporter listens.
    pub fn start(monitors: &[&Path], options: &[&str]) -> Self {
        let mut command = exporter();
        command.arg("--monitor").args(monitors).args(["--listen", "127.0.0.1:0"]).args(options);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.strip_prefix("bareblk: metrics at http://").unwrap();
        let address = address.strip_suffix("/metrics\n").unwrap().parse().unwrap();
        Self { child, address }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn connect(&self) -> TcpStream {
        connect(self.address)
    }

    pub fn get(&self, path: &str) -> Answer {
        get(self.address, path, "*/*")
    }

    /// The samples of `/metrics` in the classic format.
    pub fn metrics(&self) -> String {
        let answer = self.get("/metrics");
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.body
    }

    /// The answer to `/metrics` as far as it came; `None` if it is no success. The exporter ends a connection that takes
    /// too long, which a busy machine can cause.
    pub fn metrics_in_time(&self) -> Option<String> {
        let mut text = String::new();
        send(self.address, "/metrics", "*/*").read_to_string(&mut text).ok()?;
        text.starts_with("HTTP/1.1 200").then_some(text)
    }

    /// The value of one sample, by its name and labels.
    pub fn value(&self, sample: &str) -> Option<f64> {
        value(&self.metrics(), sample)
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn value(metrics: &str, sample: &str) -> Option<f64> {
    let line = metrics.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '))?;
    Some(line.parse().unwrap())
}

/// An answer to a request.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

/// Sends a GET, and reads the answer.
pub fn get(address: SocketAddr, path: &str, accept: &str) -> Answer {
    read(send(address, path, accept))
}

/// Sends a GET.
fn send(address: SocketAddr, path: &str, accept: &str) -> TcpStream {
    let mut stream = connect(address);
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nAccept: {accept}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

/// Reads an answer up to the end of the connection.
pub fn read(mut stream: TcpStream) -> Answer {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_owned(), body: body.to_owned() }
}
