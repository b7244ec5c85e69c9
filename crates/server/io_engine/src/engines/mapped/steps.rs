//! The steps of an op: lookup, pieces, results; and the pieces of reads.
//!
//! `start → go_on: extent → part, copy, zeroes or table … on_inner → … go_on again → end`

use disk_image::CheckedRange;
use disk_image::volume::link::Change;
use disk_image::volume::{CompressedPlace, Extent, LoadedSlice, Lookup, NoExtent, Place, SliceId};
use guest_mem::{IoVecs, PieceCursor};

use super::attached::Attached;
use super::op::{OpState, Token, Work};
use super::{MAX_PENDING, MappedEngine, whole};
use crate::core::turn::{TURN_BYTES, cost_bytes};
use crate::engine::{Op, OpError, OpKind};

const ZEROES: [u8; 4096] = [0; 4096];

/// Whether a piece has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begun {
    Yes,
    /// The op waits for a slice, or for a change of the tables.
    Waits,
    /// Something is used up: the op must wait in its disk's line.
    Later,
    /// The disk may copy no more in this turn.
    NextTurn,
    /// No: the op has failed.
    Failed,
}

impl MappedEngine {
    /// Starts an op that is not empty.
    #[inline]
    pub(super) fn start(&mut self, op: Op, work: Work, (offset_bytes, len_bytes): (u64, u64)) {
        let Some(slot) = self.free.pop() else { unreachable!("there is a slot for each share") };
        self.running += 1;
        let Op { token, file, buffers, kind } = op;
        let Some(disk) = self.disks.get_mut(file.0 as usize).and_then(Option::as_mut) else {
            unreachable!("{file:?} has a share")
        };
        let state = &mut self.ops[slot as usize];
        // Field by field: the other ones have their values since the slot's last op ended.
        (state.is_running, state.work, state.token, state.file) = (true, work, token, file);
        (state.offset_bytes, state.len_bytes) = (offset_bytes, len_bytes);
        state.lookup = Lookup::new(len_bytes);
        if let Some(member) = &mut disk.member {
            // Before the first lookup.
            state.group = member.begin();
        }
        let mut buffers = buffers;
        if disk.line.is_empty()
            && let Some((file, kind)) = whole_op(disk, state, &kind)
        {
            let inner_file = disk.files[file];
            state.whole_file = file;
            match self.inner.push(Op { token: whole(slot), file: inner_file, kind, buffers }) {
                Ok(()) => return,
                Err(refused) => buffers = refused.buffers,
            }
        }
        state.buffers = buffers;
        self.start_pieces(slot);
    }

    #[cold]
    fn start_pieces(&mut self, slot: u32) {
        let (state, disk) = self.op_and_disk(slot);
        if disk.line.is_empty() {
            self.go_on(slot, None);
        } else {
            state.is_in_line = true;
            disk.line.push_back(slot);
        }
    }

    pub(super) fn op_and_disk(&mut self, slot: u32) -> (&mut OpState, &mut Attached) {
        let state = &mut self.ops[slot as usize];
        match self.disks.get_mut(state.file.0 as usize).and_then(Option::as_mut) {
            Some(disk) => (state, disk),
            None => unreachable!("{:?} has ops", state.file),
        }
    }

    /// Begins as many pieces as possible, and ends the op if none is left. `loaded`: a slice for which the op waited.
    pub(super) fn go_on(&mut self, slot: u32, loaded: Option<LoadedSlice<'_>>) {
        loop {
            let (state, _) = self.op_and_disk(slot);
            debug_assert!(
                state.is_running && !state.is_in_line && !state.is_due && !state.is_waiting,
                "slot {slot}"
            );
            if state.is_over() {
                break;
            }
            if state.pending == MAX_PENDING {
                return;
            }
            let begun = match state.work {
                Work::Read => self.read_on(slot, loaded),
                work => self.write_on(slot, work, loaded),
            };
            if !self.has_begun(slot, begun) {
                return;
            }
        }
        if self.ops[slot as usize].pending == 0 {
            let durable = self.make_durable(slot);
            if self.has_begun(slot, durable) {
                self.end(slot);
            }
        }
    }

