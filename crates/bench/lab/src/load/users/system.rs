//! The shared structures of a small operating system, and the steps of the users' jobs.
//!
//! ```text
//! fork:  free list −4 · semaphore (write) · table (write) · run queue +1
//! 8 × page fault:  free list −1 · page list +1;   every 4th: semaphore (read)
//! 4 × (look-up in the table (read) · a turn in the run queue)
//! exit:  page list −8 · free list +12 · semaphore (write) · table (write) · run queue −1
//! ```
//!
//! - A job is a process that starts, touches memory, is looked up, and ends, as in the published load. Each step takes
//!   one lock, or takes and releases one semaphore, after a short piece of work without a lock.
//! - The structures are real, though small: pages are on lists, and no page may be lost or be on two lists.
//!   [`System::is_idle`] checks this after all jobs.
//! - The semaphore's waiters sleep. The subject of the measurement is the lock inside the semaphore.

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread::Thread;

use lock_api::Mutex;

use super::locks::{Family, ReadMostly};
use super::meter::{Caller, Meter};

/// Number of page faults of a job.
const FAULTS: usize = 8;
/// Pages that a job gets when it starts.
const FIRST_PAGES: usize = 4;
/// Largest number of pages that a job has.
const PAGES: usize = FIRST_PAGES + FAULTS;
/// Work between two steps: about a tenth of a microsecond, the same as the work under a lock.
const WORK_STEPS: u32 = 100;
/// Number of processes that one look-up visits.
const LOOKED_AT: usize = 4;
/// Number of users that share a semaphore.
const USERS_PER_SEMAPHORE: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    ForkPages,
    ChangeTree,
    EnterTable,
    Enqueue,
    Fault,
    WalkTree,
    LookUp,
    Turn,
    FreePages,
    LeaveTable,
    Dequeue,
}

/// The steps of a job.
const JOB: [Step; 25] = {
    use Step::{
        ChangeTree, Dequeue, Enqueue, EnterTable, Fault, ForkPages, FreePages, LeaveTable, LookUp, Turn,
        WalkTree,
    };
    [
        ForkPages, ChangeTree, EnterTable, Enqueue, Fault, LookUp, Fault, Turn, Fault, WalkTree, Fault,
        LookUp, Turn, Fault, LookUp, Fault, Turn, Fault, WalkTree, Fault, LookUp, Turn, FreePages,
        LeaveTable, Dequeue,
    ]
};
pub(crate) const STEPS: usize = JOB.len();

/// Puts a value on separate cache lines, as is usual for hot structures.
#[derive(Debug)]
#[repr(align(128))]
struct Apart<T>(T);

/// The structures that the jobs share.
pub(crate) struct System<F: Family> {
    free: Apart<Mutex<F::Lock, Vec<u32>>>,
    pages: Apart<Mutex<F::Lock, PageList>>,
    run_queues: Vec<Apart<Mutex<F::Lock, VecDeque<u32>>>>,
    semaphores: Vec<Apart<Semaphore<F>>>,
    table: Apart<F::Table<Table>>,
}

/// The existing processes.
#[derive(Debug)]
pub(crate) struct Table {
    /// Number of existing processes, by user.
    entries: Vec<u32>,
    living: u32,
}

impl<F: Family> System<F> {
    pub fn new(users: usize, cores: usize) -> Self {
        let pages = u32::try_from(users * PAGES).unwrap_or(u32::MAX);
        let run_queue = || Apart(Mutex::new(VecDeque::with_capacity(users)));
        let semaphore = || Apart(Semaphore::new(users));
        Self {
            free: Apart(Mutex::new((0..pages).collect())),
            pages: Apart(Mutex::new(PageList::new(pages))),
            run_queues: (0..cores.max(1)).map(|_| run_queue()).collect(),
            semaphores: (0..users.div_ceil(USERS_PER_SEMAPHORE)).map(|_| semaphore()).collect(),
            table: Apart(F::Table::around(Table { entries: vec![0; users], living: 0 })),
        }
    }

    /// Whether no page is in use and no process exists or waits for a core, as before the first job.
    pub fn is_idle(&self) -> bool {
        let mut free = self.free.0.lock().clone();
        free.sort_unstable();
        let pages = self.pages.0.lock();
        let all_free =
            free.iter().zip(0..).all(|(&page, place)| page == place) && free.len() == pages.count();
        let table = self.table.0.read();
        all_free
            && pages.is_empty()
            && self.run_queues.iter().all(|queue| queue.0.lock().is_empty())
            && self.semaphores.iter().all(|semaphore| semaphore.0.is_idle())
            && table.living == 0
            && table.entries.iter().all(|&living| living == 0)
    }
}

/// The state of a user's job.
#[derive(Debug)]
pub(crate) struct Job {
    user: usize,
    step: usize,
    pages: [u32; PAGES],
    count: usize,
    random: u32,
}

