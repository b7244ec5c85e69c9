//! Tests of the guest itself, with QEMU's own vhost-user-blk server. If a guest test behaves unexpectedly, run these
//! first.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{GuestImage, Vm};

/// A disk of a given size on QEMU's storage daemon, which ends when this value is dropped.
struct Peer {
    dir: TempDir,
    daemon: Child,
}

impl Peer {
    fn start(size_bytes: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        File::create(dir.path().join("disk")).unwrap().set_len(size_bytes).unwrap();
        let daemon = Self::serve(dir.path());
        Self { dir, daemon }
    }

    fn serve(dir: &Path) -> Child {
        let (disk, socket) = (dir.join("disk"), dir.join("socket"));
        let child = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &format!("driver=file,node-name=f0,filename={},discard=unmap", disk.display())])
            .args(["--blockdev", "driver=raw,node-name=d0,file=f0,discard=unmap"])
            .args(["--export", &format!("type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={},writable=on,num-queues=2", socket.display())])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while !socket.exists() {
            assert!(Instant::now() < deadline, "qemu-storage-daemon made no socket");
            std::thread::sleep(Duration::from_millis(10));
        }
        child
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    fn disk(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    fn kill(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn image() -> GuestImage {
    GuestImage::prepare(|step| eprintln!("{step}")).unwrap()
}

#[test]
fn guest_without_disk_runs_its_script_and_reports_status_and_values() {
    let output = Vm::new(&image()).script("echo BB:VCPUS=$(nproc)\nexit 7\n").run().unwrap();

    assert_eq!(output.exit_code, Some(7), "{}", output.console);
    assert_eq!(output.value("VCPUS"), Some("2"));
}

#[test]
fn verified_fio_on_a_peers_disk_finds_no_error() {
    let peer = Peer::start(256 << 20);
    let script = "
        mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && cp /init /mnt && umount /mnt && fsck.ext4 -fn /dev/vda || exit 1
        fio --name=v --filename=/dev/vda --ioengine=libaio --direct=1 --rw=randwrite --bsrange=4k-128k \
            --iodepth=16 --size=64m --verify=crc32c --verify_fatal=1 || exit 2
        echo BB:SECTORS=$(cat /sys/block/vda/size)
    ";
    let output = Vm::new(&image()).disk_socket(peer.socket(), 2).script(script).run().unwrap();

    assert_eq!(output.exit_code, Some(0), "{}", output.console);
    assert_eq!(output.value("SECTORS"), Some("524288"));
}

#[test]
fn running_guest_can_be_watched_answered_and_killed() {
    let script = "echo ready; read word; echo got $word; sleep 1000";
    let mut vm = Vm::new(&image()).script(script).spawn().unwrap();

    vm.wait_for_line("ready", Duration::from_secs(60)).unwrap();
    vm.send_line("hello").unwrap();
    let line = vm.wait_for_line("got", Duration::from_secs(60)).unwrap();
    let output = vm.kill();

    assert_eq!(line, "got hello");
    assert_eq!(output.exit_code, None);
}

#[test]
fn guest_that_does_not_end_is_an_error_with_its_console() {
    let vm = Vm::new(&image()).script("echo here; sleep 1000").timeout(Duration::from_secs(20));

    let error = vm.run().unwrap_err().to_string();

    assert!(error.contains("did not end within 20s") && error.contains("here"), "{error}");
}

#[test]
fn firmware_boots_the_guest_from_its_disk_and_again_after_a_reset() {
    let peer = Peer::start(128 << 20);
    let script = "
        [ \"$(dd if=/dev/vda bs=1M skip=100 count=1 2>/dev/null | head -c 6)\" = booted ] && exit 5
        printf booted | dd of=/dev/vda bs=1M seek=100 conv=notrunc,fsync 2>/dev/null
        touch /reboot
    ";
    let free_at_bytes = image().write_boot_disk(&peer.disk(), script).unwrap();

    let vm = Vm::new(&image()).disk_socket(peer.socket(), 2).boot_from_disk().across_resets();
    let output = vm.run().unwrap();

    assert!(free_at_bytes < 100 << 20);
    assert_eq!(output.exit_code, Some(5), "{}", output.console);
    assert_eq!(output.console.matches("BAREBLK-GUEST-EXIT").count(), 2, "{}", output.console);
}