    /// Whether the op can go on. Otherwise makes it wait where it must.
    fn has_begun(&mut self, slot: u32, begun: Begun) -> bool {
        let (state, disk) = self.op_and_disk(slot);
        match begun {
            Begun::Yes | Begun::Failed => return true,
            Begun::Waits => {}
            Begun::Later => {
                state.is_in_line = true;
                disk.line.push_back(slot);
            }
            Begun::NextTurn => {
                state.is_due = true;
                disk.due.push_back(slot);
                self.due += 1;
            }
        }
        false
    }

    /// Begins the next piece of a read.
    fn read_on(&mut self, slot: u32, loaded: Option<LoadedSlice<'_>>) -> Begun {
        match self.extent(slot, loaded) {
            Ok(extent) => self.begin(slot, extent),
            Err(begun) => begun,
        }
    }

    /// Where the op's next bytes are; otherwise what it waits for.
    pub(super) fn extent(&mut self, slot: u32, loaded: Option<LoadedSlice<'_>>) -> Result<Extent, Begun> {
        let (state, disk) = self.op_and_disk(slot);
        let found = disk.volume.extent(state.at(), &mut state.lookup, loaded);
        found.map_err(|missing| self.wait_for(slot, missing))
    }

    /// Makes the op wait for a slice, or fail.
    pub(super) fn wait_for(&mut self, slot: u32, missing: NoExtent) -> Begun {
        let (state, disk) = self.op_and_disk(slot);
        match missing {
            NoExtent::NotLoaded(id) => match disk.volume.slice_of_writable(id) {
                Some(slice) => self.ask(slot, Change::Load { slice }),
                None => self.load(slot, id),
            },
            NoExtent::Bad { layer, entry } => {
                disk.volume.tell(layer, state.at(), &entry);
                state.fail(state.begun_bytes, OpError::Damaged);
                Begun::Failed
            }
        }
    }

    fn begin(&mut self, slot: u32, extent: Extent) -> Begun {
        match extent.place {
            Place::Zeroes => self.begin_zeroes(slot, extent.len_bytes),
            Place::Data { file, offset_bytes } => self.begin_data(slot, file, offset_bytes, extent.len_bytes),
            Place::Compressed(place) => self.begin_compressed(slot, place, extent.len_bytes),
        }
    }

    /// Whether the disk may copy this many bytes in this turn.
    pub(super) fn may_copy(&mut self, slot: u32, len_bytes: u64) -> bool {
        let turn = self.turn;
        let (_, disk) = self.op_and_disk(slot);
        disk.turn.take(turn, cost_bytes(len_bytes, false))
    }

    fn begin_zeroes(&mut self, slot: u32, len_bytes: u64) -> Begun {
        let len_bytes = len_bytes.min(TURN_BYTES);
        if !self.may_copy(slot, len_bytes) {
            return Begun::NextTurn;
        }
        let state = &mut self.ops[slot as usize];
        let mut left = len_bytes;
        while left > 0 {
            let part_bytes = state.buffers.part(&mut state.cursor, left, &mut self.piece);
            assert!(part_bytes > 0, "the buffers are as long as the range");
            fill_zeroes(&mut self.piece);
            left -= part_bytes;
        }
        self.piece.release();
        state.begin_piece(len_bytes);
        Begun::Yes
    }

    fn begin_data(&mut self, slot: u32, file: usize, offset_bytes: u64, len_bytes: u64) -> Begun {
        let (state, disk) = self.op_and_disk(slot);
        let disk_index = state.file.0;
        let Some(range) = disk.volume.files()[file].check(offset_bytes, len_bytes) else {
            return self.begin_copy(slot, file, offset_bytes, len_bytes);
        };
        let Some(index) = disk.free_parts.pop() else { return Begun::Later };
        let part = &mut disk.parts[index as usize];
        let (mut cursor, mut buffers) = (state.cursor, std::mem::take(&mut part.buffers));
        if state.buffers.part(&mut cursor, len_bytes, &mut buffers) < len_bytes {
            buffers.release();
            part.buffers = buffers;
            disk.free_parts.push(index);
            return self.begin_copy(slot, file, offset_bytes, len_bytes);
        }
        (part.op, part.start_bytes, part.len_bytes) = (slot, state.begun_bytes, len_bytes);
        part.file = file;
        let (token, inner_file) = (Token::Part(disk_index, index).encode(), disk.files[file]);
        let op = Op { token, file: inner_file, kind: OpKind::Read { range }, buffers };
        if let Err(mut refused) = self.inner.push(op) {
            refused.buffers.release();
            let (_, disk) = self.op_and_disk(slot);
            disk.parts[index as usize].buffers = refused.buffers;
            disk.free_parts.push(index);
            return Begun::Later;
        }
        let state = &mut self.ops[slot as usize];
        state.cursor = cursor;
        state.pending += 1;
        state.begin_piece(len_bytes);
        Begun::Yes
    }

