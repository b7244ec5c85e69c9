//! A running guest under verified fio, on disks elsewhere whose own servers are killed and started again. Only in the long
//! run.
#![cfg(target_arch = "x86_64")] // the guest is an x86-64 machine
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::time::Duration;

use ceph_cluster::Store;
use fastrand::Rng;
use xtask::skip::{Reason, skip};

use crate::guest::{MIB, Served, finish, line, number, sizes, spawn};
use crate::guest_restart::VERIFIED_UNTIL_TOLD;
use crate::killed::random;
use crate::rbd_faults::{Fault, own_cluster};
use crate::rig::Place;
use crate::rig::ceph::CephImage;
use crate::rig::nbd_server::NbdServer;

/// The longest time without the disk's server, and between two faults.
const LONGEST_MS: u64 = 1500;

fn pause(random: &mut Rng) {
    std::thread::sleep(Duration::from_millis(random.u64(..LONGEST_MS)));
}

/// Runs a guest on the disk, and `fault` again and again while it writes.
fn goes_on(mut disk: Served, random: &mut Rng, mut fault: impl FnMut(&mut Rng)) {
    let mut vm = spawn(&disk.vm(VERIFIED_UNTIL_TOLD));
    line(&mut vm, "on /dev/vda starts");
    for _ in 0..sizes::REMOTE_GUEST_FAULTS.now() {
        disk.wait_requests();
        pause(random);
        fault(random);
    }
    disk.wait_requests();
    line(&mut vm, "on /dev/vda starts");
    vm.send_line("stop").unwrap();
    let seen = finish(vm);
    assert_eq!(number(&seen, "COMPLAINTS"), 0, "{}", seen.console);
    disk.terminate();
}

/// `None`: the tests are skipped.
fn long_run() -> Option<Rng> {
    if sizes::REMOTE_GUEST_FAULTS.now() == 0 {
        skip(Reason::NotLong, "a guest for each kind of disk");
        return None;
    }
    Some(random())
}

#[test]
fn verified_writes_go_on_while_an_nbd_server_is_killed_and_started() {
    let Some(mut random) = long_run() else { return };
    let Some(mut export) = NbdServer::file(16 * MIB, &[]) else { return };
    let disk = Served::elsewhere(Place::new(), export.uri().into(), &[]);
    goes_on(disk, &mut random, |random| {
        export.kill();
        pause(random);
        export.start().unwrap();
    });
}

#[test]
fn verified_writes_go_on_while_a_clusters_storage_daemon_is_killed_and_started() {
    let Some(mut random) = long_run() else { return };
    let Some(own) = own_cluster(Store::Bluestore) else { return };
    let image = CephImage::of(own.cluster.folder().to_owned(), 16 * MIB);
    let conf = image.conf().display().to_string();
    let disk = Served::elsewhere(Place::new(), image.spec().into(), &["--rbd-conf", &conf]);
    goes_on(disk, &mut random, |random| Fault::OsdDies.happen(&image, random));
}
