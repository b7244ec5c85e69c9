//! Requests as drivers lay them out, well-formed and malformed: which ones are understood, which are refused,
//! and how.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::sync::Arc;

use guest_mem::{AccessError, GuestAddress, GuestMemory, GuestRange, MemoryView, Region};
use virtio_blk::{
    DeviceId, NoStatusByte, Parsed, ReplySlot, Request, RequestFault, RequestHeader, Segment, Status,
    encode_segments, kind,
};
use virtqueue::Chain;

/// 64 KiB of memory at 0, then nothing.
const END: u64 = 0x1_0000;
const HEADER: u64 = 0x100;
const DATA: u64 = 0x1000;
const STATUS: u64 = 0x200;
/// Value of a status byte before the device stores it.
const UNTOUCHED: u8 = 0xee;

fn view() -> MemoryView {
    let region = Arc::new(Region::from_memfd(GuestAddress(0), END).unwrap());
    let view = MemoryView::new(Arc::new(GuestMemory::new(vec![region]).unwrap()));
    view.store(STATUS, &[UNTOUCHED]).unwrap();
    view
}

/// Parses with a separate segment buffer for each request.
fn parse<'c>(chain: &'c Chain, view: &MemoryView) -> Result<Parsed<'c>, NoStatusByte> {
    virtio_blk::parse(chain, view, Box::leak(Box::default()))
}

fn range(addr: u64, len_bytes: u32) -> GuestRange {
    GuestRange { addr, len_bytes }
}

fn chain(readable: &[GuestRange], writable: &[GuestRange]) -> Chain {
    let mut chain = Chain::with_capacity(16);
    chain.set(readable, writable);
    chain
}

fn put_header(view: &MemoryView, kind: u32, sector: u64) {
    view.store(HEADER, &RequestHeader { kind, sector }.to_bytes()).unwrap();
}

fn byte_at(view: &MemoryView, addr: u64) -> u8 {
    let mut byte = [0];
    view.read(addr, &mut byte).unwrap();
    byte[0]
}

/// Header, `data` as readable buffers, a status byte.
fn with_data(view: &MemoryView, kind: u32, data: &[u8]) -> Chain {
    put_header(view, kind, 0);
    view.store(DATA, data).unwrap();
    chain(&[range(HEADER, 16), range(DATA, data.len() as u32)], &[range(STATUS, 1)])
}

fn fault(view: &MemoryView, chain: &Chain) -> RequestFault {
    parse(chain, view).unwrap().request.unwrap_err()
}

#[test]
fn read_gives_its_sector_and_the_writable_buffers_without_the_status() {
    let view = view();
    put_header(&view, kind::IN, 7);
    let chain = chain(&[range(HEADER, 16)], &[range(DATA, 4096), range(STATUS, 1)]);
    let Parsed { reply, request: Ok(Request::Read { sector: 7, data }) } = parse(&chain, &view).unwrap()
    else {
        panic!("not a read")
    };
    assert_eq!(data.ranges().collect::<Vec<_>>(), [range(DATA, 4096)]);
    assert_eq!((data.len_bytes(), data.count(), reply.status_addr()), (4096, 1, STATUS));
}

#[test]
fn write_gives_the_readable_buffers_without_the_header() {
    let view = view();
    put_header(&view, kind::OUT, u64::MAX);
    let chain = chain(&[range(HEADER, 16), range(DATA, 512), range(0x3000, 1024)], &[range(STATUS, 1)]);
    let Ok(Request::Write { sector: u64::MAX, data }) = parse(&chain, &view).unwrap().request else {
        panic!("not a write")
    };
    assert_eq!(data.ranges().collect::<Vec<_>>(), [range(DATA, 512), range(0x3000, 1024)]);
}

