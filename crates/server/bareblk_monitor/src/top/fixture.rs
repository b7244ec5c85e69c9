//! For tests: two readings of a server with disks in every state.

use serde_json::{Value, json};

use super::answer::Reading;
use super::sample::Sample;

/// The queue's counters after `requests` reads of 4 KiB.
fn queue(queue: u16, requests: u64) -> Value {
    json!({"queue": queue, "worker": queue % 2, "size": 256, "reads": requests, "read_bytes": requests * 4096,
        "in_flight": 31, "kicks": requests / 4, "calls": requests / 8, "worker_ns": requests * 1300})
}

/// The server's answers `seconds` after its start.
pub fn reading(seconds: u64) -> Reading {
    let reads = |per_s: u64| {
        let count = seconds * per_s;
        json!({"read": {"count": count, "max_ns": 350_000, "buckets": [[82_000, count * 6 / 10], [310_000, count * 4 / 10]]}})
    };
    let throttling = json!({"limits": [{"limit": "iops", "rate": 3000, "credit": 36, "capacity": 300, "used": seconds * 2990}],
        "group": "acme", "throttled_ns": seconds * 710_000_000});
    let stats = json!({
        "at_ns": 5_000_000_000_u64 + seconds * 1_000_000_000,
        "process_cpu_ns": seconds * 53_000_000,
        "workers": [
            {"worker": 0, "queues": 2, "settings": {"cpus": [2, 3]}, "cpu_ns": seconds * 740_000_000, "wait_ns": seconds * 20_000_000, "sleeps": seconds * 900},
            {"worker": 1, "queues": 1, "cpu_ns": seconds * 380_000_000},
        ],
        "disks": [
            {"name": "root", "image": "/images/root.raw", "socket": "/run/root.sock", "size_bytes": 20_u64 << 30, "engine": "io_uring",
                "sessions": 1, "queues_offered": 4, "latency": reads(38_100), "queues": [queue(0, seconds * 38_000), queue(1, seconds * 100)]},
            {"name": "db", "sessions": 1, "latency": reads(3000), "throttling": throttling, "queues": [queue(0, seconds * 3000)]},
            {"name": "idle", "sessions": 0, "latency": {"read": {"buckets": []}}, "queues": []},
            {"name": "broken", "sessions": 1, "failed": true, "queues": []},
            {"name": "full", "sessions": 1, "held": 7, "queues": []},
        ],
    });
    let mut reading = Reading::new(stats).unwrap();
    let groups = json!({"groups": [{"group": "acme", "disks": ["db"],
        "limits": [{"limit": "bps", "rate": 200_000_000, "credit": 5, "capacity": 10, "used": seconds * 12_000_000}]}]});
    reading.add_limits(groups).unwrap();
    reading
}

/// The interval between the two readings.
pub fn sample() -> Sample {
    Sample::between(&reading(1), &reading(2))
}
