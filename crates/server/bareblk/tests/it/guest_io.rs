//! Reads and writes of a real guest, verified by the guest: mixed sizes, large requests, several memory regions.
#![cfg(target_arch = "x86_64")] // the guest is an x86-64 machine
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::io::Write;
use std::os::unix::net::UnixStream;

use crate::guest::{MIB, Served, finish, line, number, run, sizes, spawn};

/// `/dev/vda` has split rings, `/dev/vdb` packed ones. QEMU offers packed rings only if configured to.
#[test]
fn verified_writes_of_mixed_sizes_on_two_queues_find_no_error_in_either_ring_format() {
    let mib = sizes::VERIFIED_MIB.now();
    let disks = [Served::new(2 * mib * MIB, &[]), Served::new(2 * mib * MIB, &[])];
    let script = format!(
        "for disk in a b; do
             DISK=/dev/vd$disk verified --bsrange=4k-128k --size={mib}m --numjobs=2 --offset_increment={mib}m \
                  --cpus_allowed=0-1 --cpus_allowed_policy=split
             echo BB:PACKED_$disk=$(attribute vd$disk device/features | cut -c 35) # bit 34, from 0
         done
         for queue in 0-req.0 0-req.1 1-req.0 1-req.1; do
             echo BB:CALLS_$queue=$(awk '/virtio'$queue'/ {{ print $2 + $3 }}' /proc/interrupts)
         done
         echo BB:COMPLAINTS=$(complaints)"
    );
    let vm = disks[0].vm(&script).disk_socket(disks[1].socket(), 2).disk_args("queue-size=1024,packed=on");

    let output = run(&vm);

    assert_eq!((number(&output, "PACKED_a"), number(&output, "PACKED_b")), (0, 1), "{}", output.console);
    assert_eq!(number(&output, "COMPLAINTS"), 0, "{}", output.console);
    let calls = |queue| number(&output, &format!("CALLS_{queue}"));
    assert!(
        ["0-req.0", "0-req.1", "1-req.0", "1-req.1"].iter().all(|queue| calls(queue) > 0),
        "{}",
        output.console
    );
}

/// QEMU's queues have 128 entries by default, and a guest may send longer indirect tables. The buffers are pages of a
/// file that was filled in random order, so that the guest cannot merge them.
#[test]
fn requests_of_more_segments_than_the_queue_has_entries_are_verified() {
    let mib = sizes::LARGE_BLOCKS_MIB.now();
    let disk = Served::new(mib * MIB, &["--queue-size", "1024"]);
    let script = format!(
        "echo 4088 > /sys/block/vda/queue/max_sectors_kb
         scattered() {{
             fio --name=scatter --filename=/tmp/buffers --size=$1 --rw=randwrite --bs=4k --ioengine=psync \
                 --fallocate=none > /tmp/scatter 2>&1 || fail scatter
         }}
         scattered 16m; verified --bs=1m --size={mib}m --mem=mmapshared:/tmp/buffers
         before=$(cat /sys/block/vda/stat)
         scattered 16m; verified --bs=4m --iodepth=4 --size={mib}m --mem=mmapshared:/tmp/buffers
         after=$(cat /sys/block/vda/stat)
         echo BB:BYTES_PER_WRITE=$(echo $before $after | awk '{{ print int(512 * ($24 - $7) / ($22 - $5)) }}')
         echo BB:COMPLAINTS=$(complaints)"
    );

    let output = run(&disk.vm_with_default_queues(&script));

    assert_eq!(number(&output, "COMPLAINTS"), 0, "{}", output.console);
    // 4 KiB per segment, a header and a status: more than 128 descriptors.
    assert!(number(&output, "BYTES_PER_WRITE") > 128 * 4096, "{}", output.console);
}

// ---- memory

/// `zone` reads a counter of a kernel zone; `buffers` puts fio's buffers into a tmpfs file that stays allocated, so the
/// zone with the buffers has fewer free pages. Linux takes user pages from the highest zone first.
const ZONES: &str = "
    zone() { awk '/^Node/ { here = / +'$1'$/ } here && /'$2'/ { sum += $2 } END { print sum + 0 }' /proc/zoneinfo; }
    buffers() { dd if=/dev/zero of=/tmp/buffers bs=1M count=33 2> /dev/null; ln -f /tmp/buffers /tmp/kept; }
