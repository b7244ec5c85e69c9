//! Steps 4 and 5: converts a parsed request into ops for the engine, or completes it immediately.
//!
//! `Request → checked range of the image → in-flight slot → op(s), pushed`

use disk_image::{CheckedRange, Image};
use guest_mem::{IoVecs, MemoryView};
use io_engine::{Durability, FileId, Op, OpKind, Unmap};
use virtio_blk::{Data, Request, Segment, SegmentBuffer, Segments, Status};

use super::submit_context::{MAX_OPS, SubmitContext};
use crate::data_path::disk::Disk;
use crate::data_path::queue::in_flight::{InFlight, RequestDurability, RequestInfo, RequestKind};
use crate::data_path::queue::parked::ParkedRequests;
use crate::data_path::queue::refusal::Refusal;
use crate::data_path::worker::buffers::NoBuffers;

const UNSUPPORTED: Outcome = Outcome::Finished { status: Status::Unsupp, stored_bytes: 0 };
const NOTHING_TO_DO: Outcome = Outcome::Finished { status: Status::Ok, stored_bytes: 0 };

/// The result of starting a request.
pub(super) enum Outcome {
    /// Completed without the engine.
    Finished { status: Status, stored_bytes: u64 },
    /// Passed to the engine.
    Submitted,
    /// The disk's share of the pool is used up. The chain stays in the ring until a request completes.
    Later,
}

/// The parts of a queue and its worker that are needed to start a request.
pub(super) struct Starter<'q, 'w, 'l> {
    pub(super) disk: &'q Disk,
    pub(super) image: &'q Image,
    pub(super) view: &'q MemoryView,
    pub(super) in_flight: &'q mut InFlight,
    pub(super) parked: &'q mut ParkedRequests,
    pub(super) context: &'l mut SubmitContext<'w>,
    pub(super) file: FileId,
    pub(super) durability: Durability,
    pub(super) token: u64,
    pub(super) tag: u16,
    pub(super) reply: virtio_blk::ReplySlot,
}

