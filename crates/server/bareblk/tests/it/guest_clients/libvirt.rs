//! libvirt with vhost-user disks, set up as in its documentation: a domain with one disk is defined and started, a
//! second disk is hot-plugged and unplugged, each disk's server is killed under load, and bareblk grows a disk. Another
//! domain is saved, restored and migrated (`migration.rs`).
//!
//! The libvirt is that of Debian 13, in a folder. Its sockets, logs and domains are in the test's folder, its processes
//! end with the test, and it has no network. The domain runs under emulation (`type='qemu'`). Long run only.

mod migration;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use tempfile::TempDir;
use xtask::guest::{DebianFolder, KERNEL_COMMAND_LINE, Qemu};
use xtask::skip::{Reason, skip};

use super::debian_13;
use crate::guest::{MIB, Served, guest_image, script, sizes};
use crate::rig::{bareblk, eventually, output};

/// A host name and a host UUID: libvirt refuses to migrate a domain to a host that has the same ones.
const HOSTS: [(&str, &str); 2] =
    [("first", "11111111-2222-4333-8444-555555555555"), ("second", "66666666-7777-4888-8999-aaaaaaaaaaaa")];

/// The daemon and its folder.
struct Libvirt {
    folder: DebianFolder,
    place: TempDir,
    daemons: Vec<Child>,
}

impl Libvirt {
    /// Starts libvirt as on the host with this number in [`HOSTS`].
    fn start(folder: &DebianFolder, host: usize) -> Self {
        let place = tempfile::tempdir().unwrap();
        // QEMU's user needs access to its sockets below this folder.
        open_to_others(place.path());
        let folder = folder
            .clone()
            .with_folder(&place.path().join("run"), "/run")
            .with_folder(&place.path().join("log"), "/var/log/libvirt")
            .with_folder(&place.path().join("lib"), "/var/lib/libvirt")
            .with_folder(&place.path().join("domains"), "/etc/libvirt/qemu");
        let mut libvirt = Self { folder, place, daemons: Vec::new() };
        let (name, uuid) = HOSTS[host];
        let config = libvirt.file("libvirtd.conf", &format!("host_uuid = \"{uuid}\"\n"));
        libvirt.daemon("virtlogd", "exec virtlogd");
        eventually("virtlogd listens", || {
            libvirt.run_folder().join("libvirt/virtlogd-sock").exists().then_some(())
        });
        let renamed = format!("echo {name} > /proc/sys/kernel/hostname; exec libvirtd --config {config}");
        libvirt.daemon("libvirtd", &renamed);
        eventually("libvirtd answers", || libvirt.try_virsh(&["version"]).ok());
        libvirt
    }

