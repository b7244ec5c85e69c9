//! The pieces of ops that change the disk: writes, discards and write-zeroes, in place or after a change of the tables.
//!
//! ```text
//! write:        in place? ─ yes: part or copy │ no: claim, and look again
//! zero:         whole clusters: a change │ part of a cluster: zeroes there already? │ in place? │ claim
//! discard:      whole clusters: a change │ part of a cluster: nothing
//! ```

use disk_image::volume::link::Change;
use disk_image::volume::{Extent, LoadedSlice, Place};

use super::MappedEngine;
use super::attached::Part;
use super::op::{Token, Work};
use super::steps::Begun;
use crate::engine::{Durability, Op, OpError, OpKind, Unmap};

/// The most bytes that one claim is for: a change of one op holds up the others'.
const MOST_CLAIM_BYTES: u64 = 4 << 20;

impl MappedEngine {
    /// Begins the next piece.
    pub(super) fn write_on(&mut self, slot: u32, work: Work, loaded: Option<LoadedSlice<'_>>) -> Begun {
        match work {
            Work::Read => unreachable!("`go_on` knows reads"),
            Work::Write(durability) => self.write_next(slot, durability, loaded),
            Work::Flush => self.flush(slot),
            Work::Discard(_) => self.discard_next(slot),
            Work::WriteZeroes(unmap, durability) => self.zero_next(slot, unmap, durability, loaded),
        }
    }

    /// Pushes a flush that found no room before.
    fn flush(&mut self, slot: u32) -> Begun {
        let (state, disk) = self.op_and_disk(slot);
        state.whole_file = disk.volume.table_file(0);
        let (file, buffers) = (disk.files[state.whole_file], std::mem::take(&mut state.buffers));
        let op = Op { token: super::whole(slot), file, kind: OpKind::Flush, buffers };
        match self.inner.push(op) {
            Ok(()) => Begun::Waits,
            Err(refused) => {
                self.ops[slot as usize].buffers = refused.buffers;
                Begun::Later
            }
        }
    }

    fn write_next(&mut self, slot: u32, durability: Durability, loaded: Option<LoadedSlice<'_>>) -> Begun {
        let (state, disk) = self.op_and_disk(slot);
        match disk.volume.writable_extent(state.at(), state.left_bytes(), loaded) {
            Ok(extent) => match extent.host_offset {
                Some(offset_bytes) => self.begin_write(slot, offset_bytes, extent.len_bytes, durability),
                None => self.claim(slot, extent.len_bytes),
            },
            Err(missing) => self.wait_for(slot, missing),
        }
    }

    fn claim(&mut self, slot: u32, len_bytes: u64) -> Begun {
        let (state, _) = self.op_and_disk(slot);
        let start = state.at();
        self.ask(slot, Change::Claim(start..start + len_bytes.min(MOST_CLAIM_BYTES)))
    }

    /// Writes from the guest's memory. As many pieces as a part holds, in whole blocks.
    fn begin_write(&mut self, slot: u32, offset_bytes: u64, len_bytes: u64, durability: Durability) -> Begun {
        let (state, disk) = self.op_and_disk(slot);
        let file = disk.volume.table_file(0);
        let Some(index) = disk.free_parts.pop() else { return Begun::Later };
        let (mut cursor, mut buffers) =
            (state.cursor, std::mem::take(&mut disk.parts[index as usize].buffers));
        let block_bytes = disk.volume.files()[file].block_bytes();
        let mut part_bytes = state.buffers.part(&mut cursor, len_bytes, &mut buffers);
        if !part_bytes.is_multiple_of(block_bytes) {
            part_bytes -= part_bytes % block_bytes;
            cursor = state.cursor;
            state.buffers.part(&mut cursor, part_bytes, &mut buffers);
        }
        if part_bytes == 0 {
            buffers.release();
            disk.parts[index as usize].buffers = buffers;
            disk.free_parts.push(index);
            return self.write_copy(slot, offset_bytes, len_bytes, durability);
        }
        let Some(range) = disk.volume.files()[file].check(offset_bytes, part_bytes) else {
            buffers.release();
            disk.parts[index as usize].buffers = buffers;
            disk.free_parts.push(index);
            return self.outside(slot, offset_bytes);
        };
        disk.parts[index as usize].buffers = buffers;
        let begun = self.push_part(slot, index, part_bytes, OpKind::Write { range, durability });
        if begun == Begun::Yes {
            self.ops[slot as usize].cursor = cursor;
        }
        begun
    }

