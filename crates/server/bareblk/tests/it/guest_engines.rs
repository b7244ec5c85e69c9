//! One real guest with many disks, one per engine and cache mode. The guest verifies its writes.
#![cfg(target_arch = "x86_64")] // the guest is an x86-64 machine
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use xtask::guest::Vm;

use crate::guest::{MIB, Served, guest_image, number, run, script, sizes, value};

const DISK_BYTES: u64 = 64 * MIB;

/// A guest with these disks, the first of which is `/dev/vda`.
fn guest_with(disks: &[Served], body: &str) -> Vm {
    let vm = Vm::new(&guest_image()).script(&script(body)).timeout(sizes::GUEST_DEADLINE.now());
    disks.iter().fold(vm, |vm, disk| vm.disk_socket(disk.socket(), 2).disk_args("queue-size=1024"))
}

#[test]
fn guest_finds_no_error_on_a_disk_of_any_engine() {
    let on_disk = |args: &[&str]| Served::new(DISK_BYTES, args);
    let in_memory = |args: &[&str]| Served::in_memory(DISK_BYTES, args);
    let mut disks = [
        on_disk(&["--engine", "linux-aio"]),
        on_disk(&["--engine", "posix-aio", "--fd-pool", "2"]),
        on_disk(&["--engine", "threads", "--cache", "writeback"]),
        on_disk(&["--engine", "sync", "--cache", "writeback"]),
        on_disk(&["--engine", "io_uring", "--sqpoll-ms", "20", "--iopoll"]),
        on_disk(&["--engine", "io_uring", "--pin-guest-memory", "--cache", "directsync"]),
        in_memory(&["--engine", "sync"]),
        in_memory(&[]),
    ];
    disks[7].server().wait_logged("engine=mmap");
    let body = "
        for disk in a b c d e f g h; do
            DISK=/dev/vd$disk verified --bsrange=4k-128k --size=8m --numjobs=2 --offset_increment=8m --fsync=16
            blkdiscard -o 0 -l 1048576 /dev/vd$disk || fail blkdiscard $disk
            echo BB:LEFT_$disk=$(nonzero_bytes vd$disk 0 1)
        done
        echo BB:COMPLAINTS=$(complaints)";

    let output = run(&guest_with(&disks, body));

    assert_eq!(number(&output, "COMPLAINTS"), 0, "{}", output.console);
    for disk in 'a'..='h' {
        assert_eq!(number(&output, &format!("LEFT_{disk}")), 0, "/dev/vd{disk}: {}", output.console);
    }
    disks.iter_mut().for_each(Served::terminate);
}

/// Linux shows the cache mode and can change it if the device allows that.
#[test]
fn guest_sees_the_cache_mode_and_changes_it_unless_it_is_fixed() {
    let disks = [
        Served::new(DISK_BYTES, &["--cache", "writeback"]),
        Served::new(DISK_BYTES, &["--cache", "writethrough"]),
        Served::new(DISK_BYTES, &["--cache", "directsync", "--wce", "fixed"]),
    ];
    let body = "
        for disk in a b c; do
            echo BB:BEFORE_$disk=$(attribute vd$disk queue/write_cache)
            echo 'write back' > /sys/block/vd$disk/cache_type 2> /dev/null && echo BB:SET_$disk=yes || echo BB:SET_$disk=no
            echo BB:AFTER_$disk=$(attribute vd$disk queue/write_cache)
            DISK=/dev/vd$disk verified --bs=16k --size=4m --fsync=8
        done
        echo BB:COMPLAINTS=$(complaints)";

    let output = run(&guest_with(&disks, body));

    let told = |key: &str| ['a', 'b', 'c'].map(|disk| value(&output, &format!("{key}_{disk}")).to_owned());
    assert_eq!(told("BEFORE"), ["write back", "write through", "write through"], "{}", output.console);
    assert_eq!(told("SET"), ["yes", "yes", "no"], "{}", output.console);
    assert_eq!(told("AFTER"), ["write back", "write back", "write through"], "{}", output.console);
    assert_eq!(number(&output, "COMPLAINTS"), 0, "{}", output.console);
}
