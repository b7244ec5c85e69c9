//! A builder of a guest, which becomes a QEMU command line.
//!
//! Memory is a shared memfd, as vhost-user needs. QEMU emulates only what the guest uses.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::image::GuestImage;
use super::output::GuestOutput;
use super::qemu::{Firmware, Qemu};
use super::running::RunningVm;

/// The default limit of a script. Emulation is slow: a boot takes seconds.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(120);

/// The guest powers off by itself this long after its timeout, in case the process that should stop it has ended.
const ORPHAN_GRACE: Duration = Duration::from_secs(30);

/// All features of the emulator except CMPXCHG16B: with it, QEMU 7.2 sometimes leaves bits of an address in EFLAGS, and
/// Linux 6.12 crashes in `__kmalloc`.
const TCG_CPU: &str = "max,cx16=off";

/// What executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    /// QEMU's emulator: slow, but the same everywhere.
    Tcg,
    /// The processor, through /dev/kvm.
    Kvm,
}

/// A guest to run. Defaults: no disk, TCG, 2 vCPUs, 768 MiB, an empty script, 120 s.
#[derive(Debug, Clone)]
pub struct Vm {
    image: GuestImage,
    qemu: Qemu,
    firmware: Firmware,
    accel: Accel,
    smp: u32,
    memory_mib: u64,
    memory_nodes: u64,
    disks: Vec<Disk>,
    boot_from_disk: bool,
    across_resets: bool,
    kernel_args: String,
    qemu_args: Vec<OsString>,
    programs: Vec<(PathBuf, PathBuf)>,
    files: Vec<(PathBuf, PathBuf)>,
    script: String,
    timeout: Duration,
}

#[derive(Debug, Clone)]
struct Disk {
    socket: PathBuf,
    /// `None` means QEMU's default.
    num_queues: Option<u16>,
    reconnect_s: Option<u32>,
    properties: String,
}

impl Vm {
    /// A guest that boots `image` and has no disk yet.
    #[must_use]
    pub fn new(image: &GuestImage) -> Self {
        Self {
            image: image.clone(),
            qemu: Qemu::of_this_machine(),
            firmware: Firmware::SeaBios,
            accel: Accel::Tcg,
            smp: 2,
            memory_mib: 768,
            memory_nodes: 1,
            disks: Vec::new(),
            boot_from_disk: false,
            across_resets: false,
            kernel_args: String::new(),
            qemu_args: Vec::new(),
            programs: Vec::new(),
            files: Vec::new(),
            script: String::new(),
            timeout: DEFAULT_TIMEOUT,
        }
    }

    /// Uses this QEMU instead of this machine's.
    #[must_use]
    pub fn qemu(mut self, qemu: &Qemu) -> Self {
        self.qemu = qemu.clone();
        self
    }

    /// Uses this firmware instead of QEMU's PC BIOS.
    #[must_use]
    pub fn firmware(mut self, firmware: Firmware) -> Self {
        self.firmware = firmware;
        self
    }

    /// Chooses what executes the guest's instructions.
    #[must_use]
    pub fn accel(mut self, accel: Accel) -> Self {
        self.accel = accel;
        self
    }

    /// Sets the number of vCPUs.
    #[must_use]
    pub fn smp(mut self, vcpus: u32) -> Self {
        self.smp = vcpus;
        self
    }

    /// Sets the guest's memory. The host's memory is used only as the guest touches it.
    #[must_use]
    pub fn memory_mib(mut self, memory_mib: u64) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// Splits memory and vCPUs evenly over this many NUMA nodes (default: one), each with its own memory file.
    #[must_use]
    pub fn memory_nodes(mut self, nodes: u8) -> Self {
        self.memory_nodes = u64::from(nodes.max(1));
        self
    }

    /// Adds a vhost-user-blk disk (`/dev/vda`, `/dev/vdb` …), served at `socket`.
    #[must_use]
    pub fn disk_socket(self, socket: impl AsRef<Path>, num_queues: u16) -> Self {
        self.disk(socket.as_ref(), Some(num_queues))
    }

    /// Like [`disk_socket`](Self::disk_socket), with QEMU's default number of queues.
    #[must_use]
    pub fn disk_as_it_comes(self, socket: impl AsRef<Path>) -> Self {
        self.disk(socket.as_ref(), None)
    }

