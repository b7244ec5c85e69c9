//! Every kind of request on the ring: what the device sees, and the completion that the owner gets.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use blk_driver::{Completion, Durability, PushError, RequestError, ShortReads, Work};
use guest_mem::GuestRange;
use virtio_blk::{Segment, kind};

use crate::rig::{FULL, IOERR, PLAIN, UNSUPP, rig};

#[test]
fn read_lies_in_the_ring_as_header_data_and_status() {
    let mut rig = rig(8, PLAIN);
    rig.submit_read(40, 7);
    let seen = rig.device.pop().unwrap();
    assert_eq!((seen.kind, seen.sector), (kind::IN, 40));
    assert_eq!(seen.readable[0].len_bytes, 16);
    assert_eq!(seen.writable[0], rig.data(4096));
    assert_eq!(seen.room_bytes(), 4096);
}

#[test]
fn read_that_the_device_answers_completes_with_its_token_and_length() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 7);
    assert_eq!(rig.device.serve(), 1);
    assert_eq!(rig.completions(), [Completion { token: 7, stored_bytes: 4096, result: Ok(()) }]);
    assert_eq!(rig.queue.in_flight(), 0);
}

#[test]
fn vectored_write_gives_the_device_its_buffers_in_order() {
    let mut rig = rig(8, FULL);
    let base = rig.buffer.range().addr;
    let range = |offset, len_bytes| GuestRange { addr: base + offset, len_bytes };
    let data = [range(8192, 512), range(0, 1024), range(100, 412), range(4096, 100)];
    rig.push(Work::Write { sector: 9, data: &data, durability: Durability::Cached }, 1);
    rig.queue.submit();
    let seen = rig.device.pop().unwrap();
    assert_eq!((seen.kind, seen.sector, seen.data()), (kind::OUT, 9, &data[..]));
    assert_eq!(seen.writable.len(), 1);
    rig.device.answer(&seen, 0);
    assert_eq!(rig.completions(), [Completion { token: 1, stored_bytes: 0, result: Ok(()) }]);
}

#[test]
fn durable_write_is_a_write_and_then_a_flush_and_completes_once() {
    let mut rig = rig(8, PLAIN);
    let data = [rig.data(512)];
    rig.push(Work::Write { sector: 1, data: &data, durability: Durability::Durable }, 5);
    rig.queue.submit();
    let write = rig.device.pop().unwrap();
    assert_eq!(write.kind, kind::OUT);
    rig.device.answer(&write, 0);
    assert_eq!(rig.results(), []);
    assert_eq!(rig.queue.in_flight(), 1);
    let flush = rig.device.pop().unwrap();
    assert_eq!(
        (flush.kind, flush.sector, flush.readable.len(), flush.writable.len()),
        (kind::FLUSH, 0, 1, 1)
    );
    rig.device.answer(&flush, 0);
    assert_eq!(rig.results(), [(5, Ok(()))]);
    assert_eq!(rig.queue.in_flight(), 0);
}

#[test]
fn durable_write_that_fails_is_not_flushed() {
    let mut rig = rig(8, FULL);
    let data = [rig.data(512)];
    rig.push(Work::Write { sector: 1, data: &data, durability: Durability::Durable }, 5);
    rig.queue.submit();
    let write = rig.device.pop().unwrap();
    rig.device.answer(&write, IOERR);
    assert_eq!(rig.results(), [(5, Err(RequestError::IoErr))]);
    assert_eq!(rig.device.pop(), None);
}

#[test]
fn durable_write_whose_flush_fails_ends_with_that_error() {
    let mut rig = rig(8, FULL);
    let data = [rig.data(512)];
    rig.push(Work::Write { sector: 1, data: &data, durability: Durability::Durable }, 5);
    rig.queue.submit();
    rig.device.serve();
    assert_eq!(rig.results(), []);
    let flush = rig.device.pop().unwrap();
    rig.device.answer(&flush, IOERR);
    assert_eq!(rig.results(), [(5, Err(RequestError::IoErr))]);
}

#[test]
fn flush_has_no_data_and_no_sector() {
    let mut rig = rig(8, FULL);
    rig.push(Work::Flush, 3);
    rig.queue.submit();
    let seen = rig.device.pop().unwrap();
    assert_eq!((seen.kind, seen.sector, seen.room_bytes(), seen.data()), (kind::FLUSH, 0, 0, &[][..]));
    rig.device.answer(&seen, 0);
    assert_eq!(rig.results(), [(3, Ok(()))]);
}

