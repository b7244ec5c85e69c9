//! Faults of NBD servers: they end and come back, hang, refuse, and break the protocol.

use std::io::{ErrorKind, Read, Write};
use std::net::UdpSocket;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::time::Duration;

use disk_image::{ImageError, ImageOptions};
use io_engine::{Completion, Durability, OpError, OpKind};
use nbd_client::{Address, Dial, HostDialer};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use xtask::packages::find_program;
use xtask::skip::{Reason, skip};

use crate::bed::{Bed, IMAGE_BYTES, Storage, pattern, start};
use crate::beds::{NbdServer, engine, open, options};

const BLOCK: u64 = 4096;
/// Writes in flight at a time.
const TOGETHER: u64 = 32;
const SECTORS: u64 = 512;

/// The bed on a server that the case keeps, to stop and start it.
fn bed(options: &ImageOptions) -> Bed {
    start(engine(), open(options), Storage::None, None)
}

fn write(bed: &Bed, block: u64) -> OpKind {
    OpKind::Write { range: bed.range(block * BLOCK, BLOCK), durability: Durability::Cached }
}

fn ok(completions: &[Completion]) -> bool {
    completions.iter().all(|completion| completion.result == Ok(()))
}

#[test]
fn server_that_is_killed_and_comes_back_loses_nothing() {
    let Some(mut server) = NbdServer::file(IMAGE_BYTES, &[]) else { return };
    let mut bed = bed(&options(&server));
    let mut model = vec![0_u64; SECTORS as usize];
    for round in 1..=6 {
        for number in 0..TOGETHER {
            let block = (round * 37 + number * 11) % SECTORS;
            bed.store(number * BLOCK, &pattern(round * 1000 + block, BLOCK as usize));
            bed.push(number, write(&bed, block), &[(number * BLOCK, BLOCK)]);
            model[block as usize] = round * 1000 + block;
        }
        bed.engine.submit().unwrap();
        // The requests are on their way, in the server, or answered.
        server.kill();
        server.start().unwrap();
        let done = bed.finish(TOGETHER as usize);
        assert!(ok(&done), "round {round}: {done:?}");
    }
    for (block, seed) in (0..).zip(&model) {
        let expected = if *seed == 0 { vec![0; BLOCK as usize] } else { pattern(*seed, BLOCK as usize) };
        assert_eq!(bed.read(block * BLOCK, BLOCK), expected, "block {block}");
    }
}

#[test]
fn request_to_a_server_that_hangs_fails_after_the_timeout_and_later_ones_work() {
    let Some(server) = NbdServer::nbdkit(&["memory", "16M"]) else { return };
    let options = ImageOptions { nbd_timeout: Duration::from_millis(500), ..options(&server) };
    let mut bed = bed(&options);
    let pid = Pid::from_child(server.process());
    kill_process(pid, Signal::STOP).unwrap();
    // The signal takes effect later: until then the server may answer.
    waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
    let range = bed.range(0, BLOCK);
    let completion = bed.run(OpKind::Read { range }, &[(0, BLOCK)]);
    assert_eq!(completion.result, Err(OpError::Errno(Errno::TIMEDOUT)));
    kill_process(pid, Signal::CONT).unwrap();
    bed.write(0, &pattern(1, 4096));
    assert_eq!(bed.read(0, BLOCK), pattern(1, 4096));
}

#[test]
fn requests_to_a_server_that_is_away_are_cancelled_at_once() {
    let Some(mut server) = NbdServer::nbdkit(&["memory", "16M"]) else { return };
    let mut bed = bed(&options(&server));
    server.kill();
    for number in 0..TOGETHER {
        bed.push(number, write(&bed, number), &[(number * BLOCK, BLOCK)]);
    }
    bed.engine.submit().unwrap();
    bed.engine.cancel_all();
    let done = bed.finish(TOGETHER as usize);
    assert!(done.iter().all(|it| it.result == Err(OpError::Cancelled)), "{done:?}");
}

#[test]
fn slow_server_answers_in_any_order_and_each_reply_finds_its_request() {
    let Some(server) = NbdServer::nbdkit(&["--filter=delay", "memory", "16M", "rdelay=20ms"]) else { return };
    let mut bed = bed(&options(&server));
    for number in 0..TOGETHER {
        bed.write(number * BLOCK, &pattern(number, BLOCK as usize));
    }
    for number in 0..TOGETHER {
        let range = bed.range(number * BLOCK, BLOCK);
        bed.push(number, OpKind::Read { range }, &[(number * BLOCK, BLOCK)]);
    }
    assert!(ok(&bed.finish(TOGETHER as usize)));
    for number in 0..TOGETHER {
        assert_eq!(bed.load(number * BLOCK, BLOCK), pattern(number, BLOCK as usize));
    }
}

#[test]
fn errors_of_the_server_arrive_as_what_they_are() {
    let arguments = ["--filter=error", "memory", "16M", "error-pwrite=ENOSPC", "error-pwrite-rate=100%"];
    let Some(server) = NbdServer::nbdkit(&arguments) else { return };
    let mut bed = bed(&options(&server));
    let kind = write(&bed, 0);
    assert_eq!(bed.run(kind, &[(0, BLOCK)]).result, Err(OpError::Errno(Errno::NOSPC)));
    assert_eq!(bed.read(0, BLOCK), vec![0; BLOCK as usize]);
}

