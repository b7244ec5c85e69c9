//! Shared by the guest tests: a served disk, a QEMU guest that uses it, and the guest's shell functions.
//!
//! The tests use the real `bareblk serve`, stock QEMU and a stock Linux kernel (`xtask::guest`). A guest reports in
//! lines `BB:KEY=value`, which the test reads. If a program is missing, the test names it and the command that installs
//! it.
#![allow(dead_code)] // each test binary uses only a part

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use rustix::process::Signal;
use xtask::guest::{GuestImage, GuestOutput, RunningVm, Vm};
pub use xtask::sizes;

use crate::rig::{Place, Server, Starting, bareblk, ctl, eventually, ok, output};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;

/// Shell functions for every script.
///
/// `verified` writes and reads back with fio (`DISK`, or `/dev/vda`) and shows the line with its error count.
/// `complaints` counts the kernel's messages about a disk that misbehaves (a broken queue shows as "is not a head" or
/// as a hung task).
const FUNCTIONS: &str = r#"
fail() { echo "BB:FAILED=$*"; exit 1; }
verified() {
    fio --name=verified --filename="${DISK:-/dev/vda}" --ioengine=libaio --direct=1 --rw=randwrite --iodepth=16 \
        --verify=crc32c --verify_fatal=1 "$@" > /tmp/fio 2>&1 || { echo "fio: $?"; cat /tmp/fio; fail fio; }
    grep -q 'err= 0' /tmp/fio || { cat /tmp/fio; fail "fio says nothing of errors"; }
    if grep 'err= *[1-9]' /tmp/fio; then fail "fio found errors"; fi
}
complaints() {
    dmesg | grep -c -E 'I/O error|is not a head|blocked for more than|WARNING:|BUG:|EXT4-fs (error|warning)'
}
attribute() { cat "/sys/block/$1/$2"; }
nonzero_bytes() { # DISK OFFSET_MIB COUNT_MIB, from the disk and not from memory
    sync; echo 3 > /proc/sys/vm/drop_caches
    dd if="/dev/$1" bs=1M skip="$2" count="$3" 2> /dev/null | tr -d '\0' | wc -c
}
checksum() { # DISK OFFSET_MIB COUNT_MIB
    sync; echo 3 > /proc/sys/vm/drop_caches
    dd if="/dev/$1" bs=1M skip="$2" count="$3" 2> /dev/null | sha256sum | cut -d ' ' -f 1
}
"#;

pub fn script(body: &str) -> String {
    format!("{FUNCTIONS}\n{body}\n")
}

/// The guest's kernel and tools, which are built once and kept.
pub fn guest_image() -> GuestImage {
    GuestImage::prepare(|step| eprintln!("{step}"))
        .unwrap_or_else(|error| panic!("no guest to test with: {error:#}"))
}

/// A disk with its server. The server can be started again.
pub struct Served {
    place: Place,
    image: PathBuf,
    args: Vec<String>,
    server: Option<Server>,
}

impl Served {
    /// Serves a new sparse image of `size_bytes` with these extra arguments.
    pub fn new(size_bytes: u64, args: &[&str]) -> Self {
        let place = Place::new();
        let image = place.image("disk.raw", size_bytes);
        Self::existing(place, image, args)
    }

    /// Serves a new image, with a control socket.
    pub fn with_control(size_bytes: u64) -> Self {
        Self::with_control_and(size_bytes, &[])
    }

    /// Serves a new image, with a control socket and these extra arguments.
    pub fn with_control_and(size_bytes: u64, args: &[&str]) -> Self {
        let place = Place::new();
        let image = place.image("disk.raw", size_bytes);
        let control = place.socket("c").display().to_string();
        Self::existing(place, image, &[&["--control", &control], args].concat())
    }

    /// Changes the disk's size with `bareblk ctl resize`. The server needs a control socket.
    pub fn resize(&self, size: &str) {
        let mut command = bareblk();
        command.args(["ctl", "resize", "disk.raw", size, "--control"]).arg(self.place.socket("c"));
        output(command);
    }

