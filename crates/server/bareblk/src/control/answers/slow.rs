//! The answer to `slow`: the latest slow requests of a disk in JSON. The client parses the same structures.

use std::time::{Duration, UNIX_EPOCH};

use blk_server::SlowRequest;
use serde::{Deserialize, Serialize};

use super::super::protocol::answer::ns;

/// The answer to `slow`.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SlowAnswer {
    /// The disk's `slow-ms`; null: no request is slow.
    pub slow_ms: Option<u64>,
    /// The latest slow requests, oldest first.
    pub requests: Vec<Slow>,
}

/// A slow request.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Slow {
    /// When the request was answered, in milliseconds since 1970.
    pub at_ms: u64,
    pub queue: u16,
    /// `read`, `write`, `flush`, `discard` or `write zeroes`.
    pub request: String,
    pub sector: u64,
    pub bytes: u64,
    pub took_ns: u64,
    pub tries: u32,
    /// Whether the request was answered with an error.
    pub failed: bool,
}

impl SlowAnswer {
    pub fn new(limit: Option<Duration>, requests: &[SlowRequest]) -> Self {
        Self { slow_ms: limit.map(milliseconds), requests: requests.iter().map(Slow::new).collect() }
    }
}

impl Slow {
    fn new(request: &SlowRequest) -> Self {
        Self {
            at_ms: request.at.duration_since(UNIX_EPOCH).map_or(0, milliseconds),
            queue: request.queue,
            request: request.kind.to_owned(),
            sector: request.sector,
            bytes: request.bytes,
            took_ns: ns(request.took),
            tries: request.tries,
            failed: request.failed,
        }
    }
}

pub fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
