//! What an NBD server may send: the negotiation, and the stream of replies.
//!
//! `first byte: which, and the size of the pieces; then the server's bytes → an error, or data inside the requests`

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nbd_client::{Command, HostDialer, NbdUri, Replies, Request, Requests, Step, negotiate};

/// The lengths of the reads in flight. A write and a flush follow.
const READS: [u32; 2] = [100, 4096];
const TIMEOUT: Duration = Duration::from_secs(10);

pub fn run(bytes: &[u8]) {
    let Some((&choice, stream)) = bytes.split_first() else { return };
    if choice & 1 == 0 { negotiation(stream) } else { replies(choice, stream) }
}

fn negotiation(stream: &[u8]) {
    let (client, mut server) = UnixStream::pair().unwrap();
    server.write_all(stream).unwrap();
    server.shutdown(Shutdown::Write).unwrap();
    let uri: NbdUri = "nbd://server/disk".parse().unwrap();
    match negotiate(client.into(), &uri, &HostDialer, TIMEOUT) {
        Ok((_, info)) => {
            assert!(info.min_block_bytes.is_power_of_two() && info.min_block_bytes <= 4096, "{info:?}");
            assert!(info.max_block_bytes >= 4096 && i64::try_from(info.size_bytes).is_ok(), "{info:?}");
        }
        Err(error) => assert!(error.to_string().len() < 1000, "{error}"),
    }
}

fn replies(choice: u8, stream: &[u8]) {
    let mut requests = Requests::new(4);
    let read = |len_bytes| Request { command: Command::Read, offset_bytes: 4096, len_bytes };
    let write = Request { command: Command::Write { fua: true }, offset_bytes: 0, len_bytes: 512 };
    let flush = Request { command: Command::Flush, offset_bytes: 0, len_bytes: 0 };
    for request in READS.map(read).into_iter().chain([write, flush]) {
        let slot = requests.insert(request).unwrap();
        requests.mark_sent(slot);
    }
    let mut parser = Replies::new(choice & 2 == 0);
    // Whether each byte of a read has arrived. Nothing of the other requests may arrive.
    let mut covered = [vec![false; READS[0] as usize], vec![false; READS[1] as usize], vec![], vec![]];
    for mut rest in stream.chunks(usize::from(choice >> 2) + 1) {
        loop {
            let Ok((taken, step)) = parser.step(&mut requests, rest) else { return };
            rest = &rest[taken..];
            match step {
                Step::NeedsBytes => break,
                Step::Payload { .. } if rest.is_empty() => break,
                Step::Payload { slot, at_bytes, len_bytes } => {
                    inside(&requests, slot, at_bytes, len_bytes);
                    let part = len_bytes.min(u32::try_from(rest.len()).unwrap());
                    arrived(&mut covered[slot as usize], at_bytes, part);
                    parser.took(part);
                    rest = &rest[part as usize..];
                }
                Step::Zeroes { slot, at_bytes, len_bytes } => {
                    inside(&requests, slot, at_bytes, len_bytes);
                    arrived(&mut covered[slot as usize], at_bytes, len_bytes);
                }
                Step::Done { slot, error } => {
                    let request = *requests.get(slot).expect("a request in flight");
                    let is_read = request.command == Command::Read;
                    assert!(!is_read || error != 0 || covered[slot as usize].iter().all(|byte| *byte));
                    requests.remove(slot);
                }
                Step::ShuttingDown => return,
            }
        }
    }
}

/// No byte may arrive twice.
fn arrived(covered: &mut [bool], at_bytes: u32, len_bytes: u32) {
    let part = &mut covered[at_bytes as usize..][..len_bytes as usize];
    assert!(!part.contains(&true), "{len_bytes} bytes at {at_bytes} arrive again");
    part.fill(true);
}

fn inside(requests: &Requests, slot: u32, at_bytes: u32, len_bytes: u32) {
    let request = requests.get(slot).expect("a request in flight");
    assert!(request.command == Command::Read && at_bytes + len_bytes <= request.len_bytes, "{request:?}");
}

fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).unwrap();
    let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
    [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &length.to_be_bytes(), data].concat()
}

fn chunk(slot: u64, flags: u16, kind: u16, data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).unwrap();
    let magic = 0x668e_33ef_u32.to_be_bytes();
    [&magic, &flags.to_be_bytes()[..], &kind.to_be_bytes(), &slot.to_be_bytes(), &length.to_be_bytes(), data]
        .concat()
}

fn simple(slot: u64, error: u32, data: &[u8]) -> Vec<u8> {
    [&0x6744_6698_u32.to_be_bytes(), &error.to_be_bytes()[..], &slot.to_be_bytes(), data].concat()
}

pub fn seeds() -> Vec<(String, Vec<u8>)> {
    let greeting = b"NBDMAGICIHAVEOPT\0\x03".to_vec();
    let export = [&[0, 0][..], &(1_u64 << 20).to_be_bytes(), &0x16d_u16.to_be_bytes()].concat();
    let blocks = [&[0, 3][..], &[1_u32, 4096, 1 << 25].map(u32::to_be_bytes).concat()].concat();
    let structured = option_reply(8, 1, &[]);
    let go = [option_reply(7, 3, &export), option_reply(7, 3, &blocks), option_reply(7, 1, &[])].concat();
    let refused = option_reply(7, 1 << 31 | 6, b"no such export");
    let old = [option_reply(8, 1 << 31 | 1, &[]), option_reply(7, 1 << 31 | 1, &[]), export[2..].to_vec()];
    let at = |offset: u64| (4096 + offset).to_be_bytes();
    let data = |slot, flags, offset, bytes: &[u8]| chunk(slot, flags, 1, &[&at(offset)[..], bytes].concat());
    let hole = |slot, flags, offset, len: u32| {
        chunk(slot, flags, 2, &[&at(offset)[..], &len.to_be_bytes()].concat())
    };
    let error = chunk(0, 1, 0x8001, &[&5_u32.to_be_bytes()[..], &[0, 3], b"bad"].concat());
    let seed = |name: &str, choice: u8, parts: &[Vec<u8>]| {
        (name.to_owned(), [vec![choice], parts.concat()].concat())
    };
    vec![
        seed("go", 0, &[greeting.clone(), structured.clone(), go]),
        seed("refused", 0, &[greeting.clone(), structured, refused]),
        seed("old", 0, &[greeting, old.concat()]),
        seed("chunks", 0x41, &[data(0, 0, 60, &[7; 40]), hole(0, 0, 10, 50), data(0, 1, 0, &[5; 10])]),
        seed("holes", 0xf9, &[hole(1, 1, 0, 4096), chunk(2, 1, 0, &[]), chunk(3, 1, 0, &[])]),
        seed("errors", 0x21, &[error, simple(2, 28, &[]), simple(3, 108, &[])]),
        seed("simple", 0x33, &[simple(3, 0, &[]), simple(0, 0, &[6; 100]), simple(2, 0, &[])]),
    ]
}
