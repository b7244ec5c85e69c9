//! What a request costs against its disk's limits, and whether it may start.
//!
//! `parsed request → Cost → gate: charged, or it waits in the ring`; a request that reaches no storage gets a refund

use std::time::Instant;

use virtio_blk::{Parsed, Request};

use crate::data_path::disk::Disk;
use crate::data_path::queue::refusal::Refusal;
use crate::data_path::throttle::bucket::virtual_time;
use crate::data_path::throttle::gate::{Admission, Cost, Direction, QueueGate};
use crate::host::clock::ns_at;

/// The longest request on a disk with limits. UEFI firmware reads that much at once; the limits must hold although the
/// storage does the whole request at once.
const LONGEST_BYTES: u64 = 1 << 30;

pub(super) fn gate(disk: &Disk) -> Option<Box<QueueGate>> {
    disk.throttle().map(|throttle| Box::new(QueueGate::new(throttle)))
}

/// Whether the request may start. If so, it is charged. `begun`: the previous server had begun it, and the queue is
/// stopping.
pub(super) fn admit(
    gate: &mut Option<Box<QueueGate>>,
    parsed: &Parsed<'_>,
    begun: bool,
    now: Instant,
) -> Result<bool, Refusal> {
    let Some(gate) = gate else { return Ok(true) };
    gate.settle();
    // A malformed request reaches no storage.
    let Some(cost) = parsed.request.as_ref().ok().and_then(cost) else { return Ok(true) };
    if cost.bytes > LONGEST_BYTES {
        return Err(Refusal::TooLong { bytes: cost.bytes, max: LONGEST_BYTES });
    }
    let now = virtual_time(ns_at(now));
    if !begun {
        return Ok(gate.admit(cost, now));
    }
    match gate.admit_begun(cost, now) {
        Admission::Starts => Ok(true),
        Admission::AskAgain => Ok(false),
        Admission::Refused => Err(Refusal::BeyondLimits),
    }
}

/// Undoes the charge of the request that was admitted last.
pub(super) fn refund(gate: &mut Option<Box<QueueGate>>) {
    if let Some(gate) = gate {
        gate.refund();
    }
}

/// `None`: the request is free, because it reaches no storage.
fn cost(request: &Request<'_>) -> Option<Cost> {
    let (direction, ops, bytes) = match request {
        Request::Read { data, .. } => (Direction::Read, 1, data.len_bytes()),
        Request::Write { data, .. } => (Direction::Write, 1, data.len_bytes()),
        Request::Flush => (Direction::Write, 1, 0),
        Request::Discard { segments } => (Direction::Write, segments.len(), 0),
        Request::WriteZeroes { segments } => {
            let sectors = segments.iter().map(|segment| u64::from(segment.sectors)).sum::<u64>();
            // A device or a file system may have to write these zeroes.
            (Direction::Write, segments.len(), sectors * disk_image::SECTOR_BYTES)
        }
        Request::GetId { .. } | Request::Unsupported { .. } => return None,
    };
    Some(Cost { direction, ops: ops as u64, bytes })
}
