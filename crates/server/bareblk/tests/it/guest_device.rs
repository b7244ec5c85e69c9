//! The disk in a real guest: its attributes, read-only disks, discard, growth.
#![cfg(target_arch = "x86_64")] // the guest is an x86-64 machine
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::process::Command;
use std::sync::OnceLock;

use rustix::process::Signal;
use xtask::guest::GuestOutput;

use crate::guest::{MIB, Served, finish, line, number, run, spawn, value};
use crate::qcow2;
use crate::rig::{Place, Server, output};

// ---- attributes

const ATTRIBUTES: &[&str] = &[
    "serial",
    "size",
    "ro",
    "cache_type",
    "queue/logical_block_size",
    "queue/physical_block_size",
    "queue/write_cache",
    "queue/max_segments",
    "queue/discard_max_bytes",
    "queue/write_zeroes_max_bytes",
];

/// A script that reports each attribute of `disk` and the number of queues that its driver uses.
fn describe(disk: &str) -> String {
    let list = ATTRIBUTES.join(" ");
    format!(
        "for name in {list}; do echo \"BB:{disk}/$name=$(attribute {disk} $name)\"; done
         echo BB:{disk}/queues=$(ls /sys/block/{disk}/mq | wc -l)\n"
    )
}

#[test]
fn attributes_of_a_disk_are_what_the_server_was_told() {
    let disk = Served::new(48 * MIB, &["--serial", "bareblk #1"]);

    let seen = run(&disk.vm(&describe("vda")));

    assert_eq!(value(&seen, "vda/serial"), "bareblk #1");
    assert_eq!(number(&seen, "vda/size"), 48 * MIB / 512);
    assert_eq!(number(&seen, "vda/ro"), 0);
    assert_eq!(value(&seen, "vda/queue/write_cache"), "write back");
    assert_eq!(number(&seen, "vda/queue/max_segments"), 1022);
    assert_eq!(number(&seen, "vda/queues"), 2);
    assert_eq!(number(&seen, "vda/queue/logical_block_size"), logged_block_size(&disk));
    assert_eq!(number(&seen, "vda/queue/physical_block_size") % logged_block_size(&disk), 0);
    assert!(number(&seen, "vda/queue/discard_max_bytes") > 0, "{}", seen.console);
    assert!(number(&seen, "vda/queue/write_zeroes_max_bytes") > 0, "{}", seen.console);
}

/// A value from the server's log.
fn logged(disk: &Served, name: &str) -> String {
    let log = disk.server().log();
    let value = log.split_once(&format!(" {name}=")).expect("it is logged").1;
    value.split_whitespace().next().unwrap().trim_matches('"').to_owned()
}

fn logged_block_size(disk: &Served) -> u64 {
    logged(disk, "block_size").parse().unwrap()
}