#[test]
fn small_requests_of_the_server_are_respected() {
    let limits = ["blocksize-minimum=4096", "blocksize-maximum=64K", "blocksize-error-policy=error"];
    let arguments = [&["--filter=blocksize-policy", "memory", "16M"][..], &limits].concat();
    let Some(server) = NbdServer::nbdkit(&arguments) else { return };
    let mut bed = bed(&options(&server));
    assert_eq!(bed.block_bytes(), 4096);
    bed.write(4096, &pattern(5, 1 << 20));
    assert_eq!(bed.read(4096, 1 << 20), pattern(5, 1 << 20));
}

/// A guest may cut its blocks into pieces of any length. The server refuses requests that are not whole blocks.
#[test]
fn pieces_that_are_no_whole_blocks_of_the_server_are_put_together() {
    let limits = ["blocksize-minimum=4096", "blocksize-error-policy=error"];
    let arguments = [&["--filter=blocksize-policy", "memory", "16M"][..], &limits].concat();
    let Some(server) = NbdServer::nbdkit(&arguments) else { return };
    let mut bed = bed(&options(&server));
    let (len, data) = (1 << 20, pattern(7, 1 << 20));
    for first in [512, 4096 + 512, 1] {
        bed.store(0, &data[..first as usize]);
        bed.store(1 << 20, &data[first as usize..]);
        let pieces = [(0, first), (1 << 20, len - first)];
        let range = bed.range(4096, len);
        let kind = OpKind::Write { range, durability: Durability::Durable };
        assert_eq!(bed.run(kind, &pieces).result, Ok(()), "a first piece of {first} bytes");
        assert!(bed.read(4096, len) == data, "a first piece of {first} bytes");
        bed.store(0, &[0xee; 8192]);
        assert_eq!(bed.run(OpKind::Read { range }, &pieces).result, Ok(()));
        assert!([bed.load(0, first), bed.load(1 << 20, len - first)].concat() == data);
    }
}

#[test]
fn export_that_cannot_be_served_is_refused_with_the_reason() {
    let Some(server) = NbdServer::nbdkit(&["--read-only", "memory", "16M"]) else { return };
    let refused = |options: &ImageOptions| {
        let disk_image::Location::Nbd(uri) = &options.location else { panic!("{options:?}") };
        let opened =
            disk_image::Image::open_export(std::sync::Arc::new(nbd_client::HostDialer), uri, options);
        opened.unwrap_err()
    };
    let text = format!("{:?}", refused(&options(&server)));
    assert!(text.contains("read-only"), "{text}");
    let missing = ImageOptions::new("nbd+unix:///?socket=/nonexistent/nbd.sock");
    let location = disk_image::Location::parse(&missing.path).unwrap();
    let error = refused(&ImageOptions { location, ..missing });
    assert!(matches!(error, ImageError::Unreachable { .. }), "{error:?}");
}

/// Set in the run of the test below that has a network and a name server of its own.
const OWN_NETWORK: &str = "BAREBLK_OWN_NETWORK";
/// Runs the program `$1`, with further arguments, in such a network. `$0` is a folder with the files of the resolver.
const IN_OWN_NETWORK: &str = r#"ip link set lo up && mount --bind "$0/resolv.conf" /etc/resolv.conf \
    && mount --bind "$0/nsswitch.conf" /etc/nsswitch.conf && exec "$@""#;

/// The test runs itself again where it is the name server.
#[test]
fn name_server_that_never_answers_is_given_up_after_the_timeout() {
    if std::env::var_os(OWN_NETWORK).is_some() {
        return look_up_without_an_answer();
    }
    let mut mounts = Command::new("unshare");
    let may_mount = mounts.args(["--mount", "--pid", "--fork", "--net", "true"]).status();
    if !may_mount.is_ok_and(|status| status.success()) {
        return skip(Reason::NoPrivateMounts, "");
    }
    if find_program("ip").is_none() {
        return skip(Reason::NoProgram("ip".to_owned()), "");
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("resolv.conf"), "nameserver 127.0.0.1\n").unwrap();
    std::fs::write(folder.path().join("nsswitch.conf"), "hosts: dns\n").unwrap();
    let mut again = Command::new("unshare");
    again.args(["--mount", "--net", "sh", "-c", IN_OWN_NETWORK]).arg(folder.path());
    again.arg(std::env::current_exe().unwrap()).args(["--exact", "--nocapture"]);
    again.arg("nbd::name_server_that_never_answers_is_given_up_after_the_timeout").env(OWN_NETWORK, "1");
    let output = again.output().unwrap();
    assert!(output.status.success() && output.stdout.ends_with(b"look-up given up\n"), "{output:?}");
}