#[test]
fn header_and_data_in_one_buffer_and_data_and_status_in_one_are_told_apart() {
    let view = view();
    put_header(&view, kind::OUT, 1);
    let write = chain(&[range(HEADER, 16 + 512)], &[range(STATUS, 1)]);
    let Ok(Request::Write { data, .. }) = parse(&write, &view).unwrap().request else { panic!("no write") };
    assert_eq!(data.ranges().collect::<Vec<_>>(), [range(HEADER + 16, 512)]);
    put_header(&view, kind::IN, 1);
    let read = chain(&[range(HEADER, 16)], &[range(DATA, 513)]);
    let Parsed { reply, request: Ok(Request::Read { data, .. }) } = parse(&read, &view).unwrap() else {
        panic!("no read")
    };
    assert_eq!(data.ranges().collect::<Vec<_>>(), [range(DATA, 512)]);
    assert_eq!(reply.status_addr(), DATA + 512);
}

#[test]
fn read_and_write_of_nothing_are_legal() {
    let view = view();
    put_header(&view, kind::IN, 0);
    let chain = chain(&[range(HEADER, 16)], &[range(STATUS, 1)]);
    let Ok(Request::Read { data, .. }) = parse(&chain, &view).unwrap().request else { panic!("no read") };
    assert_eq!((data.len_bytes(), data.count(), data.is_empty()), (0, 0, true));
    assert_eq!(data.ranges().next(), None);
}

#[test]
fn flush_is_a_flush_whatever_else_the_chain_holds() {
    let view = view();
    let chain = with_data(&view, kind::FLUSH, &[1, 2, 3]);
    assert!(matches!(parse(&chain, &view).unwrap().request, Ok(Request::Flush)));
}

#[test]
fn serial_is_stored_as_far_as_there_is_room_and_padded_with_nul() {
    let view = view();
    put_header(&view, kind::GET_ID, 0);
    let large = chain(&[range(HEADER, 16)], &[range(DATA, 30), range(STATUS, 1)]);
    let small = chain(&[range(HEADER, 16)], &[range(0x3000, 3), range(STATUS, 1)]);
    let store = |chain: &Chain| {
        let Ok(Request::GetId { data }) = parse(chain, &view).unwrap().request else { panic!("no GET_ID") };
        data.store(&view, DeviceId::new("disk").as_bytes()).unwrap()
    };
    assert_eq!((store(&large), store(&small)), (20, 3));
    let mut out = [9; 5];
    view.read(DATA, &mut out).unwrap();
    assert_eq!(&out, b"disk\0");
    view.read(0x3000, &mut out).unwrap();
    assert_eq!(&out, b"dis\0\0");
}

#[test]
fn serial_longer_than_twenty_bytes_is_cut() {
    assert_eq!(DeviceId::new("0123456789abcdefghijklmn").as_bytes(), b"0123456789abcdefghij");
}

#[test]
fn discard_gives_all_its_segments() {
    let view = view();
    let segments = [
        Segment { sector: 8, sectors: 16, unmap: false },
        Segment { sector: u64::MAX, sectors: 0, unmap: false },
    ];
    let chain = with_data(&view, kind::DISCARD, &encode_segments(&segments));
    let Ok(Request::Discard { segments: read }) = parse(&chain, &view).unwrap().request else {
        panic!("no discard")
    };
    assert_eq!(read.as_slice(), segments);
}

#[test]
fn write_zeroes_keeps_the_unmap_flag_of_each_segment() {
    let view = view();
    let segments =
        [Segment { sector: 8, sectors: 16, unmap: true }, Segment { sector: 99, sectors: 1, unmap: false }];
    let chain = with_data(&view, kind::WRITE_ZEROES, &encode_segments(&segments));
    let Ok(Request::WriteZeroes { segments: read }) = parse(&chain, &view).unwrap().request else {
        panic!("no write zeroes")
    };
    assert_eq!(read.as_slice(), segments);
}

#[test]
fn discard_with_the_unmap_flag_is_unsupported() {
    let view = view();
    let segments = [Segment { sector: 8, sectors: 16, unmap: true }];
    let chain = with_data(&view, kind::DISCARD, &encode_segments(&segments));
    let request = parse(&chain, &view).unwrap().request;
    assert!(matches!(request, Ok(Request::Unsupported { kind: kind::DISCARD })), "{request:?}");
}