impl Job {
    pub fn of(user: usize) -> Self {
        let random = u32::try_from(user).unwrap_or(0).wrapping_mul(2_654_435_769) | 1;
        Self { user, step: 0, pages: [0; PAGES], count: 0, random }
    }

    /// Makes one step of a job; after the last step, a new job begins. Returns whether a job has ended.
    pub fn advance<F: Family>(
        &mut self,
        system: &System<F>,
        sleeper: &mut Sleeper,
        meter: &mut Meter,
    ) -> bool {
        self.work();
        let semaphore = &system.semaphores[self.user / USERS_PER_SEMAPHORE].0;
        match JOB[self.step] {
            Step::ForkPages => self.take(FIRST_PAGES, system, meter),
            Step::ChangeTree => semaphore.change(sleeper, meter),
            Step::EnterTable => self.enter_table(system, meter),
            Step::Enqueue => self.enqueue(system, meter),
            Step::Fault => self.fault(system, meter),
            Step::WalkTree => semaphore.walk(sleeper, meter),
            Step::LookUp => self.look_up(system, meter),
            Step::Turn => self.turn(system, sleeper, meter),
            Step::FreePages => {
                self.free(system, meter);
                semaphore.change(sleeper, meter);
            }
            Step::LeaveTable => self.leave_table(system, meter),
            Step::Dequeue => self.dequeue(system, meter),
        }
        self.step = (self.step + 1) % STEPS;
        self.step == 0
    }

    /// Works without a lock.
    fn work(&mut self) {
        let mut random = self.random;
        for _ in 0..WORK_STEPS {
            random = black_box(random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
        }
        self.random = random;
    }

    fn take<F: Family>(&mut self, count: usize, system: &System<F>, meter: &mut Meter) {
        let mut free = meter.lock(Caller::FreeList, &system.free.0);
        for _ in 0..count {
            // The free list starts with as many pages as all jobs together can need.
            if let Some(page) = free.pop() {
                self.pages[self.count] = page;
                self.count += 1;
            }
        }
    }

    fn fault<F: Family>(&mut self, system: &System<F>, meter: &mut Meter) {
        self.take(1, system, meter);
        meter.lock(Caller::PageList, &system.pages.0).add(self.pages[self.count - 1]);
    }

    fn free<F: Family>(&mut self, system: &System<F>, meter: &mut Meter) {
        let mut pages = meter.lock(Caller::PageList, &system.pages.0);
        self.pages[FIRST_PAGES..self.count].iter().for_each(|&page| pages.remove(page));
        drop(pages);
        let mut free = meter.lock(Caller::FreeList, &system.free.0);
        free.extend(&self.pages[..self.count]);
        self.count = 0;
    }

    fn enter_table<F: Family>(&self, system: &System<F>, meter: &mut Meter) {
        let mut table = meter.write(Caller::Table, &system.table.0);
        table.entries[self.user] += 1;
        table.living += 1;
    }

    fn leave_table<F: Family>(&self, system: &System<F>, meter: &mut Meter) {
        let mut table = meter.write(Caller::Table, &system.table.0);
        table.entries[self.user] -= 1;
        table.living -= 1;
    }

    fn look_up<F: Family>(&self, system: &System<F>, meter: &mut Meter) {
        let table = meter.read(Caller::Table, &system.table.0);
        let first = self.random as usize % table.entries.len();
        black_box(table.entries.iter().skip(first).take(LOOKED_AT).sum::<u32>());
    }

    fn run_queue<'s, F: Family>(&self, system: &'s System<F>) -> &'s Mutex<F::Lock, VecDeque<u32>> {
        &system.run_queues[self.user % system.run_queues.len()].0
    }

    fn enqueue<F: Family>(&self, system: &System<F>, meter: &mut Meter) {
        let user = u32::try_from(self.user).unwrap_or(u32::MAX);
        meter.lock(Caller::RunQueue, self.run_queue(system)).push_back(user);
    }

    fn turn<F: Family>(&self, system: &System<F>, sleeper: &Sleeper, meter: &mut Meter) {
        meter.lock(Caller::RunQueue, self.run_queue(system)).rotate_left(1);
        if sleeper.gives_way {
            std::thread::yield_now();
        }
    }

    /// Removes the first process; only the queue's length matters, not which process is removed.
    fn dequeue<F: Family>(&self, system: &System<F>, meter: &mut Meter) {
        meter.lock(Caller::RunQueue, self.run_queue(system)).pop_front();
    }
}

/// Pages in order of use, linked by their indices. The last entry is head and tail.
#[derive(Debug)]
struct PageList {
    /// For each page, the page before it and the page after it.
    links: Vec<(u32, u32)>,
}