#[test]
fn discard_carries_its_segments_as_the_standard_has_them() {
    let mut rig = rig(8, FULL);
    let segments = [
        Segment { sector: 8, sectors: 16, unmap: false },
        Segment { sector: 1 << 40, sectors: u32::MAX, unmap: false },
    ];
    rig.push(Work::Discard { segments: &segments }, 3);
    rig.queue.submit();
    let seen = rig.device.pop().unwrap();
    let mut bytes = [0; 32];
    assert_eq!((seen.kind, seen.data().len(), seen.data()[0].len_bytes), (kind::DISCARD, 1, 32));
    rig.device.view.read(seen.data()[0].addr, &mut bytes).unwrap();
    assert_eq!(bytes[..], virtio_blk::encode_segments(&segments)[..]);
    rig.device.answer(&seen, UNSUPP);
    assert_eq!(rig.results(), [(3, Err(RequestError::Unsupported))]);
}

#[test]
fn write_zeroes_of_sixteen_segments_carries_their_flags() {
    let mut rig = rig(8, FULL);
    let segments = [Segment { sector: 8, sectors: 16, unmap: true }; 16];
    rig.push(Work::WriteZeroes { segments: &segments }, 3);
    rig.queue.submit();
    let seen = rig.device.pop().unwrap();
    let mut bytes = [0; 256];
    rig.device.view.read(seen.data()[0].addr, &mut bytes).unwrap();
    assert_eq!((seen.kind, seen.data()[0].len_bytes), (kind::WRITE_ZEROES, 256));
    assert_eq!(bytes[..], virtio_blk::encode_segments(&segments)[..]);
}

#[test]
fn id_request_offers_twenty_bytes_of_a_longer_buffer() {
    let mut rig = rig(8, FULL);
    let data = rig.data(100);
    rig.push(Work::GetId { data }, 3);
    rig.queue.submit();
    let seen = rig.device.pop().unwrap();
    assert_eq!((seen.kind, seen.room_bytes()), (kind::GET_ID, 20));
    rig.device.answer_with(&seen, 0, 13);
    assert_eq!(rig.completions(), [Completion { token: 3, stored_bytes: 12, result: Ok(()) }]);
}

#[test]
fn used_length_of_zero_for_a_read_is_success_and_shown() {
    let mut rig = rig(8, FULL);
    rig.submit_read(0, 7);
    let seen = rig.device.pop().unwrap();
    rig.device.answer_with(&seen, 0, 0);
    assert_eq!(rig.completions(), [Completion { token: 7, stored_bytes: 0, result: Ok(()) }]);
}

#[test]
fn short_used_length_is_an_error_where_lengths_are_not_trusted() {
    let mut rig = rig(8, FULL);
    rig.queue.set_short_reads(ShortReads::Refuse);
    rig.submit_read(0, 7);
    let seen = rig.device.pop().unwrap();
    rig.device.answer_with(&seen, 0, 513);
    let short = RequestError::ShortRead { stored_bytes: 512, wanted_bytes: 4096 };
    assert_eq!(rig.results(), [(7, Err(short))]);
}

#[test]
fn chain_of_one_descriptor_more_than_a_short_table_holds_uses_a_long_one() {
    let mut rig = rig(16, FULL);
    let data: Vec<_> =
        (0..9).map(|at| GuestRange { addr: rig.buffer.range().addr + at * 512, len_bytes: 512 }).collect();
    rig.push(Work::Read { sector: 0, data: &data }, 1);
    rig.push(Work::Read { sector: 0, data: &data[..2] }, 2);
    rig.queue.submit();
    let seen = rig.device.pop_all();
    assert_eq!((&seen[0].writable[..9], &seen[1].writable[..2]), (&data[..], &data[..2]));
}

#[test]
fn buffer_that_nobody_registered_is_refused_with_its_address() {
    let mut rig = rig(8, FULL);
    let data = [GuestRange { addr: 0x1000, len_bytes: 512 }];
    let refused = rig.queue.push(&blk_driver::Request::new(Work::Read { sector: 0, data: &data }, 1));
    assert_eq!(refused, Err(PushError::NotRegistered { addr: 0x1000, len_bytes: 512 }));
    assert_eq!(rig.queue.in_flight(), 0);
}

#[test]
fn buffer_that_runs_over_the_end_of_the_pool_is_refused() {
    let mut rig = rig(8, FULL);
    let end = rig.buffer.range().addr + rig.pool.size_bytes();
    let data = [GuestRange { addr: end - 512, len_bytes: 1024 }];
    let refused = rig.queue.push(&blk_driver::Request::new(Work::Read { sector: 0, data: &data }, 1));
    assert_eq!(refused, Err(PushError::NotRegistered { addr: end - 512, len_bytes: 1024 }));
}

