//! The cost of waking another thread by an eventfd: two threads wake each other alternately.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use super::{Figures, cores, cpu};
use crate::experiment::SampleError;

const BATCH: u64 = 16;

/// Measures it with each thread pinned to its own core, or placed by the scheduler.
pub(crate) fn measure(seconds: f64, pinned: bool) -> Result<Figures, SampleError> {
    let broken = |error: io::Error| SampleError::because("waking a thread", &error);
    let make = || eventfd(0, EventfdFlags::CLOEXEC).map_err(io::Error::from).map_err(broken);
    let (there, back) = (make()?, make()?);
    let cpu_ns = cpu::process_ns();
    let (wakes, seconds) = std::thread::scope(|scope| {
        let other = scope.spawn(|| answer(&there, &back, pinned));
        let found = scope.spawn(|| ask(&there, &back, Duration::from_secs_f64(seconds), pinned)).join();
        // The other thread must end even if this function fails.
        let ended = ring(&there, END);
        let _ = other.join();
        ended.and(found.unwrap_or_else(|_| Err(io::Error::other("a thread panicked"))))
    })
    .map_err(broken)?;
    #[allow(clippy::cast_precision_loss)] // of one sample
    let (wakes, cpu_us) = (wakes as f64, (cpu::process_ns() - cpu_ns) as f64 / 1000.0);
    Ok(Figures::from([
        ("iops", wakes / seconds),
        ("latency", seconds * 1e6 / wakes),
        ("cpu", cpu_us / wakes),
    ]))
}

/// Written to an eventfd to end the other thread. The eventfd's counter adds values, so the reader always notices this
/// one.
const END: u64 = 1 << 32;

/// Returns the number of wakes, two for each round trip, and the time they took.
fn ask(there: &OwnedFd, back: &OwnedFd, time: Duration, pinned: bool) -> io::Result<(u64, f64)> {
    if pinned {
        cores::pin_this_thread(0);
    }
    let start = Instant::now();
    let mut wakes = 0;
    while wakes == 0 || start.elapsed() < time {
        for _ in 0..BATCH {
            ring(there, 1)?;
            heard(back)?;
        }
        wakes += 2 * BATCH;
    }
    Ok((wakes, start.elapsed().as_secs_f64()))
}

fn answer(there: &OwnedFd, back: &OwnedFd, pinned: bool) -> io::Result<()> {
    if pinned {
        cores::pin_this_thread(1);
    }
    while heard(there)? < END {
        ring(back, 1)?;
    }
    Ok(())
}

fn ring(bell: &OwnedFd, count: u64) -> io::Result<()> {
    rustix::io::write(bell, &count.to_ne_bytes())?;
    Ok(())
}

fn heard(bell: &OwnedFd) -> io::Result<u64> {
    let mut count = [0; 8];
    rustix::io::read(bell, &mut count)?;
    Ok(u64::from_ne_bytes(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_wake_each_other_and_end() {
        for pinned in [false, true] {
            let figures = measure(0.005, pinned).unwrap();
            assert!(figures["latency"] > 0.0 && figures["iops"] > 0.0, "{figures:?}");
        }
    }
}
