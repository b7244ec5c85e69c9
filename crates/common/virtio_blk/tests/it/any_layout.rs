//! Properties: how a driver splits a request into descriptors does not matter, and no chain makes us panic.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::sync::Arc;

use guest_mem::{GuestAddress, GuestMemory, GuestRange, MemoryView, Region};
use proptest::prelude::*;
use virtio_blk::{
    Data, HEADER_BYTES, MAX_SEGMENTS, NoStatusByte, Parsed, Request, RequestHeader, Segment, Status,
    encode_segments, kind,
};
use virtqueue::Chain;

const END: u64 = 1 << 20;
/// Where the bytes of the unsplit request begin: the readable ones at `READABLE`, the writable ones at
/// `WRITABLE`.
const READABLE: u64 = 0x1000;
const WRITABLE: u64 = 0x8_0000;

fn view() -> MemoryView {
    let region = |addr, size| Arc::new(Region::from_memfd(GuestAddress(addr), size).unwrap());
    // Adjacent regions, with the border inside the readable part.
    let regions = vec![region(0, READABLE + 64), region(READABLE + 64, END - READABLE - 64)];
    MemoryView::new(Arc::new(GuestMemory::new(regions).unwrap()))
}

/// Parses with a separate segment buffer for each request.
fn parse<'c>(chain: &'c Chain, view: &MemoryView) -> Result<Parsed<'c>, NoStatusByte> {
    virtio_blk::parse(chain, view, Box::leak(Box::default()))
}

/// Cuts `len_bytes` from `addr` on into pieces of the lengths in `cuts`; the rest is one more piece.
fn cut(addr: u64, len_bytes: u32, cuts: &[u32]) -> Vec<GuestRange> {
    let (mut at, mut left, mut pieces) = (addr, len_bytes, Vec::new());
    for &wanted_bytes in cuts {
        let piece_bytes = wanted_bytes.min(left);
        pieces.push(GuestRange { addr: at, len_bytes: piece_bytes });
        at += u64::from(piece_bytes);
        left -= piece_bytes;
    }
    pieces.push(GuestRange { addr: at, len_bytes: left });
    pieces
}

fn chain(readable: &[GuestRange], writable: &[GuestRange]) -> Chain {
    let mut chain = Chain::with_capacity(64);
    chain.set(readable, writable);
    chain
}

/// The data as one list of byte addresses, independent of the pieces.
fn bytes_of(data: &Data<'_>) -> Vec<u64> {
    assert_eq!(data.count(), data.ranges().count());
    assert!(data.ranges().all(|range| range.len_bytes > 0));
    let bytes: Vec<u64> =
        data.ranges().flat_map(|r| (0..u64::from(r.len_bytes)).map(move |i| r.addr + i)).collect();
    assert_eq!(bytes.len() as u64, data.len_bytes());
    bytes
}

/// Everything a request says, in comparable form.
fn meaning(request: &Request<'_>) -> (&'static str, u64, Vec<u64>, Vec<Segment>) {
    match request {
        Request::Read { sector, data } => ("read", *sector, bytes_of(data), vec![]),
        Request::Write { sector, data } => ("write", *sector, bytes_of(data), vec![]),
        Request::Flush => ("flush", 0, vec![], vec![]),
        Request::GetId { data } => ("id", 0, bytes_of(data), vec![]),
        Request::Discard { segments } => ("discard", 0, vec![], segments.as_slice().to_vec()),
        Request::WriteZeroes { segments } => ("zeroes", 0, vec![], segments.as_slice().to_vec()),
        Request::Unsupported { kind } => ("unsupported", u64::from(*kind), vec![], vec![]),
    }
}

fn cuts() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(prop_oneof![0_u32..4, 0_u32..40, 0_u32..2000], 0..12)
}

fn kinds() -> impl Strategy<Value = u32> {
    prop_oneof![
        Just(kind::IN),
        Just(kind::OUT),
        Just(kind::FLUSH),
        Just(kind::GET_ID),
        Just(kind::DISCARD),
        Just(kind::WRITE_ZEROES),
        any::<u32>()
    ]
}

