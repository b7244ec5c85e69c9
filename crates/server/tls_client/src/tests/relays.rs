//! The relay under load, and how connections end.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::pki::{has, psk, psk_folder};
use super::rig::{Client, Server, pattern, read_request, write_request};
use crate::TlsError;

const BLOCK: usize = 1 << 20;
const COUNT: u64 = 24;

/// nbdkit with 64 MiB of memory, and a client. `None`: the test is skipped.
fn start() -> Option<(Server, Client)> {
    start_with(&["memory", "64M"])
}

fn start_with(plugin: &[&str]) -> Option<(Server, Client)> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    start_on(ours, &theirs, plugin)
}

fn start_on(ours: UnixStream, theirs: &UnixStream, plugin: &[&str]) -> Option<(Server, Client)> {
    has("nbdkit").then(|| {
        let folder: TempDir = psk_folder();
        let keys = format!("--tls-psk={}", folder.path().join("keys.psk").display());
        let mut server = Server::nbdkit_on(ours, theirs, &[&keys], plugin);
        let client = server.client(None, &psk(&folder));
        (server, client)
    })
}

fn offset(block: u64) -> u64 {
    block * BLOCK as u64
}

#[test]
fn megabytes_flow_in_both_directions_at_once_and_arrive_unchanged() {
    let Some((_server, mut client)) = start() else { return };
    for block in 0..COUNT {
        client.write(offset(block), &pattern(block, BLOCK));
    }
    let mut sender = client.socket.try_clone().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            for block in 0..COUNT {
                sender.write_all(&read_request(offset(block), BLOCK)).unwrap();
                sender.write_all(&write_request(offset(COUNT + block), &pattern(block + 99, BLOCK))).unwrap();
            }
        });
        let mut data = vec![0; BLOCK];
        for _ in 0..2 * COUNT {
            let block = client.reply_header() / offset(1);
            if block < COUNT {
                client.socket.read_exact(&mut data).unwrap();
                assert!(data == pattern(block, BLOCK), "block {block}");
            }
        }
    });
    for block in 0..COUNT {
        assert!(client.read(offset(COUNT + block), BLOCK) == pattern(block + 99, BLOCK), "block {block}");
    }
}

#[test]
fn caller_that_reads_late_gets_everything() {
    let Some((_server, mut client)) = start() else { return };
    for block in 0..COUNT {
        client.write(offset(block), &pattern(block, BLOCK));
    }
    for block in 0..COUNT {
        client.socket.write_all(&read_request(offset(block), BLOCK)).unwrap();
    }
    let mut seen: Vec<u64> = Vec::new();
    let mut data = vec![0; BLOCK];
    for _ in 0..COUNT {
        let block = client.reply(&mut data) / offset(1);
        assert!(data == pattern(block, BLOCK), "block {block}");
        seen.push(block);
    }
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..COUNT));
}

#[test]
fn single_bytes_pass_as_soon_as_they_are_written() {
    let Some((_server, mut client)) = start() else { return };
    for byte in read_request(0, 1) {
        client.socket.write_all(&[byte]).unwrap();
    }
    assert_eq!(client.reply(&mut [0]), 0);
}

#[test]
fn killed_server_ends_the_connection_with_a_reason() {
    let Some((mut server, mut client)) = start() else { return };
    let mut sender = client.socket.try_clone().unwrap();
    let writer = thread::spawn(move || while sender.write_all(&read_request(0, BLOCK)).is_ok() {});
    client.socket.read_exact(&mut [0; 1 << 16]).unwrap();
    server.child.kill().unwrap();
    // The caller gets what was decrypted, then the end. Some of its requests may be lost.
    if let Err(error) = client.socket.read_to_end(&mut Vec::new()) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    writer.join().unwrap();
    assert!(matches!(client.end.error(), Some(TlsError::Cut)), "{:?}", client.end.error());
}

#[test]
fn server_ends_when_the_caller_closes_its_socket() {
    let Some((mut server, client)) = start() else { return };
    let end = client.end.clone();
    drop(client);
    assert!(server.child.wait().unwrap().success());
    assert!(end.error().is_none());
}

#[test]
fn last_write_before_the_caller_closes_its_socket_reaches_the_server() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(8 << 20).unwrap();
    // Several threads of nbdkit would not start a request after one of them has seen the end of the connection.
    let plugin = ["--threads=1", "file", file.path().to_str().unwrap()];
    let Some((mut server, mut client)) = start_with(&plugin) else { return };
    let data = pattern(5, 4 << 20);
    client.socket.write_all(&write_request(4096, &data)).unwrap();
    drop(client);
    server.child.wait().unwrap();
    assert!(std::fs::read(file.path()).unwrap()[4096..][..data.len()] == data);
}

#[test]
fn caller_that_has_shut_down_writing_still_sees_the_server_end_the_connection() {
    let Some((mut server, mut client)) = start() else { return };
    client.socket.shutdown(Shutdown::Write).unwrap();
    assert_eq!(client.socket.read(&mut [0]).unwrap(), 0);
    assert!(server.child.wait().unwrap().success());
}

/// The server takes nothing, so the relay can neither send what the caller wrote nor wait for ever.
#[test]
fn relay_of_a_closed_socket_ends_although_the_server_is_stopped() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let Some((server, mut client)) = start_on(ours, &theirs, &["memory", "64M"]) else { return };
    let pid = Pid::from_child(&server.child);
    kill_process(pid, Signal::STOP).unwrap();
    client.socket.set_nonblocking(true).unwrap();
    let request = write_request(0, &pattern(1, 8 << 20));
    while client.socket.write(&request).is_ok() {}
    drop(client);
    // The relay's end of the connection is closed.
    let mut peer = [PollFd::new(&theirs, PollFlags::empty())];
    assert_eq!(poll(&mut peer, None).unwrap(), 1);
    assert!(peer[0].revents().contains(PollFlags::HUP));
}
