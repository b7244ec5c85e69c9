//! A running guest migrates between QEMUs on this host, repeatedly, while fio writes and verifies.
//!
//! Both QEMUs connect to the same sockets of one server. A disk may have two sessions, of which one has rings
//! (`docs/how-to/migration.md`). Guest memory goes through a socket from one QEMU to the other, page by page. QEMU
//! learns only from the server's dirty log which pages the device wrote meanwhile.
#![cfg(target_arch = "x86_64")] // the guest is an x86-64 machine
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use xtask::guest::{RunningVm, Vm};

use crate::guest::{MIB, Served, finish, number, sizes, spawn};
use crate::rig::eventually;

/// Verified runs on all disks, one after another, until a file tells them to stop. Half of fio's requests are reads,
/// into pages that only the device writes.
const VERIFIED_UNTIL_TOLD: &str = "
    (read stop < /dev/console; touch /tmp/stop) &
    number=0
    until [ -e /tmp/stop ]; do
        for disk in /dev/vd*; do
            echo run $number on $disk starts
            DISK=$disk verified --bsrange=4k-128k --size=8m --randseed=$number
        done
        number=$((number + 1))
    done
    echo BB:RUNS=$number
    echo BB:COMPLAINTS=$(complaints)";

/// One QEMU and its control socket.
struct Host {
    vm: RunningVm,
    qmp: Qmp,
}

impl Host {
    /// The QEMU in which the guest boots.
    fn first(vm: &Vm, place: &Path) -> Self {
        Self::start(vm, &place.join("qmp-0"), None)
    }

    /// A QEMU that waits for the guest; returns the socket on which it waits.
    fn next(vm: &Vm, place: &Path, number: u64) -> (Self, PathBuf) {
        let incoming = place.join(format!("incoming-{number}"));
        let host = Self::start(vm, &place.join(format!("qmp-{number}")), Some(&incoming));
        assert!(incoming.exists());
        (host, incoming)
    }

    fn start(vm: &Vm, qmp: &Path, incoming: Option<&Path>) -> Self {
        let mut vm =
            vm.clone().qemu_args(["-qmp".to_owned(), format!("unix:{},server=on,wait=off", qmp.display())]);
        if let Some(incoming) = incoming {
            vm = vm.qemu_args(["-incoming".to_owned(), format!("unix:{}", incoming.display())]);
        }
        let vm = spawn(&vm);
        let socket = eventually("QEMU listens", || UnixStream::connect(qmp).ok());
        Self { vm, qmp: Qmp::new(socket) }
    }

    fn wait_for(&mut self, pattern: &str) -> Result<(), KernelDied> {
        self.vm.wait_for_line(pattern, LINE_DEADLINE).map(drop).map_err(|error| died(format!("{error:#}")))
    }

    /// Migrates the guest. Returns QEMU's report once the guest runs in the new QEMU.
    fn migrate_to(&mut self, incoming: &Path) -> Value {
        // The bandwidth is low enough that the guest writes while most memory is copied, and high enough that the rest
        // is copied within the pause.
        self.qmp.ask("migrate-set-parameters", json!({ "max-bandwidth": 64 * MIB, "downtime-limit": 400 }));
        self.qmp.ask("migrate", json!({ "uri": format!("unix:{}", incoming.display()) }));
        eventually("the migration is over", || {
            let state = self.qmp.ask("query-migrate", json!({}));
            let status = state["status"].as_str().unwrap_or_default().to_owned();
            assert!(status != "failed" && status != "cancelled", "{state}");
            (status == "completed").then_some(state)
        })
    }
}

/// QEMU's control socket: one JSON line per command.
struct Qmp {
    socket: BufReader<UnixStream>,
}

impl Qmp {
    fn new(socket: UnixStream) -> Self {
        socket.set_read_timeout(Some(sizes::GUEST_DEADLINE.now())).unwrap();
        let mut qmp = Self { socket: BufReader::new(socket) };
        assert!(qmp.line().get("QMP").is_some());
        qmp.ask("qmp_capabilities", json!({}));
        qmp
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        assert!(self.socket.read_line(&mut line).unwrap() > 0, "QEMU is gone");
        serde_json::from_str(&line).unwrap()
    }

    /// Sends a command and returns its answer. Skips events before the answer.
    fn ask(&mut self, command: &str, arguments: Value) -> Value {
        let question = json!({ "execute": command, "arguments": arguments });
        self.socket.get_mut().write_all(format!("{question}\n").as_bytes()).unwrap();
        loop {
            let mut answer = self.line();
            assert!(answer.get("error").is_none(), "{command}: {answer}");
            if answer.get("return").is_some() {
                return answer["return"].take();
            }
        }
    }
}

/// How often the test is tried if the emulator breaks the guest. The emulated processors can lose a store to memory
/// that QEMU is sending: on a busy host, the guest's kernel then panics, stops or reports a BUG, even without any disk.
/// Wrong data that fio finds always fails the test if the guest's kernel is intact.
pub const ATTEMPTS: usize = 3;
/// Longer than a run of fio takes. A guest that prints nothing for this long has stopped.
const LINE_DEADLINE: Duration = Duration::from_secs(60);

/// The console of a guest whose kernel died or stopped.
#[derive(Debug)]
pub struct KernelDied(pub String);

/// Fails the test if fio found wrong data and the guest's kernel reported nothing wrong with its own memory.
pub fn died(text: String) -> KernelDied {
    let kernel_died = ["Kernel panic", "soft lockup", "BUG: "].iter().any(|sign| text.contains(sign));
    assert!(kernel_died || !text.contains("BB:FAILED"), "{text}");
    KernelDied(text)
}

#[test]
fn verified_writes_go_on_while_the_guest_migrates() {
    for attempt in 1..=ATTEMPTS {
        match migrate_again_and_again() {
            Ok(()) => return,
            Err(KernelDied(console)) => println!("attempt {attempt}: {console}"),
        }
    }
    panic!("the guest's kernel died in each of {ATTEMPTS} attempts");
}

/// `/dev/vda` has split rings, `/dev/vdb` packed ones.
fn migrate_again_and_again() -> Result<(), KernelDied> {
    let disks = [Served::new(8 * MIB, &[]), Served::new(8 * MIB, &[])];
    let vm = disks[0].vm(VERIFIED_UNTIL_TOLD).memory_mib(384).disk_socket(disks[1].socket(), 2);
    let vm = vm.disk_args("queue-size=1024,packed=on");
    let place = tempfile::tempdir().unwrap();
    let mut here = Host::first(&vm, place.path());
    here.wait_for("on /dev/vdb starts")?;

    for number in 1..=sizes::MIGRATIONS.now() {
        let (there, incoming) = Host::next(&vm, place.path(), number);
        let disk = usize::from(number % 2 == 0);
        disks[disk].wait_writing();
        let state = here.migrate_to(&incoming);
        println!("migration {number}: {state}");
        here = there;
        // Waits for whole runs that began after the migration, because their data was not in memory before the
        // migration.
        here.wait_for("on /dev/vda starts")?;
        here.wait_for("on /dev/vdb starts")?;
    }
    here.vm.send_line("stop").unwrap();
    here.wait_for("BB:COMPLAINTS=")?;
    let seen = finish(here.vm);

    assert_eq!(number(&seen, "COMPLAINTS"), 0, "{}", seen.console);
    for mut disk in disks {
        let log = disk.server().log();
        assert!(!log.contains("session ended"), "{log}");
        disk.terminate();
    }
    Ok(())
}