#[test]
fn unknown_segment_flags_are_unsupported_in_either_kind() {
    let view = view();
    let mut bytes = encode_segments(&[Segment { sector: 8, sectors: 16, unmap: false }; 2]);
    bytes[12] = 2; // the first segment's flags
    let discard = with_data(&view, kind::DISCARD, &bytes);
    assert!(matches!(parse(&discard, &view).unwrap().request, Ok(Request::Unsupported { .. })));
    let zeroes = with_data(&view, kind::WRITE_ZEROES, &bytes);
    let request = parse(&zeroes, &view).unwrap().request;
    assert!(matches!(request, Ok(Request::Unsupported { kind: kind::WRITE_ZEROES })), "{request:?}");
}

#[test]
fn unknown_type_is_unsupported() {
    let view = view();
    let chain = with_data(&view, 0x8000_0001, &[]);
    let request = parse(&chain, &view).unwrap().request;
    assert!(matches!(request, Ok(Request::Unsupported { kind: 0x8000_0001 })), "{request:?}");
}

#[test]
fn data_that_is_no_whole_number_of_sectors_is_refused() {
    let view = view();
    let write = with_data(&view, kind::OUT, &[0; 513]);
    assert_eq!(fault(&view, &write), RequestFault::DataLength { len_bytes: 513, sector_bytes: 512 });
    put_header(&view, kind::IN, 0);
    let read = chain(&[range(HEADER, 16)], &[range(DATA, 511), range(STATUS, 1)]);
    assert_eq!(fault(&view, &read), RequestFault::DataLength { len_bytes: 511, sector_bytes: 512 });
}

#[test]
fn segments_of_broken_length_none_or_too_many_are_refused() {
    let view = view();
    let broken = with_data(&view, kind::DISCARD, &[0; 17]);
    assert_eq!(fault(&view, &broken), RequestFault::SegmentsLength { len_bytes: 17, segment_bytes: 16 });
    let none = with_data(&view, kind::WRITE_ZEROES, &[]);
    assert_eq!(fault(&view, &none), RequestFault::NoSegments);
    let many = with_data(&view, kind::DISCARD, &[0; 17 * 16]);
    assert_eq!(fault(&view, &many), RequestFault::TooManySegments { segments: 17, max: 16 });
}

#[test]
fn request_of_65_535_segments_is_refused_before_they_are_read() {
    let view = view();
    put_header(&view, kind::DISCARD, 0);
    let chain = chain(&[range(HEADER, 16), range(END, 65_535 * 16)], &[range(STATUS, 1)]);
    assert_eq!(fault(&view, &chain), RequestFault::TooManySegments { segments: 65_535, max: 16 });
}

#[test]
fn sixteen_segments_are_accepted() {
    let view = view();
    let segments = [Segment { sector: 1, sectors: 2, unmap: true }; 16];
    let chain = with_data(&view, kind::WRITE_ZEROES, &encode_segments(&segments));
    let Ok(Request::WriteZeroes { segments: read }) = parse(&chain, &view).unwrap().request else {
        panic!("no write zeroes")
    };
    assert_eq!(read.as_slice(), segments);
}

#[test]
fn header_cut_short_is_refused_and_the_status_is_still_reachable() {
    let view = view();
    let chain = chain(&[range(HEADER, 15)], &[range(STATUS, 1)]);
    let parsed = parse(&chain, &view).unwrap();
    let fault = parsed.request.unwrap_err();
    let used_bytes = parsed.reply.write(&view, fault.status(), 0);
    assert_eq!(fault, RequestFault::HeaderTooShort { readable_bytes: 15, needed_bytes: 16 });
    assert_eq!((byte_at(&view, STATUS), used_bytes), (1, 1));
}

#[test]
fn header_in_a_gap_is_refused() {
    let view = view();
    let chain = chain(&[range(END - 8, 16)], &[range(STATUS, 1)]);
    let unmapped = AccessError::Unmapped { addr: END - 8, len_bytes: 16 };
    assert_eq!(fault(&view, &chain), RequestFault::Header(unmapped));
}