    /// Reads the blocks around the data into scratch memory.
    fn begin_copy(&mut self, slot: u32, file: usize, offset_bytes: u64, len_bytes: u64) -> Begun {
        let (_, disk) = self.op_and_disk(slot);
        let len_bytes = len_bytes.min(disk.copies.most_bytes);
        let Some(range) = disk.volume.files()[file].blocks_around(offset_bytes, len_bytes) else {
            unreachable!("an extent of data is inside its file")
        };
        let copy = (file, offset_bytes - range.offset_bytes(), None);
        self.push_copy(slot, range, copy, len_bytes)
    }

    fn begin_compressed(&mut self, slot: u32, place: CompressedPlace, len_bytes: u64) -> Begun {
        let (state, disk) = self.op_and_disk(slot);
        if disk.copies.decompressed(&place).is_some() {
            let start = state.cursor;
            if !self.may_copy(slot, len_bytes) {
                return Begun::NextTurn;
            }
            self.store_decompressed(slot, start, &place, len_bytes);
            let state = &mut self.ops[slot as usize];
            skip(&state.buffers, &mut state.cursor, len_bytes, &mut self.piece);
            state.begin_piece(len_bytes);
            return Begun::Yes;
        }
        let file = disk.volume.table_file(place.layer);
        let offset_bytes = place.cluster.host_offset;
        let Some(range) = disk.volume.files()[file].blocks_around(offset_bytes, place.cluster.len_bytes())
        else {
            let why = format!("compressed data at {offset_bytes:#x} is outside of the file");
            disk.volume.tell(place.layer, state.offset_bytes + state.begun_bytes, &why);
            state.fail(state.begun_bytes, OpError::Damaged);
            return Begun::Failed;
        };
        let copy = (file, offset_bytes - range.offset_bytes(), Some(place));
        self.push_copy(slot, range, copy, len_bytes)
    }

    fn push_copy(
        &mut self,
        slot: u32,
        range: CheckedRange,
        (file, skip_bytes, compressed): (usize, u64, Option<CompressedPlace>),
        len_bytes: u64,
    ) -> Begun {
        let (state, disk) = self.op_and_disk(slot);
        let disk_index = state.file.0;
        let Some(index) = disk.copies.free.pop() else { return Begun::Later };
        let copy = &mut disk.copies.list[index as usize];
        (copy.op, copy.is_write, copy.start_bytes, copy.len_bytes) =
            (slot, false, state.begun_bytes, len_bytes);
        (copy.cursor, copy.file, copy.skip_bytes, copy.compressed) =
            (state.cursor, file, skip_bytes, compressed);
        let mut buffers = std::mem::take(&mut copy.buffers);
        disk.copies.scratch.describe(index as usize, range.len_bytes(), &mut buffers);
        let (token, inner_file) = (Token::Copy(disk_index, index).encode(), disk.files[file]);
        let op = Op { token, file: inner_file, kind: OpKind::Read { range }, buffers };
        if let Err(refused) = self.inner.push(op) {
            let (_, disk) = self.op_and_disk(slot);
            disk.copies.list[index as usize].buffers = refused.buffers;
            disk.copies.free.push(index);
            return Begun::Later;
        }
        let state = &mut self.ops[slot as usize];
        skip(&state.buffers, &mut state.cursor, len_bytes, &mut self.piece);
        state.pending += 1;
        state.begin_piece(len_bytes);
        Begun::Yes
    }

