//! Replies in pieces of any size, and replies of a server that breaks the protocol.

use proptest::prelude::*;

use super::*;
use crate::transmission::requests::Request;

const OFFSET: u64 = 1 << 20;

/// A read of `len_bytes` that was sent, and its handle.
fn read(len_bytes: u32) -> (Requests, u64) {
    let mut requests = Requests::new(4);
    let slot = requests.insert(Request { command: Command::Read, offset_bytes: OFFSET, len_bytes }).unwrap();
    requests.mark_sent(slot);
    let handle = u64_at(&requests.header(slot), 8);
    (requests, handle)
}

fn chunk(handle: u64, flags: u16, kind: u16, data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).unwrap();
    let magic = STRUCTURED_REPLY_MAGIC.to_be_bytes();
    [
        &magic,
        &flags.to_be_bytes()[..],
        &kind.to_be_bytes(),
        &handle.to_be_bytes(),
        &length.to_be_bytes(),
        data,
    ]
    .concat()
}

fn data(handle: u64, flags: u16, at: u64, bytes: &[u8]) -> Vec<u8> {
    chunk(handle, flags, REPLY_OFFSET_DATA, &[&(OFFSET + at).to_be_bytes()[..], bytes].concat())
}

fn hole(handle: u64, flags: u16, at: u64, len: u32) -> Vec<u8> {
    chunk(handle, flags, REPLY_OFFSET_HOLE, &[&(OFFSET + at).to_be_bytes()[..], &len.to_be_bytes()].concat())
}

/// Feeds the stream in pieces of `piece` bytes. Returns the read's buffer and its result.
fn feed(
    requests: &mut Requests,
    stream: &[u8],
    piece: usize,
    buffer: &mut [u8],
) -> Result<Option<u32>, ReplyError> {
    let mut replies = Replies::new(true);
    let mut ended = None;
    for mut rest in stream.chunks(piece) {
        loop {
            let (taken, step) = replies.step(requests, rest)?;
            rest = &rest[taken..];
            match step {
                Step::NeedsBytes => break,
                Step::Payload { at_bytes, len_bytes, .. } => {
                    if rest.is_empty() {
                        break;
                    }
                    let part = rest.len().min(len_bytes as usize);
                    buffer[at_bytes as usize..][..part].copy_from_slice(&rest[..part]);
                    replies.took(u32::try_from(part).unwrap());
                    rest = &rest[part..];
                }
                Step::Zeroes { at_bytes, len_bytes, .. } => {
                    buffer[at_bytes as usize..][..len_bytes as usize].fill(0);
                }
                Step::Done { slot, error } => {
                    requests.remove(slot);
                    ended = Some(error);
                }
                Step::ShuttingDown => return Ok(Some(ESHUTDOWN)),
            }
        }
    }
    Ok(ended)
}

#[test]
fn read_in_chunks_of_data_and_holes_is_put_together_whatever_the_pieces() {
    for piece in 1..200 {
        let (mut requests, handle) = read(100);
        let stream =
            [data(handle, 0, 60, &[7; 40]), hole(handle, 0, 10, 50), data(handle, 1, 0, &[5; 10])].concat();
        let mut buffer = [0xee; 100];
        assert_eq!(feed(&mut requests, &stream, piece, &mut buffer), Ok(Some(0)));
        let expected = [vec![5; 10], vec![0; 50], vec![7; 40]].concat();
        assert_eq!(buffer[..], expected);
    }
}

#[test]
fn data_that_arrives_twice_is_an_error_although_its_total_fits_the_read() {
    let repeats: [fn(u64) -> Vec<u8>; 4] = [
        |handle| [data(handle, 0, 0, &[5; 50]), data(handle, 1, 0, &[6; 50])].concat(),
        |handle| [data(handle, 0, 50, &[5; 50]), hole(handle, 1, 49, 50)].concat(),
        |handle| {
            [data(handle, 0, 10, &[5; 20]), hole(handle, 0, 60, 20), data(handle, 1, 5, &[6; 60])].concat()
        },
        |handle| [hole(handle, 0, 0, 30), data(handle, 1, 29, &[6; 1])].concat(),
    ];
    for (number, repeat) in repeats.iter().enumerate() {
        let (mut requests, handle) = read(100);
        let result = feed(&mut requests, &repeat(handle), 7, &mut [0; 100]);
        assert!(matches!(result, Err(ReplyError::Range { .. })), "case {number}: {result:?}");
    }
}

#[test]
fn read_that_fails_after_some_data_reports_the_error() {
    let (mut requests, handle) = read(100);
    let error = chunk(handle, 0, 0x8001, &[&5_u32.to_be_bytes()[..], &[0, 2], b"no"].concat());
    let stream = [data(handle, 0, 0, &[7; 40]), error, chunk(handle, 1, REPLY_NONE, &[])].concat();
    assert_eq!(feed(&mut requests, &stream, 3, &mut [0; 100]), Ok(Some(5)));
}

#[test]
fn reply_to_a_request_that_was_not_sent_or_has_ended_is_an_error() {
    let (mut requests, handle) = read(4);
    let reply = data(handle, 1, 0, &[1; 4]);
    let twice = [reply.clone(), reply].concat();
    assert_eq!(feed(&mut requests, &twice, 7, &mut [0; 4]), Err(ReplyError::Handle { handle }));
    let unsent = requests.insert(Request { command: Command::Flush, offset_bytes: 0, len_bytes: 0 }).unwrap();
    let handle = u64_at(&requests.header(unsent), 8);
    let reply = chunk(handle, 1, REPLY_NONE, &[]);
    assert_eq!(feed(&mut requests, &reply, 7, &mut []), Err(ReplyError::Handle { handle }));
}

proptest! {
    /// Whatever the server sends, no payload lies outside the request, and a read that ends well is covered.
    #[test]
    fn any_bytes_are_refused_or_stay_inside_the_request(
        parts in prop::collection::vec((0..7_u8, any::<u16>(), 0..120_u64, 0..120_u32), 0..12),
        noise in prop::collection::vec(any::<u8>(), 0..40),
        piece in 1..64_usize,
    ) {
        let (mut requests, handle) = read(100);
        let mut stream = Vec::new();
        for (what, flags, at, len) in parts {
            stream.extend(match what {
                0 => data(handle, flags & 1, at, &vec![9; len as usize]),
                1 => hole(handle, flags & 1, at, len),
                2 => chunk(handle, flags & 1, REPLY_NONE, &[]),
                3 => chunk(handle, flags & 1, 0x8001, &[0, 0, 0, 5, 0, 0]),
                4 => chunk(handle, flags, flags, &vec![0; len as usize]),
                5 => chunk(u64::from(len), 1, REPLY_NONE, &[]),
                _ => noise.clone(),
            });
        }
        // `feed` panics if a payload does not fit the buffer.
        let _ = feed(&mut requests, &stream, piece, &mut [0; 100]);
    }
}
