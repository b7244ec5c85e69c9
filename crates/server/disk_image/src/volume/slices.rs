//! Slices of L2 tables in memory, shared by workers that never wait for each other.
//!
//! `get: version even? → words → version unchanged? → found`, `put: version odd → words → version even`
//!
//! - Each slot has a version, which is odd while its words change. A reader that sees two different versions has found
//!   nothing, and reads the slice from the file instead.
//! - A slice may be in one of [`WAYS`] slots, by its number. So a cache that has room for all slices keeps all.
//! - A slice that changes while it is served is changed here by the one thread that changes the file (`set`, `forget`,
//!   `clear`), and that thread alone puts such slices.
//! - A slot that was used since it was last looked at is passed over once when room is needed.
//! - The memory of a slot is allocated when it is first used.
//!
//! Why the orderings suffice: H.-J. Boehm, "Can seqlocks get along with programming language memory models?" (2012).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

const WAYS: usize = 4;

/// Slices by number.
#[derive(Debug)]
pub(crate) struct SliceCache {
    slots: Box<[Slot]>,
}

#[derive(Debug, Default)]
struct Slot {
    version: AtomicU64,
    /// The slice's number plus 1. 0: none.
    key: AtomicU64,
    was_used: AtomicBool,
    words: OnceLock<Box<[AtomicU64]>>,
}

impl SliceCache {
    /// Room for at least this many slices.
    pub(crate) fn new(slices: usize) -> Self {
        let slots = slices.clamp(1, usize::MAX - WAYS).next_multiple_of(WAYS);
        Self { slots: (0..slots).map(|_| Slot::default()).collect() }
    }

    #[inline]
    fn set_of(&self, number: u64) -> &[Slot] {
        let sets = self.slots.len() / WAYS;
        #[allow(clippy::cast_possible_truncation)] // less than `sets`
        let first = (number % sets as u64) as usize * WAYS;
        &self.slots[first..first + WAYS]
    }

    /// A word of a slice and, if `two`, the next one. `None`: the slice is not here now.
    #[inline]
    pub(crate) fn get(&self, number: u64, word: usize, two: bool) -> Option<[u64; 2]> {
        let found = self.set_of(number).iter().find(|slot| slot.key.load(Ordering::Relaxed) == number + 1)?;
        found.get(number, word, two)
    }

    /// Changes a word of a slice and, if `two`, the next one. Does nothing if the slice is not here.
    pub(crate) fn set(&self, number: u64, word: usize, values: [u64; 2], two: bool) {
        let found = self.set_of(number).iter().find(|slot| slot.key.load(Ordering::Relaxed) == number + 1);
        if let Some(slot) = found {
            slot.set(word, &values[..1 + usize::from(two)]);
        }
    }

    /// Forgets a slice.
    pub(crate) fn forget(&self, number: u64) {
        let found = self.set_of(number).iter().find(|slot| slot.key.load(Ordering::Relaxed) == number + 1);
        if let Some(slot) = found {
            slot.forget();
        }
    }

    /// Forgets all slices.
    pub(crate) fn clear(&self) {
        self.slots.iter().filter(|slot| slot.key.load(Ordering::Relaxed) != 0).for_each(Slot::forget);
    }

    /// Keeps a slice, unless another worker is changing the slot.
    pub(crate) fn put(&self, number: u64, words: &[u64]) {
        let set = self.set_of(number);
        let has = |key: u64| set.iter().find(|slot| slot.key.load(Ordering::Relaxed) == key);
        let slot = has(number + 1).or_else(|| has(0)).or_else(|| {
            // Each slot is asked, so that the next search finds one if this one does not.
            let mut unused = None;
            for slot in set {
                if !slot.was_used.swap(false, Ordering::Relaxed) {
                    unused = unused.or(Some(slot));
                }
            }
            unused
        });
        #[allow(clippy::cast_possible_truncation)] // less than WAYS
        let any = || &set[(number / self.slots.len() as u64 % WAYS as u64) as usize];
        slot.unwrap_or_else(any).put(number, words);
    }
}

impl Slot {
    #[inline]
    fn get(&self, number: u64, word: usize, two: bool) -> Option<[u64; 2]> {
        // Pairs with the release in `put`: the words of this version, or of a later one, are seen.
        let version = self.version.load(Ordering::Acquire);
        let words = self.words.get()?;
        let first = words.get(word)?.load(Ordering::Relaxed);
        let second = if two { words.get(word + 1)?.load(Ordering::Relaxed) } else { 0 };
        let is_it = self.key.load(Ordering::Relaxed) == number + 1;
        // Pairs with the release fence in `put`: if a word is of a later version, so is the version read next.
        fence(Ordering::Acquire);
        let is_whole = version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version;
        if !is_it || !is_whole {
            return None;
        }
        if !self.was_used.load(Ordering::Relaxed) {
            self.was_used.store(true, Ordering::Relaxed);
        }
        Some([first, second])
    }

