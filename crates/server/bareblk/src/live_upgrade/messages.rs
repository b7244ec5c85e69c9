//! The messages between the old and the new server, in their order (`mod.rs`). Each says which of the two sends it.

use std::ffi::OsString;

use blk_server::{DiskState, DiskTotals, Fact, SessionState};
use serde::{Deserialize, Serialize};

use crate::control::protocol::verbs::JobStart;

#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// New: the first frame.
    Begin,
    /// New, instead of `Begin`, if the old server's answer to `take-over` listed extras: the extras that the new server
    /// wants.
    BeginWith { extras: Vec<String> },
    /// Old: its control socket. Carries the socket.
    Control(Listener),
    /// Old: its monitor socket, if it has one and the new server wants this extra. Carries the socket.
    Monitor(Listener),
    /// Old: a disk. Carries image (unless it is on another machine), socket and, for a block device, the descriptor that
    /// claims it.
    Disk(OfferedDisk),
    /// Old: there are no more disks.
    OffersEnd,
    /// New: it has opened everything.
    Ready,
    /// Old: the state of a paused disk.
    State { disk: String, state: DiskState },
    /// Old: one of the disk's front-ends. Carries its descriptors.
    Session { disk: String, frozen_ns: u64, state: SessionState },
    /// Old: the totals of a paused disk, if the new server wants this extra.
    Totals { disk: String, totals: DiskTotals },
    /// Old: a job that the new server starts again, if it wants this extra.
    Job(JobStart),
    /// Old: there are no more states.
    StatesEnd,
    /// New: it has rebuilt all sessions.
    Prepared,
    /// Old: the disks belong to the new server.
    Yours,
    /// Either: the sender gives up, for this reason.
    No { why: String },
}

impl Message {
    /// The message's name, for the error if a different message was expected.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Begin => "Begin",
            Self::BeginWith { .. } => "BeginWith",
            Self::Control(_) => "Control",
            Self::Monitor(_) => "Monitor",
            Self::Disk(_) => "Disk",
            Self::OffersEnd => "OffersEnd",
            Self::Ready => "Ready",
            Self::State { .. } => "State",
            Self::Session { .. } => "Session",
            Self::Totals { .. } => "Totals",
            Self::Job(_) => "Job",
            Self::StatesEnd => "StatesEnd",
            Self::Prepared => "Prepared",
            Self::Yours => "Yours",
            Self::No { .. } => "No",
        }
    }
}

/// A listening socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listener {
    pub path: OsString,
    /// Whether a service manager owns the socket's file.
    pub managed: bool,
}

/// A disk as the old server serves it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OfferedDisk {
    pub name: String,
    pub image: OsString,
    pub socket: Listener,
    pub facts: Vec<Fact>,
    pub capacity_sectors: u64,
    /// Whether the message carries another descriptor, which claims the block device.
    pub claimed: bool,
}
