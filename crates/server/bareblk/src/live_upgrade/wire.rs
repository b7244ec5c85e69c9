//! Frames on the connection: a message in JSON, followed by descriptors.
//!
//! ```text
//! "bbto"  4 bytes | length of the body, u32 | descriptors, u32 | body | one byte for each 64 descriptors, which it carries
//! ```
//!
//! - Little-endian. Both ends are on one host, and may have different versions.
//! - The receiver checks lengths and counts before it allocates, and accepts descriptors only where they belong.
//! - Each wait has a time limit, unless the caller passes none.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::messages::Message;

const MAGIC: [u8; 4] = *b"bbto";
const HEADER_BYTES: usize = 12;
/// Maximum length of a body. A session with 256 queues and 512 memory regions needs a quarter of it.
const MAX_BODY_BYTES: usize = 1 << 20;
/// Maximum number of descriptors of a message, enough for the same session: three per queue and one per region.
const MAX_FDS: usize = 2048;
/// Descriptors per byte; Linux accepts at most 253.
const FDS_AT_A_TIME: usize = 64;
/// The pause after the kernel has refused to send because too many descriptors are in flight.
const PAUSE: Duration = Duration::from_millis(1);

/// Why the connection has failed.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error("the other process ended the connection")]
    Closed,
    #[error("the other process did not answer within {} s", limit.as_secs_f64())]
    TooSlow { limit: Duration },
    #[error("the received data is not a frame of a live upgrade: it begins with {begin:02x?}")]
    NoFrame { begin: [u8; 4] },
    #[error(
        "a frame has {bytes} bytes and {fds} descriptors; at most {MAX_BODY_BYTES} and {MAX_FDS} are allowed"
    )]
    TooLarge { bytes: usize, fds: usize },
    #[error("a frame came with {count} descriptors, but {wanted} were announced")]
    Descriptors { count: usize, wanted: usize },
    #[error("descriptors of a frame were lost: this process has no room for them (RLIMIT_NOFILE)")]
    DescriptorsLost,
    /// The error's text fits on one line, whatever the other process has sent.
    #[error("a message cannot be parsed: {}", .0.to_string().escape_debug())]
    NotUnderstood(serde_json::Error),
    #[error("the connection failed")]
    Io(#[from] io::Error),
}

impl From<serde_json::Error> for WireError {
    fn from(error: serde_json::Error) -> Self {
        Self::NotUnderstood(error)
    }
}

impl From<Errno> for WireError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::PIPE | Errno::CONNRESET => Self::Closed,
            errno => Self::Io(errno.into()),
        }
    }
}

/// The end of the wait; `None`: no limit.
#[derive(Clone, Copy, Debug)]
struct Deadline(Option<(Instant, Duration)>);

impl Deadline {
    fn new(limit: Option<Duration>) -> Self {
        Self(limit.map(|limit| (Instant::now() + limit, limit)))
    }

    fn wait(self, stream: &UnixStream, what: PollFlags) -> Result<(), WireError> {
        match (vhost_user::wait(&mut [PollFd::new(stream, what)], self.0.map(|(end, _)| end))?, self.0) {
            (0, Some((_, limit))) => Err(WireError::TooSlow { limit }),
            _ => Ok(()),
        }
    }
}

