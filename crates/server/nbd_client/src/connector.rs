//! The thread that connects a link again: it tries until it succeeds or the link is gone.

use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::export::Export;
use crate::inbox::Shared;

/// The first and the longest pause between two attempts.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// The pause between two checks whether the link is still there.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Starts the thread. `was_lost`: a connection was lost, so the log tells when there is one again.
pub(crate) fn start(export: &Arc<Export>, shared: &Arc<Shared>, was_lost: bool) -> io::Result<()> {
    let (export, shared) = (Arc::downgrade(export), Arc::downgrade(shared));
    let begin = Instant::now();
    let thread = std::thread::Builder::new().name("bareblk-nbd".into());
    thread.spawn(move || connect(&export, &shared, was_lost.then_some(begin))).map(drop)
}

fn connect(export: &Weak<Export>, shared: &Weak<Shared>, lost_at: Option<Instant>) {
    let (mut pause, longest) = PAUSES;
    let mut told = String::new();
    loop {
        {
            let (Some(export), Some(shared)) = (export.upgrade(), shared.upgrade()) else { return };
            if !shared.wants_connection() {
                // Another link has given its connection to this one.
                return;
            }
            if export.may_connect(&shared) {
                match export.open_connection() {
                    Ok(connection) => {
                        if let Some(lost_at) = lost_at {
                            let after_ms = lost_at.elapsed().as_millis();
                            tracing::info!(export = %export.uri(), "connected to the NBD server again after {after_ms} ms");
                        }
                        return shared.deliver(connection);
                    }
                    Err(error) => {
                        let text = with_causes(&error);
                        if text != told {
                            tracing::warn!(export = %export.uri(), "cannot reconnect yet: {text}");
                            told = text;
                        }
                    }
                }
            }
        }
        let end = Instant::now() + pause;
        while Instant::now() < end && shared.strong_count() > 0 {
            std::thread::sleep(LOOK_AGAIN);
        }
        pause = (pause * 2).min(longest);
    }
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
