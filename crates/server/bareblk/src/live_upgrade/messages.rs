//! What old and new server say to each other, in this order (`mod.rs`).
//!
//! Not here: how it travels (`wire.rs`).

use std::ffi::OsString;

use blk_server::{DiskState, Fact, SessionState};
use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// New: the connection's lines are over.
    Begin,
    /// Old: the control socket, which comes with it.
    Control(Listener),
    /// Old: a disk; with it come image, socket and, for a block device, what keeps the kernel off it.
    Disk(OfferedDisk),
    /// Old: these were all disks.
    OffersEnd,
    /// New: everything is open.
    Ready,
    /// Old: what there is to know of a disk that pauses now.
    State { disk: String, state: DiskState },
    /// Old: one of its front-ends; with it come its descriptors.
    Session { disk: String, frozen_ns: u64, state: SessionState },
    /// Old: these were all.
    StatesEnd,
    /// New: all of it is understood.
    Prepared,
    /// Old: they are the new server's.
    Yours,
    /// Either: nothing will come of it.
    No { why: String },
}

impl Message {
    /// For who expected another one.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Begin => "Begin",
            Self::Control(_) => "Control",
            Self::Disk(_) => "Disk",
            Self::OffersEnd => "OffersEnd",
            Self::Ready => "Ready",
            Self::State { .. } => "State",
            Self::Session { .. } => "Session",
            Self::StatesEnd => "StatesEnd",
            Self::Prepared => "Prepared",
            Self::Yours => "Yours",
            Self::No { .. } => "No",
        }
    }
}

/// A socket that is listened on.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listener {
    pub path: OsString,
    /// Its file is a service manager's.
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
    /// A third descriptor comes with it.
    pub claimed: bool,
}