    /// Makes the version odd. `None`: it is, because another worker changes the slot.
    fn begin_change(&self) -> Option<u64> {
        let version = self.version.load(Ordering::Relaxed);
        if !version.is_multiple_of(2) {
            return None;
        }
        let odd = version.wrapping_add(1);
        // Acquire: the words are stored after it.
        self.version.compare_exchange(version, odd, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // Pairs with the acquire fence in `get`.
        fence(Ordering::Release);
        Some(version)
    }

    fn set(&self, word: usize, values: &[u64]) {
        let Some(version) = self.begin_change() else { unreachable!("one thread changes these slices") };
        let words = self.words.get().and_then(|words| words.get(word..word + values.len()));
        words
            .into_iter()
            .flatten()
            .zip(values)
            .for_each(|(kept, value)| kept.store(*value, Ordering::Relaxed));
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    fn forget(&self) {
        let Some(version) = self.begin_change() else { unreachable!("one thread changes these slices") };
        self.key.store(0, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }

    fn put(&self, number: u64, words: &[u64]) {
        let Some(version) = self.begin_change() else { return };
        let kept = self.words.get_or_init(|| words.iter().map(|_| AtomicU64::new(0)).collect());
        for (kept, word) in kept.iter().zip(words) {
            kept.store(*word, Ordering::Relaxed);
        }
        // A slice that is shorter than those before would leave words of another one.
        let key = if kept.len() == words.len() { number + 1 } else { 0 };
        self.key.store(key, Ordering::Relaxed);
        self.was_used.store(true, Ordering::Relaxed);
        self.version.store(version.wrapping_add(2), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    fn slice(number: u64) -> Vec<u64> {
        (0..8).map(|word| number * 100 + word).collect()
    }

    #[test]
    fn cache_with_room_for_all_slices_keeps_all() {
        let cache = SliceCache::new(10);
        (0..10).for_each(|number| cache.put(number, &slice(number)));
        for number in 0..10 {
            assert_eq!(cache.get(number, 3, true), Some([number * 100 + 3, number * 100 + 4]));
        }
        assert_eq!(
            (cache.get(11, 0, false), cache.get(3, 8, false), cache.get(3, 7, true)),
            (None, None, None)
        );
    }

    #[test]
    fn word_that_is_set_changes_only_if_the_slice_is_there() {
        let cache = SliceCache::new(4);
        cache.put(2, &slice(2));
        cache.set(2, 3, [7, 8], true);
        cache.set(2, 5, [9, 99], false);
        cache.set(3, 3, [7, 8], true);
        let words = [2, 4, 5, 6].map(|word| cache.get(2, word, false).map(|words| words[0]));
        assert_eq!(words, [Some(202), Some(8), Some(9), Some(206)]);
        assert_eq!((cache.get(2, 3, true), cache.get(3, 3, true)), (Some([7, 8]), None));
    }

    #[test]
    fn forgotten_slice_is_not_found_until_it_is_put_again() {
        let cache = SliceCache::new(4);
        [2, 3].into_iter().for_each(|number| cache.put(number, &slice(number)));
        cache.forget(2);
        cache.forget(7);
        cache.set(2, 3, [7, 8], true);
        assert_eq!((cache.get(2, 3, true), cache.get(3, 3, true)), (None, Some([303, 304])));
        cache.put(2, &slice(2));
        assert_eq!(cache.get(2, 3, true), Some([203, 204]));
        cache.clear();
        assert_eq!((cache.get(2, 3, true), cache.get(3, 3, true)), (None, None));
    }

    #[test]
    fn slice_in_use_stays_when_room_is_needed() {
        let (cache, mut misses) = (SliceCache::new(4), 0);
        for number in 1..100 {
            if cache.get(0, 0, false).is_none() {
                cache.put(0, &slice(0));
                misses += 1;
            }
            cache.put(number, &slice(number));
            assert!(cache.get(number, 0, false).is_some());
        }
        assert!(misses <= 2, "{misses} misses of a slice that is used again and again");
    }

    #[test]
    fn readers_see_no_words_of_another_slice_while_writers_replace_them() {
        let (cache, found) = (SliceCache::new(4), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for writer in 0..2 {
                let cache = &cache;
                scope.spawn(move || {
                    (0..20_000)
                        .for_each(|turn| cache.put(turn * 3 % 16 + writer, &slice(turn * 3 % 16 + writer)));
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    for turn in 0..200_000_u64 {
                        let (number, word) = (turn % 18, (turn % 7) as usize);
                        if let Some(words) = cache.get(number, word, true) {
                            let first = number * 100 + word as u64;
                            assert_eq!(words, [first, first + 1]);
                            found.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert!(found.into_inner() > 0);
    }
}