    /// Lets the guest go on in an overlay: a new file. The next server serves it as the command says.
    pub fn overlay(&mut self, name: &str) {
        let (file, disk) = (self.place.path(name), self.image.file_name().unwrap().to_str().unwrap());
        let file_of_disk = format!("{disk}={}", file.display());
        let answer = ok(&self.place, &["snapshot", "--overlay", &file_of_disk]);
        println!("overlay after {} ns", answer["paused_ns"]);
        self.serve_from_now_on(answer["keys"][0].as_str().unwrap());
    }

    /// Merges the overlay into the image below it, in which the guest goes on.
    pub fn commit(&mut self) {
        let name = ok(&self.place, &["list"])["disks"][0]["name"].as_str().unwrap().to_owned();
        output(ctl(&self.place, &["commit", &name, "--wait"]));
        let jobs = ok(&self.place, &["jobs"]);
        println!("committed: {}", jobs["jobs"][0]);
        self.serve_from_now_on(jobs["jobs"][0]["keys"].as_str().unwrap());
    }

    /// The next server serves the disk as these keys say.
    fn serve_from_now_on(&mut self, keys: &str) {
        for (key, value) in keys.split(' ').filter_map(|key| key.split_once('=')) {
            let option = format!("--{key}");
            if key == "image" {
                self.image = value.into();
            } else if let Some(at) = self.args.iter().position(|arg| *arg == option) {
                self.args[at + 1] = value.to_owned();
            } else {
                self.args.extend([option, value.to_owned()]);
            }
        }
    }

    /// Serves a disk elsewhere, with a control socket.
    pub fn elsewhere(place: Place, name: PathBuf, args: &[&str]) -> Self {
        let control = place.socket("c").display().to_string();
        Self::existing(place, name, &[&["--control", &control], args].concat())
    }

    /// Serves an image on tmpfs.
    pub fn in_memory(size_bytes: u64, args: &[&str]) -> Self {
        let place = Place::in_memory();
        let image = place.image("disk.raw", size_bytes);
        Self::existing(place, image, args)
    }

    pub fn existing(place: Place, image: PathBuf, args: &[&str]) -> Self {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        let mut served = Self { place, image, args, server: None };
        served.start();
        served
    }

    pub fn start(&mut self) {
        let mut command = self.place.serve(&self.image, "s");
        command.args(&self.args);
        self.server = Some(Server::start(command));
    }

    /// Starts a new server that takes over through the control socket. Returns the line in which it reports the live
    /// upgrade.
    pub fn hand_on(&mut self) -> String {
        let mut command = self.place.serve(&self.image, "s");
        command.args(&self.args).arg("--take-over").arg(self.place.socket("c"));
        let (successor, mut lines) = Starting::new(command).wait_lines(2);
        let old = self.server.replace(successor).expect("a server that runs");
        let log = old.log_file();
        let status = old.wait_ended();
        let log = std::io::read_to_string(log).unwrap();
        assert!(status.code() == Some(0) && !log.contains("panicked"), "{log}");
        lines.remove(0)
    }

    /// Stops the server with SIGTERM and checks that it reports no lost request.
    pub fn terminate(&mut self) {
        let server = self.server.take().expect("a server that runs");
        let log = server.log_file();
        let status = server.stop(Signal::TERM);
        let log = std::io::read_to_string(log).unwrap();
        assert_eq!(status.code(), Some(0), "{log}");
        assert!(log.contains("everything is on stable storage") && !log.contains("panicked"), "{log}");
    }

    /// Kills the server with SIGKILL.
    pub fn kill(&mut self) {
        self.server.take().expect("a server that runs").kill();
    }

    pub fn server(&self) -> &Server {
        self.server.as_ref().expect("a server that runs")
    }

    /// Kills the server while the guest writes, and waits until the next server serves those writes. Returns how many
    /// requests the next server resubmitted.
    pub fn kill_under_load(&mut self) -> u64 {
        self.wait_writing();
        self.kill();
        self.start();
        self.wait_writing();
        self.done_again()
    }