fn segments() -> impl Strategy<Value = Vec<Segment>> {
    let segment = (any::<u64>(), any::<u32>(), any::<bool>()).prop_map(|(sector, sectors, unmap)| Segment {
        sector,
        sectors,
        unmap,
    });
    prop::collection::vec(segment, 0..=MAX_SEGMENTS + 2)
}

/// Ranges inside memory, across its end, and far away.
fn any_ranges() -> impl Strategy<Value = Vec<GuestRange>> {
    let addr = prop_oneof![0..END, END - 100..END + 100, any::<u64>(), u64::MAX - 40..=u64::MAX];
    let len_bytes = prop_oneof![0_u32..64, 0_u32..8192, any::<u32>()];
    let range = (addr, len_bytes).prop_map(|(addr, len_bytes)| GuestRange { addr, len_bytes });
    prop::collection::vec(range, 0..8)
}

proptest! {
    #[test]
    fn request_cut_anywhere_means_the_same_as_the_uncut_one(
        kind in kinds(),
        sector in any::<u64>(),
        segments in segments(),
        data_sectors in 0_u32..20,
        odd_bytes in prop_oneof![4 => Just(0_u32), 1 => 0_u32..600],
        readable_cuts in cuts(),
        writable_cuts in cuts(),
    ) {
        let view = view();
        let header = RequestHeader { kind, sector }.to_bytes();
        let content = encode_segments(&segments);
        let is_segments = kind == kind::DISCARD || kind == kind::WRITE_ZEROES;
        let sectors_bytes = data_sectors * 512 + odd_bytes;
        let out_bytes = if is_segments { content.len() as u32 + odd_bytes } else { sectors_bytes };
        view.store(READABLE, &header).unwrap();
        view.store(READABLE + HEADER_BYTES as u64, &content).unwrap();
        let readable_bytes = HEADER_BYTES as u32 + out_bytes;
        let uncut = chain(&cut(READABLE, readable_bytes, &[]), &cut(WRITABLE, sectors_bytes + 1, &[]));
        let pieces = chain(
            &cut(READABLE, readable_bytes, &readable_cuts),
            &cut(WRITABLE, sectors_bytes + 1, &writable_cuts),
        );
        let (uncut, pieces) = (parse(&uncut, &view).unwrap(), parse(&pieces, &view).unwrap());
        prop_assert_eq!(pieces.reply.status_addr(), WRITABLE + u64::from(sectors_bytes));
        prop_assert_eq!(pieces.reply, uncut.reply);
        prop_assert_eq!(
            pieces.request.as_ref().map(meaning).map_err(|fault| *fault),
            uncut.request.as_ref().map(meaning).map_err(|fault| *fault)
        );
    }

    #[test]
    fn any_chain_is_parsed_or_refused_and_the_used_length_stays_in_the_writable_part(
        readable in any_ranges(),
        writable in any_ranges(),
        noise in prop::collection::vec(any::<u8>(), 256),
    ) {
        let view = view();
        for range in &readable {
            // Where the header is mapped, store something there, often a valid kind.
            let kind = u32::from(noise[0] % 16);
            let _ = view.store(range.addr, &noise);
            let _ = view.store(range.addr, &kind.to_le_bytes());
        }
        let chain = chain(&readable, &writable);
        let Ok(parsed) = parse(&chain, &view) else { return Ok(()) };
        let data_bytes = match &parsed.request {
            Ok(Request::Read { data, .. } | Request::GetId { data }) => data.len_bytes(),
            _ => 0,
        };
        let used_bytes = parsed.reply.write(&view, Status::IoErr, data_bytes);
        prop_assert!(used_bytes >= 1);
        prop_assert!(u64::from(used_bytes) <= chain.writable_bytes());
        let mut status = [0];
        view.read(parsed.reply.status_addr(), &mut status).unwrap();
        prop_assert_eq!(status[0], 1);
    }
}