    /// A host cluster outside of the file, or one that is no multiple of blocks.
    #[cold]
    fn outside(&mut self, slot: u32, offset_bytes: u64) -> Begun {
        let (state, disk) = self.op_and_disk(slot);
        disk.volume.tell(
            0,
            state.at(),
            &format!("the host cluster at {offset_bytes:#x} is outside of the file"),
        );
        state.fail(state.begun_bytes, OpError::Damaged);
        Begun::Failed
    }

    /// Pushes a part, whose buffers are set.
    fn push_part(&mut self, slot: u32, index: u32, len_bytes: u64, kind: OpKind) -> Begun {
        let (state, disk) = self.op_and_disk(slot);
        let (disk_index, file) = (state.file.0, disk.volume.table_file(0));
        let buffers = std::mem::take(&mut disk.parts[index as usize].buffers);
        disk.parts[index as usize] =
            Part { op: slot, start_bytes: state.begun_bytes, len_bytes, file, ..Part::default() };
        let (token, inner_file) = (Token::Part(disk_index, index).encode(), disk.files[file]);
        if let Err(mut refused) = self.inner.push(Op { token, file: inner_file, kind, buffers }) {
            refused.buffers.release();
            let (_, disk) = self.op_and_disk(slot);
            disk.parts[index as usize].buffers = refused.buffers;
            disk.free_parts.push(index);
            return Begun::Later;
        }
        let state = &mut self.ops[slot as usize];
        state.pending += 1;
        state.begin_piece(len_bytes);
        Begun::Yes
    }

    /// Writes a block, or a few, of which the guest's memory has more pieces than a part holds.
    fn write_copy(&mut self, slot: u32, offset_bytes: u64, len_bytes: u64, durability: Durability) -> Begun {
        let (state, disk) = self.op_and_disk(slot);
        let (disk_index, file) = (state.file.0, disk.volume.table_file(0));
        let len_bytes = len_bytes.min(disk.copies.most_bytes);
        let Some(range) = disk.volume.files()[file].check(offset_bytes, len_bytes) else {
            return self.outside(slot, offset_bytes);
        };
        if disk.copies.free.is_empty() {
            return Begun::Later;
        }
        if !self.may_copy(slot, len_bytes) {
            return Begun::NextTurn;
        }
        let Self { ops, disks, piece, .. } = self;
        let Some(Some(disk)) = disks.get_mut(disk_index as usize) else { unreachable!("the op has a disk") };
        let Some(index) = disk.copies.free.pop() else { unreachable!("one is free") };
        let state = &mut ops[slot as usize];
        let mut cursor = state.cursor;
        if !disk.copies.store(index, &state.buffers, &mut cursor, len_bytes, piece) {
            disk.copies.free.push(index);
            state.fail(state.begun_bytes, OpError::Errno(rustix::io::Errno::FAULT));
            return Begun::Failed;
        }
        let copy = &mut disk.copies.list[index as usize];
        (copy.op, copy.is_write, copy.start_bytes, copy.len_bytes) =
            (slot, true, state.begun_bytes, len_bytes);
        (copy.file, copy.compressed) = (file, None);
        let mut buffers = std::mem::take(&mut copy.buffers);
        disk.copies.scratch.describe(index as usize, len_bytes, &mut buffers);
        let (token, inner_file) = (Token::Copy(disk_index, index).encode(), disk.files[file]);
        let op = Op { token, file: inner_file, kind: OpKind::Write { range, durability }, buffers };
        if let Err(refused) = self.inner.push(op) {
            let (_, disk) = self.op_and_disk(slot);
            disk.copies.list[index as usize].buffers = refused.buffers;
            disk.copies.free.push(index);
            return Begun::Later;
        }
        let state = &mut self.ops[slot as usize];
        state.cursor = cursor;
        state.pending += 1;
        state.begin_piece(len_bytes);
        Begun::Yes
    }

