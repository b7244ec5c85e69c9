//! Divides a limited resource among files: each file has a reserve, and all files share the rest.
//!
//! `attach → plan (reserve, common) … take (own reserve first, then the common part) → give_back … detach`
//!
//! - The resources are slots in the op table, bounce buffers, threads, control blocks of `posix-aio`, and the server's
//!   large buffers. A file stands for a disk.
//! - A single file may use all slots. With several files, the reserves together are at most half of the slots, and the
//!   rest is common. A disk that hangs keeps what it holds, but cannot use the other files' reserves.
//! - A reserve is never below `least`, so many files raise the number of slots above the number requested.
//! - When a file is attached, other files may hold more slots than the new plan leaves them. The files keep
//!   their slots, so the table grows: to at most 1.5 times the number requested, plus `least` per file.
//!
//! This type only counts; the callers hold the resources. Taking and returning cost an addition and a comparison.

use crate::engine::FileId;

/// The counters. See the module documentation.
#[derive(Debug)]
pub struct Shares {
    asked: u32,
    least: u32,
    is_split: bool,
    /// Per file.
    reserve: u32,
    /// Negative while files hold more than the plan leaves them.
    common_left: i64,
    places: u32,
    /// Slots in use, by file.
    used: Vec<Option<u32>>,
}

impl Shares {
    /// Divides `asked` slots. Each file has at least `least` in reserve.
    #[must_use]
    pub fn new(asked: u32, least: u32) -> Self {
        let common_left = i64::from(asked);
        Self { asked, least, is_split: true, reserve: 0, common_left, places: asked, used: Vec::new() }
    }

    /// Treats all files as one disk, without reserves.
    pub(crate) fn do_not_split(&mut self) {
        self.is_split = false;
        self.plan();
    }

    /// Adds a file.
    ///
    /// # Panics
    /// If the file is already attached.
    pub fn attach(&mut self, file: FileId) {
        let index = file.0 as usize;
        if index >= self.used.len() {
            self.used.resize(index + 1, None);
        }
        assert!(self.used[index].replace(0).is_none(), "{file:?} is attached already");
        self.plan();
    }

    /// Removes a file.
    ///
    /// # Panics
    /// If the file is not attached, or still holds slots.
    pub fn detach(&mut self, file: FileId) {
        let taken = self.used.get_mut(file.0 as usize).and_then(Option::take);
        assert!(taken == Some(0), "{file:?} holds {taken:?} slots, expected 0");
        self.plan();
    }

    /// Recomputes the reserves. Never called on the request path.
    fn plan(&mut self) {
        let files = self.disks();
        let (reserve, common) = plan(self.asked, self.least, files);
        let over = |used: &u32| i64::from(used.saturating_sub(reserve));
        let over: i64 = self.used.iter().flatten().map(over).sum();
        self.reserve = reserve;
        self.common_left = i64::from(common) - over;
        let needed = u64::from(reserve) * u64::from(files) + u64::from(common).max(over.unsigned_abs());
        self.places = self.places.max(u32::try_from(needed).unwrap_or(u32::MAX));
    }

    /// Number of disks among which the slots are divided.
    pub(crate) fn disks(&self) -> u32 {
        let files = self.used.iter().flatten().count();
        if self.is_split { u32::try_from(files).unwrap_or(u32::MAX) } else { 1 }
    }

    /// Number of slots needed to honour all reserves. Never shrinks.
    #[must_use]
    pub fn places(&self) -> u32 {
        self.places
    }

    /// Number of slots that any file can take now.
    #[inline]
    pub(crate) fn room_for_any(&self) -> usize {
        usize::try_from(self.common_left).unwrap_or(0)
    }

    /// Number of slots that this file can take now; 0 if the file is not attached.
    #[inline]
    #[must_use]
    pub fn room(&self, file: FileId) -> usize {
        let Some(Some(used)) = self.used.get(file.0 as usize) else { return 0 };
        self.reserve.saturating_sub(*used) as usize + self.room_for_any()
    }

    /// Takes a slot. Returns false if the file can have none now.
    #[inline]
    #[must_use]
    pub fn take(&mut self, file: FileId) -> bool {
        let Some(Some(used)) = self.used.get_mut(file.0 as usize) else { return false };
        if *used >= self.reserve {
            if self.common_left <= 0 {
                return false;
            }
            self.common_left -= 1;
        }
        *used += 1;
        true
    }

    /// Returns a slot that [`Shares::take`] took.
    #[inline]
    pub fn give_back(&mut self, file: FileId) {
        let Some(Some(used)) = self.used.get_mut(file.0 as usize) else {
            debug_assert!(false, "{file:?} is not attached");
            return;
        };
        debug_assert!(*used > 0, "{file:?} holds no slot");
        *used -= 1;
        if *used >= self.reserve {
            self.common_left += 1;
        }
    }

    /// Number of slots that the file holds; `None` if the file is not attached.
    #[must_use]
    pub fn used(&self, file: FileId) -> Option<u32> {
        self.used.get(file.0 as usize).copied().flatten()
    }
}

