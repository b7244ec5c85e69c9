//! A domain of libvirt is saved and restored, and migrates between two daemons, while fio writes and verifies.
//!
//! Both daemons run on this host, each with folders, a host name and a host UUID of its own, because libvirt refuses
//! to migrate a domain to its own host (`docs/how-to/migration.md`).

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use xtask::guest::DebianFolder;
use xtask::skip::{Reason, skip};

use super::{Console, Libvirt, disk, open_to_others, qemu_user};
use crate::guest::{MIB, Served, sizes};
use crate::guest_clients::debian_13;
use crate::guest_migration::{ATTEMPTS, KernelDied, died};
use crate::rig::Place;
use crate::sandbox::Loop;

/// Verified runs until the console receives a line. Before each run, the guest reads a part of the disk into its page
/// cache, into pages that only the device writes; after it, the guest checks these pages. A migration that misses a
/// page of them fails the check. The open file keeps the page cache, and fio must not drop it.
const SCRIPT: &str = "
    exec 3< /dev/vda
    part() { dd if=/dev/vda bs=1M skip=$1 count=4 2> /dev/null; }
    for at in 8 12; do
        dd if=/dev/urandom of=/dev/vda bs=1M seek=$at count=4 conv=notrunc 2> /dev/null
        part $at | sha256sum > /tmp/sum-$at
    done
    sync
    rm -f /tmp/stop; (read stop < /dev/console; touch /tmp/stop) &
    number=0
    until [ -e /tmp/stop ]; do
        echo run $number starts
        at=$((8 + number % 2 * 4))
        echo 3 > /proc/sys/vm/drop_caches
        part $at > /dev/null
        DISK=/dev/vda verified --bsrange=4k-128k --size=8m --invalidate=0 --randseed=$number
        part $at | sha256sum | cmp - /tmp/sum-$at || fail wrong data in the page cache
        number=$((number + 1))
    done
    echo BB:COMPLAINTS=$(complaints)";

/// Runs the test again if the emulator breaks the guest.
fn attempts(test: impl Fn(&DebianFolder) -> Result<(), KernelDied>) {
    if !sizes::ALL_CLIENTS.now() {
        return skip(Reason::NotLong, "libvirt");
    }
    let Some(folder) = debian_13() else { return };
    for attempt in 1..=ATTEMPTS {
        match test(&folder) {
            Ok(()) => return,
            Err(KernelDied(console)) => println!("attempt {attempt}: {console}"),
        }
    }
    panic!("the guest's kernel died in each of {ATTEMPTS} attempts");
}

#[test]
fn domain_of_libvirt_is_saved_restored_and_migrated_under_load_and_loses_nothing() {
    attempts(|folder| {
        let mut disk = disk(&qemu_user(folder));
        let [first, second] = [0, 1].map(|host| Libvirt::start(folder, host));
        let mut console = first.start_domain(&disk, SCRIPT);
        runs(&mut console)?;

        disk.wait_writing();
        let file = first.place.path().join("saved").display().to_string();
        first.virsh(&["save", "bareblk", &file]);
        assert_eq!(first.state(), "shut off");
        first.virsh(&["restore", &file]);
        runs(&mut Console::open(&first))?;

        disk.wait_writing();
        first.migrate_to(&second, &[]);
        assert_eq!((first.state(), second.state()), ("shut off".into(), "running".into()));
        let mut console = Console::open(&second);
        runs(&mut console)?;
        disk.kill_under_load();
        ends(console)?;
        disk.terminate();
        println!(
            "client: {}: saved and restored, migrated under load, all verified",
            second.versions(folder)
        );
        Ok(())
    });
}

/// Two loop devices on one file stand for storage that two hosts share: each server locks its own device.
#[test]
fn domain_of_libvirt_migrates_to_another_server_on_the_same_storage_and_loses_nothing() {
    attempts(|folder| {
        let place = Place::new();
        let storage = place.image("storage", 16 * MIB);
        let (Some(here), Some(there)) = (Loop::new(&storage), Loop::new(&storage)) else { return Ok(()) };
        let user = qemu_user(folder);
        let [mut old, mut new] = [&here, &there].map(|device| disk_on(Place::new(), device.0.clone(), &user));
        let [first, second] = [0, 1].map(|host| Libvirt::start(folder, host));
        runs(&mut first.start_domain(&old, SCRIPT))?;

        old.wait_writing();
        let [from, to] = [&old, &new].map(|disk| disk.socket().display().to_string());
        let domain = first.virsh(&["dumpxml", "bareblk", "--migratable"]);
        assert!(domain.contains(&from), "{domain}");
        first.migrate_to(&second, &["--xml", &first.file("there.xml", &domain.replace(&from, &to))]);
        old.terminate();
        let mut console = Console::open(&second);
        runs(&mut console)?;
        new.kill_under_load();
        ends(console)?;
        new.terminate();
        let versions = second.versions(folder);
        println!("client: {versions}: migrated under load to a server on the same storage, all verified");
        Ok(())
    });
}

fn disk_on(place: Place, device: PathBuf, user: &str) -> Served {
    let disk = Served::existing(
        place,
        device,
        &["--socket-owner", user, "--cache", "none", "--serial", "shared-disk"],
    );
    open_to_others(disk.socket().parent().unwrap());
    disk
}

/// Waits for a whole run that began after this call.
fn runs(console: &mut Console) -> Result<(), KernelDied> {
    for _ in 0..2 {
        console.try_wait_for(" starts").map_err(died)?;
    }
    Ok(())
}

/// Ends the load and checks what the guest says.
fn ends(mut console: Console) -> Result<(), KernelDied> {
    console.socket.get_mut().write_all(b"stop\n").unwrap();
    let complaints = console.try_wait_for("BB:COMPLAINTS=").map_err(died)?;
    assert!(complaints.trim().ends_with("COMPLAINTS=0"), "{}", console.text);
    Ok(())
}

impl Libvirt {
    fn migrate_to(&self, other: &Self, words: &[&str]) {
        let place = other.place.path();
        // QEMU's user creates a socket in this folder.
        let folder = place.join("migration");
        std::fs::create_dir(&folder).unwrap();
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o777)).unwrap();
        let daemon = other.run_folder().join("libvirt/libvirt-sock");
        let there = format!("qemu+unix:///system?socket={}", daemon.display());
        let memory = format!("unix://{}/memory", folder.display());
        // The bandwidth is low enough that the guest writes while most memory is copied.
        let how = ["--live", "--bandwidth", "64", "--migrateuri", &memory];
        self.virsh(&[&["migrate", "bareblk", &there], &how[..], words].concat());
    }
}
