//! Chooses the next block and its direction.
//!
//! - Sequential: from the start of the span to its end, then from the start again. Each direction has its own position,
//!   and every clone starts at the same offset, as in fio.
//! - Random: any block, evenly distributed; keeps no map of used blocks (fio's `norandommap`).
//! - The same seed gives the same blocks; clones differ from each other.

use crate::job::{Job, Mix, Order, Span};

/// The direction of one transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// A read.
    Read,
    /// A write.
    Write,
}

impl Direction {
    /// Both directions, in fio's order.
    pub const ALL: [Self; 2] = [Self::Read, Self::Write];

    /// Index into arrays of both directions.
    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Self::Read => 0,
            Self::Write => 1,
        }
    }
}

/// One thread's positions.
#[derive(Clone, Debug)]
pub(crate) struct Offsets {
    order: Order,
    mix: Mix,
    read_percent: u32,
    span: Span,
    block_bytes: u64,
    next: [u64; 2],
    random: fastrand::Rng,
}

impl Offsets {
    /// Makes the positions of clone `clone`, which works on `span`.
    pub fn new(job: &Job, clone: u32, span: Span) -> Self {
        Self {
            order: job.pattern.order,
            mix: job.pattern.mix,
            read_percent: job.read_percent,
            span,
            block_bytes: job.block_bytes.into(),
            next: [0; 2],
            random: fastrand::Rng::with_seed(job.seed ^ u64::from(clone).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        }
    }

    /// The direction of the next request.
    #[inline]
    pub fn direction(&mut self) -> Direction {
        match self.mix {
            Mix::Read => Direction::Read,
            Mix::Write => Direction::Write,
            Mix::Both if self.random.u32(0..100) < self.read_percent => Direction::Read,
            Mix::Both => Direction::Write,
        }
    }

    /// The first byte of the next request.
    #[inline]
    pub fn next(&mut self, direction: Direction) -> u64 {
        let block = match self.order {
            Order::Random => self.random.u64(0..self.span.blocks),
            Order::Sequential => {
                let next = &mut self.next[direction.index()];
                let block = *next;
                *next = if block + 1 == self.span.blocks { 0 } else { block + 1 };
                block
            }
        };
        self.span.offset_bytes + block * self.block_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Pattern;

    const SPAN: Span = Span { offset_bytes: 8192, blocks: 4 };

    fn offsets(order: Order, mix: Mix, clone: u32) -> Offsets {
        let job = Job { pattern: Pattern { order, mix }, ..Job::default() };
        Offsets::new(&job, clone, SPAN)
    }

    #[test]
    fn sequential_blocks_start_again_at_the_end_in_each_direction_for_itself() {
        let mut offsets = offsets(Order::Sequential, Mix::Both, 0);
        let read: Vec<_> = (0..5).map(|_| offsets.next(Direction::Read)).collect();
        assert_eq!(read, [8192, 12288, 16384, 20480, 8192]);
        assert_eq!(offsets.next(Direction::Write), 8192);
    }

    #[test]
    fn random_blocks_reach_the_whole_span_and_nothing_else() {
        let mut offsets = offsets(Order::Random, Mix::Read, 0);
        let found: std::collections::BTreeSet<_> = (0..200).map(|_| offsets.next(Direction::Read)).collect();
        assert_eq!(found, [8192, 12288, 16384, 20480].into());
    }

    #[test]
    fn clones_draw_different_blocks_and_the_same_clone_the_same() {
        let draw = |clone| {
            let mut offsets = offsets(Order::Random, Mix::Read, clone);
            (0..32).map(|_| offsets.next(Direction::Read)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(0), draw(1));
    }

    #[test]
    fn mixed_directions_keep_the_percentage() {
        let job = Job {
            pattern: Pattern { order: Order::Random, mix: Mix::Both },
            read_percent: 70,
            ..Job::default()
        };
        let mut offsets = Offsets::new(&job, 0, SPAN);
        let reads = (0..10_000).filter(|_| offsets.direction() == Direction::Read).count();
        assert!((6_700..7_300).contains(&reads), "{reads}");
    }
}
