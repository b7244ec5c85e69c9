//! Guests whose disks have limits of IOPS or bandwidth, and what they get in each window of time.

use std::io;
use std::time::{Duration, Instant};

pub(crate) mod guest;

pub(crate) mod server;

pub(crate) mod windows;

/// A server that has created its socket may not listen on it yet.
const LISTENS_WITHIN: Duration = Duration::from_secs(5);

/// Connects as soon as the server listens.
fn once_it_listens<T>(connect: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let end = Instant::now() + LISTENS_WITHIN;
    loop {
        match connect() {
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
            done => return done,
        }
    }
}