";

/// This machine type puts 2 GiB below 4 GiB and the rest above: as two regions of one file.
#[test]
fn buffers_above_4_gib_are_read_and_written() {
    let mib = sizes::VERIFIED_MIB.now();
    let disk = Served::new(mib * MIB, &[]);
    let script = format!(
        "{ZONES}
         echo BB:START_PFN=$(zone Normal start_pfn)
         before=$(zone Normal nr_free_pages)
         buffers
         verified --bs=1m --iodepth=32 --size={mib}m --mem=mmapshared:/tmp/buffers
         echo BB:TAKEN_ABOVE_PAGES=$((before - $(zone Normal nr_free_pages)))
         echo BB:COMPLAINTS=$(complaints)"
    );

    let output = run(&disk.vm(&script).memory_mib(5 * 1024));

    assert_eq!(number(&output, "COMPLAINTS"), 0, "{}", output.console);
    assert!(number(&output, "START_PFN") >= (4 << 30) / 4096, "{}", output.console);
    assert!(number(&output, "TAKEN_ABOVE_PAGES") >= 32 * MIB / 4096, "{}", output.console);
}

/// Each node has its own memory file. First, one vCPU at a time uses the memory of its node; then both vCPUs do.
#[test]
fn guest_with_two_nodes_of_memory_reads_and_writes_from_both() {
    let mib = sizes::VERIFIED_MIB.now();
    let disk = Served::new(2 * mib * MIB, &[]);
    let script = format!(
        "echo BB:NODES=$(ls -d /sys/devices/system/node/node* | wc -l)
         verified --bsrange=4k-128k --size={mib}m --cpus_allowed=0
         verified --bsrange=4k-128k --size={mib}m --cpus_allowed=1
         verified --bsrange=4k-128k --size={mib}m --numjobs=2 --offset_increment={mib}m \
                  --cpus_allowed=0-1 --cpus_allowed_policy=split
         echo BB:COMPLAINTS=$(complaints)"
    );

    let output = run(&disk.vm(&script).memory_nodes(2));

    assert_eq!(number(&output, "NODES"), 2, "{}", output.console);
    assert_eq!(number(&output, "COMPLAINTS"), 0, "{}", output.console);
}

/// The front-end adds a region while queues run. The guest then allocates its buffers there.
#[test]
fn memory_that_is_plugged_in_under_load_is_read_and_written() {
    let mib = sizes::VERIFIED_MIB.now();
    let disk = Served::new(mib * MIB, &[]);
    let monitor = disk.socket().with_file_name("monitor");
    let script = format!(
        "{ZONES}
         (while [ ! -e /tmp/stop ]; do verified --bsrange=4k-128k --size=16m; done) & load=$!
         echo ready
         until [ $(zone Movable nr_free_pages) -gt 20000 ]; do sleep 0.1; done
         touch /tmp/stop; wait $load || fail 'under load'
         before=$(zone Movable nr_free_pages)
         buffers
         verified --bs=1m --iodepth=32 --size={mib}m --mem=mmapshared:/tmp/buffers
         echo BB:TAKEN_PAGES=$((before - $(zone Movable nr_free_pages)))
         echo BB:COMPLAINTS=$(complaints)"
    );
    let vm = disk.vm(&script).kernel_args("memhp_default_state=online_movable");
    let vm = vm.qemu_args(["-m", "slots=2,maxmem=2G", "-monitor"]);
    let mut vm = spawn(&vm.qemu_args([format!("unix:{},server=on,wait=off", monitor.display())]));

    line(&mut vm, "ready");
    disk.wait_writing();
    let mut monitor = UnixStream::connect(monitor).unwrap();
    monitor.write_all(b"object_add memory-backend-memfd,id=more,size=256M,share=on\n").unwrap();
    monitor.write_all(b"device_add pc-dimm,id=dimm,memdev=more\n").unwrap();
    let output = finish(vm);

    assert_eq!(number(&output, "COMPLAINTS"), 0, "{}", output.console);
    assert!(number(&output, "TAKEN_PAGES") >= 32 * MIB / 4096, "{}", output.console);
}
