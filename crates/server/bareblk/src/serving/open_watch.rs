//! Says in the log which image a start waits for: one line, when its time is over, and the wait goes on.
//!
//! `images, one after the other → begin (path) … not the next one in time → a warning → nothing until the next`
//!
//! - A file system that does not answer (NFS, FUSE) holds up whoever opens a file there, for ever if need be; no thread
//!   can be waited with instead, as nothing else is to be done before all images are open.
//! - Its thread ends, and is waited for, when this is dropped: the process is confined after.
//!
//! Not here: images that a running server opens, which have a limit (`open_disk.rs`).

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use tracing::warn;

/// Longer than any file system takes that works.
const SAY_AFTER: Duration = Duration::from_secs(5);

/// See the file's head.
#[derive(Debug)]
pub struct OpenWatch {
    /// `None` while it is dropped.
    images: Option<Sender<PathBuf>>,
    thread: Option<JoinHandle<()>>,
}

impl OpenWatch {
    /// # Errors
    /// If there is no thread for it.
    pub fn start() -> Result<Self> {
        let (images, begun) = channel();
        let thread = std::thread::Builder::new().name("bareblk-patience".into()).spawn(move || watch(&begun));
        let thread = thread.context("cannot start the thread that says which image is waited for")?;
        Ok(Self { images: Some(images), thread: Some(thread) })
    }

    /// This one is opened from now on, and the one before is open.
    pub fn begin(&self, image: &Path) {
        if let Some(images) = &self.images {
            let _ = images.send(image.to_owned());
        }
    }
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        self.images = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn watch(begun: &Receiver<PathBuf>) {
    let mut next = begun.recv().ok();
    while let Some(image) = next {
        next = match begun.recv_timeout(SAY_AFTER) {
            Ok(image) => Some(image),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                let (image, seconds) = (image.display(), SAY_AFTER.as_secs());
                warn!(
                    %image,
                    "not open after {seconds} s: somebody has it locked, or its file system does not answer; the start \
                     waits for it, Ctrl-C gives up"
                );
                begun.recv().ok()
            }
        };
    }
}
