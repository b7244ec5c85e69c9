//! Stock VMMs: firmware boots a Linux guest from the disk, and the guest's verified load survives `kill -9` of each
//! server.
//!
//! - The smoke run uses this machine's QEMU with its defaults.
//! - The long run uses this machine's QEMU and kernel package, and those of Debian 13 (from a folder,
//!   `xtask::guest::DebianFolder`), each with SeaBIOS and OVMF, four queue sizes and both ring formats; and libvirt
//!   (`libvirt.rs`).
//! - One guest has a disk for each queue size and ring format. Each disk has its own server.
//! - Each combination prints a line (`client: …`); docs/how-to/clients.md has the results.
#![cfg(target_arch = "x86_64")] // the guest is an x86-64 machine
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod libvirt;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use xtask::guest::{DebianFolder, Firmware, GuestImage, GuestOutput, Prepared, Qemu, Vm};
use xtask::skip::{Reason, skip, skip_part};

use crate::guest::{MIB, Served, finish, guest_image, line, number, script, sizes, spawn, value};
use crate::rig::Place;

/// A VMM, with the firmware and the kernel that it boots.
struct Client {
    qemu: Qemu,
    firmware: Firmware,
    image: GuestImage,
}

impl Client {
    fn name(&self) -> String {
        let firmware = match self.firmware {
            Firmware::SeaBios => "SeaBIOS",
            Firmware::Ovmf => "OVMF",
        };
        let kernel = self.image.kernel_package();
        let kernel = kernel.trim_start_matches("linux-image-").trim_end_matches("-cloud-amd64");
        format!("QEMU {}, {firmware}, Linux {kernel}", self.qemu.version().unwrap())
    }

    /// Firmware may drive a transitional device as a legacy device, which no vhost-user server supports.
    fn properties(&self) -> &'static str {
        match self.firmware {
            Firmware::SeaBios => "",
            Firmware::Ovmf => "disable-legacy=on",
        }
    }
}

/// A disk's name in the table, and its QEMU options besides the socket.
type Variant = (&'static str, &'static str);

const AS_IT_COMES: &[Variant] = &[("default, split", "")];

const ALL_VARIANTS: &[Variant] = &[
    ("default, split", ""),
    ("default, packed", "packed=on"),
    ("128, split", "queue-size=128"),
    ("128, packed", "queue-size=128,packed=on"),
    ("256, split", "queue-size=256"),
    ("256, packed", "queue-size=256,packed=on"),
    ("1024, split", "queue-size=1024"),
    ("1024, packed", "queue-size=1024,packed=on"),
];

/// Runs a verified load on each disk until the console receives a line, then one more run, which only the last server
/// serves. A background job reads the console by name, because the shell gives the job no standard input.
fn load_script(variants: &[Variant]) -> String {
    let letters: String = letters().take(variants.len()).flat_map(|letter| [letter, ' ']).collect();
    format!(
        "echo BB:BY_FIRMWARE=$(ls /read-by-firmware)
         for letter in {letters}; do
             echo BB:SERIAL_$letter=$(attribute vd$letter serial)
             echo BB:PACKED_$letter=$(attribute vd$letter device/features | cut -c 35) # bit 34, from 0
             echo BB:RING_$letter=$(attribute vd$letter mq/0/nr_tags)
             echo BB:QUEUES_$letter=$(ls /sys/block/vd$letter/mq | wc -l)
         done
         run() {{ DISK=/dev/vd$1 verified --bsrange=4k-128k --offset={FREE_MIB}m --size=8m --randseed=$2; }}
         for letter in {letters}; do
             rm -f /tmp/next; (read next < /dev/console; touch /tmp/next) & reader=$!
             number=0
             until [ -e /tmp/next ]; do
                 [ $number = 0 ] && echo load on vd$letter
                 run $letter $number
                 number=$((number + 1))
             done
             wait $reader
             run $letter $number
         done
         echo BB:COMPLAINTS=$(complaints)"
    )
}

/// Free space on the guest's disk, in addition to kernel, tools and archives.
const FREE_MIB: u64 = 160;

fn letters() -> impl Iterator<Item = char> {
    'a'..='z'
}

