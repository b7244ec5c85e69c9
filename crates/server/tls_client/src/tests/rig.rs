//! NBD servers as peers: their negotiation up to TLS, and requests on the decrypted socket.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::{Connection, Credentials, End, TlsError, connect};

/// Long enough for any machine; no test waits for its end.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const OPT_EXPORT_NAME: u32 = 1;
const OPT_STARTTLS: u32 = 5;
const REP_ACK: u32 = 1;
/// Fixed newstyle, no zeroes.
const CLIENT_FLAGS: u32 = 3;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// A server process, killed when this is dropped.
pub(super) struct Server {
    pub child: Child,
    /// A socket on which the server and the client have agreed to start TLS.
    pub socket: Option<UnixStream>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// nbdkit with one connection, which is its standard input and output.
    pub fn nbdkit(tls: &[&str], plugin: &[&str]) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        Self::nbdkit_on(ours, &theirs, tls, plugin)
    }

    pub fn nbdkit_on(ours: UnixStream, theirs: &UnixStream, tls: &[&str], plugin: &[&str]) -> Self {
        let end = || Stdio::from(OwnedFd::from(theirs.try_clone().unwrap()));
        let mut command = Command::new("nbdkit");
        command.args(["--single", "--tls=require"]).args(tls).args(plugin);
        let child = command.stdin(end()).stdout(end()).spawn().unwrap();
        Self::start_tls(child, ours)
    }

    /// qemu-nbd, which accepts connections on a socket that it inherits.
    pub fn qemu_nbd(credentials: &str, image: &Path) -> Self {
        const START: &str = "export LISTEN_FDS=1 LISTEN_PID=$$; exec qemu-nbd \"$@\" 3<&0";
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nbd");
        let listener = UnixListener::bind(&path).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", START, "sh", "--object", credentials, "--tls-creds", "tls0", "-f", "raw"]);
        command.arg(image).stdin(Stdio::from(OwnedFd::from(listener)));
        let child = command.spawn().unwrap();
        Self::start_tls(child, UnixStream::connect(&path).unwrap())
    }

    fn start_tls(child: Child, mut socket: UnixStream) -> Self {
        let mut greeting = [0; 18];
        socket.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        socket.write_all(&CLIENT_FLAGS.to_be_bytes()).unwrap();
        socket.write_all(&option(OPT_STARTTLS)).unwrap();
        let mut reply = [0; 20];
        socket.read_exact(&mut reply).unwrap();
        assert_eq!(reply[12..16], REP_ACK.to_be_bytes());
        Self { child, socket: Some(socket) }
    }

    pub fn connect(&mut self, host: Option<&str>, credentials: &Credentials) -> Result<Connection, TlsError> {
        connect(self.socket.take().unwrap().into(), host, credentials, PATIENCE)
    }

    /// Connects and opens the export.
    pub fn client(&mut self, host: Option<&str>, credentials: &Credentials) -> Client {
        Client::open(self.connect(host, credentials).unwrap())
    }
}

fn option(number: u32) -> Vec<u8> {
    [OPTION_MAGIC, &number.to_be_bytes()[..], &[0; 4]].concat()
}

/// An NBD client on the decrypted socket.
pub(super) struct Client {
    pub socket: UnixStream,
    pub end: End,
}

impl Client {
    pub fn open(Connection { socket, end }: Connection) -> Self {
        let mut client = Self { socket: socket.into(), end };
        client.socket.write_all(&option(OPT_EXPORT_NAME)).unwrap();
        let mut size_and_flags = [0; 10];
        client.socket.read_exact(&mut size_and_flags).unwrap();
        client
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        self.socket.write_all(&write_request(offset, data)).unwrap();
        self.reply(&mut []);
    }

    pub fn read(&mut self, offset: u64, length: usize) -> Vec<u8> {
        self.socket.write_all(&read_request(offset, length)).unwrap();
        let mut data = vec![0; length];
        self.reply(&mut data);
        data
    }

    /// Reads a reply without an error. Returns the request's handle.
    pub fn reply(&mut self, data: &mut [u8]) -> u64 {
        let handle = self.reply_header();
        self.socket.read_exact(data).unwrap();
        handle
    }

    pub fn reply_header(&mut self) -> u64 {
        let mut header = [0; 16];
        self.socket.read_exact(&mut header).unwrap();
        assert_eq!(header[..8], [REPLY_MAGIC.to_be_bytes(), [0; 4]].concat());
        u64::from_be_bytes(header[8..].try_into().unwrap())
    }

    /// Writes and reads back a few blocks.
    pub fn assert_stores_data(&mut self) {
        let data = pattern(3, 200_000);
        self.write(4096, &data);
        assert_eq!(self.read(4096, data.len()), data);
    }
}

/// The offset is also the request's handle.
pub(super) fn read_request(offset: u64, length: usize) -> Vec<u8> {
    request(0, offset, length)
}

pub(super) fn write_request(offset: u64, data: &[u8]) -> Vec<u8> {
    [request(1, offset, data.len()), data.to_vec()].concat()
}

fn request(kind: u16, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend([0; 2]);
    bytes.extend(kind.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(u32::try_from(length).unwrap().to_be_bytes());
    bytes
}

/// Bytes that differ from place to place and from seed to seed.
pub(super) fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..length).map(|_| next()).collect()
}
