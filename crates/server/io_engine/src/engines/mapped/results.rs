//! What the results of inner ops mean for the ops that wait for them.

use std::sync::Arc;

use disk_image::volume::{CompressedPlace, LoadedSlice, SLICE_BYTES};
use guest_mem::{IoVecs, PieceCursor};
use rustix::io::Errno;

use super::MappedEngine;
use super::attached::Attached;
use super::op::{OpState, Token, Work};
use super::steps::fill_zeroes;
use crate::engine::{Completion, OpError};

#[allow(clippy::cast_possible_truncation)] // 4096
const SLICE: usize = SLICE_BYTES as usize;

impl MappedEngine {
    #[inline]
    pub(super) fn on_inner(&mut self, completion: Completion) {
        match Token::decode(completion.token) {
            Token::Whole(slot) => self.on_whole(slot, completion),
            Token::Part(disk, index) => self.on_part(disk, index, completion),
            Token::Table(disk, index) => self.on_table(disk, index, completion),
            Token::Copy(disk, index) => self.on_copy(disk, index, completion),
        }
    }

    pub(super) fn attached(&mut self, disk: u32) -> &mut Attached {
        match self.disks.get_mut(disk as usize).and_then(Option::as_mut) {
            Some(disk) => disk,
            None => unreachable!("disk {disk} has ops in flight"),
        }
    }

    #[inline]
    fn on_whole(&mut self, slot: u32, mut completion: Completion) {
        let op = &mut self.ops[slot as usize];
        let (file, disk) = (op.whole_file, op.file);
        if let Err(error) = completion.result
            && self.attached(disk.0).ends_there(file, error)
        {
            let len_bytes = self.ops[slot as usize].len_bytes;
            fill_behind_end(&mut completion, len_bytes);
        }
        self.tell_end(slot, file, completion.stored_bytes, completion.result);
        if completion.result.is_ok() && self.may_have_lost_writes(slot) {
            (completion.result, completion.sync_failed) = (Err(OpError::Errno(Errno::IO)), true);
        }
        self.end_group(slot);
        let op = &mut self.ops[slot as usize];
        completion.token = op.token;
        (op.is_running, op.cancelled) = (false, false);
        self.free.push(slot);
        self.running -= 1;
        self.finished.push_back((disk, completion));
        self.go_on_in_line(disk.0);
    }

    /// Whether the op makes writes durable, and a sync of the metadata thread has failed.
    fn may_have_lost_writes(&mut self, slot: u32) -> bool {
        let (op, disk) = self.op_and_disk(slot);
        (op.work.is_durable() || matches!(op.work, Work::Flush))
            && disk.member.as_ref().is_some_and(|member| member.has_sync_failed())
    }

    fn on_part(&mut self, disk: u32, index: u32, mut completion: Completion) {
        let attached = self.attached(disk);
        let part = &mut attached.parts[index as usize];
        let (slot, start_bytes, len_bytes, file) = (part.op, part.start_bytes, part.len_bytes, part.file);
        if let Err(error) = completion.result
            && attached.ends_there(file, error)
        {
            fill_behind_end(&mut completion, len_bytes);
        }
        completion.buffers.release();
        self.tell_end(slot, file, start_bytes + completion.stored_bytes, completion.result);
        let attached = self.attached(disk);
        attached.parts[index as usize].buffers = completion.buffers;
        attached.free_parts.push(index);
        let op = &mut self.ops[slot as usize];
        op.pending -= 1;
        op.sync_failed |= completion.sync_failed;
        if let Err(error) = completion.result {
            op.fail(start_bytes + completion.stored_bytes, error);
        }
        self.resume(slot);
        self.go_on_in_line(disk);
    }

