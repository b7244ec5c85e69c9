//! `cargo xtask demo`: runs bareblk with a stock guest, and compares its figures with the host's.
//!
//! `packages → build → disk image (→ Ceph cluster) → server → guest runs fio → host runs the same fio → table`
//!
//! After success, an error or Ctrl-C, `Drop` removes server, socket, image and cluster.

mod ceph;
mod disk;
mod fio;
mod progress;
mod report;
mod server;

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use xtask::guest::{Accel, GuestImage, GuestOutput, RunningVm, Vm};
use xtask::{command, packages, workspace};

use crate::setup;
use ceph::CephDisk;
use disk::DemoDisk;
use fio::{JOBS, Numbers};
use progress::{Interrupt, Progress};
use report::Row;
use server::Server;

/// A boot with /dev/kvm takes a second or two; if the device exists but does not work, the guest never boots.
const KVM_TRIAL: Duration = Duration::from_secs(10);
const BOOT_LIMIT: Duration = Duration::from_secs(120);
const GUEST_QUEUES: u16 = 2;

/// Options of the demo.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    setup: setup::Args,
    /// Put the disk into a Ceph cluster of one node, which is started for the demo and stopped afterwards
    #[arg(long)]
    ceph: bool,
    /// Keep the disk image and the server's log, and print their location
    #[arg(long)]
    keep: bool,
    /// Seconds that each fio job runs, in the guest and on the host
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    setup::ensure(args.setup, if args.ceph { setup::CEPH } else { setup::USUAL })?;
    let interrupt = Interrupt::catch()?;
    let progress = Progress::new();
    let program = build_server(&progress)?;

    let mut disk = DemoDisk::create(&progress, &interrupt)?;
    if args.keep {
        println!("keeping {}", disk.keep().display());
    }
    let ceph = args.ceph.then(|| CephDisk::create(&disk.image(), &progress)).transpose()?;
    interrupt.check()?;
    let image = GuestImage::prepare(|step| progress.step(step))?;
    let accel = pick_accel(&image, &progress);

    progress.step("starting the server");
    let file = || vec![disk.image().to_string_lossy().into_owned()];
    let served = ceph.as_ref().map_or_else(file, CephDisk::served);
    let mut server = Server::start(&program, &served, disk.log(), &interrupt)?;
    let guest = run_guest(&image, accel, &mut server, args.seconds, &progress, &interrupt)?;
    progress.step("stopping the server");
    server.stop()?;

    let can_run = ceph.is_none() || ceph::fio_has_rbd()?;
    let host = Host { disk: &disk, ceph: ceph.as_ref(), can_run };
    let how = host.says();
    let rows = compare(guest, &host, args.seconds, &progress, &interrupt)?;
    if ceph.is_some() {
        progress.step("stopping the cluster");
        drop(ceph);
    }
    progress.finish();
    print!("{}", report::text(&rows, accel, &image.kernel_package(), how));
    Ok(())
}

fn build_server(progress: &Progress) -> Result<std::path::PathBuf> {
    progress.step("building bareblk (release; a first build takes minutes)");
    let mut cargo = Command::new(workspace::cargo());
    command::output(
        cargo.args(["build", "--release", "--package", "bareblk"]).current_dir(workspace::root()),
    )?;
    Ok(workspace::build_dir()?.join("release").join("bareblk"))
}

/// KVM, if a guest really boots with it: the device may exist without working.
fn pick_accel(image: &GuestImage, progress: &Progress) -> Accel {
    if !packages::opens_read_write("/dev/kvm".as_ref()) {
        return Accel::Tcg;
    }
    progress.step("testing whether /dev/kvm works");
    let boots = Vm::new(image).accel(Accel::Kvm).timeout(KVM_TRIAL).run();
    if boots.is_ok_and(|output| output.exit_code == Some(0)) { Accel::Kvm } else { Accel::Tcg }
}

/// A job's result in the guest, and its cost for the server.
struct GuestJob {
    numbers: Numbers,
    server_cpu: Duration,
}