fn disks(client: &Client, variants: &[Variant]) -> Vec<Served> {
    let serve = |number| Served::new((FREE_MIB + 8) * MIB, &["--serial", &format!("disk-{number}")]);
    let mut disks: Vec<Served> = (0..variants.len()).map(serve).collect();
    disks.iter_mut().for_each(Served::terminate);
    let images: Vec<&Path> = disks.iter().map(|disk| disk.image().as_path()).collect();
    let script = script(&load_script(variants));
    let free_at_bytes = client.image.write_boot_disks(client.firmware, &images, &script).unwrap();
    assert!(free_at_bytes <= FREE_MIB * MIB, "{free_at_bytes}");
    disks.iter_mut().for_each(Served::start);
    disks
}

fn vm(client: &Client, variants: &[Variant], disks: &[Served]) -> Vm {
    let mut vm = Vm::new(&client.image).qemu(&client.qemu).firmware(client.firmware).boot_from_disk();
    for (disk, (_, variant)) in disks.iter().zip(variants) {
        vm = vm.disk_as_it_comes(disk.socket()).reconnect_s(1);
        let words = [client.properties(), variant].into_iter().filter(|words| !words.is_empty());
        let properties = words.collect::<Vec<_>>().join(",");
        vm = if properties.is_empty() { vm } else { vm.disk_args(&properties) };
    }
    vm.timeout(sizes::GUEST_DEADLINE.now())
}

/// The result for one disk.
struct Row {
    variant: &'static str,
    ring: u64,
    queues: u64,
    done_again: u64,
}

/// Boots the guest, kills each disk's server under its load, and checks that no write was lost.
fn rows(client: &Client, variants: &'static [Variant]) -> Vec<Row> {
    let mut disks = disks(client, variants);
    let mut vm = spawn(&vm(client, variants, &disks));
    let (kills, mut done_again) = (sizes::CLIENT_KILLS.now(), Vec::new());
    for (disk, letter) in disks.iter_mut().zip(letters()) {
        line(&mut vm, &format!("load on vd{letter}"));
        done_again.push((0..kills).map(|_| disk.kill_under_load()).sum());
        vm.send_line("next").unwrap();
    }
    let seen = finish(vm);
    assert_eq!(number(&seen, "COMPLAINTS"), 0, "{}", seen.console);
    let by_firmware: Vec<_> = value(&seen, "BY_FIRMWARE").split_whitespace().collect();
    let all: Vec<_> = (0..variants.len()).map(|number| number.to_string()).collect();
    assert_eq!(by_firmware, all, "the firmware did not read all disks: {}", seen.console);
    disks.iter_mut().for_each(Served::terminate);
    let rows = variants.iter().zip(done_again).enumerate();
    rows.map(|(at, (variant, done_again))| row(at, variant, done_again, &seen)).collect()
}

fn row(at: usize, variant: &Variant, done_again: u64, seen: &GuestOutput) -> Row {
    let letter = letters().nth(at).unwrap();
    let said = |key: &str| number(seen, &format!("{key}_{letter}"));
    assert_eq!(value(seen, &format!("SERIAL_{letter}")), format!("disk-{at}"), "{}", seen.console);
    assert_eq!(said("PACKED") == 1, variant.0.ends_with("packed"), "{}", seen.console);
    Row { variant: variant.0, ring: said("RING"), queues: said("QUEUES"), done_again }
}

/// Prints a line for each disk. Returns false if a disk lost data.
fn works(client: &Client, variants: &'static [Variant]) -> bool {
    let name = client.name();
    let Ok(rows) = catch_unwind(AssertUnwindSafe(|| rows(client, variants))) else {
        println!("client: {name}: FAILED, see above");
        return false;
    };
    let kills = sizes::CLIENT_KILLS.now();
    for Row { variant, ring, queues, done_again } in rows {
        println!(
            "client: {name}, queue size {variant}: booted by firmware, {queues} rings of {ring}, \
             server killed {kills} times under load, {done_again} requests done again, all verified"
        );
    }
    true
}

/// `None` if this machine cannot have the folder; the test then prints the reason.
fn debian_13() -> Option<DebianFolder> {
    let prepared = DebianFolder::prepare("trixie", &mut |step| eprintln!("{step}"));
    match prepared.unwrap_or_else(|error| panic!("no Debian 13: {error:#}")) {
        Prepared::Ready(folder) => Some(folder),
        Prepared::NotHere(reason, why) => {
            skip_part(reason, format!("clients of Debian 13: {why}"));
            None
        }
    }
}

