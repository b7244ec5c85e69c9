//! Logs which image delays a start: one line when opening takes too long. The start keeps waiting.
//!
//! `images, one after the other → begin (path) … not the next one in time → a warning → nothing until the next`
//!
//! - A file system that does not answer (NFS, FUSE) blocks the thread that opens a file there, perhaps forever.
//!   Opening on another thread would not help, because the start can do nothing else before all images are open.
//! - Dropping this value ends its thread and waits for it, because the sandbox needs a process with one thread.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use tracing::warn;

/// Time until the warning: longer than any working file system takes.
const SAY_AFTER: Duration = Duration::from_secs(5);

/// The thread that watches a start.
#[derive(Debug)]
pub struct OpenWatch {
    /// `None` only during drop.
    images: Option<Sender<PathBuf>>,
    thread: Option<JoinHandle<()>>,
}

impl OpenWatch {
    /// # Errors
    /// There are no more threads.
    pub fn start() -> Result<Self> {
        let (images, begun) = channel();
        let thread = std::thread::Builder::new().name("bareblk-patience".into()).spawn(move || watch(&begun));
        let thread = thread.context("cannot start the thread that reports images that are slow to open")?;
        Ok(Self { images: Some(images), thread: Some(thread) })
    }

    /// Notes that the start now opens this image; the previous image is open.
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
                    "image not open after {seconds} s: another process holds its lock, or its file system does not \
                     respond; still waiting (Ctrl-C gives up)"
                );
                begun.recv().ok()
            }
        };
    }
}
