//! Opens a job's target, and gives each thread its port to it.

use std::sync::Arc;
use std::time::Duration;

use disk_image::{Access, CacheMode, HostOpener, Image, ImageOptions, SECTOR_BYTES};
use io_engine::EngineKind;

use crate::error::RunError;
use crate::job::{Job, Limits};
use crate::target::connection::Connection;
use crate::target::file::FilePort;
use crate::target::port::{Port, PortError};
use crate::target::{Client, Target};

/// How long to retry a locked file: io_uring releases a file a little after its last user has ended.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// An open target.
pub(super) enum Opened {
    File(Arc<Image>, EngineKind),
    Socket(Box<Connection>),
}

impl Opened {
    pub(super) fn open(job: &Job, target: &Target, client: &Client) -> Result<Self, RunError> {
        match target {
            Target::Socket(path) => Ok(Self::Socket(Box::new(Connection::open(path, job, client)?))),
            Target::File(path, engine) => {
                let options = ImageOptions {
                    access: if job.pattern.writes() { Access::ReadWrite } else { Access::ReadOnly },
                    cache: if job.direct { CacheMode::None } else { CacheMode::Writeback },
                    discard: false,
                    lock_timeout: LOCK_TIMEOUT,
                    ..ImageOptions::new(path)
                };
                let image = Image::open(&HostOpener, &options)?;
                Ok(Self::File(Arc::new(image), engine.unwrap_or(job.engine)))
            }
        }
    }

    pub(super) fn limits(&self) -> Limits {
        match self {
            Self::File(image, _) => Limits {
                size_bytes: image.capacity_sectors().saturating_mul(SECTOR_BYTES),
                block_bytes: image.block_size(),
                read_only: image.read_only(),
                flush: true,
            },
            Self::Socket(connection) => connection.limits(),
        }
    }

    /// Returns the requests per submission: one for files, as in fio, and all ready requests for rings, where a batch
    /// costs one index update.
    pub(super) fn usual_batch(&self, job: &Job) -> u32 {
        match self {
            Self::File(..) => 1,
            Self::Socket(_) => job.depth,
        }
    }

    /// The data that a thread needs to open its port.
    pub(super) fn start(&mut self, job: &Job, clone: u32) -> Result<Start, PortError> {
        match self {
            Self::File(image, kind) => Ok(Start::File(Arc::clone(image), *kind)),
            Self::Socket(connection) => Ok(Start::Ready(connection.port(job, clone)?)),
        }
    }

    pub(super) fn connection(&self) -> Option<&Connection> {
        match self {
            Self::Socket(connection) => Some(connection),
            Self::File(..) => None,
        }
    }
}

/// What a thread needs for its port: the thread creates its engine itself, but a queue already exists in the session.
pub(super) enum Start {
    File(Arc<Image>, EngineKind),
    Ready(Box<dyn Port + Send>),
}

impl Start {
    pub(super) fn port(self, job: &Job) -> Result<Box<dyn Port>, PortError> {
        match self {
            Self::File(image, kind) => Ok(Box::new(FilePort::open(image, kind, job.block_bytes, job.depth)?)),
            Self::Ready(port) => Ok(port),
        }
    }
}
