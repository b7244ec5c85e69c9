//! A running guest whose servers restart, are killed, or are replaced by live upgrades; and an image on a full file
//! system.
//!
//! - A server that is told to stop finishes its requests. Its successor continues with the rings, and the guest notices
//!   nothing.
//! - A killed server leaves its in-flight log with the VMM (vhost-user, INFLIGHT_SHMFD). Its successor resubmits the
//!   requests in the log, and the guest notices nothing either. `BAREBLK_KILL_SEED` repeats a schedule of kills.
#![cfg(target_arch = "x86_64")] // the guest is an x86-64 machine
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use xtask::guest::Vm;

use crate::guest::{MIB, Served, finish, line, number, sizes, spawn, value};
use crate::rig::{Place, is_root};

/// Verified runs on all disks, one after another, until a file tells them to stop. Each run prints a line when it
/// starts. A background job reads the console by name, because the shell gives the job no standard input.
pub const VERIFIED_UNTIL_TOLD: &str = "
    (read stop < /dev/console; touch /tmp/stop) &
    number=0
    until [ -e /tmp/stop ]; do
        for disk in /dev/vd*; do
            echo run $number on $disk starts
            DISK=$disk verified --bsrange=4k-128k --size=16m --randseed=$number
        done
        number=$((number + 1))
    done
    echo BB:COMPLAINTS=$(complaints)";

/// `/dev/vda` has split rings, `/dev/vdb` packed ones.
fn disks_of_both_formats(bytes: u64) -> [Served; 2] {
    [Served::new(bytes, &[]), Served::new(bytes, &[])]
}

fn vm_with_both_formats(disks: &[Served; 2], body: &str) -> Vm {
    let vm = disks[0].vm(body).reconnect_s(1).disk_socket(disks[1].socket(), 2);
    vm.disk_args("queue-size=1024,packed=on").reconnect_s(1)
}

#[test]
fn verified_writes_go_on_while_servers_are_stopped_and_started() {
    let mut disks = disks_of_both_formats(16 * MIB);
    let mut vm = spawn(&vm_with_both_formats(&disks, VERIFIED_UNTIL_TOLD));

    for _ in 0..sizes::RESTARTS.now() {
        for _ in 1..sizes::RUNS_BETWEEN_RESTARTS.now() {
            line(&mut vm, "on /dev/vdb starts");
        }
        for (disk, starts) in disks.iter_mut().zip(["on /dev/vda starts", "on /dev/vdb starts"]) {
            line(&mut vm, starts);
            disk.wait_writing();
            disk.terminate();
            disk.start();
        }
    }
    line(&mut vm, "on /dev/vdb starts");
    vm.send_line("stop").unwrap();
    let seen = finish(vm);

    assert_eq!(number(&seen, "COMPLAINTS"), 0, "{}", seen.console);
}

/// QEMU is not configured to reconnect, so a lost connection would make the disk fail.
#[test]
fn verified_writes_go_on_while_servers_take_over_from_each_other_and_images_change() {
    let mut disks = [(); 2].map(|()| Served::with_control(16 * MIB));
    let vm = disks[0].vm(VERIFIED_UNTIL_TOLD).disk_socket(disks[1].socket(), 2);
    let mut vm = spawn(&vm.disk_args("queue-size=1024,packed=on"));

    for _ in 0..sizes::RESTARTS.now() {
        for (disk, starts) in disks.iter_mut().zip(["on /dev/vda starts", "on /dev/vdb starts"]) {
            line(&mut vm, starts);
            disk.wait_writing();
            let said = disk.hand_on();
            println!("{said}");
            assert!(said.contains("paused for"), "{said}");
        }
    }
    // The guest goes on in another image, and a new server takes that over, too.
    for (disk, starts) in disks.iter_mut().zip(["on /dev/vda starts", "on /dev/vdb starts"]) {
        line(&mut vm, starts);
        disk.wait_writing();
        disk.overlay("overlay.qcow2");
        disk.hand_on();
    }
    // It goes back to the first one, which gets all that was written meanwhile.
    for (disk, starts) in disks.iter_mut().zip(["on /dev/vda starts", "on /dev/vdb starts"]) {
        line(&mut vm, starts);
        disk.wait_writing();
        disk.commit();
        disk.hand_on();
    }
    line(&mut vm, "on /dev/vdb starts");
    vm.send_line("stop").unwrap();
    let seen = finish(vm);

    assert_eq!(number(&seen, "COMPLAINTS"), 0, "{}", seen.console);
    disks.iter_mut().for_each(Served::terminate);
}

