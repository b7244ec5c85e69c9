//! Leaves out disks, workers and groups whose samples do not fit, so that the answer stays bounded.

use super::families::{DISK_SAMPLES, LIMIT_SAMPLES, WORKER_SAMPLES};
use crate::exporter::answer::Disk;
use crate::exporter::histogram::BUCKETS;
use crate::exporter::servers::Figures;

/// Samples of a histogram: its buckets, sum and count.
const HISTOGRAM_SAMPLES: usize = BUCKETS + 2;

/// Subtracts the number of samples from `room`. Returns how many samples did not fit.
pub fn fit(figures: &mut Figures, room: &mut usize) -> u64 {
    let mut dropped = 0_u64;
    let mut fits = |samples: usize| {
        let left = room.checked_sub(samples);
        match left {
            Some(left) => *room = left,
            None => dropped = dropped.saturating_add(u64::try_from(samples).unwrap_or(u64::MAX)),
        }
        left.is_some()
    };
    figures.stats.workers.retain(|_| fits(WORKER_SAMPLES));
    figures.groups.retain(|group| fits(group.limits.len().saturating_mul(LIMIT_SAMPLES)));
    figures.stats.disks.retain(|disk| fits(samples(disk)));
    dropped
}

fn samples(disk: &Disk) -> usize {
    let timed = disk.latency.kinds().iter().filter(|(_, times)| !times.buckets.is_empty()).count();
    let limits = disk.throttling.limits.len().saturating_mul(LIMIT_SAMPLES);
    (DISK_SAMPLES + timed * HISTOGRAM_SAMPLES).saturating_add(limits)
}
