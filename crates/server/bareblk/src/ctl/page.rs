//! Formats the answers to `show`, `health` and `snapshot`.

use std::fmt::Write;

use serde_json::Value;

use super::tables::{plain, queues, size, state};
use crate::control::answers::reports::{DiskStats, HealthAnswer, ShowAnswer};
use crate::control::protocol::verbs::SnapshotFile;

/// Everything about one disk.
pub fn disk(shown: &ShowAnswer) -> String {
    let ShowAnswer { disk: stats, settings } = shown;
    let DiskStats { disk, placement, .. } = stats;
    let mut text = String::new();
    let mut line = |key: &str, value: &str| {
        let _ = writeln!(text, "{key:<10} {}", plain(value));
    };
    line("disk", &disk.name);
    line("image", &disk.image);
    line("socket", &disk.socket);
    line("state", state(disk));
    line("size", &size(disk.size_bytes));
    line("engine", &disk.engine);
    line("sessions", &disk.sessions.to_string());
    line("queues", &format!("{} of {}", disk.queues_running, disk.queues_offered));
    if disk.held > 0 {
        line("parked", &format!("{} requests", disk.held));
    }
    if let Some(placement) = placement {
        line("placement", &placement.placement);
    }
    text.push_str("\nsettings\n");
    for (key, value) in settings {
        let _ = writeln!(text, "  {:<18} {}", plain(key), plain(value));
    }
    if !stats.queues.is_empty() {
        text.push('\n');
        text += &queues(std::slice::from_ref(stats));
    }
    text
}

/// A line if the server is healthy, and a line for each worker or disk with a problem.
pub fn health(answer: &HealthAnswer) -> String {
    let HealthAnswer {
        healthy,
        workers,
        disks,
        silent_workers,
        failed_disks,
        refused_disks,
        waiting_disks,
        holding_disks,
    } = answer;
    let mut text = String::new();
    if *healthy {
        let _ = writeln!(text, "healthy (workers: {workers}, disks: {disks})");
    }
    for worker in silent_workers {
        let _ =
            writeln!(text, "worker {worker} does not respond: is the storage of one of its disks hanging?");
    }
    for disk in failed_disks {
        let why = if refused_disks.contains(disk) {
            "another client has broken or removed its lock: every request fails until the disk is removed and added again"
        } else {
            "a sync failed, so the disk accepts no writes until the server is restarted"
        };
        let _ = writeln!(text, "disk {} has failed: {why}", plain(disk));
    }
    for disk in waiting_disks {
        let disk = plain(disk);
        let _ =
            writeln!(text, "disk {disk} is not served yet: its server does not answer (bareblk ctl list)");
    }
    for disk in holding_disks {
        let disk = plain(disk);
        let _ =
            writeln!(text, "disk {disk} has parked requests: its guest waits (bareblk ctl resume {disk})");
    }
    text
}

/// One line for each new file, and one for the length of the pause. After an overlay, also what the next start needs.
pub fn snapshots(files: &[SnapshotFile], overlay: bool, ok: &Value) -> String {
    let paused_us = ok["paused_ns"].as_u64().unwrap_or_default() / 1000;
    let line = |file: &SnapshotFile| format!("{}: {}\n", plain(&file.disk), plain(&file.file));
    let lines: String = files.iter().map(line).collect();
    let mut text = format!("{lines}the disks were paused for {paused_us} µs\n");
    for keys in ok["keys"].as_array().into_iter().flatten().filter_map(Value::as_str).filter(|_| overlay) {
        let _ = writeln!(text, "before the next start, configure: {}", plain(keys));
    }
    text
}
