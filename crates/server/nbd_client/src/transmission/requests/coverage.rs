//! Which parts of a read have arrived. No allocation.
//!
//! `chunk → add → an error if a byte arrives twice … the end of the read: is every byte there?`
//!
//! - A server may send the chunks of a read in any order. Servers send them in ascending order in practice, so that one
//!   part grows.
//! - A sum of lengths would not be enough: a byte that arrives twice would hide one that never arrives.

/// Maximum number of parts with gaps between them.
pub(crate) const MAX_PARTS: usize = 8;

/// Why a part cannot be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Some of its bytes are there already.
    Twice,
    /// It would be one of more than [`MAX_PARTS`] parts.
    Scattered,
}

/// The parts that have arrived: ascending, without overlap, and with a gap between each two.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Coverage {
    /// Start and end of each part.
    parts: [(u32, u32); MAX_PARTS],
    count: usize,
}

impl Coverage {
    /// Forgets all parts.
    #[inline]
    pub fn clear(&mut self) {
        self.count = 0;
    }

    /// Adds the bytes from `start` to `end`. There is at least one.
    #[inline]
    pub fn add(&mut self, start: u32, end: u32) -> Result<(), Refused> {
        let parts = &self.parts[..self.count];
        let next = parts.iter().position(|part| part.0 >= start).unwrap_or(self.count);
        let left = next.checked_sub(1).map(|left| self.parts[left]);
        let right = parts.get(next).copied();
        if left.is_some_and(|left| left.1 > start) || right.is_some_and(|right| right.0 < end) {
            return Err(Refused::Twice);
        }
        let joins_left = left.is_some_and(|left| left.1 == start);
        let joins_right = right.is_some_and(|right| right.0 == end);
        match (joins_left, joins_right) {
            (true, true) => {
                self.parts[next - 1].1 = self.parts[next].1;
                self.parts.copy_within(next + 1..self.count, next);
                self.count -= 1;
            }
            (true, false) => self.parts[next - 1].1 = end,
            (false, true) => self.parts[next].0 = start,
            (false, false) if self.count == MAX_PARTS => return Err(Refused::Scattered),
            (false, false) => {
                self.parts.copy_within(next..self.count, next + 1);
                self.parts[next] = (start, end);
                self.count += 1;
            }
        }
        Ok(())
    }

    /// Number of bytes that have arrived.
    pub fn bytes(&self) -> u32 {
        self.parts[..self.count].iter().map(|(start, end)| end - start).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn gap_that_is_filled_joins_its_neighbours() {
        let mut coverage = Coverage::default();
        let added = [(0, 10), (20, 30), (10, 20)].map(|(start, end)| coverage.add(start, end));
        assert_eq!((added, coverage.count, coverage.bytes()), ([Ok(()); 3], 1, 30));
    }

    #[test]
    fn one_part_more_than_the_limit_is_refused_and_one_that_joins_is_not() {
        let mut coverage = Coverage::default();
        assert!((0..8).all(|number| coverage.add(number * 10, number * 10 + 1) == Ok(())));
        assert_eq!(coverage.add(200, 201), Err(Refused::Scattered));
        assert_eq!((coverage.add(1, 10), coverage.bytes()), (Ok(()), 17));
    }

    proptest! {
        /// The model remembers each byte.
        #[test]
        fn parts_agree_with_a_model_of_bytes(chunks in prop::collection::vec((0..64_u32, 1..16_u32), 0..40)) {
            let (mut coverage, mut model) = (Coverage::default(), [false; 80]);
            for (start, len) in chunks {
                let bytes = start as usize..(start + len) as usize;
                let is_there = model[bytes.clone()].iter().any(|byte| *byte);
                match coverage.add(start, start + len) {
                    Ok(()) => {
                        prop_assert!(!is_there);
                        model[bytes].fill(true);
                    }
                    Err(Refused::Twice) => prop_assert!(is_there),
                    Err(Refused::Scattered) => {
                        let starts = (1..80).filter(|at| model[*at] && !model[at - 1]).count();
                        prop_assert_eq!(starts + usize::from(model[0]), MAX_PARTS);
                    }
                }
                prop_assert_eq!(coverage.bytes() as usize, model.iter().filter(|byte| **byte).count());
            }
        }
    }
}