fn all_qemus(debian_13: Option<&DebianFolder>) -> Vec<Qemu> {
    [Qemu::of_this_machine()].into_iter().chain(debian_13.map(Qemu::of)).collect()
}

fn firmwares(qemu: &Qemu) -> &'static [Firmware] {
    if qemu.has_ovmf() {
        return &[Firmware::SeaBios, Firmware::Ovmf];
    }
    skip_part(Reason::NoOvmf, "OVMF of this machine: run `cargo xtask setup --long`");
    &[Firmware::SeaBios]
}

/// All combinations of QEMU, firmware and kernel.
fn all_clients() -> Vec<Client> {
    let folder = debian_13();
    let kernel_of =
        |folder| GuestImage::prepare_with_kernel_of(folder, &mut |step| eprintln!("{step}")).unwrap();
    let images: Vec<_> = [guest_image()].into_iter().chain(folder.as_ref().map(kernel_of)).collect();
    let mut clients = Vec::new();
    for qemu in all_qemus(folder.as_ref()) {
        for &firmware in firmwares(&qemu) {
            let client = |image: &GuestImage| Client { qemu: qemu.clone(), firmware, image: image.clone() };
            clients.extend(images.iter().map(client));
        }
    }
    clients
}

#[test]
fn guests_booted_by_firmware_lose_nothing_when_their_servers_are_killed() {
    if !sizes::ALL_CLIENTS.now() {
        let image = guest_image();
        let client = Client { qemu: Qemu::of_this_machine(), firmware: Firmware::SeaBios, image };
        return assert!(works(&client, AS_IT_COMES));
    }
    let failed: Vec<_> =
        all_clients().iter().filter(|client| !works(client, ALL_VARIANTS)).map(Client::name).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

// ---- combinations that fail, and the reason in the server's log

/// Starts the guest, waits for the log line that contains `part`, and prints it.
fn is_refused(vm: &Vm, disk: &Served, client: &str, part: &str) {
    let vm = spawn(vm);
    disk.server().wait_logged(part);
    let _ = vm.kill();
    let log = disk.server().log();
    let line = log.lines().find(|line| line.contains(part)).unwrap();
    let reason = line.split_once("blk_server::session: ").map_or(line, |(_, reason)| reason);
    println!("client: {client}: {}", reason.split(" disk=").next().unwrap());
}

#[test]
fn ovmf_on_a_transitional_device_is_refused_by_a_line_that_says_what_helps() {
    if !sizes::ALL_CLIENTS.now() {
        return skip(Reason::NotLong, "OVMF");
    }
    for qemu in all_qemus(debian_13().as_ref()) {
        if !firmwares(&qemu).contains(&Firmware::Ovmf) {
            continue;
        }
        let disk = Served::new(16 * MIB, &[]);
        let vm = Vm::new(&guest_image()).qemu(&qemu).firmware(Firmware::Ovmf).boot_from_disk();
        let vm = vm.disk_as_it_comes(disk.socket()).reconnect_s(1);

        let client = format!("QEMU {}, OVMF, device as it comes", qemu.version().unwrap());
        is_refused(&vm, &disk, &client, "disable-legacy=on");
    }
}

/// QEMU passes the NVDIMM's file to the server as guest memory.
#[test]
fn guest_with_an_nvdimm_on_an_ordinary_file_is_refused_by_a_line_that_says_why() {
    let qemu = Qemu::of_this_machine();
    let (disk, place) = (Served::new(16 * MIB, &[]), Place::new());
    let file = place.image("nvdimm", 64 * MIB);
    let backend = format!("memory-backend-file,id=nv,mem-path={},size=64M,share=on", file.display());
    let vm = Vm::new(&guest_image()).qemu(&qemu).disk_as_it_comes(disk.socket()).reconnect_s(1);
    let vm = vm.qemu_args(["-machine", "nvdimm=on", "-m", "slots=2,maxmem=2G", "-object"]);
    let vm = vm.qemu_args([backend.as_str(), "-device", "nvdimm,memdev=nv"]);

    let client = format!("QEMU {}, NVDIMM on a file that is not DAX", qemu.version().unwrap());
    is_refused(&vm, &disk, &client, "share a memfd");
}
