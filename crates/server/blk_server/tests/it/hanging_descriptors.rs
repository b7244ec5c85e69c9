//! Descriptors with which a front-end tries to block the server's threads: a write, a type check or a close that never
//! returns.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::rig::fuse_disk::FuseDisk;
use crate::rig::passed::{add_transfer, serves, table_of};
use crate::rig::{
    FrontEnd, Guest, MIB, Options, PATIENCE, Rig, USER_BASE, code, eventually, feature, kind, region_words,
};
use blk_server::{Socket, SocketConfig};
use disk_image::{HostOpener, Opener};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::net::SendFlags;
use rustix::net::sockopt::set_socket_linger;

/// A guest of this disk whose requests complete.
fn guest_of(rig: &Rig, disk: usize) -> (FrontEnd, Guest) {
    let mut front_end = rig.connect_to(disk);
    front_end.negotiate(feature::USUAL);
    front_end.share_memory(16 * MIB);
    let mut guest = front_end.start_queue(0, 256, feature::USUAL);
    assert!(serves(&mut guest));
    (front_end, guest)
}

fn two_disks() -> Rig {
    Rig::start(Options { disks: 2, ..Options::default() })
}

/// Fills the eventfd's counter until told to stop, so that every writer blocks.
fn keep_full(call: &impl AsFd, stop: &AtomicBool) {
    fcntl_setfl(call, OFlags::NONBLOCK).unwrap();
    // Only an empty counter accepts this value, and the server may signal in between.
    while rustix::io::write(call, &(u64::MAX - 1).to_ne_bytes()).is_err() {
        let _ = rustix::io::read(call, &mut [0; 8]);
    }
    while !stop.load(Ordering::Relaxed) {
        fcntl_setfl(call, OFlags::empty()).unwrap();
        std::thread::yield_now();
    }
}

#[test]
fn call_descriptor_that_is_full_and_blocks_its_writers_keeps_no_worker_waiting() {
    let rig = two_disks();
    let (_hostile, mut guest) = guest_of(&rig, 0);
    let (_neighbour, mut neighbour) = guest_of(&rig, 1);
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, guest_call) = (Arc::clone(&stop), guest.call.try_clone().unwrap());
    let filler = std::thread::spawn(move || keep_full(&guest_call, &stopped));
    let served = (0..50).all(|_| {
        let pending = add_transfer(&mut guest, kind::OUT, 0, 8 * MIB, 4096);
        // The guest wants an interrupt for each completion.
        while guest.ring.pop_used().unwrap().is_some() {}
        assert!(!guest.ring.arm_interrupts().unwrap());
        guest.submit();
        eventually(|| pending.status(&guest) == 0) && serves(&mut neighbour)
    });
    stop.store(true, Ordering::Relaxed);
    filler.join().unwrap();
    assert!(served);
}

/// The number of sessions of the tested disk.
fn sessions(rig: &Rig) -> usize {
    rig.server.as_ref().unwrap().report().disks[0].sessions
}

/// A file on a FUSE file system. Dropping this value makes the host answer before the file is closed; otherwise the
/// process could not exit.
struct HangingFile {
    file: File,
    host: FuseDisk,
}

impl Drop for HangingFile {
    fn drop(&mut self) {
        self.host.let_go();
    }
}

/// Passes the file as memory and as call descriptor. The server refuses and closes it without waiting.
fn pass_hanging_file(front_end: &FrontEnd, file: impl AsFd) {
    let table = table_of(&[region_words(0, MIB, USER_BASE, 0)]);
    let fds = [file.as_fd()];
    assert_ne!(front_end.acked(code::SET_MEM_TABLE, &table, &fds), 0);
    assert_ne!(front_end.acked(code::SET_VRING_CALL, &0_u64.to_ne_bytes(), &fds), 0);
    assert_ne!(front_end.acked(code::SET_INFLIGHT_FD, &[0; 20], &fds), 0);
}