    fn discard_next(&mut self, slot: u32) -> Begun {
        match self.whole_clusters(slot, true) {
            Next::Whole { end } => self.ask_to_zero(slot, end, true),
            Next::Part { len_bytes } => {
                self.ops[slot as usize].begin_piece(len_bytes);
                Begun::Yes
            }
        }
    }

    fn ask_to_zero(&mut self, slot: u32, end: u64, unmap: bool) -> Begun {
        let range = self.ops[slot as usize].at()..end;
        self.ask(slot, Change::Zero { range, unmap })
    }

    fn zero_next(
        &mut self,
        slot: u32,
        unmap: Unmap,
        durability: Durability,
        loaded: Option<LoadedSlice<'_>>,
    ) -> Begun {
        let most_bytes = match self.whole_clusters(slot, unmap == Unmap::Allowed) {
            Next::Whole { end } => return self.ask_to_zero(slot, end, unmap == Unmap::Allowed),
            Next::Part { len_bytes } => len_bytes,
        };
        let Extent { len_bytes, place } = match self.extent(slot, loaded) {
            Ok(extent) => extent,
            Err(begun) => return begun,
        };
        let len_bytes = len_bytes.min(most_bytes);
        if place == Place::Zeroes && unmap == Unmap::Allowed {
            self.ops[slot as usize].begin_piece(len_bytes);
            return Begun::Yes;
        }
        let (state, disk) = self.op_and_disk(slot);
        match disk.volume.writable_extent(state.at(), len_bytes, loaded) {
            Ok(extent) => match extent.host_offset {
                Some(offset_bytes) => {
                    self.zero_in_place(slot, (offset_bytes, extent.len_bytes), unmap, durability)
                }
                None => self.claim(slot, extent.len_bytes),
            },
            Err(missing) => self.wait_for(slot, missing),
        }
    }

    fn zero_in_place(
        &mut self,
        slot: u32,
        (offset_bytes, len_bytes): (u64, u64),
        unmap: Unmap,
        durability: Durability,
    ) -> Begun {
        let (_, disk) = self.op_and_disk(slot);
        let file = disk.volume.table_file(0);
        let Some(range) = disk.volume.files()[file].check(offset_bytes, len_bytes) else {
            return self.outside(slot, offset_bytes);
        };
        let Some(index) = disk.free_parts.pop() else { return Begun::Later };
        self.push_part(slot, index, len_bytes, OpKind::WriteZeroes { range, unmap, durability })
    }

    /// Whether whole clusters come next that can read as zeroes without data; otherwise how far the part goes.
    fn whole_clusters(&mut self, slot: u32, unmap: bool) -> Next {
        let (state, disk) = self.op_and_disk(slot);
        let (start, len_bytes) = (state.at(), state.left_bytes());
        if !disk.volume.can_zero(unmap) {
            return Next::Part { len_bytes };
        }
        let cluster_bytes = disk.volume.compression(0).map_or(1, |(_, cluster_bytes)| cluster_bytes);
        let end = start + len_bytes;
        // The disk may end inside of a cluster, which is then a whole one.
        let whole_end = if end == disk.volume.size_bytes() { end } else { end - end % cluster_bytes };
        let next = start.next_multiple_of(cluster_bytes);
        if start < next {
            return Next::Part { len_bytes: (next - start).min(len_bytes) };
        }
        if start < whole_end { Next::Whole { end: whole_end } } else { Next::Part { len_bytes } }
    }
}

/// What comes next of a range that becomes zeroes.
enum Next {
    /// Whole clusters, up to a guest's offset.
    Whole {
        end: u64,
    },
    Part {
        len_bytes: u64,
    },
}