impl PageList {
    /// An empty list with room for pages `0..pages`.
    fn new(pages: u32) -> Self {
        Self { links: (0..=pages).map(|own| (own, own)).collect() }
    }

    /// Number of pages that the list has room for.
    fn count(&self) -> usize {
        self.links.len() - 1
    }

    fn is_empty(&self) -> bool {
        let end = self.count();
        self.links[end].0 as usize == end
    }

    fn add(&mut self, page: u32) {
        let end = self.count();
        let last = self.links[end].0;
        self.links[page as usize] = (last, self.links[last as usize].1);
        self.links[last as usize].1 = page;
        self.links[end].0 = page;
    }

    fn remove(&mut self, page: u32) {
        let (before, after) = self.links[page as usize];
        self.links[before as usize].1 = after;
        self.links[after as usize].0 = before;
        self.links[page as usize] = (page, page);
    }
}

/// A reader/writer semaphore whose waiters sleep. Its lock is held for a few instructions, twice per use.
struct Semaphore<F: Family> {
    state: Mutex<F::Lock, State>,
}

#[derive(Debug)]
struct State {
    readers: u32,
    is_written: bool,
    waiting: VecDeque<Arc<Seat>>,
    changes: u64,
}

/// A thread that sleeps, and its wake-up flag.
#[derive(Debug)]
struct Seat {
    thread: Thread,
    is_woken: AtomicBool,
}

/// What one thread needs to sleep at semaphores and to yield.
#[derive(Debug)]
pub(crate) struct Sleeper {
    seat: Arc<Seat>,
    /// Whether a turn in the run queue also yields to the real scheduler.
    gives_way: bool,
}

impl Sleeper {
    /// Makes the sleeper of the calling thread. With `gives_way`, the thread runs one of many users, and yields to the
    /// others in between.
    pub fn new(gives_way: bool) -> Self {
        let seat = Seat { thread: std::thread::current(), is_woken: AtomicBool::new(false) };
        Self { seat: Arc::new(seat), gives_way }
    }

    fn sleep(&self) {
        // Acquire pairs with the release in `wake`.
        while !self.seat.is_woken.swap(false, Acquire) {
            std::thread::park();
        }
    }
}

impl Seat {
    fn wake(&self) {
        // Release pairs with the acquire in `sleep`.
        self.is_woken.store(true, Release);
        self.thread.unpark();
    }
}

impl<F: Family> Semaphore<F> {
    fn new(users: usize) -> Self {
        let waiting = VecDeque::with_capacity(users);
        Self { state: Mutex::new(State { readers: 0, is_written: false, waiting, changes: 0 }) }
    }

    fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.readers == 0 && !state.is_written && state.waiting.is_empty()
    }

    /// Takes and releases the semaphore as a writer.
    fn change(&self, sleeper: &mut Sleeper, meter: &mut Meter) {
        self.down(sleeper, meter, |state| {
            let may = state.readers == 0 && !state.is_written;
            state.is_written |= may;
            may
        });
        self.up(meter, |state| {
            state.changes += 1;
            state.is_written = false;
        });
    }

    /// Takes and releases the semaphore as a reader.
    fn walk(&self, sleeper: &mut Sleeper, meter: &mut Meter) {
        self.down(sleeper, meter, |state| {
            state.readers += u32::from(!state.is_written);
            !state.is_written
        });
        self.up(meter, |state| state.readers -= 1);
    }

    fn down(&self, sleeper: &Sleeper, meter: &mut Meter, enters: impl Fn(&mut State) -> bool) {
        loop {
            let mut state = meter.lock(Caller::Semaphore, &self.state);
            if enters(&mut state) {
                return;
            }
            state.waiting.push_back(Arc::clone(&sleeper.seat));
            drop(state);
            sleeper.sleep();
        }
    }

    /// Wakes the first waiter. If newcomers enter first, that waiter sleeps again.
    fn up(&self, meter: &mut Meter, leaves: impl FnOnce(&mut State)) {
        let mut state = meter.lock(Caller::Semaphore, &self.state);
        leaves(&mut state);
        let free = state.readers == 0 && !state.is_written;
        let first = if free { state.waiting.pop_front() } else { None };
        drop(state);
        if let Some(first) = first {
            first.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_off_the_list_in_any_order() {
        let mut list = PageList::new(4);
        [2, 0, 3].into_iter().for_each(|page| list.add(page));
        assert_eq!((list.links[4], list.links[0], list.count()), ((3, 2), (2, 3), 4));
        [0, 3, 2].into_iter().for_each(|page| list.remove(page));
        assert!(list.is_empty(), "{list:?}");
    }

    #[test]
    fn job_takes_no_more_pages_than_there_is_room_for() {
        let faults = JOB.iter().filter(|&&step| step == Step::Fault).count();
        assert_eq!(FIRST_PAGES + faults, PAGES);
    }
}
