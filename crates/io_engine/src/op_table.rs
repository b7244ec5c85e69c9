//! The ops an engine owns: a slab of fixed size, taken once.
//!
//! A call is named to the kernel by its slot's index and generation, so that a result that comes twice,
//! or late, finds nobody.
//!
//! Not here: what an op is waiting for (`completion.rs`).

use crate::completion::OpState;

/// The top bit is left to the kernels: io_uring marks its watches with it.
const GENERATION_MASK: u32 = 0x7fff_ffff;

#[derive(Debug)]
struct Slot {
    generation: u32,
    op: Option<OpState>,
}

#[derive(Debug, Default)]
pub(crate) struct OpTable {
    slots: Box<[Slot]>,
    free: Vec<u32>,
}

impl OpTable {
    pub fn new(depth: u32) -> Self {
        let slots = (0..depth).map(|_| Slot { generation: 0, op: None }).collect();
        Self { slots, free: (0..depth).rev().collect() }
    }

    #[inline]
    pub fn room(&self) -> usize {
        self.free.len()
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The caller has checked that there is room.
    #[inline]
    pub fn insert(&mut self, op: OpState) -> Option<u32> {
        let index = self.free.pop()?;
        self.slots[index as usize].op = Some(op);
        Some(index)
    }

    #[inline]
    pub fn get_mut(&mut self, index: u32) -> Option<&mut OpState> {
        self.slots.get_mut(index as usize)?.op.as_mut()
    }

    #[inline]
    pub fn remove(&mut self, index: u32) -> Option<OpState> {
        let slot = self.slots.get_mut(index as usize)?;
        let op = slot.op.take()?;
        slot.generation = (slot.generation + 1) & GENERATION_MASK;
        self.free.push(index);
        Some(op)
    }

    /// What the kernel is told as `user_data`.
    #[inline]
    pub fn name(&self, index: u32) -> u64 {
        u64::from(self.slots[index as usize].generation) << 32 | u64::from(index)
    }

    /// The slot behind a `user_data`, if it still means the same op.
    #[inline]
    pub fn find(&self, user_data: u64) -> Option<u32> {
        #[allow(clippy::cast_possible_truncation)] // the halves of a 64-bit number
        let (generation, index) = ((user_data >> 32) as u32, user_data as u32);
        let slot = self.slots.get(index as usize)?;
        (slot.generation == generation && slot.op.is_some()).then_some(index)
    }

    /// Every op, with its index.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut OpState)> {
        (0..).zip(self.slots.iter_mut()).filter_map(|(index, slot)| Some((index, slot.op.as_mut()?)))
    }
}
