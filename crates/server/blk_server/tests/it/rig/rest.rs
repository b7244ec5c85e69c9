//! Whether the server's threads are idle, and how much memory this process uses, from /proc.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use super::eventually;

/// Polling ends and threads become idle within this time.
const SETTLE: Duration = Duration::from_millis(500);

/// The server's threads by ID, with the number of their context switches.
pub fn switches() -> BTreeMap<String, (String, u64)> {
    let task = |entry: fs::DirEntry| {
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        let name = fs::read_to_string(entry.path().join("comm")).ok()?.trim().to_owned();
        let counts = status.lines().filter(|line| line.contains("ctxt_switches"));
        let counts = counts.filter_map(|line| line.split_whitespace().last()?.parse::<u64>().ok());
        let id = entry.file_name().into_string().ok()?;
        name.starts_with("bareblk-").then(|| (id, (name, counts.sum())))
    };
    fs::read_dir("/proc/self/task").unwrap().filter_map(|entry| task(entry.unwrap())).collect()
}

/// Waits until none of the server's threads has run for a while.
pub fn come_to_rest() -> bool {
    eventually(|| {
        let before = switches();
        std::thread::sleep(SETTLE);
        switches() == before
    })
}

/// A line of /proc/self/status that counts in KiB: "VmRSS:" and so on.
pub fn status_kib(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