#[test]
fn headers_and_rings_are_not_memory_for_requests() {
    let mut rig = rig(8, FULL);
    let data = [GuestRange { addr: rig.device.end.layout.descriptors.0, len_bytes: 512 }];
    let refused = rig.queue.push(&blk_driver::Request::new(Work::Read { sector: 0, data: &data }, 1));
    assert_eq!(refused, Err(PushError::NotRegistered { addr: data[0].addr, len_bytes: 512 }));
}

#[test]
fn bytes_that_are_no_whole_sectors_are_refused_with_value_and_limit() {
    let mut rig = rig(8, FULL);
    let data = [rig.data(512), rig.data(100)];
    let refused = rig.queue.push(&blk_driver::Request::new(Work::Read { sector: 0, data: &data }, 1));
    let text =
        "the request has 612 bytes of data; the length must be a multiple of 512, from 512 to 4294966784";
    assert_eq!(refused.unwrap_err().to_string(), text);
    let nothing = rig.queue.push(&blk_driver::Request::new(Work::Read { sector: 0, data: &[] }, 1));
    assert!(matches!(nothing, Err(PushError::DataLength { len_bytes: 0, .. })));
}

#[test]
fn empty_buffer_and_short_id_and_too_many_segments_are_refused() {
    let mut rig = rig(8, FULL);
    let empty = [rig.data(0)];
    let mut push = |work| rig.queue.push(&blk_driver::Request::new(work, 1)).unwrap_err();
    assert_eq!(push(Work::Read { sector: 0, data: &empty }), PushError::EmptyBuffer { addr: empty[0].addr });
    let id = GuestRange { len_bytes: 19, ..empty[0] };
    assert_eq!(push(Work::GetId { data: id }), PushError::IdLength { len_bytes: 19, min_bytes: 20 });
    let segments = [Segment::default(); 17];
    let too_many = PushError::SegmentCount { what: "discard", count: 17, max: 16 };
    assert_eq!(push(Work::Discard { segments: &segments }), too_many);
    let none = PushError::SegmentCount { what: "write zeroes", count: 0, max: 16 };
    assert_eq!(push(Work::WriteZeroes { segments: &[] }), none);
}

#[test]
fn more_buffers_than_the_device_takes_are_refused() {
    let mut rig = rig(1024, FULL);
    let data = vec![rig.data(512); 129];
    let refused = rig.queue.push(&blk_driver::Request::new(Work::Read { sector: 0, data: &data }, 1));
    assert_eq!(refused, Err(PushError::TooManyBuffers { buffers: 129, max: 128 }));
    rig.push(Work::Read { sector: 0, data: &data[..128] }, 2);
}

#[test]
fn requests_beyond_the_ring_are_refused_until_one_completes() {
    let mut rig = rig(4, FULL);
    (0..4).for_each(|token| rig.submit_read(0, token));
    let data = [rig.data(512)];
    let request = blk_driver::Request::new(Work::Read { sector: 0, data: &data }, 9);
    assert_eq!(rig.queue.room(1), 0);
    assert_eq!(rig.queue.push(&request), Err(PushError::Full { in_flight: 4 }));
    let first = rig.device.pop().unwrap();
    rig.device.answer(&first, 0);
    assert_eq!(rig.results(), [(0, Ok(()))]);
    assert_eq!(rig.queue.room(1), 1);
    assert_eq!(rig.queue.push(&request), Ok(()));
}

#[test]
fn ring_without_indirect_tables_is_full_when_its_descriptors_are() {
    let mut rig = rig(8, PLAIN);
    assert_eq!((rig.queue.room(1), rig.queue.room(2), rig.queue.room(7)), (2, 2, 0));
    (0..2).for_each(|token| rig.submit_read(0, token));
    let data = [rig.data(512)];
    let request = blk_driver::Request::new(Work::Read { sector: 0, data: &data }, 9);
    assert_eq!(rig.queue.push(&request), Err(PushError::Full { in_flight: 2 }));
}

#[test]
fn kick_is_asked_for_once_per_batch_and_rings_the_bell() {
    let mut rig = rig(8, FULL);
    let data = [rig.data(512)];
    rig.push(Work::Read { sector: 0, data: &data }, 1);
    rig.push(Work::Read { sector: 0, data: &data }, 2);
    rig.queue.prepare_kick().unwrap().notify();
    assert!(rig.queue.prepare_kick().is_none());
    let mut count = [0; 8];
    rustix::io::read(&*rig.bell, &mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
    let stats = rig.queue.stats();
    assert_eq!((stats.pushed, stats.kicks, stats.publications, stats.completed), (2, 1, 1, 0));
}
