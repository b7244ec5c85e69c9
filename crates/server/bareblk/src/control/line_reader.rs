//! Reads a client's lines, and limits their length and the time that each takes.
//!
//! Between lines it sleeps without a time limit, so an idle client causes no wake-ups.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const CHUNK_BYTES: usize = 4096;

/// The limits of one line.
#[derive(Clone, Copy, Debug)]
pub struct LineLimits {
    /// The length without the line break.
    pub bytes: usize,
    /// The time from the first byte to the line break.
    pub time: Duration,
}

/// Why there is no further line.
#[derive(Debug, thiserror::Error)]
pub enum NoLine {
    #[error("the connection ended")]
    Ended,
    #[error("the connection ended in the middle of a line: end each request with a line break")]
    Half,
    #[error("the line is longer than {max} bytes: send a shorter one")]
    TooLong { max: usize },
    #[error("no complete line within {} s: send each request as one whole line", limit.as_secs_f64())]
    TooSlow { limit: Duration },
    #[error("the connection failed")]
    Io(#[source] io::Error),
}

/// One client's lines.
#[derive(Debug)]
pub struct LineReader<'a> {
    stream: &'a UnixStream,
    limits: LineLimits,
    buffer: Vec<u8>,
}

impl<'a> LineReader<'a> {
    pub fn new(stream: &'a UnixStream, limits: LineLimits) -> Self {
        Self { stream, limits, buffer: Vec::new() }
    }

    /// Whether the client has sent bytes beyond the last line.
    pub fn has_more(&self) -> bool {
        !self.buffer.is_empty()
    }

    /// The next line, without its line break.
    pub fn next(&mut self) -> Result<Vec<u8>, NoLine> {
        let mut begun = (!self.buffer.is_empty()).then(Instant::now);
        let mut seen = 0;
        loop {
            if let Some(length) = self.buffer[seen..].iter().position(|&byte| byte == b'\n') {
                return self.take(seen + length);
            }
            seen = self.buffer.len();
            if seen > self.limits.bytes {
                return Err(NoLine::TooLong { max: self.limits.bytes });
            }
            if !self.read_more(begun)? {
                return Err(if self.buffer.is_empty() { NoLine::Ended } else { NoLine::Half });
            }
            begun.get_or_insert_with(Instant::now);
        }
    }

    fn take(&mut self, length: usize) -> Result<Vec<u8>, NoLine> {
        let rest = self.buffer.split_off(length + 1);
        let mut line = std::mem::replace(&mut self.buffer, rest);
        line.truncate(length);
        let max = self.limits.bytes;
        if line.len() > max { Err(NoLine::TooLong { max }) } else { Ok(line) }
    }

    /// Returns false at the end of the connection.
    fn read_more(&mut self, begun: Option<Instant>) -> Result<bool, NoLine> {
        let limit = self.limits.time;
        let left = begun.map(|begun| limit.saturating_sub(begun.elapsed()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(NoLine::TooSlow { limit });
        }
        self.stream.set_read_timeout(left).map_err(NoLine::Io)?;
        let mut chunk = [0; CHUNK_BYTES];
        match self.stream.read(&mut chunk) {
            Ok(bytes) => {
                self.buffer.extend_from_slice(&chunk[..bytes]);
                Ok(bytes > 0)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(true),
            // The read timed out: the caller's next call finds that no time is left.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(false),
            Err(error) => Err(NoLine::Io(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const LIMITS: LineLimits = LineLimits { bytes: 10, time: Duration::from_millis(50) };

    fn pair_with(sent: &[u8]) -> (UnixStream, UnixStream) {
        let (mut client, server) = UnixStream::pair().unwrap();
        client.write_all(sent).unwrap();
        (client, server)
    }

    #[test]
    fn lines_sent_at_once_come_one_by_one() {
        let (client, server) = pair_with(b"one\n\nthree\n");
        let mut lines = LineReader::new(&server, LIMITS);
        assert_eq!(lines.next().unwrap(), b"one");
        assert_eq!(lines.next().unwrap(), b"");
        assert_eq!(lines.next().unwrap(), b"three");
        drop(client);
        assert!(matches!(lines.next(), Err(NoLine::Ended)));
    }

    #[test]
    fn line_at_the_limit_is_taken_and_one_byte_more_is_not() {
        let (_client, server) = pair_with(b"0123456789\n0123456789a\n");
        let mut lines = LineReader::new(&server, LIMITS);
        assert_eq!(lines.next().unwrap().len(), 10);
        assert!(matches!(lines.next(), Err(NoLine::TooLong { max: 10 })));
    }

    #[test]
    fn line_without_end_is_too_long_before_it_is_complete() {
        let (_client, server) = pair_with(&[b'x'; 4096]);
        assert!(matches!(LineReader::new(&server, LIMITS).next(), Err(NoLine::TooLong { .. })));
    }

    #[test]
    fn line_that_does_not_go_on_is_too_slow() {
        let (_client, server) = pair_with(b"one\nhalf");
        let mut lines = LineReader::new(&server, LIMITS);
        assert_eq!(lines.next().unwrap(), b"one");
        assert!(matches!(lines.next(), Err(NoLine::TooSlow { .. })));
    }

    #[test]
    fn line_that_comes_drop_by_drop_is_too_slow() {
        let (mut client, server) = UnixStream::pair().unwrap();
        let dripping = std::thread::spawn(move || {
            while client.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let limits = LineLimits { bytes: 1 << 20, ..LIMITS };
        assert!(matches!(LineReader::new(&server, limits).next(), Err(NoLine::TooSlow { .. })));
        drop(server);
        dripping.join().unwrap();
    }

    #[test]
    fn end_in_the_middle_of_a_line_is_told_from_an_end_between_lines() {
        let (client, server) = pair_with(b"half");
        drop(client);
        assert!(matches!(LineReader::new(&server, LIMITS).next(), Err(NoLine::Half)));
    }
}
