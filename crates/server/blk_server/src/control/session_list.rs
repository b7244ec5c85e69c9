//! The sessions of one disk, and whether further ones may join.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::data_path::disk::session_link::EndReason;
use crate::session::shared::SessionShared;

/// Maximum number of front-ends connected to one disk: two while one replaces the other, and some that only read the
/// configuration.
const MAX_SESSIONS: usize = 8;
/// Maximum number of a disk's sessions that are ending to make room.
const MAX_ENDING: usize = 8;

/// Why a front-end is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoSession {
    #[error("{MAX_SESSIONS} front-ends are connected, which is the limit for one disk")]
    Full,
    #[error("the disk is being removed")]
    Leaving,
    #[error(transparent)]
    System(#[from] io::Error),
}

#[derive(Debug, Default)]
struct State {
    sessions: Vec<Arc<SessionShared>>,
    closed: bool,
}

/// The sessions of one disk whose threads still hold resources of it.
#[derive(Debug, Default)]
pub(crate) struct SessionList(Mutex<State>);

impl SessionList {
    pub(crate) fn all(&self) -> Vec<Arc<SessionShared>> {
        self.lock().sessions.clone()
    }

    pub(crate) fn count(&self) -> usize {
        self.lock().sessions.len()
    }

    /// Lets no further sessions join. Returns the current ones.
    pub(crate) fn close(&self) -> Vec<Arc<SessionShared>> {
        let mut state = self.lock();
        state.closed = true;
        state.sessions.clone()
    }

    /// Adds a session. If there are too many, ends one that has never sent a message. In any other case a session may
    /// stay silent without limit: a VMM connects long before its guest starts.
    pub(crate) fn add(&self) -> Result<Arc<SessionShared>, NoSession> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let mut state = self.lock();
        if state.closed {
            return Err(NoSession::Leaving);
        }
        if state.sessions.len() >= MAX_SESSIONS {
            let silent = state.sessions.iter().find(|session| session.is_silent());
            silent.ok_or(NoSession::Full)?.end(EndReason::MadeRoom);
            if state.sessions.len() >= MAX_SESSIONS + MAX_ENDING {
                return Err(NoSession::Full);
            }
        }
        let session = SessionShared::new(NEXT_ID.fetch_add(1, Ordering::Relaxed))?;
        state.sessions.push(Arc::clone(&session));
        Ok(session)
    }

    pub(crate) fn forget(&self, session: &Arc<SessionShared>) {
        self.lock().sessions.retain(|known| !Arc::ptr_eq(known, session));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
