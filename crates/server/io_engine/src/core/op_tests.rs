//! Tests of an op's state machine without a kernel: each test passes in results and checks the next call.
//!
//! `tests/contract` tests the same behaviour through whole engines.

use std::sync::Arc;

use disk_image::{Alignment, CacheMode, CheckedRange, HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, MemoryView, Region};

use rustix::io::Errno;

use super::*;
use crate::backend::Target;
use crate::core::result::{MAX_RETRIES, Next};
use crate::engine::FileSpec;
use crate::engine::OpError;

const IMAGE_BYTES: u64 = 8 << 30;

struct Rig {
    op: OpState,
    file: OpenFile,
    bounce: Bounce,
    stats: Stats,
    view: MemoryView,
    range: CheckedRange,
    _folder: tempfile::TempDir,
}

/// A read of the first `len_bytes` of a sparse image, on a file that requires `alignment`.
fn read(len_bytes: u64, addr: u64, alignment: Alignment) -> Rig {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.raw");
    let (create_bytes, cache) = (Some(IMAGE_BYTES), CacheMode::Writeback);
    let options = ImageOptions { create_bytes, cache, ..ImageOptions::new(path) };
    let image = Image::open(&HostOpener, &options).unwrap();
    let region = Region::from_memfd(GuestAddress(0), 4 << 30).unwrap();
    let view = MemoryView::new(Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap()));
    let mut buffers = IoVecs::with_capacity(4);
    let len = u32::try_from(len_bytes).unwrap();
    buffers.fill(&view, [GuestRange { addr, len_bytes: len }]).unwrap();
    let range = image.check(0, len_bytes).unwrap();
    let kind = OpKind::Read { range };
    let op = OpState::new(&mut Op { token: 1, file: FileId(0), kind, buffers });
    let spec = FileSpec::of_file(Arc::clone(image.file().unwrap()), alignment);
    let file = OpenFile::new(spec, Target::Fd(-1), true);
    let mut bounce = Bounce::default();
    bounce.shares.attach(FileId(0));
    Rig { op, file, bounce, stats: Stats::default(), view, range, _folder: folder }
}

const BUFFERED: Alignment = Alignment { memory_bytes: 1, offset_bytes: 1 };
const DIRECT: Alignment = Alignment { memory_bytes: 512, offset_bytes: 512 };

impl Rig {
    fn call(&mut self) -> Call {
        self.op.next_call(&self.file, &mut self.bounce, &mut self.stats).unwrap()
    }

    fn result(&mut self, result: i32) -> Next {
        self.op.on_result(result, &mut self.file, &self.bounce, &mut self.stats)
    }
}

#[test]
fn transfer_past_the_page_cache_goes_in_calls_of_bounded_size() {
    let mut rig = read(3 << 20, 0, DIRECT);
    let first = rig.call();
    assert!(matches!(first.buffers, Buffers::One { len_bytes: 0x20_0000, .. }));
    assert_eq!(rig.result(0x20_0000), Next::Call);
    let second = rig.call();
    assert_eq!(second.offset_bytes, 0x20_0000);
    assert!(matches!(second.buffers, Buffers::One { len_bytes: 0x10_0000, .. }));
    assert_eq!(rig.result(0x10_0000), Next::Done(Ok(())));
    assert_eq!(rig.op.stored_bytes, 3 << 20);
}

#[test]
fn transfer_through_the_page_cache_goes_in_calls_of_bounded_size() {
    let mut rig = read(1 << 20, 0, BUFFERED);
    let first = rig.call();
    assert!(matches!(first.buffers, Buffers::One { len_bytes: 0x8_0000, .. }));
    assert_eq!(rig.result(0x8_0000), Next::Call);
    assert_eq!((rig.call().offset_bytes, rig.result(0x8_0000)), (0x8_0000, Next::Done(Ok(()))));
}

#[test]
fn array_through_the_page_cache_is_cut_between_pieces() {
    let mut rig = read(1 << 20, 0, BUFFERED);
    let pieces = (0..4).map(|i| GuestRange { addr: i << 20, len_bytes: 200 << 10 });
    let view = rig.view.clone();
    rig.op.buffers.fill(&view, pieces).unwrap();
    assert!(matches!(rig.call().buffers, Buffers::Many { count: 2, .. }));
}

#[test]
fn write_whose_data_was_lost_on_the_way_to_a_bounce_buffer_is_not_made() {
    let mut rig = read(4096, 1, DIRECT);
    rig.op.purpose = Purpose::Write(Durability::Cached);
    rustix::fs::ftruncate(rig.view.memory().regions()[0].fd(), 0).unwrap();
    let call = rig.op.next_call(&rig.file, &mut rig.bounce, &mut rig.stats);
    assert!(matches!(call, Err(NoCall::LostMemory)));
}

#[test]
fn write_whose_data_was_lost_before_it_was_made_is_not_made() {
    let mut rig = read(4096, 0, BUFFERED);
    rig.op.purpose = Purpose::Write(Durability::Cached);
    assert!(rig.op.direct_transfer(&rig.file).is_some());
    rustix::fs::ftruncate(rig.view.memory().regions()[0].fd(), 0).unwrap();
    rig.view.read(0, &mut [1]).unwrap(); // as an access by other code would
    assert!(rig.op.direct_transfer(&rig.file).is_none());
    let call = rig.op.next_call(&rig.file, &mut rig.bounce, &mut rig.stats);
    assert!(matches!(call, Err(NoCall::LostMemory)));
}