#[test]
fn segments_in_a_gap_are_refused() {
    let view = view();
    put_header(&view, kind::DISCARD, 0);
    let chain = chain(&[range(HEADER, 16), range(END, 16)], &[range(STATUS, 1)]);
    let unmapped = AccessError::Unmapped { addr: END, len_bytes: 16 };
    assert_eq!(fault(&view, &chain), RequestFault::Segments(unmapped));
}

#[test]
fn data_in_a_gap_is_not_yet_a_fault() {
    let view = view();
    put_header(&view, kind::IN, 0);
    let chain = chain(&[range(HEADER, 16)], &[range(u64::MAX, 512), range(STATUS, 1)]);
    let Ok(Request::Read { data, .. }) = parse(&chain, &view).unwrap().request else { panic!("no read") };
    assert_eq!(data.ranges().collect::<Vec<_>>(), [range(u64::MAX, 512)]);
}

#[test]
fn chain_without_a_writable_byte_cannot_be_answered() {
    let view = view();
    put_header(&view, kind::OUT, 0);
    let none = chain(&[range(HEADER, 16)], &[]);
    let zero_length = chain(&[range(HEADER, 16)], &[range(STATUS, 0)]);
    assert_eq!(parse(&none, &view).unwrap_err(), NoStatusByte::Missing);
    assert_eq!(parse(&zero_length, &view).unwrap_err(), NoStatusByte::Missing);
}

#[test]
fn zero_length_descriptor_after_the_status_does_not_hide_it() {
    let view = view();
    put_header(&view, kind::FLUSH, 0);
    let chain = chain(&[range(HEADER, 16)], &[range(STATUS, 1), range(END, 0)]);
    assert_eq!(parse(&chain, &view).unwrap().reply.status_addr(), STATUS);
}

#[test]
fn status_byte_in_a_gap_or_past_the_address_space_cannot_be_answered() {
    let view = view();
    put_header(&view, kind::FLUSH, 0);
    let unmapped = |addr| NoStatusByte::Unmapped(AccessError::Unmapped { addr, len_bytes: 1 });
    let gap = chain(&[range(HEADER, 16)], &[range(END - 1, 2)]);
    assert_eq!(parse(&gap, &view).unwrap_err(), unmapped(END));
    let wrapped = chain(&[range(HEADER, 16)], &[range(u64::MAX - 1, 0x1000)]);
    assert_eq!(parse(&wrapped, &view).unwrap_err(), unmapped(u64::MAX));
}

fn reply(view: &MemoryView) -> ReplySlot {
    put_header(view, kind::FLUSH, 0);
    parse(&chain(&[range(HEADER, 16)], &[range(STATUS, 1)]), view).unwrap().reply
}

#[test]
fn used_length_counts_the_stored_data_and_the_status() {
    let view = view();
    assert_eq!(reply(&view).write(&view, Status::Ok, 4096), 4097);
    assert_eq!(byte_at(&view, STATUS), 0);
    assert_eq!(reply(&view).write(&view, Status::Unsupp, 0), 1);
    assert_eq!(byte_at(&view, STATUS), 2);
}

#[test]
fn used_length_that_exceeds_its_field_is_cut() {
    let view = view();
    assert_eq!(reply(&view).write(&view, Status::Ok, 1 << 40), u32::MAX);
}

#[test]
fn used_length_is_zero_if_the_status_byte_has_gone() {
    let reply = reply(&view());
    let empty = MemoryView::new(Arc::new(GuestMemory::default()));
    assert_eq!(reply.write(&empty, Status::Ok, 4096), 0);
}

#[test]
fn status_bytes_are_read_back_and_unknown_ones_are_none() {
    assert_eq!(
        [0, 1, 2, 3].map(Status::from_byte),
        [Some(Status::Ok), Some(Status::IoErr), Some(Status::Unsupp), None]
    );
}