    fn disk(mut self, socket: &Path, num_queues: Option<u16>) -> Self {
        let socket = socket.to_path_buf();
        self.disks.push(Disk { socket, num_queues, reconnect_s: None, properties: String::new() });
        self
    }

    /// Sets properties (`queue-size=256,config-wce=off`) of the disk added last; has no effect before the first disk.
    #[must_use]
    pub fn disk_args(mut self, properties: &str) -> Self {
        if let Some(disk) = self.disks.last_mut() {
            disk.properties = format!("{},{properties}", disk.properties);
        }
        self
    }

    /// Makes QEMU reconnect the disk added last at this interval after its server has ended.
    #[must_use]
    pub fn reconnect_s(mut self, interval_s: u32) -> Self {
        if let Some(disk) = self.disks.last_mut() {
            disk.reconnect_s = Some(interval_s);
        }
        self
    }

    /// Lets the firmware boot from the first disk, which has the script, and find the others (see
    /// [`GuestImage::write_boot_disk`]).
    #[must_use]
    pub fn boot_from_disk(mut self) -> Self {
        self.boot_from_disk = true;
        self
    }

    /// Keeps QEMU running when the guest resets itself: it boots again and runs the script again.
    #[must_use]
    pub fn across_resets(mut self) -> Self {
        self.across_resets = true;
        self
    }

    /// Adds words to the kernel's command line.
    #[must_use]
    pub fn kernel_args(mut self, words: &str) -> Self {
        self.kernel_args = format!("{} {words}", self.kernel_args);
        self
    }

    /// Adds arguments for QEMU.
    #[must_use]
    pub fn qemu_args<S: Into<OsString>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.qemu_args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds a program of this machine with its libraries at the path `inside` the guest. The path must not lie below a
    /// folder that `/init` mounts (`/tmp`, `/mnt`, `/dev` …). Does not work with a disk that boots.
    #[must_use]
    pub fn program(mut self, program: impl Into<PathBuf>, inside: impl Into<PathBuf>) -> Self {
        self.programs.push((program.into(), inside.into()));
        self
    }

    /// Like [`program`](Self::program), for a file that needs no libraries.
    #[must_use]
    pub fn file(mut self, file: impl Into<PathBuf>, inside: impl Into<PathBuf>) -> Self {
        self.files.push((file.into(), inside.into()));
        self
    }

    /// Sets the script, which the guest's busybox shell runs.
    #[must_use]
    pub fn script(mut self, text: &str) -> Self {
        text.clone_into(&mut self.script);
        self
    }

    /// Sets the time limit, counted from QEMU's start.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Runs the guest until it powers off.
    ///
    /// # Errors
    /// QEMU cannot start or fails, or the timeout passes. The text ends with the console's last lines.
    pub fn run(&self) -> Result<GuestOutput> {
        self.spawn()?.wait()
    }

    /// Starts the guest and returns at once. Dropping the result kills it.
    ///
    /// # Errors
    /// QEMU cannot be started.
    pub fn spawn(&self) -> Result<RunningVm> {
        let dir = tempfile::Builder::new().prefix("run-").tempdir_in(self.image.cache())?;
        let mut qemu = self.machine();
        if self.firmware == Firmware::Ovmf {
            let [code, variables] = self.qemu.ovmf_drives(dir.path())?;
            qemu.args(["-drive", &code, "-drive", &variables]);
        }
        if self.boot_from_disk {
            self.check_boots_from_disk()?;
        } else {
            let initrd = self.write_initrd(dir.path())?;
            qemu.arg("-kernel").arg(self.image.kernel()).arg("-initrd").arg(initrd);
            qemu.arg("-append").arg(self.kernel_command_line());
        }
        for (index, disk) in self.disks.iter().enumerate() {
            self.add_disk(&mut qemu, index, disk)?;
        }
        qemu.args(&self.qemu_args);
        RunningVm::start(qemu, dir, self.timeout)
    }