#[test]
fn file_that_hangs_when_it_is_closed_keeps_no_session_no_cut_and_no_stop_waiting() {
    let Some(host) = FuseDisk::mount(1 << 20, Arc::new(|| 0)) else { return };
    let HangingFile { file, host } = &HangingFile { file: File::open(host.path()).unwrap(), host };
    let mut rig = two_disks();
    let (hostile, mut guest) = guest_of(&rig, 0);
    let (_neighbour, mut neighbour) = guest_of(&rig, 1);
    host.hang();
    pass_hanging_file(&hostile, file);
    assert!(eventually(|| host.hanging() == 1), "one thread closes");
    assert!(serves(&mut guest) && serves(&mut neighbour));
    let server = rig.server.as_ref().unwrap();
    server.cut_off(&["test0".to_owned()], PATIENCE).unwrap();
    drop(server.freeze(PATIENCE).unwrap());
    assert!(hostile.is_closed());
    let (_again, mut guest) = guest_of(&rig, 0);
    assert!(serves(&mut guest) && serves(&mut neighbour));
    rig.stop();
    assert_eq!(host.hanging(), 1);
}

/// A connection whose last close waits for a peer that never reads.
fn lingering() -> (TcpStream, TcpListener, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let peer = listener.accept().unwrap().0;
    stream.set_nonblocking(true).unwrap();
    while std::io::Write::write(&mut &stream, &[0; 1 << 16]).is_ok() {}
    stream.set_nonblocking(false).unwrap();
    set_socket_linger(&stream, Some(PATIENCE * 2)).unwrap();
    (stream, listener, peer)
}

#[test]
fn lingering_socket_in_a_message_that_is_not_read_keeps_no_session_from_ending() {
    let rig = two_disks();
    let (_neighbour, mut neighbour) = guest_of(&rig, 1);
    let (stream, _listener, _peer) = lingering();
    let front_end = rig.connect();
    // Header version 3 ends the session at its first message.
    let bad = [1_u32, 3, 0].map(u32::to_ne_bytes).concat();
    let frozen = rig.server.as_ref().unwrap().freeze(PATIENCE).unwrap();
    front_end.send_raw(&bad, &[]);
    front_end.send_raw(&bad, &[stream.as_fd()]);
    drop(stream);
    drop(frozen);
    assert!(front_end.is_closed());
    assert!(eventually(|| sessions(&rig) == 0));
    assert!(serves(&mut neighbour));
}

#[test]
fn lingering_socket_with_an_urgent_byte_keeps_no_session_from_ending() {
    let rig = two_disks();
    let (hostile, _guest) = guest_of(&rig, 0);
    let (_neighbour, mut neighbour) = guest_of(&rig, 1);
    let (stream, _listener, _peer) = lingering();
    hostile.send_urgent(&[stream.as_fd()]);
    drop(stream);
    drop(hostile);
    assert!(eventually(|| sessions(&rig) == 0));
    assert!(serves(&mut neighbour));
}

#[test]
fn lingering_socket_of_a_front_end_that_is_not_accepted_keeps_no_disk_from_being_removed() {
    let rig = two_disks();
    let (_neighbour, mut neighbour) = guest_of(&rig, 1);
    let folder = tempfile::tempdir().unwrap(); // with a short path
    let config = SocketConfig { path: folder.path().join("own"), mode: 0o600, uid: None, gid: None };
    let opener: Arc<dyn Opener> = Arc::new(HostOpener);
    let listening = Socket::bind(&opener, &config).unwrap();
    let never_accepted = UnixStream::connect(&config.path).unwrap();
    let (stream, _listener, _peer) = lingering();
    vhost_user::send(&never_accepted, &[0], &[stream.as_fd()], SendFlags::empty()).unwrap();
    drop((stream, never_accepted));
    let (closed, is_closed) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(listening);
        let _ = closed.send(());
    });
    is_closed.recv_timeout(PATIENCE).expect("the close waits for a socket that lingers");
    assert!(serves(&mut neighbour));
}