    /// Makes the op wait for a slice, and reads the slice unless it is already being read.
    fn load(&mut self, slot: u32, id: SliceId) -> Begun {
        let (state, disk) = self.op_and_disk(slot);
        let disk_index = state.file.0;
        if let Some(load) = disk.loads.iter_mut().find(|load| load.id == Some(id)) {
            load.waiting.push(slot);
            state.pending += 1;
            state.is_waiting = true;
            return Begun::Waits;
        }
        let place = disk.volume.place_of(id);
        let range = place.map(|(file, offset_bytes, len_bytes)| {
            (file, offset_bytes, len_bytes, disk.volume.files()[file].blocks_around(offset_bytes, len_bytes))
        });
        let (file, offset_bytes, len_bytes, range) = match range {
            Ok((file, offset_bytes, len_bytes, Some(range))) => (file, offset_bytes, len_bytes, range),
            Ok((.., None)) => unreachable!("`place_of` is inside the file"),
            Err(NoExtent::Bad { layer, entry }) => {
                disk.volume.tell(layer, state.offset_bytes + state.begun_bytes, &entry);
                state.fail(state.begun_bytes, OpError::Damaged);
                return Begun::Failed;
            }
            Err(NoExtent::NotLoaded(_)) => unreachable!("L1 tables are in memory"),
        };
        let Some(index) = disk.loads.iter().position(|load| load.id.is_none()) else { return Begun::Later };
        let load = &mut disk.loads[index];
        (load.file, load.skip_bytes, load.len_bytes) = (file, offset_bytes - range.offset_bytes(), len_bytes);
        let mut buffers = std::mem::take(&mut load.buffers);
        disk.slices.describe(index, range.len_bytes(), &mut buffers);
        #[allow(clippy::cast_possible_truncation)] // 16
        let token = Token::Table(disk_index, index as u32).encode();
        let op = Op { token, file: disk.files[file], kind: OpKind::Read { range }, buffers };
        let refused = self.inner.push(op).err();
        let (state, disk) = self.op_and_disk(slot);
        let load = &mut disk.loads[index];
        if let Some(refused) = refused {
            load.buffers = refused.buffers;
            return Begun::Later;
        }
        load.id = Some(id);
        load.waiting.push(slot);
        state.pending += 1;
        state.is_waiting = true;
        Begun::Waits
    }
}

/// The inner op that does all of an op, and the volume's file, if there is one.
#[inline]
fn whole_op(disk: &Attached, state: &mut OpState, kind: &OpKind) -> Option<(usize, OpKind)> {
    let (offset_bytes, len_bytes) = (state.offset_bytes, state.len_bytes);
    match *kind {
        OpKind::Read { .. } => {
            let extent = disk.volume.extent(offset_bytes, &mut state.lookup, None);
            let Ok(Extent { len_bytes: found, place: Place::Data { file, offset_bytes } }) = extent else {
                return None;
            };
            let range = disk.volume.files()[file].check(offset_bytes, len_bytes)?;
            (found == len_bytes).then_some((file, OpKind::Read { range }))
        }
        OpKind::Write { durability, .. } => {
            let extent = disk.volume.writable_extent(offset_bytes, len_bytes, None).ok()?;
            // After the look: an entry that was found in place before it was durable is noticed.
            if state.work.is_durable() && disk.member.as_ref().is_some_and(|member| member.is_dirty()) {
                return None;
            }
            if extent.len_bytes < len_bytes {
                return None;
            }
            let file = disk.volume.table_file(0);
            let range = disk.volume.files()[file].check(extent.host_offset?, len_bytes)?;
            Some((file, OpKind::Write { range, durability }))
        }
        OpKind::Flush => Some((disk.volume.table_file(0), OpKind::Flush)),
        OpKind::Discard { .. } | OpKind::WriteZeroes { .. } => None,
    }
}

/// Moves the cursor.
pub(super) fn skip(buffers: &IoVecs, cursor: &mut PieceCursor, len_bytes: u64, piece: &mut IoVecs) {
    let mut left = len_bytes;
    while left > 0 {
        let part_bytes = buffers.part(cursor, left, piece);
        assert!(part_bytes > 0, "the buffers are as long as the range");
        left -= part_bytes;
    }
    piece.release();
}

/// Stores zeroes in all that is left of the buffers.
pub(super) fn fill_zeroes(buffers: &mut IoVecs) {
    while buffers.remaining_bytes() > 0 {
        let copied = buffers.copy_in(&ZEROES);
        buffers.advance(copied as u64);
    }
}