fn look_up_without_an_answer() {
    let server = UdpSocket::bind("127.0.0.1:53").unwrap();
    let address = Address::Tcp { host: "storage.example".to_owned(), port: 10809 };
    for _ in 0..3 {
        let error = HostDialer.dial(&address, Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        let text = error.to_string();
        assert!(text.contains("storage.example") && text.contains("0.05 s"), "{text}");
    }
    let mut question = [0; 512];
    server.recv(&mut question).unwrap();
    assert!(question.windows(7).any(|bytes| bytes == b"storage"));
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap());
    assert_eq!(names.filter(|name| name == "bareblk-lookup\n").count(), 1);
    println!("look-up given up");
    std::process::exit(0);
}

/// What a server sends after the negotiation, for each request.
type Answer = fn(&[u8; 28]) -> Vec<u8>;

/// A server that negotiates like others, and then answers requests as `answer` says.
fn hostile(answer: Answer) -> (tempfile::TempDir, ImageOptions) {
    let folder = crate::bed::ram_folder();
    let socket = folder.path().join("nbd.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.map(|stream| std::thread::spawn(move || serve(stream, answer)));
        }
    });
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let location = disk_image::Location::parse(std::path::Path::new(&uri)).unwrap();
    let nbd_timeout = Duration::from_millis(500);
    (folder, ImageOptions { location, nbd_timeout, ..ImageOptions::new(uri) })
}

fn serve(mut stream: UnixStream, answer: Answer) -> std::io::Result<()> {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header)?;
        let option = &header[8..12];
        let mut data = vec![0; u32::from_be_bytes(header[12..].try_into().unwrap()) as usize];
        stream.read_exact(&mut data)?;
        let reply = |kind: u32, data: &[u8]| {
            let length = data.len() as u32;
            [
                &0x0003_e889_0455_65a9_u64.to_be_bytes(),
                option,
                &kind.to_be_bytes(),
                &length.to_be_bytes(),
                data,
            ]
            .concat()
        };
        if option == 7_u32.to_be_bytes() {
            // The size, and the flags of an export with flush and several connections.
            let info = [&[0, 0][..], &(16_u64 << 20).to_be_bytes(), &0x0105_u16.to_be_bytes()].concat();
            stream.write_all(&[reply(3, &info), reply(1, &[])].concat())?;
            break;
        }
        stream.write_all(&reply(1, &[]))?;
    }
    loop {
        let mut request = [0; 28];
        stream.read_exact(&mut request)?;
        stream.write_all(&answer(&request))?;
    }
}

/// A structured chunk for the request.
fn chunk(request: &[u8; 28], flags: u16, kind: u16, data: &[u8]) -> Vec<u8> {
    let length = data.len() as u32;
    let magic = 0x668e_33ef_u32.to_be_bytes();
    [&magic, &flags.to_be_bytes()[..], &kind.to_be_bytes(), &request[8..16], &length.to_be_bytes(), data]
        .concat()
}

fn data_chunk(request: &[u8; 28], flags: u16, shift: u64, len: usize) -> Vec<u8> {
    let offset = u64::from_be_bytes(request[16..24].try_into().unwrap()).wrapping_add(shift);
    chunk(request, flags, 1, &[&offset.to_be_bytes()[..], &vec![0x5a; len]].concat())
}

#[test]
fn reply_that_breaks_the_protocol_ends_the_connection_and_the_request_fails_in_time() {
    let lies: [(&str, Answer); 12] = [
        ("wrong magic", |_| vec![0x11; 20]),
        ("handle never given", |request| {
            let mut other = *request;
            other[8] ^= 0x80;
            data_chunk(&other, 1, 0, 4096)
        }),
        ("too much data", |request| data_chunk(request, 1, 0, 4097)),
        ("data before the range", |request| data_chunk(request, 1, u64::MAX, 4096)),
        ("data behind the range", |request| data_chunk(request, 1, 1, 4096)),
        ("data twice", |request| [data_chunk(request, 0, 0, 4096), data_chunk(request, 1, 0, 1)].concat()),
        ("not all data", |request| data_chunk(request, 1, 0, 4095)),
        ("no data", |request| chunk(request, 1, 0, &[])),
        ("empty data", |request| data_chunk(request, 1, 0, 0)),
        ("huge chunk", |request| {
            let mut huge = data_chunk(request, 1, 0, 4096);
            huge[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
            huge
        }),
        ("simple reply with data", |request| {
            [&0x6744_6698_u32.to_be_bytes(), &[0; 4][..], &request[8..16], &[0x5a; 4096]].concat()
        }),
        ("errors without end", |request| chunk(request, 0, 0x8001, &[0, 0, 0, 5, 0, 0]).repeat(100)),
    ];
    for (lie, answer) in lies {
        let (_folder, options) = hostile(answer);
        let mut bed = bed(&options);
        bed.store(8192, &pattern(9, 4096));
        let range = bed.range(0, BLOCK);
        let completion = bed.run(OpKind::Read { range }, &[(4096, BLOCK)]);
        assert_eq!(completion.result, Err(OpError::Errno(Errno::TIMEDOUT)), "{lie}");
        assert_eq!(bed.load(8192, 4096), pattern(9, 4096), "{lie}: memory behind the buffer");
    }
}