    fn machine(&self) -> Command {
        let (memory_mib, smp) = (self.memory_mib, self.smp);
        let (accel, cpu) = match self.accel {
            Accel::Tcg => ("tcg", TCG_CPU),
            Accel::Kvm => ("kvm", "max"),
        };
        let mut qemu = self.qemu.command();
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio"]);
        let smp = format!("{smp}{}", self.sockets());
        qemu.args(["-accel", accel, "-cpu", cpu, "-smp", &smp, "-m", &format!("{memory_mib}M")]);
        self.add_memory(&mut qemu);
        if !self.across_resets {
            qemu.arg("-no-reboot");
        }
        qemu
    }

    /// QEMU accepts memory either for the machine or for its nodes, not for both.
    fn add_memory(&self, qemu: &mut Command) {
        let node_mib = self.memory_mib / self.memory_nodes;
        for node in 0..self.memory_nodes {
            qemu.arg("-object").arg(format!("memory-backend-memfd,id=mem{node},size={node_mib}M,share=on"));
        }
        if self.memory_nodes == 1 {
            qemu.args(["-machine", "q35,memory-backend=mem0"]);
            return;
        }
        qemu.args(["-machine", "q35"]);
        for node in 0..self.memory_nodes {
            qemu.arg("-numa").arg(format!("node,memdev=mem{node}{}", self.cpus_of(node)));
        }
    }

    /// One socket per node, because Linux warns about a socket that spans two nodes.
    fn sockets(&self) -> String {
        let nodes = self.memory_nodes;
        let splits = nodes > 1 && u64::from(self.smp).is_multiple_of(nodes);
        if splits { format!(",sockets={nodes}") } else { String::new() }
    }

    /// The node's vCPUs; otherwise QEMU would give all vCPUs of a socket to one node. Empty with fewer vCPUs than
    /// nodes.
    fn cpus_of(&self, node: u64) -> String {
        let first = |node| node * u64::from(self.smp) / self.memory_nodes;
        if u64::from(self.smp) < self.memory_nodes {
            return String::new();
        }
        format!(",cpus={}-{}", first(node), first(node + 1) - 1)
    }

    fn add_disk(&self, qemu: &mut Command, index: usize, disk: &Disk) -> Result<()> {
        let reconnect = disk.reconnect_s.map(|interval_s| self.qemu.reconnect_option(interval_s));
        let reconnect = reconnect.transpose()?.unwrap_or_default();
        let boot = if self.boot_from_disk { format!(",bootindex={index}") } else { String::new() };
        let Disk { socket, num_queues, properties, .. } = disk;
        let queues = num_queues.map(|queues| format!(",num-queues={queues}")).unwrap_or_default();
        let socket = socket.to_str().context("the socket's path is not UTF-8")?.replace(',', ",,");
        qemu.arg("-chardev").arg(format!("socket,id=c{index},path={socket}{reconnect}"));
        let device = format!("vhost-user-blk-pci,id=d{index},chardev=c{index}{queues}");
        qemu.arg("-device").arg(format!("{device}{boot}{properties}"));
        Ok(())
    }

    fn write_initrd(&self, dir: &Path) -> Result<PathBuf> {
        let initrd = dir.join("initrd");
        self.image.write_initrd_with(&self.script, &self.programs, &self.files, &initrd)?;
        Ok(initrd)
    }

    fn check_boots_from_disk(&self) -> Result<()> {
        if self.disks.is_empty() {
            bail!("a guest that boots from its disk needs a disk: call disk_socket");
        }
        if !self.script.is_empty() {
            bail!(
                "a guest that boots from its disk reads its script from the disk: pass the script to \
                 write_boot_disk"
            );
        }
        Ok(())
    }

    fn kernel_command_line(&self) -> String {
        let limit_s = (self.timeout + ORPHAN_GRACE).as_secs();
        format!("{} bareblk.limit_s={limit_s}{}", KERNEL_COMMAND_LINE, self.kernel_args)
    }
}

/// A serial console without kernel messages, which would mix with the script's lines; `dmesg` has them all. The kernel
/// does not check its timer: on a busy machine an emulated timer is late, and the kernel would panic. It does not zero
/// pages on allocation (Debian's default), which would take a tenth of an emulated boot.
pub const KERNEL_COMMAND_LINE: &str =
    "console=ttyS0 quiet loglevel=1 panic=-1 no_timer_check init_on_alloc=0";