/// Sends one message, with copies of these descriptors.
pub fn send(
    stream: &UnixStream,
    message: &Message,
    fds: &[BorrowedFd<'_>],
    limit: Duration,
) -> Result<(), WireError> {
    let deadline = Deadline::new(Some(limit));
    let body = serde_json::to_vec(message)?;
    let (bytes, count) = (body.len(), fds.len());
    if bytes > MAX_BODY_BYTES || count > MAX_FDS {
        return Err(WireError::TooLarge { bytes, fds: count });
    }
    let word = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes();
    let frame = [&MAGIC[..], &word(bytes), &word(count), &body].concat();
    let mut left = frame.as_slice();
    while let Some(rest) = left.get(..).filter(|rest| !rest.is_empty()) {
        let sent = send_some(stream, rest, &[], deadline)?;
        left = rest.get(sent..).unwrap_or_default();
    }
    for fds in fds.chunks(FDS_AT_A_TIME) {
        send_some(stream, &[0], fds, deadline)?;
    }
    Ok(())
}

fn send_some(
    stream: &UnixStream,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    deadline: Deadline,
) -> Result<usize, WireError> {
    loop {
        deadline.wait(stream, PollFlags::OUT)?;
        match vhost_user::send(stream, bytes, fds, SendFlags::DONTWAIT) {
            Ok(sent) => return Ok(sent),
            Err(Errno::AGAIN) => {}
            // Too many descriptors are in flight: wait until the peer has received some.
            Err(Errno::TOOMANYREFS) => std::thread::sleep(PAUSE),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Waits for one message. `limit` applies until its last byte; `None`: no limit.
pub fn receive(stream: &UnixStream, limit: Option<Duration>) -> Result<(Message, Vec<OwnedFd>), WireError> {
    let deadline = Deadline::new(limit);
    let mut header = [0; HEADER_BYTES];
    fill(stream, &mut header, deadline)?;
    let [m0, m1, m2, m3, b0, b1, b2, b3, f0, f1, f2, f3] = header;
    let begin = [m0, m1, m2, m3];
    if begin != MAGIC {
        return Err(WireError::NoFrame { begin });
    }
    let number = |bytes| usize::try_from(u32::from_le_bytes(bytes)).unwrap_or(usize::MAX);
    let (bytes, wanted) = (number([b0, b1, b2, b3]), number([f0, f1, f2, f3]));
    if bytes > MAX_BODY_BYTES || wanted > MAX_FDS {
        return Err(WireError::TooLarge { bytes, fds: wanted });
    }
    let mut body = vec![0; bytes];
    fill(stream, &mut body, deadline)?;
    let mut fds = Vec::new();
    for _ in 0..wanted.div_ceil(FDS_AT_A_TIME) {
        fds.extend(receive_fds(stream, deadline)?);
    }
    if fds.len() != wanted {
        return Err(WireError::Descriptors { count: fds.len(), wanted });
    }
    Ok((serde_json::from_slice(&body)?, fds))
}

/// Fills `out`, and closes descriptors that arrive with these bytes.
fn fill(stream: &UnixStream, mut out: &mut [u8], deadline: Deadline) -> Result<(), WireError> {
    while !out.is_empty() {
        let received = receive_some(stream, out, deadline, drop)?;
        out = out.get_mut(received..).unwrap_or_default();
    }
    Ok(())
}

fn receive_fds(stream: &UnixStream, deadline: Deadline) -> Result<Vec<OwnedFd>, WireError> {
    let mut fds = Vec::new();
    receive_some(stream, &mut [0], deadline, |fd| fds.push(fd))?;
    let count = fds.len();
    if count > FDS_AT_A_TIME {
        return Err(WireError::Descriptors { count, wanted: FDS_AT_A_TIME });
    }
    Ok(fds)
}

fn receive_some(
    stream: &UnixStream,
    out: &mut [u8],
    deadline: Deadline,
    mut take: impl FnMut(OwnedFd),
) -> Result<usize, WireError> {
    loop {
        deadline.wait(stream, PollFlags::IN)?;
        match vhost_user::receive(stream, out, RecvFlags::DONTWAIT, &mut take) {
            Ok(received) if received.fds_lost => return Err(WireError::DescriptorsLost),
            Ok(received) if received.bytes == 0 => return Err(WireError::Closed),
            Ok(received) => return Ok(received.bytes),
            Err(Errno::AGAIN) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    const SOON: Option<Duration> = Some(Duration::from_millis(200));

    fn answer_to(bytes: &[u8]) -> WireError {
        let (mut there, here) = UnixStream::pair().unwrap();
        there.write_all(bytes).unwrap();
        let error = receive(&here, SOON).unwrap_err();
        drop(there);
        error
    }

    #[test]
    fn message_arrives_with_all_its_descriptors_in_their_order() {
        let (there, here) = UnixStream::pair().unwrap();
        let files: Vec<_> = (0..150).map(|_| tempfile::tempfile().unwrap()).collect();
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let sender = std::thread::scope(|scope| {
            let sender = scope.spawn(|| send(&there, &Message::Prepared, &fds, Duration::from_secs(5)));
            let (message, received) = receive(&here, Some(Duration::from_secs(5))).unwrap();
            assert!(matches!(message, Message::Prepared));
            let inode = |fd: BorrowedFd<'_>| rustix::fs::fstat(fd).unwrap().st_ino;
            let [sent, received] = [fds.clone(), received.iter().map(AsFd::as_fd).collect()]
                .map(|fds| fds.into_iter().map(inode).collect::<Vec<_>>());
            assert_eq!(sent, received);
            sender.join().unwrap()
        });
        sender.unwrap();
    }

    #[test]
    fn what_is_no_frame_is_refused_before_anything_is_taken() {
        assert!(matches!(answer_to(b"{\"id\":1,\"do\":\"list\"}\n"), WireError::NoFrame { .. }));
        let large = [&MAGIC[..], &u32::MAX.to_le_bytes(), &[0; 4]].concat();
        assert!(matches!(answer_to(&large), WireError::TooLarge { fds: 0, .. }));
        let many = [&MAGIC[..], &[0; 4], &u32::MAX.to_le_bytes()].concat();
        assert!(matches!(answer_to(&many), WireError::TooLarge { bytes: 0, .. }));
    }

    #[test]
    fn body_that_is_no_message_and_descriptors_that_do_not_come_are_refused() {
        let nonsense = [&MAGIC[..], &3_u32.to_le_bytes(), &[0; 4], b"{]}"].concat();
        assert!(matches!(answer_to(&nonsense), WireError::NotUnderstood(_)));
        let two_lines = [&MAGIC[..], &14_u32.to_le_bytes(), &[0; 4], br#"{"a\nb":[1,2]}"#].concat();
        assert!(!answer_to(&two_lines).to_string().contains('\n'), "a line break from the other process");
        let none = [&MAGIC[..], &7_u32.to_le_bytes(), &1_u32.to_le_bytes(), b"\"Ready\"", &[0]].concat();
        assert!(matches!(answer_to(&none), WireError::Descriptors { count: 0, wanted: 1 }));
    }

    #[test]
    fn silence_ends_at_the_limit_and_half_a_frame_with_the_connection() {
        let (mut there, here) = UnixStream::pair().unwrap();
        there.write_all(&MAGIC).unwrap();
        assert!(matches!(receive(&here, SOON), Err(WireError::TooSlow { .. })));
        there.write_all(&MAGIC).unwrap();
        drop(there);
        assert!(matches!(receive(&here, SOON), Err(WireError::Closed)));
    }
}
