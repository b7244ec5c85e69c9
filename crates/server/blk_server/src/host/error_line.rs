//! Formats an error and its causes as one line, for the log.

use std::error::Error;

/// `error: cause: cause of the cause`
pub(crate) fn error_line(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        line = format!("{line}: {cause}");
        source = cause.source();
    }
    line
}