    /// The number of its predecessor's requests that this server resubmitted, from its log.
    pub fn done_again(&self) -> u64 {
        let log = self.server().log();
        let counts = log.lines().filter_map(|line| line.split_once("redone=")).map(|(_, count)| count);
        let digits = |count: &str| count.chars().take_while(char::is_ascii_digit).collect::<String>();
        counts.map(|count| digits(count).parse::<u64>().unwrap()).sum()
    }

    pub fn image(&self) -> &PathBuf {
        &self.image
    }

    pub fn socket(&self) -> PathBuf {
        self.place.socket("s")
    }

    pub fn set_size(&self, size_bytes: u64) {
        File::options().write(true).open(&self.image).unwrap().set_len(size_bytes).unwrap();
    }

    /// The bytes that the file system has allocated to the image.
    pub fn allocated_bytes(&self) -> u64 {
        std::fs::metadata(&self.image).unwrap().blocks() * 512
    }

    /// Waits until the server writes, which shows that the guest's load has begun.
    pub fn wait_writing(&self) {
        let before = self.written_bytes();
        eventually("the server writes", || (self.written_bytes() > before + MIB).then_some(()));
    }

    /// The same for a server with a control socket, wherever its disk is.
    pub fn wait_requests(&self) {
        let writes = || ok(&self.place, &["stats"])["disks"][0]["totals"]["writes"].as_u64().unwrap();
        let before = writes();
        eventually("the guest writes", || (writes() > before + 100).then_some(()));
    }

    /// Bytes that this server wrote, to storage or to the page cache.
    fn written_bytes(&self) -> u64 {
        let counts = std::fs::read_to_string(format!("/proc/{}/io", self.server().pid())).unwrap();
        let line = counts.lines().find_map(|line| line.strip_prefix("write_bytes: ")).unwrap();
        line.parse().unwrap()
    }

    /// A guest with this disk as `/dev/vda`: 2 vCPUs, 2 queues of 1024.
    pub fn vm(&self, body: &str) -> Vm {
        self.vm_with_default_queues(body).disk_args("queue-size=1024")
    }

    /// Like [`vm`](Self::vm), with QEMU's default queue size of 128.
    pub fn vm_with_default_queues(&self, body: &str) -> Vm {
        Vm::new(&guest_image())
            .disk_socket(self.socket(), 2)
            .script(&script(body))
            .timeout(sizes::GUEST_DEADLINE.now())
    }
}

/// Runs the guest to its end and checks that its script succeeded.
pub fn run(vm: &Vm) -> GuestOutput {
    succeeded(vm.run().unwrap_or_else(|error| panic!("{error:#}")))
}

pub fn spawn(vm: &Vm) -> RunningVm {
    vm.spawn().unwrap_or_else(|error| panic!("{error:#}"))
}

/// Waits for the end of a guest that is already running.
pub fn finish(vm: RunningVm) -> GuestOutput {
    succeeded(vm.wait().unwrap_or_else(|error| panic!("{error:#}")))
}

fn succeeded(output: GuestOutput) -> GuestOutput {
    assert_eq!(output.exit_code, Some(0), "{}", output.console);
    output
}

/// Returns the next console line that contains `pattern`.
pub fn line(vm: &mut RunningVm, pattern: &str) -> String {
    vm.wait_for_line(pattern, sizes::GUEST_DEADLINE.now()).unwrap_or_else(|error| panic!("{error:#}"))
}

/// The value that the guest reported as `BB:key=value`.
pub fn value<'a>(output: &'a GuestOutput, key: &str) -> &'a str {
    output.value(key).unwrap_or_else(|| panic!("the guest did not say {key}:\n{}", output.console))
}

pub fn number(output: &GuestOutput, key: &str) -> u64 {
    let text = value(output, key);
    text.trim().parse().unwrap_or_else(|_| panic!("{key} is no number: {text}\n{}", output.console))
}
