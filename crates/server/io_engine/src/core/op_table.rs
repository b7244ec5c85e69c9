//! The table of ops that an engine owns. It grows when files are attached (`shares.rs`), never when ops are pushed.
//!
//! The `user_data` of a call holds its slot's index and generation, so a duplicate or late result matches no op.

use crate::core::op::OpState;
use crate::core::turn::NextInLine;

/// The top bit is reserved: io_uring marks its watches with it.
const GENERATION_MASK: u32 = 0x7fff_ffff;

#[derive(Debug)]
struct Slot {
    generation: u32,
    op: Option<OpState>,
}

#[derive(Debug, Default)]
pub(crate) struct OpTable {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl OpTable {
    pub fn new(depth: u32) -> Self {
        let mut table = Self::default();
        table.grow(depth);
        table
    }

    /// Grows the table to `places` ops. Ops may move, but calls in flight point only to memory outside the slots.
    pub fn grow(&mut self, places: u32) {
        #[allow(clippy::cast_possible_truncation)] // never more than were requested
        let before = self.slots.len() as u32;
        if places <= before {
            return;
        }
        self.slots.reserve_exact((places - before) as usize);
        self.slots.extend((before..places).map(|_| Slot { generation: 0, op: None }));
        // Capacity for all of them, so that freeing a slot never allocates. Lower slots are used first.
        let mut free = Vec::with_capacity(places as usize);
        free.extend((before..places).rev());
        free.append(&mut self.free);
        self.free = free;
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The caller has checked that a slot is free.
    #[inline]
    pub fn insert(&mut self, op: OpState) -> Option<(u32, &mut OpState)> {
        let index = self.free.pop()?;
        Some((index, self.slots[index as usize].op.insert(op)))
    }

    /// The op at `index`. Here and in the other functions, `index` must be that of a live op.
    #[inline]
    pub fn at(&mut self, index: u32) -> &mut OpState {
        self.named_at(index).1
    }

    #[inline]
    pub fn remove(&mut self, index: u32) -> OpState {
        let slot = &mut self.slots[index as usize];
        let Some(op) = slot.op.take() else { no_op(index) };
        slot.generation = (slot.generation + 1) & GENERATION_MASK;
        self.free.push(index);
        op
    }

    /// An op, and the `user_data` of its calls.
    #[inline]
    pub fn named_at(&mut self, index: u32) -> (u64, &mut OpState) {
        let slot = &mut self.slots[index as usize];
        let Some(op) = &mut slot.op else { no_op(index) };
        (name_of(slot.generation, index), op)
    }

    /// The `user_data` of an op's calls.
    #[inline]
    pub fn name(&self, index: u32) -> u64 {
        name_of(self.slots[index as usize].generation, index)
    }

    /// The op that `user_data` refers to, with its index, if the op is still live.
    #[inline]
    pub fn find_mut(&mut self, user_data: u64) -> Option<(u32, &mut OpState)> {
        #[allow(clippy::cast_possible_truncation)] // the halves of a 64-bit number
        let (generation, index) = ((user_data >> 32) as u32, user_data as u32);
        let slot = self.slots.get_mut(index as usize)?;
        let op = slot.op.as_mut().filter(|_| slot.generation == generation)?;
        Some((index, op))
    }

    /// Every op, with its index.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut OpState)> {
        (0..).zip(self.slots.iter_mut()).filter_map(|(index, slot)| Some((index, slot.op.as_mut()?)))
    }
}

impl NextInLine for OpTable {
    fn next_of(&mut self, index: u32) -> &mut u32 {
        &mut self.at(index).next_in_line
    }
}

/// The core keeps an index only while its op is live.
#[cold]
fn no_op(index: u32) -> ! {
    unreachable!("there is no op {index}")
}

#[inline]
fn name_of(generation: u32, index: u32) -> u64 {
    u64::from(generation) << 32 | u64::from(index)
}
