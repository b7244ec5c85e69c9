//! Connections of one export: with servers that threads play, one per connection.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicUsize;

use rustix::event::{PollFd, PollFlags, poll};

use super::*;
use crate::link::Link;
use crate::uri::Address;

/// An event that takes longer will not come.
const PATIENCE: Duration = Duration::from_secs(300);
const FLAGS: u16 = 0b101; // with flush, without several connections
const MULTI_CONN: u16 = 1 << 8;

/// Answers the requests of one connection after the negotiation. The first argument is the connection's number.
type Answer = fn(usize, UnixStream) -> io::Result<()>;

#[derive(Debug)]
struct Servers {
    flags: u16,
    answer: Answer,
    dials: AtomicUsize,
}

impl Servers {
    fn export(flags: u16, answer: Answer) -> (Arc<Export>, Arc<Self>) {
        let servers = Arc::new(Self { flags, answer, dials: AtomicUsize::new(0) });
        let uri = "nbd://server/disk".parse().unwrap();
        let dial = Arc::clone(&servers) as Arc<dyn Dial>;
        (Export::connect(&uri, ExportOptions::default(), dial).unwrap(), servers)
    }

    fn dials(&self) -> usize {
        self.dials.load(Ordering::SeqCst)
    }
}

impl Dial for Servers {
    fn dial(&self, _address: &Address, _timeout: Duration) -> io::Result<OwnedFd> {
        let (client, mut server) = UnixStream::pair()?;
        let (flags, answer) = (self.flags, self.answer);
        let number = self.dials.fetch_add(1, Ordering::SeqCst);
        if number == 1 && flags & MULTI_CONN == 0 {
            // Time for a second thread to make the mistake of connecting, too.
            let begin = Instant::now();
            while self.dials() == 2 && begin.elapsed() < Duration::from_millis(200) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        std::thread::spawn(move || {
            negotiate_as_server(&mut server, flags)?;
            answer(number, server)
        });
        Ok(client.into())
    }
}

fn negotiate_as_server(stream: &mut UnixStream, flags: u16) -> io::Result<()> {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    stream.read_exact(&mut [0; 4])?;
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header)?;
        let length = u32::from_be_bytes(header[12..].try_into().unwrap());
        stream.read_exact(&mut vec![0; length as usize])?;
        let reply = |kind: u8, data: &[u8]| {
            let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
            let length = u32::try_from(data.len()).unwrap().to_be_bytes();
            [&magic[..], &header[8..12], &[0, 0, 0, kind], &length, data].concat()
        };
        let info = [&[0, 0][..], &(1_u64 << 20).to_be_bytes(), &flags.to_be_bytes()].concat();
        if header[11] == 7 {
            return stream.write_all(&[reply(3, &info), reply(1, &[])].concat());
        }
        stream.write_all(&reply(1, &[]))?;
    }
}

/// Answers each request with this error number.
fn answer_with(error: u32, mut stream: UnixStream) -> io::Result<()> {
    loop {
        let mut request = [0; HEADER_BYTES];
        stream.read_exact(&mut request)?;
        stream.write_all(
            &[&0x6744_6698_u32.to_be_bytes()[..], &error.to_be_bytes(), &request[8..16]].concat(),
        )?;
    }
}

fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

fn wait_for_connection(link: &Link) -> (OwnedFd, bool) {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        if let Some(connection) = link.has_news().then(|| link.take_connection()).flatten() {
            return connection;
        }
        let fd = link.wake_fd();
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], None).unwrap();
        rustix::io::read(fd, &mut [0; 8]).unwrap();
    }
    panic!("no connection");
}

#[test]
fn flush_of_a_server_that_was_restarted_uses_a_new_connection() {
    let (export, servers) = Servers::export(FLAGS, |number, stream| match number {
        0 => Ok(()),
        _ => answer_with(0, stream),
    });
    export.flush(deadline()).unwrap();
    assert_eq!(servers.dials(), 2);
    export.flush(deadline()).unwrap();
    assert_eq!(servers.dials(), 2, "the new connection is kept");
}

#[test]
fn flush_that_the_server_refuses_is_reported_and_not_repeated() {
    let (export, servers) = Servers::export(FLAGS, |_, stream| answer_with(5, stream));
    let error = export.flush(deadline()).unwrap_err().to_string();
    assert_eq!((error.as_str(), servers.dials()), ("the NBD server cannot flush: error 5", 1));
}

#[test]
fn server_that_ends_each_connection_is_tried_at_growing_intervals() {
    let (export, _servers) = Servers::export(FLAGS | MULTI_CONN, |_, _| Ok(()));
    let link = Link::attach(&export).unwrap();
    drop(wait_for_connection(&link));
    let begin = Instant::now();
    for _ in 0..4 {
        link.reconnect(Some("the server has ended the connection"));
        drop(wait_for_connection(&link));
    }
    // A lower bound: a slow machine only takes longer.
    assert!(begin.elapsed() >= Duration::from_millis(50 + 100 + 200 + 400), "{:?}", begin.elapsed());
}

#[test]
fn two_links_of_an_export_without_multi_conn_share_one_connection() {
    let (export, servers) = Servers::export(FLAGS, |_, stream| answer_with(0, stream));
    let (first, second) =
        (Arc::new(Link::attach(&export).unwrap()), Arc::new(Link::attach(&export).unwrap()));
    drop(wait_for_connection(&first));
    second.reconnect(None);
    first.reconnect(Some("a test"));
    let (sender, connections) = std::sync::mpsc::channel();
    for link in [first, second] {
        let sender = sender.clone();
        std::thread::spawn(move || {
            let (socket, structured) = wait_for_connection(&link);
            sender.send(()).unwrap();
            link.give_back(socket, structured);
        });
    }
    (0..2).for_each(|_| connections.recv_timeout(PATIENCE).unwrap());
    assert_eq!(servers.dials(), 2, "the first connection, and the one that both links used");
}

#[test]
fn thread_that_waits_for_a_server_keeps_neither_the_export_nor_the_link() {
    let (export, servers) = Servers::export(FLAGS, |_, _| Ok(()));
    let link = Link::attach(&export).unwrap();
    drop(wait_for_connection(&link));
    link.reconnect(Some("a test"));
    // The thread now waits in `dial` for the other connection that this test never makes.
    let begin = Instant::now();
    while servers.dials() < 2 && begin.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
    let export_weak = Arc::downgrade(&export);
    drop((link, export));
    assert_eq!(export_weak.strong_count(), 0);
}

/// The worker would take the second connection and forget the requests on the first.
#[test]
fn link_that_has_a_connection_takes_no_second_one() {
    let link = Shared::new().unwrap();
    let connection = || Connection { socket: UnixStream::pair().unwrap().0.into(), structured: true };
    assert!(link.offer(connection()).is_err(), "no thread connects for it");
    assert!(link.begin_connecting().is_some());
    assert!(link.offer(connection()).is_ok());
    assert!(link.take_connection().is_some());
    assert!(link.offer(connection()).is_err(), "its worker uses the first");
}