/// Returns the reserve of each of `files`, and the size of the common part.
fn plan(asked: u32, least: u32, files: u32) -> (u32, u32) {
    if files <= 1 {
        return (0, asked);
    }
    let reserve = (asked / files.saturating_mul(2)).max(least);
    (reserve, asked.saturating_sub(reserve.saturating_mul(files)).max(asked / 2))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn take(shares: &mut Shares, file: u32, most: usize) -> usize {
        (0..most).take_while(|_| shares.take(FileId(file))).count()
    }

    fn attached(asked: u32, least: u32, files: u32) -> Shares {
        let mut shares = Shares::new(asked, least);
        (0..files).for_each(|file| shares.attach(FileId(file)));
        shares
    }

    #[test]
    fn one_file_has_all_places() {
        let mut shares = attached(64, 32, 1);
        assert_eq!((shares.room(FileId(0)), take(&mut shares, 0, 1000), shares.places()), (64, 64, 64));
    }

    #[test]
    fn file_that_takes_all_it_can_leaves_the_others_their_reserve() {
        let mut shares = attached(1024, 32, 2);
        assert_eq!(take(&mut shares, 0, 5000), 768);
        assert_eq!((shares.room(FileId(0)), shares.room(FileId(1))), (0, 256));
        assert_eq!((take(&mut shares, 1, 5000), shares.places()), (256, 1024));
    }

    #[test]
    fn file_that_comes_after_another_took_everything_has_its_reserve() {
        let mut shares = attached(1024, 32, 1);
        take(&mut shares, 0, 1024);
        shares.attach(FileId(1));
        assert_eq!((shares.room(FileId(1)), shares.places()), (256, 1280));
        shares.give_back(FileId(0));
        assert_eq!((shares.room(FileId(0)), shares.room(FileId(1))), (0, 256), "the debt comes first");
    }

    #[test]
    fn reserve_is_never_below_the_least_however_many_files_there_are() {
        let mut shares = attached(1024, 32, 200);
        assert_eq!(take(&mut shares, 7, 5000), 512 + 32);
        assert!((0..200).filter(|&file| file != 7).all(|file| shares.room(FileId(file)) == 32));
        assert_eq!(shares.places(), 512 + 200 * 32);
    }

    #[test]
    fn one_thread_for_two_files_is_one_for_each() {
        let mut shares = attached(1, 1, 2);
        assert_eq!((take(&mut shares, 0, 9), take(&mut shares, 1, 9), shares.places()), (1, 1, 2));
    }

    #[test]
    fn last_file_that_stays_has_everything_again() {
        let mut shares = attached(64, 1, 3);
        take(&mut shares, 2, 5);
        shares.detach(FileId(0));
        shares.detach(FileId(1));
        assert_eq!(shares.room(FileId(2)), 59);
    }

    #[test]
    fn files_of_one_disk_keep_nothing_from_each_other() {
        let mut shares = Shares::new(64, 32);
        shares.do_not_split();
        [0, 1].into_iter().for_each(|file| shares.attach(FileId(file)));
        assert_eq!((take(&mut shares, 0, 99), shares.room(FileId(1)), shares.places()), (64, 0, 64));
    }

    #[test]
    fn place_of_a_file_that_is_not_attached_is_refused() {
        let mut shares = attached(8, 1, 1);
        assert_eq!((shares.take(FileId(1)), shares.room(FileId(9))), (false, 0));
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Attach(u32),
        Detach(u32),
        Take(u32, usize),
        GiveBack(u32, usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0_u32..6).prop_map(Step::Attach),
            (0_u32..6).prop_map(Step::Detach),
            ((0_u32..6), (1_usize..200)).prop_map(|(file, count)| Step::Take(file, count)),
            ((0_u32..6), (1_usize..200)).prop_map(|(file, count)| Step::GiveBack(file, count)),
        ];
        prop::collection::vec(step, 0..60)
    }

    proptest! {
        #[test]
        fn whatever_happens_reserves_are_free_and_places_suffice(
            asked in 1_u32..200, least in 0_u32..40, steps in steps()
        ) {
            let mut shares = Shares::new(asked, least);
            // One file may hold all slots. Each file that comes later may add its reserve, which shrinks with their
            // number.
            let added: u32 = (2..=6).map(|files| (asked / (2 * files)).max(least)).sum();
            let bound = asked + added + 6 * least;
            for step in steps {
                match step {
                    Step::Attach(file) if shares.used(FileId(file)).is_none() => shares.attach(FileId(file)),
                    Step::Detach(file) if shares.used(FileId(file)) == Some(0) => shares.detach(FileId(file)),
                    Step::Take(file, count) => _ = take(&mut shares, file, count),
                    Step::GiveBack(file, count) => {
                        let used = shares.used(FileId(file)).unwrap_or(0) as usize;
                        (0..count.min(used)).for_each(|_| shares.give_back(FileId(file)));
                    }
                    Step::Attach(_) | Step::Detach(_) => {}
                }
                let (files, reserve) = (shares.disks(), shares.reserve);
                let used: Vec<u32> = shares.used.iter().flatten().copied().collect();
                prop_assert!(files < 2 || reserve >= least);
                prop_assert!(used.iter().map(|used| (*used).max(reserve)).sum::<u32>() <= shares.places());
                prop_assert!(shares.places() <= bound, "{} places, {bound}", shares.places());
                for file in (0..6).map(FileId).filter(|file| shares.used(*file).is_some()) {
                    let kept = reserve.saturating_sub(shares.used(file).unwrap());
                    prop_assert!(shares.room(file) >= kept as usize);
                }
            }
        }
    }
}
