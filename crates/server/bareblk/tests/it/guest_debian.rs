//! A guest installs Debian into a qcow2 image with a backing file, boots from it, and goes on while its disk gets overlays
//! and commits them. Only in the long run.
#![cfg(target_arch = "x86_64")] // the guest is an x86-64 machine
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::geteuid;
use xtask::packages::find_program;
use xtask::skip::{Reason, skip};

use crate::guest::{MIB, Served, finish, line, number, sizes, spawn, value};
use crate::qcow2::{assert_consistent, content_in, folder, tool};
use crate::rig::Place;

/// Unpacks the archive on the second disk to the first.
const INSTALL: &str = "
    mkfs.ext4 -q /dev/vda && mount -t ext4 /dev/vda /mnt || fail mkfs
    tar -x -C /mnt -f /dev/vdb || fail tar
    umount /mnt || fail umount
    echo BB:COMPLAINTS=$(complaints)";

/// The installed system takes over.
const BOOT: &str = "
    mount -t ext4 /dev/vda /mnt || fail mount
    echo /root/boot > /switch";

/// The installed system's first process. Each round copies `/usr/share` and compares what earlier rounds have written.
const BOOT_SCRIPT: &str = r#"#!/bin/bash
exec < /dev/console > /dev/console 2>&1
mount -t proc proc /proc; mount -o remount,rw /
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
code=0
for round in 1 2 3 4; do
    echo "round $round starts"
    cp -a /usr/share "/root/copy-$round" || code=1
    sync; echo 3 > /proc/sys/vm/drop_caches
    for copy in /root/copy-*; do diff -r /usr/share "$copy" > /dev/null || code=1; done
done
dpkg --audit || code=1
echo "BB:PACKAGES=$(dpkg-query -W | wc -l)"
echo "BB:COMPLAINTS=$(dmesg | grep -c -E 'I/O error|is not a head|blocked for more than|EXT4-fs (error|warning)')"
mount -o remount,ro /; sync
echo "BAREBLK-GUEST-EXIT $code"
echo o > /proc/sysrq-trigger; sleep 60
"#;

/// An archive with a Debian system, made once.
fn archive() -> Option<PathBuf> {
    if !sizes::INSTALLS_DEBIAN.now() {
        skip(Reason::NotLong, "an installation of Debian");
        return None;
    }
    if !geteuid().is_root() {
        skip(Reason::NotRoot, "an installation of Debian");
        return None;
    }
    if find_program("debootstrap").is_none() {
        skip(Reason::NoProgram("debootstrap".to_owned()), "run `cargo xtask setup --long`");
        return None;
    }
    let place = Place::new();
    let (root, tar) = (place.path("root"), Path::new(env!("CARGO_TARGET_TMPDIR")).join("debian.tar"));
    let run = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{command:?}: {output:?}");
    };
    run(Command::new("debootstrap").args(["--variant=minbase", "bookworm"]).arg(&root));
    std::fs::write(root.join("root/boot"), BOOT_SCRIPT).unwrap();
    run(Command::new("chmod").arg("+x").arg(root.join("root/boot")));
    run(Command::new("tar")
        .args(["--blocking-factor=2048", "-c", "-C"])
        .arg(&root)
        .arg("-f")
        .arg(&tar)
        .arg("."));
    Some(tar)
}

#[test]
fn debian_is_installed_boots_and_goes_on_while_its_disk_is_snapshot_and_committed() {
    let Some(tar) = archive() else { return };
    let place = Place::new();
    place.image("base.raw", 3072 * MIB);
    let words = ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "debian.qcow2"];
    if tool(&place, "qemu-img", &words).is_none() {
        return;
    }
    let (image, folder) = (place.path("debian.qcow2"), folder(&place));
    let (control, folders) = (place.socket("c").display().to_string(), folder.display().to_string());
    let args = ["--control", &control, "--format", "qcow2", "--backing-folders", &folders];
    let mut disk = Served::existing(place, image, &args);
    let source = Served::existing(Place::new(), tar, &["--readonly", "--format", "raw"]);
    let seen = finish(spawn(&disk.vm(INSTALL).disk_socket(source.socket(), 1)));
    assert_eq!(number(&seen, "COMPLAINTS"), 0, "{}", seen.console);

    let mut vm = spawn(&disk.vm(BOOT));
    for (round, commits) in [(1, 0), (2, 0), (3, 1), (4, 1)] {
        line(&mut vm, &format!("round {round} starts"));
        disk.wait_writing();
        match commits {
            0 => disk.overlay(&format!("snapshot-{round}.qcow2")),
            _ => disk.commit(),
        }
    }
    let seen = finish(vm);
    assert_eq!(number(&seen, "COMPLAINTS"), 0, "{}", seen.console);
    println!("{} packages", value(&seen, "PACKAGES"));
    disk.terminate();
    assert_consistent(&folder, "debian.qcow2", false);
    content_in(&folder, "debian.qcow2");
    let check = Command::new("fsck.ext4").arg("-fn").arg(folder.join("content")).output().unwrap();
    assert!(check.status.success(), "{check:?}");
}
