//! libvirt with vhost-user disks, set up as in its documentation: a domain with one disk is defined and started, a
//! second disk is hot-plugged and unplugged, and each disk's server is killed under load.
//!
//! The libvirt is that of Debian 13, in a folder. Its sockets, logs and domains are in the test's folder, its processes
//! end with the test, and it has no network. The domain runs under emulation (`type='qemu'`). Long run only.

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

/// The daemon and its folder.
struct Libvirt {
    folder: DebianFolder,
    place: TempDir,
    daemons: Vec<Child>,
}

impl Libvirt {
    fn start(folder: &DebianFolder) -> Self {
        let place = tempfile::tempdir().unwrap();
        // QEMU's user needs access to its sockets below this folder.
        open_to_others(place.path());
        let folder = folder
            .clone()
            .with_folder(&place.path().join("run"), "/run")
            .with_folder(&place.path().join("log"), "/var/log/libvirt")
            .with_folder(&place.path().join("domains"), "/etc/libvirt/qemu");
        let mut libvirt = Self { folder, place, daemons: Vec::new() };
        libvirt.daemon("virtlogd");
        eventually("virtlogd listens", || {
            libvirt.run_folder().join("libvirt/virtlogd-sock").exists().then_some(())
        });
        libvirt.daemon("libvirtd");
        eventually("libvirtd answers", || libvirt.try_virsh(&["version"]).ok());
        libvirt
    }

    fn daemon(&mut self, program: &str) {
        let log = std::fs::File::create(self.place.path().join(program)).unwrap();
        let mut command = self.folder.daemon(program);
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
    let disk = Served::new(16 * MIB, &["--socket-owner", user]);
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
        loop {
            let mut line = Vec::new();
            let count = self.socket.read_until(b'\n', &mut line).unwrap_or(0);
            let line = String::from_utf8_lossy(&line).into_owned();
            self.text.push_str(&line);
            assert!(count > 0 && !line.contains("BB:FAILED"), "no {part:?} from the guest:\n{}", self.text);
            if line.contains(part) {
                return line;
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
fn domain_of_libvirt_takes_a_disk_in_and_out_and_loses_nothing_when_servers_are_killed() {
    if !sizes::ALL_CLIENTS.now() {
        return skip(Reason::NotLong, "libvirt");
    }
    let Some(folder) = debian_13() else { return };
    let user = qemu_user(&folder);
    let [mut first, mut second] = [disk(&user), disk(&user)];
    let libvirt = Libvirt::start(&folder);
    let image = guest_image();
    let initrd = libvirt.file("initrd", "");
    image.write_initrd(&script(SCRIPT), Path::new(&initrd)).unwrap();

    // A copy, because libvirt changes the owner of the files that a domain boots to QEMU's user.
    let kernel = libvirt.place.path().join("kernel");
    std::fs::copy(image.kernel(), &kernel).unwrap();

    libvirt.virsh(&["define", &libvirt.file("domain.xml", &domain(&kernel, &initrd, &first))]);
    libvirt.virsh(&["start", "--paused", "bareblk"]);
    let mut console = Console::open(&libvirt);
    libvirt.virsh(&["resume", "bareblk"]);
    console.kill_under_load(&mut first, "vda");
    console.wait_for("plug a disk in");
    let plugged = libvirt.file("disk.xml", &documented(&second));
    libvirt.virsh(&["attach-device", "bareblk", &plugged, "--live"]);
    console.kill_under_load(&mut second, "vdb");
    console.wait_for("unplug it");
    libvirt.virsh(&["detach-device", "bareblk", &plugged, "--live"]);
    console.kill_under_load(&mut first, "vda");
    let complaints = console.wait_for("BB:COMPLAINTS=");
    eventually("the domain is off", || (libvirt.virsh(&["domstate", "bareblk"]) == "shut off").then_some(()));

    assert!(complaints.trim().ends_with("COMPLAINTS=0"), "{}", console.text);
    let version = libvirt.virsh(&["version", "--daemon"]);
    println!(
        "client: libvirt {}, QEMU {}, SeaBIOS: defined, started, a disk plugged in and out, servers killed under load, all verified",
        version.split_whitespace().last().unwrap_or_default(),
        Qemu::of(&folder).version().unwrap()
    );
    [first, second].iter_mut().for_each(Served::terminate);
}
