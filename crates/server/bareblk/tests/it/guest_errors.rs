//! A real guest on failing storage: only the requests to the failed sectors get errors. With `--on-error
//! hold-on-enospc` the guest waits for free space and never sees an error.
//!
//! The tests need the right to mount (a small tmpfs, FUSE). Without that right, the tests report that they are skipped.
#![cfg(target_arch = "x86_64")] // the guest is an x86-64 machine
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value;

use crate::guest::{MIB, Served, finish, line, number, spawn};
use crate::rig::fuse_disk::{Call, FuseDisk};
use crate::rig::small_fs::{Kind, SmallFs};
use crate::rig::{Place, bareblk, eventually, output};

fn ctl(control: &Path, words: &[&str]) -> Value {
    let mut command = bareblk();
    command.args(["ctl", "--json", "--control"]).arg(control).args(words);
    serde_json::from_str(&output(command)).unwrap()
}

#[test]
fn guest_sees_errors_where_the_host_has_them_and_waits_for_room_where_it_was_told_to() {
    let ticks = AtomicU64::new(0);
    let Some(bad) = FuseDisk::mount(32 << 20, Arc::new(move || ticks.fetch_add(1, Ordering::Relaxed))) else {
        return;
    };
    let Some(small) = SmallFs::mount(Kind::Tmpfs, 8) else { return };
    bad.fail(Call::Read, 16 * MIB..16 * MIB + 4096, fuser::Errno::EIO);
    bad.fail(Call::Write, 16 * MIB..16 * MIB + 4096, fuser::Errno::EIO);
    let first = Served::existing(Place::new(), bad.path(), &[]);
    let sparse = small.path().join("sparse.raw");
    std::fs::File::create(&sparse).unwrap().set_len(64 * MIB).unwrap();
    let place = Place::new();
    let control = place.socket("c");
    let hold = ["--on-error", "hold-on-enospc", "--retry-after", "0", "--name", "sparse", "--control"];
    let args = [&hold[..], &[control.to_str().unwrap()]].concat();
    let second = Served::existing(place, sparse, &args);
    let script = "
        errors() { # READ|WRITE OFFSET: fio's word for what went wrong there, 0 if nothing did
            fio --name=at --filename=/dev/vda --rw=$1 --offset=$2 --size=64k --bs=4k --direct=1 --ioengine=psync \
                --continue_on_error=all > /tmp/at 2>&1
            grep -o 'total_err *= *[0-9]*\\|total errors=[0-9]*\\|errors *: total=[0-9]*' /tmp/at | grep -o '[0-9]*$' || echo 0
        }
        for place in 8m 16m 24m; do
            echo BB:READ_$place=$(errors read $place)
            echo BB:WRITE_$place=$(errors write $place)
        done
        DISK=/dev/vda verified --bsrange=4k-64k --size=16m
        echo BB:BAD_SPOTS=$(dmesg | grep 'I/O error, dev vda' | grep -v -c 'sector 32768 ')
        echo filling
        DISK=/dev/vdb verified --bsrange=4k-64k --size=24m
        echo BB:COMPLAINTS=$(dmesg | grep -c -E 'dev vdb|blocked for more than|WARNING:|BUG:')";
    let vm = first.vm(script).disk_socket(second.socket(), 2);
    let mut vm = spawn(&vm);

    line(&mut vm, "filling");
    let held = || ctl(&control, &["list"])["ok"]["disks"][0]["held"].as_u64().unwrap();
    eventually("requests are held", || (held() > 0).then_some(()));
    second.server().wait_logged("write is parked");
    assert!(second.server().log().contains("No space left on device"));
    small.grow(80);
    let resumed = ctl(&control, &["resume", "sparse"])["ok"]["resumed"].as_u64().unwrap();
    let output = finish(vm);

    assert!(resumed > 0 && held() == 0);
    for place in ["8m", "24m"] {
        assert_eq!(number(&output, &format!("READ_{place}")), 0, "{}", output.console);
        assert_eq!(number(&output, &format!("WRITE_{place}")), 0, "{}", output.console);
    }
    assert_eq!((number(&output, "READ_16m"), number(&output, "WRITE_16m")), (1, 1), "{}", output.console);
    assert_eq!((number(&output, "BAD_SPOTS"), number(&output, "COMPLAINTS")), (0, 0), "{}", output.console);
    second.server().wait_logged("all parked requests are answered");
    first.server().wait_logged("sector=32768 offset=16777216 bytes=4096");
}
