//! A file in memory that knows which of its sectors are not synced, and that can fail.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::rc::Rc;

use fastrand::Rng;
use xtask::sizes::Size;

use crate::read_at::ReadAt;
use crate::write::interface::WriteAt;
use crate::write::tests::model::Model;

pub const SECTOR: u64 = 512;
const PAGE: u64 = 4096;

/// With so many unsynced sectors, all subsets are tried.
const EXHAUSTIVE: Size<usize> = Size { smoke: 4, full: 10 };
/// With more, so many random subsets, besides all, none, each missing and each alone.
const DRAWS: Size<usize> = Size { smoke: 3, full: 24 };
/// With more than these, only some are missing or alone in a smoke test.
const SINGLES: Size<usize> = Size { smoke: 8, full: 1 << 20 };

/// The content of a file.
#[derive(Clone, Default)]
pub struct Content {
    pages: HashMap<u64, Rc<[u8]>>,
    pub len: u64,
}

/// A change that is not synced.
#[derive(Clone)]
pub enum Item {
    Sector { offset: u64, data: Box<[u8]> },
    Len(u64),
}

impl Content {
    pub fn of(bytes: &[u8]) -> Self {
        let mut content = Self::default();
        for (index, data) in bytes.chunks(SECTOR as usize).enumerate() {
            let mut sector = data.to_vec();
            sector.resize(SECTOR as usize, 0);
            content.apply(&Item::Sector { offset: index as u64 * SECTOR, data: sector.into() });
        }
        content.len = bytes.len() as u64;
        content
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len as usize];
        self.read_at(0, &mut bytes).unwrap();
        bytes
    }

    pub fn apply(&mut self, item: &Item) {
        match item {
            Item::Sector { offset, data } => {
                let page = self.pages.entry(offset / PAGE).or_insert_with(|| vec![0; PAGE as usize].into());
                let start = (offset % PAGE) as usize;
                Rc::make_mut(page)[start..start + data.len()].copy_from_slice(data);
                self.len = self.len.max(offset + SECTOR);
            }
            Item::Len(len) => {
                self.pages.retain(|page, _| page * PAGE < *len);
                if let Some(page) = self.pages.get_mut(&(len / PAGE)) {
                    Rc::make_mut(page)[(len % PAGE) as usize..].fill(0);
                }
                self.len = *len;
            }
        }
    }

    fn sector(&self, offset: u64) -> [u8; SECTOR as usize] {
        let mut sector = [0; SECTOR as usize];
        self.read_at(offset, &mut sector).unwrap();
        sector
    }
}

impl ReadAt for Content {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.len.saturating_sub(offset).min(buffer.len() as u64) as usize;
        let mut done = 0;
        while done < count {
            let at = offset + done as u64;
            let start = (at % PAGE) as usize;
            let len = (PAGE as usize - start).min(count - done);
            match self.pages.get(&(at / PAGE)) {
                Some(page) => buffer[done..done + len].copy_from_slice(&page[start..start + len]),
                None => buffer[done..done + len].fill(0),
            }
            done += len;
        }
        Ok(count)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.len)
    }
}

/// Which call fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// Its number among all calls that change the file, from 0.
    pub call: u64,
    pub kind: io::ErrorKind,
}

struct State {
    durable: Content,
    now: Content,
    unsynced: Vec<Item>,
    /// The first of the unsynced changes that no crash had yet.
    fresh: usize,
    calls: u64,
    syncs: u64,
    fault: Option<Fault>,
    is_failed: bool,
    rng: Rng,
}

/// The disk. After each call, every crash is checked against the model.
#[derive(Clone)]
pub struct SimDisk {
    state: Rc<RefCell<State>>,
    model: Rc<RefCell<Model>>,
}

impl std::fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SimDisk")
    }
}

impl SimDisk {
    pub fn new(content: Content, model: Rc<RefCell<Model>>, seed: u64) -> Self {
        let state = State {
            durable: content.clone(),
            now: content,
            unsynced: Vec::new(),
            fresh: 0,
            calls: 0,
            syncs: 0,
            fault: None,
            is_failed: false,
            rng: Rng::with_seed(seed),
        };
        Self { state: Rc::new(RefCell::new(state)), model }
    }

    pub fn fail(&self, fault: Fault) {
        self.state.borrow_mut().fault = Some(fault);
    }

    /// Whether the fault has happened.
    pub fn has_failed(&self) -> bool {
        self.state.borrow().is_failed
    }