fn run_guest(
    image: &GuestImage,
    accel: Accel,
    server: &mut Server,
    seconds: u32,
    progress: &Progress,
    interrupt: &Interrupt,
) -> Result<Vec<GuestJob>> {
    progress.step("booting the guest");
    let vm = Vm::new(image).accel(accel).disk_socket(server.socket(), GUEST_QUEUES);
    let limit = BOOT_LIMIT + Duration::from_secs(120 + 4 * u64::from(seconds));
    let mut vm = vm.script(&fio::guest_script(seconds)).timeout(limit).spawn()?;
    let mut watch = Watch { vm: &mut vm, server, interrupt };

    watch.line("BB-START verify")?;
    progress.step("guest: writing with verification");
    watch.line("BB-DONE verify")?;
    let mut server_cpu = Vec::new();
    for job in JOBS {
        watch.line(&format!("BB-START {}", job.name))?;
        progress.step(&format!("guest: {} for {seconds} s", job.title));
        let before = watch.server.cpu_time()?;
        watch.line(&format!("BB-DONE {}", job.name))?;
        server_cpu.push(watch.server.cpu_time()?.saturating_sub(before));
    }
    let output = watch.end()?;
    JOBS.iter().zip(server_cpu).map(|(job, cpu)| guest_job(&output, job, cpu)).collect()
}

fn guest_job(output: &GuestOutput, job: &fio::Job, server_cpu: Duration) -> Result<GuestJob> {
    let json =
        output.block(job.name).with_context(|| format!("the guest printed no result of {}", job.name))?;
    Ok(GuestJob { numbers: job.parse(json)?, server_cpu })
}

/// Watches a guest until it or its server fails, or the user interrupts.
struct Watch<'a> {
    vm: &'a mut RunningVm,
    server: &'a mut Server,
    interrupt: &'a Interrupt,
}

impl Watch<'_> {
    fn line(&mut self, pattern: &str) -> Result<()> {
        loop {
            if self.vm.wait_for_line(pattern, Interrupt::POLL).is_ok() {
                return Ok(());
            }
            self.interrupt.check()?;
            self.server.check_alive()?;
            if let Some(output) = self.vm.try_wait()? {
                bail!("the guest ended before it printed {pattern:?}:\n{}", output.console);
            }
        }
    }

    fn end(&mut self) -> Result<GuestOutput> {
        loop {
            if let Some(output) = self.vm.try_wait()? {
                return Ok(output);
            }
            self.interrupt.check()?;
            std::thread::sleep(Interrupt::POLL);
        }
    }
}

/// How fio reaches the disk on the host.
struct Host<'d> {
    disk: &'d DemoDisk,
    ceph: Option<&'d CephDisk>,
    /// Whether fio has the engine for it.
    can_run: bool,
}

impl Host<'_> {
    fn says(&self) -> &'static str {
        match self.ceph {
            None => "fio: libaio with O_DIRECT on both sides",
            Some(_) if self.can_run => ceph::HOST,
            Some(_) => ceph::NO_HOST,
        }
    }

    fn run(&self, job: &fio::Job, seconds: u32, interrupt: &Interrupt) -> Result<Option<Numbers>> {
        if !self.can_run {
            return Ok(None);
        }
        let Some(ceph) = self.ceph else {
            let mut fio = Command::new("fio");
            fio.args(job.args(&self.disk.image().to_string_lossy(), seconds)).arg("--allow_file_create=0");
            return job.parse(&interruptible(&mut fio, interrupt)?.0).map(Some);
        };
        let (report, cpu) = interruptible(&mut ceph.fio(job, seconds), interrupt)?;
        // fio reports the CPU time of its own thread; librbd works on others.
        Ok(Some(Numbers { cpu_us: cpu.as_secs_f64() * 1e6, ..job.parse(&report)? }))
    }
}

fn compare(
    guest: Vec<GuestJob>,
    host: &Host<'_>,
    seconds: u32,
    progress: &Progress,
    interrupt: &Interrupt,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (job, guest) in JOBS.iter().zip(guest) {
        progress.step(&format!("host: {} for {seconds} s", job.title));
        let host = host.run(job, seconds, interrupt)?;
        rows.push(Row { title: job.title, guest: guest.numbers, host, server_cpu: guest.server_cpu });
    }
    Ok(rows)
}

/// Like `command::output`, but ends early if the user interrupts. Also returns the program's processor time, as seen
/// shortly before its end.
fn interruptible(command: &mut Command, interrupt: &Interrupt) -> Result<(String, Duration)> {
    let answer = tempfile::NamedTempFile::new()?;
    let name = command::describe(command);
    let mut child = command.stdin(Stdio::null()).stdout(answer.reopen()?).spawn()?;
    let mut cpu = Duration::ZERO;
    let status = loop {
        cpu = server::cpu_time(&child).unwrap_or_default().max(cpu);
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if let Err(error) = interrupt.check() {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
        std::thread::sleep(Interrupt::POLL);
    };
    let text = std::fs::read_to_string(answer.path())?;
    if !status.success() {
        bail!("`{name}` failed ({status}): {}", text.trim());
    }
    Ok((text, cpu))
}
