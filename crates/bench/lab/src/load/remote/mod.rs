//! Disks elsewhere: images in a Ceph cluster of one node, and exports of an NBD server, started for the measurement.
//!
//! `Place → RemoteDisk (cluster or nbdkit; filled through a server) → Storage`

mod ceph;

mod trouble;

use std::process::Command;

pub(crate) use ceph::Ceph;
pub(crate) use ceph_cluster::Store;
use trouble::NBDKIT_MISSING;
pub(crate) use trouble::{Nbdkit, Stopped};
use workload::{Client, Mix, Order, Pattern, Progress, Watch};

use crate::error::LabError;
use crate::experiment::{SampleError, Setup};
use crate::load::disk::clients;
use crate::load::disk::test_file::TestFile;
use crate::load::server::process::{Kind, Launch, ServerProcess, Storage};

/// The image that is measured.
const IMAGE: &str = "disk";

/// Where a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// In a Ceph cluster whose OSD stores data like this.
    Ceph(Store),
    /// In the memory of an NBD server.
    NbdMemory,
    /// In a file of an NBD server.
    NbdFile,
}

/// A disk that a server on this host provides. Dropping it ends that server.
pub(crate) enum RemoteDisk {
    Image(Ceph),
    Export { server: ServerProcess, _file: Option<TestFile> },
}

impl RemoteDisk {
    /// Starts the server of the disk, and fills the disk.
    ///
    /// # Errors
    /// The inner error says why there is no such disk on this machine; the outer one ends the run.
    pub fn make(
        place: Place,
        setup: &Setup,
        tell: &mut dyn FnMut(&str, f64),
    ) -> Result<Result<Self, String>, LabError> {
        let made = match place {
            Place::Ceph(store) => Ceph::start(setup, store, tell).and_then(|ceph| {
                ceph.create_image(IMAGE, setup.effort.file_bytes)?;
                Ok(Self::Image(ceph))
            }),
            Place::NbdMemory => export(setup, None),
            Place::NbdFile => {
                let what = format!("filling a file in {}", setup.storage.display());
                let (parent, size_bytes) = (&setup.storage, setup.effort.file_bytes);
                let file = TestFile::fill(parent, size_bytes, &setup.stop, &mut |share| tell(&what, share))?;
                export(setup, Some(file))
            }
        };
        let made = made.and_then(|disk| match place {
            Place::NbdFile => Ok(disk),
            _ => disk.fill(setup, tell).map(|()| disk),
        });
        match made {
            _ if setup.stop.is_asked() => Err(LabError::Interrupted),
            made => Ok(made.map_err(|error| error.to_string())),
        }
    }

    pub fn storage(&self) -> Storage<'_> {
        match self {
            Self::Image(ceph) => ceph.image(IMAGE),
            Self::Export { server, .. } => Storage::Nbd(server.socket()),
        }
    }

    /// Writes the whole disk, because blocks that were never written are read faster.
    fn fill(&self, setup: &Setup, tell: &mut dyn FnMut(&str, f64)) -> Result<(), SampleError> {
        let kind = Kind::Own { engine: "auto", cache: "none", workers: 1, polls: true };
        let program = setup.program.as_deref();
        let server = ServerProcess::start(kind, program, self.storage(), 1, &setup.stop)?;
        let job = workload::Job {
            pattern: Pattern { order: Order::Sequential, mix: Mix::Write },
            block_bytes: 1 << 20,
            depth: 4,
            ..workload::Job::default()
        };
        let mut watch = Filling(tell);
        clients::go(server.socket(), &job, &Client::default(), &setup.stop, &mut watch).map(drop)
    }
}

/// nbdkit, which serves `file`, or memory.
fn export(setup: &Setup, file: Option<TestFile>) -> Result<RemoteDisk, SampleError> {
    let server = ServerProcess::launch(&setup.stop, |folder| {
        let socket = folder.join("nbd.sock");
        let mut command = Command::new("nbdkit");
        command.arg("--foreground").arg("--unix").arg(&socket);
        match &file {
            Some(file) => command.arg("file").arg(file.path()),
            None => command.arg("memory").arg(setup.effort.file_bytes.to_string()),
        };
        Ok(Launch { command, sockets: vec![socket], missing: Some(NBDKIT_MISSING) })
    })?;
    Ok(RemoteDisk::Export { server, _file: file })
}

/// Shows the progress of filling.
struct Filling<'t>(&'t mut dyn FnMut(&str, f64));

impl Watch for Filling<'_> {
    fn tick(&mut self, progress: &Progress) {
        (self.0)("filling the disk", progress.share);
    }

    fn event(&mut self, _: &str) {}
}