/// vda uses the page cache, large blocks and short queues; vdb is read-only; vdc is a chain of qcow2 images.
#[test]
fn options_of_two_disks_show_in_one_guest_and_a_read_only_one_refuses_writes() {
    let cached = ["--cache", "writeback", "--block-size", "4096", "--queue-size", "256"];
    let cached = Served::new(48 * MIB, &cached);
    let read_only = Served::new(16 * MIB, &["--readonly"]);
    let place = Place::new();
    let mapped = qcow2::chain(&place).map(|image| {
        Server::start(qcow2::serve(&place, &image, &["--backing-folders", &qcow2::folders(&place)]))
    });
    let body = format!(
        "{} {}
         verified --bsrange=4k-128k --size=16m
         echo 'write through' > /sys/block/vda/cache_type || fail cache_type
         echo \"BB:AFTER=$(attribute vda cache_type)\"
         verified --bs=4k --size=1m
         dd if=/dev/vdb of=/dev/null bs=1M 2> /dev/null && echo BB:READ=yes
         if dd if=/init of=/dev/vdb conv=fsync 2> /tmp/refusal; then fail 'written to a read-only disk'; fi
         echo \"BB:REFUSAL=$(grep -v records /tmp/refusal | tail -n 1)\"
         [ -e /dev/vdc ] && dd if=/dev/vdc bs=64k 2> /dev/null | md5sum > /tmp/sum && echo BB:SUM=$(cat /tmp/sum)
         echo BB:COMPLAINTS=$(complaints)",
        describe("vda"),
        describe("vdb")
    );
    let vm = cached.vm_with_default_queues(&body).disk_args("queue-size=256");

    let mut vm = vm.disk_socket(read_only.socket(), 1);
    if mapped.is_some() {
        vm = vm.disk_socket(place.socket("s"), 1);
    }

    let seen = run(&vm);

    assert_eq!(number(&seen, "vda/queue/logical_block_size"), 4096);
    assert_eq!(number(&seen, "vda/queue/max_segments"), 254);
    assert_eq!(value(&seen, "vda/cache_type"), "write back");
    assert_eq!(value(&seen, "AFTER"), "write through");
    assert_eq!(number(&seen, "vdb/ro"), 1);
    assert_eq!(number(&seen, "vdb/queues"), 1);
    assert_eq!(number(&seen, "vdb/queue/discard_max_bytes"), 0);
    assert_eq!(value(&seen, "vdb/serial"), logged(&read_only, "serial"));
    assert_eq!(value(&seen, "READ"), "yes");
    assert!(value(&seen, "REFUSAL").contains("Operation not permitted"), "{}", seen.console);
    assert_eq!(number(&seen, "COMPLAINTS"), 0, "{}", seen.console);
    assert_eq!(read_only.allocated_bytes(), 0);
    if let Some(server) = mapped {
        qcow2::content(&place, "top.qcow2");
        let mut md5sum = Command::new("md5sum");
        md5sum.arg(place.path("content"));
        let first = |text: &str| text.split_whitespace().next().unwrap().to_owned();
        assert_eq!(first(value(&seen, "SUM")), first(&output(md5sum)));
        assert!(server.stop(Signal::TERM).success());
    }
}

// ---- discard

/// On each disk, writes 16 MiB, discards the first half and zeroes the second. Calls `blkdiscard` by its path: busybox
/// would run its own, which cannot zero.
const DISCARD: &str = "
    for disk in vda vdb; do
        dd if=/dev/urandom of=/dev/$disk bs=1M count=16 conv=fsync 2> /dev/null || fail write
        echo BB:$disk/DISCARD_MAX=$(attribute $disk queue/discard_max_bytes)
        checksum $disk 8 8 > /tmp/$disk
    done
    echo written; read go
    for disk in vda vdb; do
        /tools/blkdiscard -o 0 -l 8M /dev/$disk; echo BB:$disk/DISCARD_STATUS=$?
        [ \"$(checksum $disk 8 8)\" = \"$(cat /tmp/$disk)\" ] && echo BB:$disk/REST=untouched
        echo BB:$disk/NONZERO_DISCARDED=$(nonzero_bytes $disk 0 8)
    done
    echo discarded; read go
    for disk in vda vdb; do
        /tools/blkdiscard -z -o 8M -l 8M /dev/$disk || fail 'blkdiscard -z'
        echo BB:$disk/NONZERO_ZEROED=$(nonzero_bytes $disk 8 8)
    done
    echo BB:COMPLAINTS=$(complaints)";

/// A guest's output, and the allocated bytes of its disks' images after each of the three steps. `/dev/vda` allows
/// discards, `/dev/vdb` does not. Two tests share this guest.
fn discarded() -> &'static (GuestOutput, [[u64; 3]; 2]) {
    static DISCARDED: OnceLock<(GuestOutput, [[u64; 3]; 2])> = OnceLock::new();
    DISCARDED.get_or_init(|| {
        let disks = [Served::new(64 * MIB, &[]), Served::new(64 * MIB, &["--discard", "off"])];
        let allocated = || disks.each_ref().map(Served::allocated_bytes);
        let mut vm = spawn(&disks[0].vm(DISCARD).disk_socket(disks[1].socket(), 2));
        let mut after_next = |step: &str| {
            line(&mut vm, step);
            let bytes = allocated();
            vm.send_line("go").unwrap();
            bytes
        };
        let (written, discarded) = (after_next("written"), after_next("discarded"));
        let (seen, zeroed) = (finish(vm), allocated());
        (seen, [0, 1].map(|disk| [written[disk], discarded[disk], zeroed[disk]]))
    })
}