    /// Calls that wrote, and syncs.
    pub fn calls(&self) -> (u64, u64) {
        let state = self.state.borrow();
        (state.calls, state.syncs)
    }

    /// What a process reads that starts now.
    pub fn now(&self) -> Content {
        self.state.borrow().now.clone()
    }

    /// A random state after a loss of power.
    pub fn crashed(&self) -> Content {
        let state = &mut *self.state.borrow_mut();
        let mut content = state.durable.clone();
        for item in &state.unsynced {
            if state.rng.bool() {
                content.apply(item);
            }
        }
        content
    }

    /// Makes changes, or a part of them if this call fails.
    fn change(&self, items: Vec<Item>) -> io::Result<()> {
        let mut result = Ok(());
        {
            let state = &mut *self.state.borrow_mut();
            let error = state.failing();
            let is_new = |now: &Content, item: &Item| match item {
                Item::Sector { offset, data } => {
                    now.len < offset + SECTOR || now.sector(*offset)[..] != data[..]
                }
                Item::Len(len) => now.len != *len,
            };
            for item in items {
                let is_done = error.is_none() || matches!(item, Item::Sector { .. }) && state.rng.bool();
                if is_done && is_new(&state.now, &item) {
                    state.now.apply(&item);
                    state.unsynced.push(item);
                }
            }
            if let Some(kind) = error {
                result = Err(kind.into());
            }
        }
        self.check();
        result
    }

    /// Tries the crashes that are possible since the last call.
    fn check(&self) {
        let state = &mut *self.state.borrow_mut();
        let model = self.model.borrow();
        model.check_killed(&state.now);
        let count = state.unsynced.len();
        let fresh = std::mem::replace(&mut state.fresh, count);
        if fresh == count && count > 0 {
            return;
        }
        let crash = |has: &dyn Fn(usize) -> bool| {
            let mut content = state.durable.clone();
            for (index, item) in state.unsynced.iter().enumerate() {
                if has(index) {
                    content.apply(item);
                }
            }
            model.check_crashed(&content);
        };
        if count <= EXHAUSTIVE.now() {
            for subset in 0_usize..1 << count {
                // Crashes without the fresh changes were there before.
                if count == 0 || subset >> fresh != 0 {
                    crash(&|index| subset & (1 << index) != 0);
                }
            }
            return;
        }
        crash(&|_| true);
        crash(&|index| index >= fresh);
        let skip = count.div_ceil(SINGLES.now());
        let first = state.rng.usize(..skip);
        for single in (first..count).step_by(skip) {
            crash(&|index| index != single);
            crash(&|index| index == single);
        }
        for _ in 0..DRAWS.now() {
            let chosen: Vec<bool> = (0..count).map(|_| state.rng.bool()).collect();
            crash(&|index| chosen[index]);
        }
    }
}

impl State {
    /// Counts a call. Returns the error with which it fails.
    fn failing(&mut self) -> Option<io::ErrorKind> {
        let call = self.calls;
        self.calls += 1;
        let fault = self.fault.filter(|fault| fault.call == call)?;
        self.is_failed = true;
        Some(fault.kind)
    }
}

impl ReadAt for SimDisk {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.state.borrow().now.read_at(offset, buffer)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.state.borrow().now.len)
    }
}

impl WriteAt for SimDisk {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        assert!(offset.is_multiple_of(SECTOR) && (data.len() as u64).is_multiple_of(SECTOR));
        let sectors = data.chunks(SECTOR as usize).enumerate();
        let item = |(index, data): (usize, &[u8])| Item::Sector {
            offset: offset + index as u64 * SECTOR,
            data: data.into(),
        };
        self.change(sectors.map(item).collect())
    }

    fn sync_data(&self) -> io::Result<()> {
        {
            let state = &mut *self.state.borrow_mut();
            state.syncs += 1;
            if let Some(kind) = state.failing() {
                return Err(kind.into());
            }
            state.durable = state.now.clone();
            state.unsynced.clear();
            state.fresh = 0;
            self.model.borrow_mut().synced();
        }
        self.check();
        Ok(())
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        assert!(len_bytes.is_multiple_of(PAGE), "a length of {len_bytes} bytes");
        self.change(vec![Item::Len(len_bytes)])
    }

    fn punch_hole(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        assert!(offset + len_bytes <= self.state.borrow().now.len, "a hole past the end of the file");
        self.write_at(offset, &vec![0; len_bytes as usize])
    }
}