    /// Runs the shell's line in a UTS namespace, so that it may change the host's name.
    fn daemon(&mut self, log: &str, line: &str) {
        let log = std::fs::File::create(self.place.path().join(log)).unwrap();
        let mut command = self.folder.daemon("unshare");
        command.args(["--uts", "sh", "-c", line]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.daemons.push(command.spawn().unwrap());
    }

    fn run_folder(&self) -> PathBuf {
        self.place.path().join("run")
    }

    /// Returns virsh's output, or its error.
    fn try_virsh(&self, words: &[&str]) -> Result<String, String> {
        let mut command = self.folder.command("virsh");
        let ended = command.args(["--connect", "qemu:///system", "--quiet"]).args(words).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if ended.status.success() { Ok(text(&ended.stdout)) } else { Err(text(&ended.stderr)) }
    }

    fn virsh(&self, words: &[&str]) -> String {
        self.try_virsh(words)
            .unwrap_or_else(|said| panic!("virsh {}: {said}\n{}", words.join(" "), self.logs()))
    }

    /// Defines a domain with this disk, and starts it. The guest runs the script.
    fn start_domain(&self, disk: &Served, body: &str) -> Console {
        let image = guest_image();
        let initrd = self.file("initrd", "");
        image.write_initrd(&script(body), Path::new(&initrd)).unwrap();
        // A copy, because libvirt changes the owner of the files that a domain boots to QEMU's user.
        let kernel = self.place.path().join("kernel");
        std::fs::copy(image.kernel(), &kernel).unwrap();
        self.virsh(&["define", &self.file("domain.xml", &domain(&kernel, &initrd, disk))]);
        self.virsh(&["start", "--paused", "bareblk"]);
        let console = Console::open(self);
        self.virsh(&["resume", "bareblk"]);
        console
    }

    /// The domain's state, such as `running`.
    fn state(&self) -> String {
        self.virsh(&["domstate", "bareblk"])
    }

    fn versions(&self, folder: &DebianFolder) -> String {
        let libvirt = self.virsh(&["version", "--daemon"]);
        let libvirt = libvirt.split_whitespace().last().unwrap_or_default();
        format!("libvirt {libvirt}, QEMU {}, SeaBIOS", Qemu::of(folder).version().unwrap())
    }

    /// The logs, for a failure message.
    fn logs(&self) -> String {
        let files = ["libvirtd", "log/qemu/bareblk.log"].map(|name| self.place.path().join(name));
        files.iter().filter_map(|path| std::fs::read_to_string(path).ok()).collect()
    }

    /// Writes a file for virsh and returns its path.
    fn file(&self, name: &str, text: &str) -> String {
        let path = self.place.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        for daemon in &mut self.daemons {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

fn open_to_others(path: &Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// The user ID that libvirt runs QEMU as. This machine may not know the user's name.
fn qemu_user(folder: &DebianFolder) -> String {
    let users = std::fs::read_to_string(folder.root().join("etc/passwd")).unwrap();
    let line = users.lines().find(|line| line.starts_with("libvirt-qemu:")).expect("libvirt's user");
    line.split(':').nth(2).unwrap().to_owned()
}

/// A disk whose socket QEMU's user may connect to.
fn disk(user: &str) -> Served {
    let disk = Served::with_control_and(16 * MIB, &["--socket-owner", user]);
    open_to_others(disk.socket().parent().unwrap());
    disk
}

/// The parts that `bareblk vmm-args` prints for `domain` and for `devices`.
fn printed_for(disk: &Served) -> (String, String) {
    let mut command = bareblk();
    command.args(["vmm-args", "--vmm", "libvirt", "--memory", "768M", "--socket"]).arg(disk.socket());
    let text = output(command);
    let (domain, devices) = text.split_once("<!-- Put this below devices. -->").expect("two parts");
    (domain.to_owned(), devices.to_owned())
}

/// The disk as in libvirt's documentation of the domain format ("vhostuser" disks), with a shorter reconnect interval.
fn documented(disk: &Served) -> String {
    format!(
        "<disk type='vhostuser' device='disk'>
           <driver name='qemu' type='raw'/>
           <source type='unix' path='{}'><reconnect enabled='yes' timeout='1'/></source>
           <target dev='vdb' bus='virtio'/>
         </disk>",
        disk.socket().display()
    )
}

/// Enough ports for the devices that libvirt adds and for the hot-plugged disk (libvirt's documentation, "PCI topology
/// and hotplug"). Without a spare port libvirt reports "No more available PCI slots".
const ROOT_PORTS: &str = "
    <controller type='pci' model='pcie-root-port'/><controller type='pci' model='pcie-root-port'/>
    <controller type='pci' model='pcie-root-port'/><controller type='pci' model='pcie-root-port'/>
    <controller type='pci' model='pcie-root-port'/><controller type='pci' model='pcie-root-port'/>";

fn domain(kernel: &Path, initrd: &str, disk: &Served) -> String {
    let (memory, disk) = printed_for(disk);
    format!(
        "<domain type='qemu'>
           <name>bareblk</name>
           {memory}
           <vcpu>2</vcpu>
           <os>
             <type arch='x86_64' machine='q35'>hvm</type>
             <kernel>{}</kernel>
             <initrd>{initrd}</initrd>
             <cmdline>{KERNEL_COMMAND_LINE}</cmdline>
           </os>
           <features><acpi/></features>
           <devices>
             <controller type='pci' model='pcie-root'/>
             {ROOT_PORTS}
             <serial type='unix'><source mode='bind' path='/run/console'/></serial>
             {disk}
           </devices>
         </domain>",
        kernel.display()
    )
}

/// Runs a load on one disk until the console receives a line, like `load_script`.
const SCRIPT: &str = "
    load() {
        rm -f /tmp/next; (read next < /dev/console; touch /tmp/next) & reader=$!
        echo load on $1
        number=0
        until [ -e /tmp/next ]; do
            DISK=/dev/$1 verified --bsrange=4k-128k --size=8m --randseed=$number
            number=$((number + 1))
        done
        wait $reader
        DISK=/dev/$1 verified --bsrange=4k-128k --size=8m --randseed=$number
    }
    load vda
    echo plug a disk in
    until [ -e /sys/block/vdb ]; do sleep 0.1; done
    load vdb
    echo unplug it
    while [ -e /sys/block/vdb ]; do sleep 0.1; done
    load vda
    echo grow vda of $(attribute vda size) sectors
    tries=0
    until [ $(attribute vda size) = 65536 ]; do
        tries=$((tries + 1))
        [ $tries -lt 300 ] || fail vda has $(attribute vda size) sectors
        sleep 0.1
    done
    DISK=/dev/vda verified --bsrange=4k-128k --offset=24m --size=8m
    echo BB:COMPLAINTS=$(complaints)";

/// The guest's serial port.
struct Console {
    socket: BufReader<UnixStream>,
    text: String,
}

impl Console {
    fn open(libvirt: &Libvirt) -> Self {
        let socket = UnixStream::connect(libvirt.run_folder().join("console")).unwrap();
        socket.set_read_timeout(Some(sizes::GUEST_DEADLINE.now())).unwrap();
        Self { socket: BufReader::new(socket), text: String::new() }
    }

    /// Reads until a line contains `part`.
    fn wait_for(&mut self, part: &str) -> String {
        self.try_wait_for(part).unwrap_or_else(|seen| panic!("no {part:?} from the guest:\n{seen}"))
    }

    /// Like [`wait_for`](Self::wait_for). The error is all that the guest has printed.
    fn try_wait_for(&mut self, part: &str) -> Result<String, String> {
        loop {
            let mut line = Vec::new();
            let count = self.socket.read_until(b'\n', &mut line).unwrap_or(0);
            let line = String::from_utf8_lossy(&line).into_owned();
            self.text.push_str(&line);
            if count == 0 || line.contains("BB:FAILED") {
                return Err(self.text.clone());
            }
            if line.contains(part) {
                return Ok(line);
            }
        }
    }

    /// Kills servers while the guest writes, then ends the load.
    fn kill_under_load(&mut self, disk: &mut Served, name: &str) {
        self.wait_for(&format!("load on {name}"));
        for _ in 0..sizes::CLIENT_KILLS.now() {
            disk.kill_under_load();
        }
        self.socket.get_mut().write_all(b"next\n").unwrap();
    }
}

#[test]
fn domain_of_libvirt_takes_a_disk_in_and_out_sees_it_grow_and_loses_nothing_when_servers_are_killed() {
    if !sizes::ALL_CLIENTS.now() {
        return skip(Reason::NotLong, "libvirt");
    }
    let Some(folder) = debian_13() else { return };
    let user = qemu_user(&folder);
    let [mut first, mut second] = [disk(&user), disk(&user)];
    let libvirt = Libvirt::start(&folder, 0);
    let mut console = libvirt.start_domain(&first, SCRIPT);
    console.kill_under_load(&mut first, "vda");
    console.wait_for("plug a disk in");
    let plugged = libvirt.file("disk.xml", &documented(&second));
    libvirt.virsh(&["attach-device", "bareblk", &plugged, "--live"]);
    console.kill_under_load(&mut second, "vdb");
    console.wait_for("unplug it");
    libvirt.virsh(&["detach-device", "bareblk", &plugged, "--live"]);
    console.kill_under_load(&mut first, "vda");
    console.wait_for("grow vda of 32768 sectors");
    for (words, what) in [
        (&["blockresize", "bareblk", "vda", "32M"][..], "resize"),
        (&["domblkinfo", "bareblk", "vda"], "info"),
    ] {
        let refused = libvirt.try_virsh(words).unwrap_err();
        assert!(refused.contains(&format!("block {what} is not supported for vhostuser disk")), "{refused}");
    }
    first.resize("32M");
    let complaints = console.wait_for("BB:COMPLAINTS=");
    eventually("the domain is off", || (libvirt.state() == "shut off").then_some(()));

    assert!(complaints.trim().ends_with("COMPLAINTS=0"), "{}", console.text);
    println!(
        "client: {}: defined, started, a disk plugged in and out, servers killed under load, a disk grown by bareblk, \
         all verified",
        libvirt.versions(&folder)
    );
    [first, second].iter_mut().for_each(Served::terminate);
}