#[test]
fn idle_guest_goes_on_with_the_successors_of_killed_servers() {
    let mut disks = disks_of_both_formats(16 * MIB);
    let body = "
        sums() { checksum vda 0 16; checksum vdb 0 16; }
        for disk in a b; do DISK=/dev/vd$disk verified --bs=16k --size=16m; done
        before=$(sums)
        for number in $(seq 3); do
            echo idle; read go
            [ \"$(sums)\" = \"$before\" ] || fail 'what was written is not there'
        done
        for disk in a b; do DISK=/dev/vd$disk verified --bsrange=4k-128k --size=16m; done
        echo BB:COMPLAINTS=$(complaints)";
    let mut vm = spawn(&vm_with_both_formats(&disks, body));

    for _ in 0..3 {
        line(&mut vm, "idle");
        disks.iter_mut().for_each(Served::kill);
        disks.iter_mut().for_each(Served::start);
        vm.send_line("go").unwrap();
    }
    let seen = finish(vm);

    assert_eq!(number(&seen, "COMPLAINTS"), 0, "{}", seen.console);
}

/// Long enough for a few fio runs to start and end, short enough that most servers are killed at work.
const LONGEST_LIFE_MS: u64 = 400;

/// Makes a file system on each disk, writes files with fsync while the server is killed, and checks the files
/// afterwards.
const FILES_UNDER_KILLS: &str = "
    for disk in a b; do
        mkfs.ext4 -q /dev/vd$disk && mount -t ext4 /dev/vd$disk /mnt || fail mkfs
        echo files on /dev/vd$disk start
        for number in $(seq 60); do
            dd if=/dev/urandom of=/mnt/$number bs=7777 count=10 conv=fsync 2> /dev/null || fail write
        done
        (cd /mnt && find . -type f | xargs sha256sum) > /tmp/sums
        umount /mnt && fsck.ext4 -fn /dev/vd$disk || fail fsck
        mount -t ext4 /dev/vd$disk /mnt || fail mount
        echo BB:WHOLE_$disk=$(cd /mnt && sha256sum -c /tmp/sums | grep -c OK)
        umount /mnt
    done
    echo BB:COMPLAINTS_IN_ALL=$(complaints)";

/// The servers are killed at random times. No write is lost or stale, the guest sees no error, and the file systems are
/// intact.
#[test]
fn verified_writes_go_on_while_servers_are_killed_and_started() {
    let seed =
        std::env::var("BAREBLK_KILL_SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    println!("BAREBLK_KILL_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut disks = disks_of_both_formats(16 * MIB);
    let body = format!("{VERIFIED_UNTIL_TOLD}\n{FILES_UNDER_KILLS}");
    let mut vm = spawn(&vm_with_both_formats(&disks, &body));
    let mut done_again = [0, 0];
    let mut kill = |disks: &mut [Served; 2], at: usize| {
        disks[at].wait_writing();
        std::thread::sleep(Duration::from_millis(random.u64(..LONGEST_LIFE_MS)));
        disks[at].kill();
        disks[at].start();
    };

    for _ in 0..sizes::KILLS.now() / 2 {
        for (at, starts) in ["on /dev/vda starts", "on /dev/vdb starts"].into_iter().enumerate() {
            line(&mut vm, starts);
            done_again[at] += disks[at].done_again();
            kill(&mut disks, at);
        }
    }
    line(&mut vm, "on /dev/vdb starts");
    vm.send_line("stop").unwrap();
    for (at, starts) in ["files on /dev/vda start", "files on /dev/vdb start"].into_iter().enumerate() {
        line(&mut vm, starts);
        done_again[at] += disks[at].done_again();
        kill(&mut disks, at);
    }
    let seen = finish(vm);

    for (disk, done_again) in disks.iter().zip(&mut done_again) {
        *done_again += disk.done_again();
    }
    println!("requests done again, split and packed: {done_again:?}");
    assert_eq!(number(&seen, "COMPLAINTS"), 0, "{}", seen.console);
    assert_eq!(number(&seen, "COMPLAINTS_IN_ALL"), 0, "{}", seen.console);
    assert_eq!([number(&seen, "WHOLE_a"), number(&seen, "WHOLE_b")], [60, 60], "{}", seen.console);
    // With few kills, one of the disks may have had nothing in flight at any kill.
    assert!(done_again.iter().any(|&count| count > 0), "no server had anything in flight: {done_again:?}");
}

#[test]
fn server_told_to_stop_under_load_finishes_its_requests_and_ends_with_zero() {
    let mut disk = Served::new(64 * MIB, &[]);
    let body = "
        echo starts
        fio --name=load --filename=/dev/vda --ioengine=libaio --direct=1 --rw=randwrite --bs=4k --iodepth=32 \
            --time_based --runtime=600 > /dev/null";
    let mut vm = spawn(&disk.vm(body));
    line(&mut vm, "starts");
    disk.wait_writing();

    disk.terminate();

    assert!(!disk.socket().exists());
    let _ = vm.kill();
}

// ---- a full file system

/// A small tmpfs, unmounted when dropped.
struct SmallFileSystem {
    place: Place,
}

impl SmallFileSystem {
    /// Mounts the file system; `None` if this process may not mount.
    fn mount(size_bytes: u64) -> Option<Self> {
        let place = Place::new();
        let dir = place.path("small");
        std::fs::create_dir(&dir).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={size_bytes}"), "tmpfs"]).arg(&dir);
        (is_root() && mount.status().unwrap().success()).then_some(Self { place })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path("small").join(name)
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        // Lazy, because the server is dropped later and still has the image open.
        let _ = Command::new("umount").arg("--lazy").arg(self.place.path("small")).status();
    }
}

/// Uses the page cache: tmpfs supports O_DIRECT only on some kernels.
#[test]
fn full_file_system_is_an_io_error_for_the_guest_and_space_makes_it_go_on() {
    let Some(small) = SmallFileSystem::mount(48 * MIB) else {
        return xtask::skip::skip(xtask::skip::Reason::NoTmpfs, "");
    };
    std::fs::write(small.path("ballast"), vec![1; 32 << 20]).unwrap();
    let image = small.path("disk.raw");
    std::fs::File::create(&image).unwrap().set_len(40 * MIB).unwrap();
    let mut disk = Served::existing(Place::new(), image, &["--cache", "writeback"]);
    let body = "
        if dd if=/dev/zero of=/dev/vda bs=1M count=40 conv=fsync 2> /tmp/refusal; then fail 'no room, no error'; fi
        echo \"BB:REFUSAL=$(grep -v records /tmp/refusal | tail -n 1)\"
        echo full; read go
        verified --bs=64k --size=32m";
    let mut vm = spawn(&disk.vm(body));

    line(&mut vm, "full");
    std::fs::remove_file(small.path("ballast")).unwrap();
    vm.send_line("go").unwrap();
    let seen = finish(vm);

    let refusal = value(&seen, "REFUSAL");
    assert!(["Input/output error", "No space left"].iter().any(|text| refusal.contains(text)), "{refusal}");
    disk.terminate();
}
