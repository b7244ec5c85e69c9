//! Standard output, and the errors of `bareblk ctl` that `--json` tells apart.

use std::io::{self, Write};

use anyhow::Result;

/// An error in the server's answer.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ServerError(pub String);

/// This client, not the server, looked for the disk and did not find it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NoDisk(pub String);

/// Returns false if the reader has closed standard output, which is not an error.
pub fn print(text: &str) -> Result<bool> {
    let mut out = io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error.into()),
    }
}