impl Starter<'_, '_, '_> {
    #[inline]
    pub(super) fn start(mut self, request: Request<'_>) -> Result<Outcome, Refusal> {
        match request {
            Request::Read { sector, data } => self.read(sector, data),
            Request::Write { sector, data } => self.write(sector, data),
            // These calls copy the starter, so that reads and writes can keep its fields in registers.
            Request::Flush => Starter { ..self }.flush(),
            Request::GetId { data } => Starter { ..self }.get_id(data),
            Request::Discard { segments } => Starter { ..self }.discard(segments),
            Request::WriteZeroes { segments } => Starter { ..self }.write_zeroes(segments),
            Request::Unsupported { .. } => Ok(UNSUPPORTED),
        }
    }

    /// Returns the durability that success guarantees to the guest.
    #[inline]
    fn check_writable(&self, kind: RequestKind) -> Result<RequestDurability, Refusal> {
        if self.image.read_only() {
            return Err(Refusal::ReadOnly { kind });
        }
        if self.disk.has_failed_with(self.image) {
            return Err(Refusal::DiskFailed { kind });
        }
        Ok(match self.durability {
            Durability::Cached => RequestDurability::Done,
            Durability::Durable => RequestDurability::Durable,
        })
    }

    #[inline]
    fn read(&mut self, sector: u64, data: Data<'_>) -> Result<Outcome, Refusal> {
        let info = RequestInfo {
            kind: RequestKind::Read,
            sector,
            bytes: data.len_bytes(),
            durability: RequestDurability::Done,
        };
        self.transfer(info, data, |range, _| OpKind::Read { range })
    }

    #[inline]
    fn write(&mut self, sector: u64, data: Data<'_>) -> Result<Outcome, Refusal> {
        let durability = self.check_writable(RequestKind::Write)?;
        let info = RequestInfo { kind: RequestKind::Write, sector, bytes: data.len_bytes(), durability };
        self.transfer(info, data, |range, durability| OpKind::Write { range, durability })
    }

    #[inline]
    fn transfer(
        &mut self,
        info: RequestInfo,
        data: Data<'_>,
        op_kind: impl FnOnce(CheckedRange, Durability) -> OpKind,
    ) -> Result<Outcome, Refusal> {
        // Step 4: turn the sectors into a range of the image.
        let range = self.image.check(info.sector, info.bytes)?;
        if info.bytes == 0 {
            return Ok(NOTHING_TO_DO);
        }
        let buffers = match self.context.pool.fill(self.file, self.view, data) {
            Ok(buffers) => buffers,
            Err(NoBuffers::Exhausted) => return Ok(Outcome::Later),
            Err(NoBuffers::Refused(why)) => return Err(why.into()),
        };
        self.context.budget.take_bytes(info.bytes);
        Ok(self.submit(info, op_kind(range, self.durability), buffers))
    }

    /// Restarts a parked request. `buffers`: the unfinished part of a read or write.
    #[cold]
    pub(super) fn restart(mut self, info: RequestInfo, buffers: IoVecs) -> Result<Outcome, Refusal> {
        match info.kind {
            RequestKind::Read => {
                let info = RequestInfo { durability: RequestDurability::Done, ..info };
                self.transfer_rest(info, buffers, |range, _| OpKind::Read { range })
            }
            RequestKind::Write => {
                // The guest may have changed its cache mode in the meantime.
                let info = RequestInfo { durability: self.check_writable(RequestKind::Write)?, ..info };
                self.transfer_rest(info, buffers, |range, durability| OpKind::Write { range, durability })
            }
            RequestKind::Flush => self.flush(),
            RequestKind::Discard => self.restart_segments(Self::discard),
            RequestKind::WriteZeroes => self.restart_segments(Self::write_zeroes),
        }
    }

    fn restart_segments(
        self,
        start: fn(Self, Segments<'_>) -> Result<Outcome, Refusal>,
    ) -> Result<Outcome, Refusal> {
        let Some(kept) = self.parked.segments(self.tag) else { return Ok(UNSUPPORTED) };
        let mut buffer = SegmentBuffer::default();
        buffer.keep(&kept);
        start(self, buffer.kept())
    }

    /// Checks the range again, because the image may have become shorter.
    fn transfer_rest(
        &mut self,
        info: RequestInfo,
        buffers: IoVecs,
        op_kind: impl FnOnce(CheckedRange, Durability) -> OpKind,
    ) -> Result<Outcome, Refusal> {
        let whole = self.image.check(info.sector, info.bytes)?;
        let done_bytes = info.bytes.saturating_sub(buffers.remaining_bytes());
        let rest = whole.after(done_bytes).filter(|_| buffers.remaining_bytes() > 0);
        let Some(range) = rest else { return Err(Refusal::LostBuffers { kind: info.kind }) };
        self.context.budget.take_bytes(range.len_bytes());
        Ok(self.submit(info, op_kind(range, self.durability), buffers))
    }

    #[inline(never)]
    fn flush(mut self) -> Result<Outcome, Refusal> {
        if self.disk.ignores_flushes() {
            return Ok(NOTHING_TO_DO);
        }
        if self.disk.has_failed_with(self.image) {
            return Err(Refusal::DiskFailed { kind: RequestKind::Flush });
        }
        let info = RequestInfo {
            kind: RequestKind::Flush,
            sector: 0,
            bytes: 0,
            durability: RequestDurability::Flushed,
        };
        Ok(self.submit(info, OpKind::Flush, IoVecs::with_capacity(0)))
    }

    /// Stores up to 20 bytes, or fewer if the driver has less room.
    #[inline(never)]
    fn get_id(self, data: Data<'_>) -> Result<Outcome, Refusal> {
        let stored_bytes = u64::from(data.store(self.view, self.disk.serial())?);
        Ok(Outcome::Finished { status: Status::Ok, stored_bytes })
    }

    #[inline(never)]
    fn discard(mut self, segments: Segments<'_>) -> Result<Outcome, Refusal> {
        let durability = self.check_writable(RequestKind::Discard)?;
        let Some(limits) = self.image.discard_limits() else { return Ok(UNSUPPORTED) };
        let op_kind = |range, _: &Segment, durability| OpKind::Discard { range, durability };
        self.segments((RequestKind::Discard, durability), &segments, limits.max_sectors, op_kind)
    }

    #[inline(never)]
    fn write_zeroes(mut self, segments: Segments<'_>) -> Result<Outcome, Refusal> {
        let durability = self.check_writable(RequestKind::WriteZeroes)?;
        let Some(limits) = self.image.write_zeroes_limits() else { return Ok(UNSUPPORTED) };
        let op_kind = |range, segment: &Segment, durability| {
            let unmap = if segment.unmap && limits.may_unmap { Unmap::Allowed } else { Unmap::Forbidden };
            OpKind::WriteZeroes { range, unmap, durability }
        };
        self.segments((RequestKind::WriteZeroes, durability), &segments, limits.max_sectors, op_kind)
    }

    /// Checks all segments before it starts the first one.
    fn segments(
        &mut self,
        (kind, durability): (RequestKind, RequestDurability),
        segments: &Segments,
        max_sectors: u32,
        op_kind: impl Fn(CheckedRange, &Segment, Durability) -> OpKind,
    ) -> Result<Outcome, Refusal> {
        let image = self.image;
        let mut ranges = [None; MAX_OPS];
        let (mut ops, mut bytes) = (0, 0);
        for (slot, segment) in ranges.iter_mut().zip(segments.iter()) {
            let (sectors, max) = (segment.sectors, max_sectors);
            if sectors > max {
                return Err(Refusal::SegmentTooLong { kind, sectors, max });
            }
            let range = image.check(segment.sector, u64::from(sectors) * disk_image::SECTOR_BYTES)?;
            bytes += range.len_bytes();
            if sectors > 0 {
                ops += 1;
                *slot = Some((range, segment));
            }
        }
        let Some((_, first)) = ranges.iter().flatten().next() else { return Ok(NOTHING_TO_DO) };
        let info = RequestInfo { kind, sector: first.sector, bytes, durability };
        self.parked.keep_segments(self.tag, segments);
        self.in_flight.begin(self.tag, self.reply, info, ops, self.context.now_ns);
        for (range, segment) in ranges.into_iter().flatten() {
            self.push(op_kind(range, segment, self.durability), IoVecs::with_capacity(0));
        }
        Ok(Outcome::Submitted)
    }

    /// Step 5 of a request with one op: slot, then op; the worker submits the batch.
    #[inline(always)] // the compiler would make it a call for each request
    fn submit(&mut self, info: RequestInfo, kind: OpKind, buffers: IoVecs) -> Outcome {
        self.in_flight.begin(self.tag, self.reply, info, 1, self.context.now_ns);
        self.push(kind, buffers);
        Outcome::Submitted
    }

    #[inline]
    fn push(&mut self, kind: OpKind, buffers: IoVecs) {
        let op = Op { token: self.token, file: self.file, kind, buffers };
        self.context.room -= 1;
        let pushed = self.context.engine.push(op);
        assert!(pushed.is_ok(), "`take_requests` made sure that the engine has room");
    }
}
