//! A second thread that overwrites memory while the code under test reads it, as a hostile process might.
//!
//! `input's last bytes → addresses → while the work runs: alternately a random value and the old one`
//!
//! - A value that changes between two reads of a field breaks code that checks it before use.
//! - Which value a read sees is random: a failing input may have to be repeated several times.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use guest_mem::MemoryView;

/// Length of the input's tail that determines all addresses.
const TAIL_BYTES: usize = 32;
const PLACES: usize = 8;
/// How often an address changes its value before the next one does.
const TURNS: usize = 16;

/// The memory to overwrite.
pub(crate) enum Scribbled {
    Mapped(MemoryView),
    /// Files. They are never written beyond their ends, so that a truncated file stays truncated.
    Files(Vec<File>),
}

impl Scribbled {
    fn read(&self, at: u64, bytes: &mut [u8]) -> bool {
        match self {
            Self::Mapped(view) => view.read(at, bytes).is_ok(),
            Self::Files(files) => {
                file(files, at).is_some_and(|(file, at)| file.read_exact_at(bytes, at).is_ok())
            }
        }
    }

    /// Stores at the address that `read` has read.
    fn store(&self, at: u64, bytes: &[u8]) {
        match self {
            Self::Mapped(view) => drop(view.store(at, bytes)),
            Self::Files(files) => {
                let place = file(files, at);
                let inside = |file: &File, at| file.metadata().is_ok_and(|is| at + 8 <= is.len());
                if let Some((file, at)) = place.filter(|&(file, at)| inside(file, at)) {
                    let _ = file.write_all_at(bytes, at);
                }
            }
        }
    }
}

/// Selects a file and an offset: the low sixteen bits are the offset, the next ones select the file.
fn file(files: &[File], at: u64) -> Option<(&File, u64)> {
    let which = usize::try_from(at >> 16).ok()? % files.len().max(1);
    files.get(which).map(|file| (file, at & 0xffff))
}

/// Runs `work` while another thread overwrites addresses of `memory` in `spans`, as the tail of `input` determines.
pub(crate) fn beside_a_scribbler<T>(
    memory: Scribbled,
    spans: &[Range<u64>],
    input: &[u8],
    work: impl FnOnce() -> T,
) -> T {
    let places = places(spans, input);
    let done = AtomicBool::new(false);
    let is_done = &done;
    std::thread::scope(|scope| {
        let _end = SetAtEnd(is_done);
        scope.spawn(move || scribble(&memory, &places, is_done));
        work()
    })
}

/// Sets the flag when dropped, also after a panic, because the scope waits for the thread.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        // Relaxed: the thread is joined before its writes are read.
        self.0.store(true, Relaxed);
    }
}

/// One, two, four or eight bytes, aligned to their length, and the value to store there.
#[derive(Clone, Copy)]
struct Place {
    at: u64,
    len: usize,
    value: u64,
}

fn places(spans: &[Range<u64>], input: &[u8]) -> Vec<Place> {
    let tail = &input[input.len().saturating_sub(TAIL_BYTES)..];
    let place = |number: u64| {
        // FNV-1a, so that similar inputs get different addresses.
        let mix = |sum: u64, byte: u64| (sum ^ byte).wrapping_mul(0x100_0000_01b3);
        let sum = tail.iter().copied().map(u64::from).fold(mix(0xcbf2_9ce4_8422_2325, number), mix);
        let len = 1_u64 << (sum >> 60 & 3);
        let span = &spans[usize::from(sum.to_le_bytes()[5]) % spans.len()];
        let at = (span.start + sum % (span.end - span.start)) / len * len;
        let value = if sum >> 58 & 1 == 0 { sum >> 32 & 0xff } else { mix(sum, number) };
        Place { at, len: usize::try_from(len).unwrap_or(1), value }
    };
    (0..PLACES as u64).map(place).collect()
}

fn scribble(memory: &Scribbled, places: &[Place], done: &AtomicBool) {
    for place in places.iter().cycle() {
        if done.load(Relaxed) {
            return;
        }
        let mut old = [0; 8];
        if memory.read(place.at, &mut old[..place.len]) {
            for _ in 0..TURNS {
                memory.store(place.at, &place.value.to_le_bytes()[..place.len]);
                memory.store(place.at, &old[..place.len]);
            }
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::guest::Guest;

    const PATIENCE: Duration = Duration::from_secs(300);

    #[test]
    fn work_meets_other_values_than_it_left_and_memory_is_as_it_was_afterwards() {
        let guest = Guest::new(&[0x1000]);
        let changes = || guest.now().iter().any(|&byte| byte != 0);
        let end = Instant::now() + PATIENCE;
        let memory = Scribbled::Mapped(guest.view.clone());
        let seen = beside_a_scribbler(memory, &[0x10..0x20, 0x80..0xa0], b"input", || {
            std::iter::repeat_with(changes).any(|seen| seen || Instant::now() > end)
        });
        assert!(seen && Instant::now() < end);
        assert!(!changes());
    }
}
