//! Waits for sockets until a deadline.

use std::io;
use std::time::Instant;

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

/// Waits until one of `fds` is ready, or until `end`; without an `end`, forever. Polls at least once. Returns how many
/// of `fds` are ready; 0 after the deadline.
///
/// # Errors
/// `poll`'s, except `EINTR`.
pub fn wait(fds: &mut [PollFd<'_>], end: Option<Instant>) -> io::Result<usize> {
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        // A time that does not fit exceeds any machine's uptime, so it means no limit.
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(fds, timeout.as_ref()) {
            Err(Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use rustix::event::PollFlags;

    use super::*;

    #[test]
    fn time_that_is_up_still_looks_once_and_says_what_is_ready() {
        let (mut here, there) = UnixStream::pair().unwrap();
        let past = Some(Instant::now());
        assert_eq!(wait(&mut [PollFd::new(&there, PollFlags::IN)], past).unwrap(), 0);
        here.write_all(&[1]).unwrap();
        assert_eq!(wait(&mut [PollFd::new(&there, PollFlags::IN)], past).unwrap(), 1);
        assert_eq!(wait(&mut [PollFd::new(&there, PollFlags::IN)], None).unwrap(), 1);
    }
}