#[test]
fn discarded_blocks_are_freed_and_zeroed_ones_are_kept_and_both_read_as_zeroes() {
    let (seen, [[written, discarded, zeroed], _]) = discarded();

    assert!(*written >= 16 * MIB && number(seen, "vda/DISCARD_MAX") > 0, "{}", seen.console);
    assert_eq!(number(seen, "vda/DISCARD_STATUS"), 0, "{}", seen.console);
    assert_eq!(*discarded, written - 8 * MIB);
    assert_eq!(value(seen, "vda/REST"), "untouched", "{}", seen.console);
    assert_eq!(number(seen, "vda/NONZERO_DISCARDED"), 0);
    // The guest requests zeroes without UNMAP.
    assert_eq!(zeroed, discarded);
    assert_eq!(number(seen, "vda/NONZERO_ZEROED"), 0);
    assert_eq!(number(seen, "COMPLAINTS"), 0, "{}", seen.console);
}

#[test]
fn image_whose_discard_is_off_keeps_its_blocks() {
    let (seen, [_, [written, discarded, zeroed]]) = discarded();

    assert_eq!(number(seen, "vdb/DISCARD_MAX"), 0, "{}", seen.console);
    assert_ne!(number(seen, "vdb/DISCARD_STATUS"), 0, "{}", seen.console);
    assert_eq!([discarded, zeroed], [written; 2]);
    assert_eq!(value(seen, "vdb/REST"), "untouched", "{}", seen.console);
    assert!(number(seen, "vdb/NONZERO_DISCARDED") > 0, "{}", seen.console);
    assert_eq!(number(seen, "vdb/NONZERO_ZEROED"), 0);
}

// ---- growth

#[test]
fn image_that_grows_is_seen_by_the_running_guest_and_one_that_shrinks_keeps_its_size() {
    let disk = Served::new(32 * MIB, &[]);
    let body = format!(
        "echo BB:BEFORE=$(attribute vda size); echo ready
         until [ $(attribute vda size) = {grown} ]; do sleep 0.1; done
         verified --bs=64k --offset=32m --size=32m
         echo grown; read go
         echo BB:AFTER=$(attribute vda size)
         if dd if=/dev/vda of=/dev/null bs=64k skip=256 count=1 iflag=direct; then fail 'read what is not there'; fi
         echo gone; read go
         dd if=/dev/vda of=/dev/null bs=64k skip=256 count=1 iflag=direct || fail 'not read'",
        grown = 96 * MIB / 512
    );
    let mut vm = spawn(&disk.vm(&body));

    line(&mut vm, "ready");
    disk.set_size(96 * MIB);
    disk.server().signal(Signal::HUP);
    line(&mut vm, "grown");
    disk.set_size(16 * MIB);
    disk.server().signal(Signal::HUP);
    disk.server().wait_logged("image shrank");
    vm.send_line("go").unwrap();
    line(&mut vm, "gone");
    disk.set_size(96 * MIB);
    vm.send_line("go").unwrap();
    let seen = finish(vm);

    assert_eq!(number(&seen, "BEFORE"), 32 * MIB / 512);
    assert_eq!(number(&seen, "AFTER"), 96 * MIB / 512);
}
