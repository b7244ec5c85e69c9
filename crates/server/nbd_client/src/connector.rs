//! The thread that connects a link again: it tries until it succeeds or the link is gone.

use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::error::NbdError;
use crate::export::{Export, Turn};
use crate::inbox::Shared;
use crate::pause::Pause;

/// The pause between two checks whether the link is still there.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Starts the thread. It waits for `pause` before its first attempt. `was_lost`: a connection was lost, so the log tells
/// when there is one again.
pub(crate) fn start(
    export: &Arc<Export>,
    shared: &Arc<Shared>,
    pause: Pause,
    was_lost: bool,
) -> io::Result<()> {
    let (export, shared) = (Arc::downgrade(export), Arc::downgrade(shared));
    let begin = Instant::now();
    let thread = std::thread::Builder::new().name("bareblk-nbd".into());
    thread.spawn(move || connect(&export, &shared, pause, was_lost.then_some(begin))).map(drop)
}

fn connect(export: &Weak<Export>, shared: &Weak<Shared>, mut pause: Pause, lost_at: Option<Instant>) {
    let mut told = String::new();
    loop {
        let end = Instant::now() + pause.duration();
        while Instant::now() < end && shared.strong_count() > 0 {
            std::thread::sleep(LOOK_AGAIN.min(pause.duration()));
        }
        match attempt(export, shared) {
            Attempt::Connected => {
                if let (Some(lost_at), Some(export)) = (lost_at, export.upgrade()) {
                    let after_ms = lost_at.elapsed().as_millis();
                    tracing::info!(export = %export.uri(), "connected to the NBD server again after {after_ms} ms");
                }
                return;
            }
            Attempt::Gone => return,
            Attempt::Later => {}
            Attempt::Failed(error) => {
                let text = with_causes(&error);
                if let Some(export) = export.upgrade().filter(|_| text != told) {
                    tracing::warn!(export = %export.uri(), "cannot reconnect yet: {text}");
                    told = text;
                }
            }
        }
        pause = pause.after_failure();
    }
}

/// How an attempt ended.
enum Attempt {
    Connected,
    /// The link or the export is gone.
    Gone,
    /// Another link has the only connection.
    Later,
    Failed(NbdError),
}

/// Keeps neither the export nor the link alive while it waits for the server.
fn attempt(export: &Weak<Export>, shared: &Weak<Shared>) -> Attempt {
    let turn = match (export.upgrade(), shared.upgrade()) {
        (Some(export), Some(shared)) => export.begin_opening(&shared),
        _ => return Attempt::Gone,
    };
    let server = match turn {
        Turn::Done => return Attempt::Connected,
        Turn::Wait => return Attempt::Later,
        Turn::Open(server) => server,
    };
    let opened = server.open_connection();
    let Some(export) = export.upgrade() else { return Attempt::Gone };
    let ended = match (opened, shared.upgrade()) {
        (Ok(connection), Some(shared)) => {
            // If another link has given its connection to this one meanwhile, the new one is spare.
            if let Err(spare) = shared.offer(connection) {
                export.give_back(spare);
            }
            Attempt::Connected
        }
        (Ok(connection), None) => {
            export.give_back(connection);
            Attempt::Gone
        }
        (Err(error), _) => Attempt::Failed(error),
    };
    export.end_opening();
    ended
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
