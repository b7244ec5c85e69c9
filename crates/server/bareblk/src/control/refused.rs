//! Why the server refused a request, and the error that a client gets for it.

use blk_server::AdminError;

use super::protocol::answer::{ErrorKind, Fault};

/// Why the server refused a request.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The server's own reason.
    #[error(transparent)]
    Server(#[from] AdminError),
    /// Settings that are invalid in themselves; the text names them.
    #[error("{0}")]
    Settings(String),
    /// Any other error.
    #[error(transparent)]
    Failed(anyhow::Error),
}

impl From<anyhow::Error> for Refused {
    /// Keeps the server's own reasons distinct.
    fn from(error: anyhow::Error) -> Self {
        error.downcast().map_or_else(Self::Failed, Self::Server)
    }
}

impl From<Refused> for Fault {
    fn from(refused: Refused) -> Self {
        let kind = match &refused {
            Refused::Server(error) => kind(error),
            Refused::Settings(_) => ErrorKind::BadSettings,
            Refused::Failed(_) => ErrorKind::Failed,
        };
        Self::new(kind, format!("{:#}", anyhow::Error::from(refused)))
    }
}

fn kind(error: &AdminError) -> ErrorKind {
    match error {
        AdminError::NoDisk { .. } => ErrorKind::NoDisk,
        AdminError::DiskExists { .. } => ErrorKind::DiskExists,
        AdminError::NoWorker { .. } => ErrorKind::NoWorker,
        AdminError::NoQueue { .. } => ErrorKind::NoQueue,
        AdminError::LastWorker { .. } => ErrorKind::LastWorker,
        AdminError::NotPlaced { .. } => ErrorKind::NotPlaced,
        AdminError::NoGroup { .. } => ErrorKind::NoGroup,
        AdminError::Limits { .. } => ErrorKind::BadSettings,
        AdminError::NotDrained { .. } | AdminError::CompletionWorkerStays { .. } => ErrorKind::NotDrained,
        AdminError::Unsuitable { .. } => ErrorKind::Unsuitable,
        AdminError::InUse { .. } => ErrorKind::InUse,
        AdminError::WouldShrink { .. } => ErrorKind::WouldShrink,
        // Clients need not distinguish the server's other reasons.
        _ => ErrorKind::Failed,
    }
}