    /// Keeps the slice, and lets the ops go on that wait for it.
    fn on_table(&mut self, disk: u32, index: u32, completion: Completion) {
        let attached = self.attached(disk);
        let Completion { mut result, stored_bytes, buffers, .. } = completion;
        let load = &attached.loads[index as usize];
        if let Err(error) = result
            && attached.ends_there(load.file, error)
            && stored_bytes >= load.skip_bytes + load.len_bytes
        {
            // The block goes on past the file's end, the slice does not.
            result = Ok(());
        }
        let load = &mut attached.loads[index as usize];
        load.buffers = buffers;
        let file = load.file;
        let Some(id) = load.id else { unreachable!("the load is in use") };
        let mut waiting = std::mem::take(&mut load.waiting);
        let mut words = std::mem::take(&mut load.words);
        if result.is_ok() {
            let mut bytes = [0; SLICE];
            let len_bytes = usize::try_from(load.len_bytes).unwrap_or(usize::MAX);
            let (skip_bytes, valid_bytes) = (load.skip_bytes, u64::MAX);
            attached.slices.read(index as usize, skip_bytes, valid_bytes, &mut bytes[..len_bytes]);
            words.clear();
            words.extend(bytes[..len_bytes].as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)));
            attached.volume.keep(LoadedSlice { id, words: &words });
        }
        self.continued += waiting.len();
        for slot in waiting.drain(..) {
            let op = &mut self.ops[slot as usize];
            op.pending -= 1;
            op.is_waiting = false;
            match result {
                Ok(()) => self.go_on(slot, Some(LoadedSlice { id, words: &words })),
                Err(error) => {
                    let at_bytes = op.begun_bytes;
                    op.fail(at_bytes, error);
                    self.tell_end(slot, file, at_bytes, result);
                    self.resume(slot);
                }
            }
        }
        let load = &mut self.attached(disk).loads[index as usize];
        (load.id, load.waiting, load.words) = (None, waiting, words);
        self.go_on_in_line(disk);
    }

    fn on_copy(&mut self, disk: u32, index: u32, completion: Completion) {
        let attached = self.attached(disk);
        let copy = &mut attached.copies.list[index as usize];
        let (slot, file, start_bytes) = (copy.op, copy.file, copy.start_bytes);
        copy.buffers = completion.buffers;
        copy.valid_bytes = completion.stored_bytes;
        if copy.is_write {
            return self.on_written_copy(disk, index, completion.result, completion.sync_failed);
        }
        let is_compressed = copy.compressed.is_some();
        match completion.result {
            Err(error) if !attached.ends_there(file, error) => {
                self.ops[slot as usize].fail(start_bytes, error);
                self.tell_end(slot, file, start_bytes, completion.result);
                self.end_copy(disk, index);
            }
            _ if is_compressed => {
                attached.copies.ready.push_back(index);
                if attached.copies.ready.len() == 1 {
                    self.inflating += 1;
                }
            }
            _ => {
                let Self { ops, disks, piece, .. } = self;
                if let Some(Some(attached)) = disks.get_mut(disk as usize) {
                    let cursor = attached.copies.list[index as usize].cursor;
                    store(&ops[slot as usize].buffers, cursor, attached.copies.data(index), piece);
                }
                self.end_copy(disk, index);
            }
        }
    }

    /// Ends the op's part in the grace of unlinked clusters: it looks nothing up any more.
    #[inline]
    fn end_group(&mut self, slot: u32) {
        let op = &self.ops[slot as usize];
        let (disk, group) = (op.file.0, op.group);
        if let Some(member) = &mut self.attached(disk).member {
            member.end(group);
        }
    }

    fn on_written_copy(&mut self, disk: u32, index: u32, result: Result<(), OpError>, sync_failed: bool) {
        let copy = &self.attached(disk).copies.list[index as usize];
        let (slot, start_bytes) = (copy.op, copy.start_bytes);
        let op = &mut self.ops[slot as usize];
        op.sync_failed |= sync_failed;
        if let Err(error) = result {
            op.fail(start_bytes, error);
        }
        self.end_copy(disk, index);
    }

    /// Logs which file ended too early: the error has only the offset in that file.
    #[inline]
    fn tell_end(&mut self, slot: u32, file: usize, at_bytes: u64, result: Result<(), OpError>) {
        if let Err(error @ OpError::EndOfImage { .. }) = result {
            let op = &self.ops[slot as usize];
            let (disk, offset_bytes) = (op.file.0, op.offset_bytes + at_bytes);
            self.attached(disk).volume.tell_of_file(file, offset_bytes, &error);
        }
    }

    fn end_copy(&mut self, disk: u32, index: u32) {
        let copies = &mut self.attached(disk).copies;
        copies.free.push(index);
        let slot = copies.list[index as usize].op;
        self.ops[slot as usize].pending -= 1;
        self.resume(slot);
        self.go_on_in_line(disk);
    }

    /// Decompresses one cluster, and ends all copies that wait for it. Disks take turns.
    pub(super) fn inflate_one(&mut self) {
        if self.inflating == 0 {
            return;
        }
        let has_ready =
            |disk: &Option<Attached>| disk.as_ref().is_some_and(|disk| !disk.copies.ready.is_empty());
        let after = self.disks.iter().enumerate().skip(self.next_inflating).find(|(_, disk)| has_ready(disk));
        let found = after.or_else(|| self.disks.iter().enumerate().find(|(_, disk)| has_ready(disk)));
        let Some((disk, _)) = found else { unreachable!("a disk has a cluster to decompress") };
        self.next_inflating = disk + 1;
        #[allow(clippy::cast_possible_truncation)] // it is a file's number
        let disk = disk as u32;
        self.inflate_first(disk);
        let attached = self.attached(disk);
        if attached.copies.ready.is_empty() {
            self.inflating -= 1;
        }
    }

    fn inflate_first(&mut self, disk: u32) {
        let mut is_first = true;
        loop {
            let attached = self.attached(disk);
            let Some(&index) = attached.copies.ready.front() else { return };
            let copy = &attached.copies.list[index as usize];
            let Some(place) = copy.compressed else { unreachable!("only compressed clusters wait") };
            let (slot, start_bytes, cursor, len_bytes) =
                (copy.op, copy.start_bytes, copy.cursor, copy.len_bytes);
            if !is_first && attached.copies.decompressed(&place).is_none() {
                return;
            }
            is_first = false;
            attached.copies.ready.pop_front();
            self.continued += 1;
            let attached = self.attached(disk);
            if let Err(error) = attached.copies.decompress(index, &attached.volume) {
                let why = format!("compressed data at {:#x}: {error}", place.cluster.host_offset);
                let volume = Arc::clone(&attached.volume);
                let op = &mut self.ops[slot as usize];
                volume.tell(place.layer, op.offset_bytes + start_bytes, &why);
                op.fail(start_bytes, OpError::Damaged);
            } else {
                self.store_decompressed(slot, cursor, &place, len_bytes);
            }
            self.end_copy(disk, index);
        }
    }

    /// Copies from the cluster that was decompressed last.
    pub(super) fn store_decompressed(
        &mut self,
        slot: u32,
        cursor: PieceCursor,
        place: &CompressedPlace,
        len_bytes: u64,
    ) {
        let Self { ops, disks, piece, .. } = self;
        let op = &ops[slot as usize];
        let Some(Some(attached)) = disks.get(op.file.0 as usize) else { return };
        let range =
            usize::try_from(place.skip_bytes).ok().zip(usize::try_from(place.skip_bytes + len_bytes).ok());
        let cluster = attached.copies.decompressed(place);
        let data = cluster.zip(range).and_then(|(cluster, (start, end))| cluster.get(start..end));
        let Some(data) = data else { unreachable!("an extent is inside its cluster") };
        store(&op.buffers, cursor, data, piece);
    }

    /// Lets an op go on after one of its pieces has ended.
    pub(super) fn resume(&mut self, slot: u32) {
        let op = &self.ops[slot as usize];
        if !op.is_in_line && !op.is_due && !op.is_waiting {
            self.go_on(slot, None);
        }
    }

    /// Lets the ops in a disk's line go on, until one must wait again.
    #[inline]
    pub(super) fn go_on_in_line(&mut self, disk: u32) {
        while let Some(slot) = self.attached(disk).line.pop_front() {
            self.ops[slot as usize].is_in_line = false;
            self.go_on(slot, None);
            if self.ops[slot as usize].is_in_line {
                // It has gone to the end.
                self.attached(disk).line.rotate_right(1);
                return;
            }
        }
    }

    /// Lets the ops of all disks' lines go on.
    #[cold]
    pub(super) fn go_on_in_all_lines(&mut self) {
        #[allow(clippy::cast_possible_truncation)] // each is a file's number
        let disks = self.disks.len() as u32;
        for disk in 0..disks {
            if self.disks[disk as usize].is_some() {
                self.go_on_in_line(disk);
            }
        }
    }

    /// Lets each disk's due ops go on, until one has used up the disk's new turn.
    #[inline]
    pub(super) fn go_on_with_due(&mut self) {
        if self.due > 0 {
            self.go_on_with_due_of_all();
        }
    }

    #[cold]
    fn go_on_with_due_of_all(&mut self) {
        for disk in 0..self.disks.len() {
            while let Some(slot) = self.disks[disk].as_mut().and_then(|disk| disk.due.pop_front()) {
                self.due -= 1;
                self.continued += 1;
                self.ops[slot as usize].is_due = false;
                self.go_on(slot, None);
                if self.ops[slot as usize].is_due {
                    // It has gone to the end, so that another op is the next turn's first.
                    break;
                }
            }
        }
    }

    /// Completes an op of which no piece is in flight.
    pub(super) fn end(&mut self, slot: u32) {
        self.end_group(slot);
        let op = &mut self.ops[slot as usize];
        if op.failed.is_none() && self.may_have_lost_writes(slot) {
            let op = &mut self.ops[slot as usize];
            op.sync_failed = true;
            op.fail(op.begun_bytes, OpError::Errno(Errno::IO));
        }
        let op = &mut self.ops[slot as usize];
        let (done_bytes, result) = match op.failed {
            Some((at, error)) => (at, Err(error)),
            None if op.begun_bytes == op.len_bytes => (op.len_bytes, Ok(())),
            None => (op.begun_bytes, Err(OpError::Cancelled)),
        };
        let (token, file, mut buffers) = (op.token, op.file, std::mem::take(&mut op.buffers));
        let (work, sync_failed) = (op.work, op.sync_failed);
        *op = OpState::default();
        if work.moves_data() {
            buffers.advance(done_bytes);
        }
        self.free.push(slot);
        self.running -= 1;
        let stored_bytes = if work == Work::Read { done_bytes } else { 0 };
        let completion = Completion { token, result, sync_failed, stored_bytes, buffers };
        self.finished.push_back((file, completion));
    }
}

