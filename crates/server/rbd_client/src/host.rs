//! What an image needs of the process that uses it. A program without a sandbox needs none of it.

use std::io;

/// The process that uses an image.
pub trait Host: std::fmt::Debug + Send + Sync {
    /// Names this process, among all processes of all hosts and of all times; `None`: it cannot be named.
    fn own_record(&self) -> Option<String>;

    /// Whether the process with this record has certainly ended.
    fn has_ended(&self, record: &str) -> bool;

    /// Runs `call` on a new thread that may do all that librbd does.
    ///
    /// # Errors
    /// The thread cannot be started.
    fn start_thread(&self, call: Box<dyn FnOnce() + Send>) -> io::Result<()>;
}
