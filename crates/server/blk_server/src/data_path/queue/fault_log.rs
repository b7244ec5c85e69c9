//! Log lines for refused requests and unusable rings.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use io_engine::signal_shared;
use tracing::{error, warn};

use crate::data_path::disk::Disk;
use crate::data_path::disk::log_limit::Allowed;
use crate::host::error_line::error_line;

#[cold]
pub(super) fn log_refused(disk: &Disk, queue: u16, now: Instant, fault: &dyn std::error::Error) {
    if let Some(Allowed { suppressed }) = disk.log_allowed(now) {
        let disk = disk.name();
        warn!(disk, queue, suppressed, "request refused: {}", error_line(fault));
    }
}

/// Logs the fault and signals the front-end's err fd.
pub(crate) fn report_ring_fault(disk: &Disk, queue: u16, err: Option<&Arc<OwnedFd>>, what: &str) {
    if let Some(Allowed { suppressed }) = disk.log_allowed(Instant::now()) {
        error!(disk = disk.name(), queue, suppressed, "queue stopped until the guest resets it: {what}");
    }
    if let Some(err) = err {
        signal_shared(err.as_ref());
    }
}