/// Makes a success of a read that came to the file's end: stores zeroes in what is left of the range.
fn fill_behind_end(completion: &mut Completion, len_bytes: u64) {
    let buffers = &mut completion.buffers;
    let consumed = len_bytes - buffers.remaining_bytes();
    // Part of a block is stored, but the buffers still begin with that block.
    buffers.advance(completion.stored_bytes - consumed);
    fill_zeroes(buffers);
    completion.stored_bytes = len_bytes;
    completion.result = Ok(());
}

/// Copies to the buffers from `cursor` on.
fn store(buffers: &IoVecs, mut cursor: PieceCursor, data: &[u8], piece: &mut IoVecs) {
    let mut data = data;
    while !data.is_empty() {
        let part_bytes = buffers.part(&mut cursor, data.len() as u64, piece);
        assert!(part_bytes > 0, "the buffers are as long as the range");
        let copied = piece.copy_in(data);
        data = &data[copied..];
    }
    piece.release();
}

impl Attached {
    /// Whether a read has come to the end that the file had when it was opened, so that the rest is zeroes.
    fn ends_there(&self, file: usize, error: OpError) -> bool {
        let OpError::EndOfImage { offset_bytes, .. } = error else { return false };
        self.volume.files().get(file).is_some_and(|file| file.len_bytes() == offset_bytes)
    }
}
