//! What each thread of a contest does: its work with the lock and without it, and where it runs.

use super::exclusive::{Lines, generate};
use crate::load::cores::pin_this_thread;

/// The threads of a contest, and the turn that each of them repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    pub threads: usize,
    pub held: Held,
    pub outside: Outside,
    /// Each thread is pinned to a core, round robin. Otherwise the scheduler places it.
    pub is_pinned: bool,
}

impl Load {
    /// 50 steps with the lock held and 100 without it, in pinned threads.
    pub fn usual(threads: usize) -> Self {
        Self { threads, held: Held::Steps50, outside: Outside::Steps100, is_pinned: true }
    }

    /// Pins the calling thread, which is number `place`, if the load is pinned. The caller calls this before the
    /// thread's first turn.
    pub fn place_this_thread(self, place: usize) {
        if self.is_pinned {
            pin_this_thread(place);
        }
    }
}

/// The work with the lock held. Each number of steps is a constant, so that the compiler can unroll the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// One step, on one of the two cache lines: a few ns.
    Step,
    /// Work of about 50 ns, on both cache lines.
    Steps50,
    /// Work of about 500 ns, on both cache lines.
    Steps500,
}

impl Held {
    #[inline]
    pub fn work(self, lines: &mut Lines) {
        match self {
            Self::Step => lines.first.0 = generate(lines.first.0, 1),
            Self::Steps50 => lines.work(50),
            Self::Steps500 => lines.work(500),
        }
    }
}

/// The work between two acquisitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outside {
    /// Work of about 100 ns: steps that depend on each other.
    Steps100,
    /// Work of this many pause instructions. Their duration depends on the processor.
    Pauses(u32),
}

impl Outside {
    /// Returns the next `value`; only steps change it.
    #[inline]
    pub fn work(self, value: u64) -> u64 {
        match self {
            Self::Steps100 => std::hint::black_box(generate(value, 100)),
            Self::Pauses(count) => {
                (0..count).for_each(|_| std::hint::spin_loop());
                value
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::thread::sched_getaffinity;

    use super::*;
    use crate::load::cores;

    #[test]
    fn short_turn_leaves_the_second_line_alone_and_longer_ones_take_all_their_steps() {
        let after = |held: Held| {
            let mut lines = Lines::default();
            held.work(&mut lines);
            (lines.first.0, lines.second.0)
        };
        let both = |half| (generate(0, half), generate(generate(0, half), half));
        assert_eq!(after(Held::Step), (generate(0, 1), 0));
        assert_eq!((after(Held::Steps50), after(Held::Steps500)), (both(25), both(250)));
    }

    #[test]
    fn only_steps_outside_change_the_value() {
        assert_eq!(Outside::Steps100.work(7), generate(7, 100));
        assert_eq!(Outside::Pauses(20).work(7), 7);
    }

    #[test]
    fn thread_that_is_not_pinned_may_use_every_core() {
        let all = cores::all().len();
        let usable = |is_pinned| {
            let load = Load { is_pinned, ..Load::usual(1) };
            let thread = std::thread::spawn(move || {
                load.place_this_thread(0);
                sched_getaffinity(None).unwrap().count() as usize
            });
            thread.join().unwrap()
        };
        assert_eq!((usable(true), usable(false)), (1, all));
    }
}