#[test]
fn only_transfers_from_and_to_the_guests_own_buffers_are_made_directly() {
    let mut rig = read(4096, 1, DIRECT);
    assert!(rig.op.direct_transfer(&rig.file).is_none(), "it is to be bounced");
    rig = read(4096, 0, BUFFERED);
    assert!(rig.op.direct_transfer(&rig.file).is_some());
    rig.op.stage = Stage::Sync;
    assert!(rig.op.direct_transfer(&rig.file).is_none(), "it is no transfer");
}

#[test]
fn write_whose_data_was_lost_while_it_was_made_is_not_done() {
    let mut rig = read(4096, 0, BUFFERED);
    rig.op.purpose = Purpose::Write(Durability::Cached);
    rig.call();
    rustix::fs::ftruncate(rig.view.memory().regions()[0].fd(), 0).unwrap();
    rig.view.read(0, &mut [1]).unwrap(); // as a copy by the engine would
    assert_eq!(rig.result(4096), Next::Done(Err(OpError::Errno(Errno::FAULT))));
}

#[test]
fn direct_read_that_stops_inside_a_block_goes_on_from_the_blocks_start() {
    let mut rig = read(4096, 0, DIRECT);
    rig.call();
    assert_eq!(rig.result(700), Next::Call);
    assert_eq!((rig.call().offset_bytes, rig.op.stored_bytes), (512, 512));
}

#[test]
fn direct_read_that_ends_inside_its_first_block_is_the_end_of_the_image() {
    let mut rig = read(4096, 0, DIRECT);
    rig.call();
    let ended = OpError::EndOfImage { offset_bytes: 100, end_bytes: 4096 };
    assert_eq!(rig.result(100), Next::Done(Err(ended)));
    assert_eq!(rig.op.stored_bytes, 100);
}

#[test]
fn odd_address_is_bounced_only_where_alignment_is_asked_for() {
    let mut direct = read(4096, 1, DIRECT);
    direct.call();
    let mut buffered = read(4096, 1, BUFFERED);
    buffered.call();
    assert_eq!((direct.stats.bounced_ops, buffered.stats.bounced_ops), (1, 0));
}

#[test]
fn without_a_free_bounce_buffer_there_is_no_call() {
    let mut rig = read(4096, 1, DIRECT);
    while rig.bounce.take(FileId(0)).is_some() {}
    assert!(rig.op.next_call(&rig.file, &mut rig.bounce, &mut rig.stats).is_err());
    assert_eq!(rig.stats.bounced_ops, 0);
}

#[test]
fn progress_resets_the_count_of_retries() {
    let mut rig = read(4096, 0, BUFFERED);
    assert!((0..MAX_RETRIES).all(|_| rig.result(-libc::EAGAIN) == Next::Call));
    assert_eq!(rig.result(512), Next::Call);
    assert!((0..MAX_RETRIES).all(|_| rig.result(-libc::EINTR) == Next::Call));
    assert_eq!(rig.result(-libc::EINTR), Next::Done(Err(OpError::Errno(Errno::INTR))));
}

#[test]
fn cancelled_op_ends_with_its_next_result_unless_that_was_the_last() {
    let mut rig = read(4096, 0, BUFFERED);
    rig.op.cancelled = true;
    assert_eq!(rig.result(4096), Next::Done(Ok(())));
    let mut rig = read(4096, 0, BUFFERED);
    rig.op.cancelled = true;
    assert_eq!(rig.result(512), Next::Done(Err(OpError::Cancelled)));
}

#[test]
#[should_panic(expected = "buffers differ from the range")]
fn op_whose_buffers_are_shorter_than_its_range_is_a_bug_of_the_caller() {
    let rig = read(4096, 0, BUFFERED);
    let kind = OpKind::Read { range: rig.range };
    let _ = OpState::new(&mut Op { token: 1, file: FileId(0), kind, buffers: IoVecs::with_capacity(0) });
}

/// A durable write on a backend whose calls have no flag for durability.
fn durable_write_without_a_flag() -> Rig {
    let mut rig = read(4096, 0, BUFFERED);
    let kind = OpKind::Write { range: rig.range, durability: Durability::Durable };
    let mut buffers = IoVecs::with_capacity(1);
    buffers.fill(&rig.view, [GuestRange { addr: 0, len_bytes: 4096 }]).unwrap();
    rig.op = OpState::new(&mut Op { token: 1, file: FileId(0), kind, buffers });
    rig.file.has_durable_writes = false;
    rig
}

#[test]
fn durable_write_whose_call_has_no_flag_is_followed_by_a_sync() {
    let mut rig = durable_write_without_a_flag();
    let (first, at_sync) = (rig.call(), rig.op.is_at_sync());
    assert_eq!((first.verb, first.flags, at_sync), (Verb::Write, 0, false));
    assert_eq!(rig.result(4096), Next::Call);
    assert_eq!((rig.call().verb, rig.op.is_at_sync()), (Verb::Sync, true));
    assert_eq!(rig.result(0), Next::Done(Ok(())));
}

#[test]
fn durable_write_whose_sync_fails_is_not_done() {
    let mut rig = durable_write_without_a_flag();
    rig.call();
    rig.result(4096);
    assert_eq!(rig.result(-libc::EIO), Next::Done(Err(OpError::Errno(Errno::IO))));
}
