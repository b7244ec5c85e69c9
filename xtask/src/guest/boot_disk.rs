//! A disk that a PC's firmware boots: GRUB in the first MiB, then kernel and file system as plain sectors.
//!
//! ```text
//! sector 0    boot.img, which loads core.img from sector 1       (SeaBIOS)
//!             or a FAT volume with core.img as its EFI program   (OVMF)
//! 2044        a mark: an archive with one file, named by the disk
//! 2048        the kernel
//! then        the tools, at the next MiB; not on every disk
//! then        base archive + script archive, at the next MiB
//! then        free, at the next MiB: the offset that is returned
//! ```
//!
//! GRUB reads `(hd0)START+LENGTH` through the firmware, which is slow under emulation. Therefore Linux, not GRUB, reads
//! the tools; a disk without tools has only busybox. Each disk has a mark, so the guest finds a file for each disk that
//! its firmware could read. GRUB is unpacked like the kernel, not installed.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::image::GuestImage;
use super::kernel::unpack_package;
use super::qemu::Firmware;
use super::vm::KERNEL_COMMAND_LINE;
use super::{fat, initramfs};
use crate::{command, packages, workspace};

const SECTOR_BYTES: u64 = 512;
const MIB_BYTES: u64 = 1 << 20;

/// The offset of the mark, between GRUB's FAT volume and the kernel.
const MARK_AT_BYTES: u64 = fat::FREE_SECTOR as u64 * SECTOR_BYTES;
const MARK_BYTES: u64 = MIB_BYTES - MARK_AT_BYTES;

impl GuestImage {
    /// Makes the existing file `disk` boot this guest with SeaBIOS and run `script`. Returns the offset in bytes from
    /// which the disk is free. The guest has no `/tools`. For [`Vm::boot_from_disk`](super::Vm::boot_from_disk).
    ///
    /// # Errors
    /// GRUB's packages cannot be fetched, or the file cannot be written.
    pub fn write_boot_disk(&self, disk: &Path, script: &str) -> Result<u64> {
        self.write_disk(Firmware::SeaBios, disk, None, script, "")
    }

    /// Like [`write_boot_disk`](Self::write_boot_disk), for either firmware, and with tools. For each of `disks` that
    /// the firmware could read (the first one boots), the guest finds a file `/read-by-firmware/N`, counted from 0.
    ///
    /// # Errors
    /// Those of [`write_boot_disk`](Self::write_boot_disk).
    pub fn write_boot_disks(&self, firmware: Firmware, disks: &[&Path], script: &str) -> Result<u64> {
        let first = disks.first().context("a guest that boots from its disk needs a disk")?;
        let tools = fs::read(self.tools())?;
        let mark = |number| format!(" (hd{number}){}", sectors(MARK_AT_BYTES, MARK_BYTES));
        let marks: String = (0..disks.len()).map(mark).collect();
        let free_at = self.write_disk(firmware, first, Some(&tools), script, &marks)?;
        for (number, disk) in disks.iter().enumerate() {
            self.write_mark(disk, number)?;
        }
        Ok(free_at)
    }

    fn write_disk(
        &self,
        firmware: Firmware,
        disk: &Path,
        tools: Option<&[u8]>,
        script: &str,
        marks: &str,
    ) -> Result<u64> {
        let work = tempfile::tempdir_in(self.cache())?;
        let kernel = fs::read(self.kernel())?;
        let tools_at = MIB_BYTES + whole_mib(&kernel);
        let archives_at = tools_at + tools.map_or(0, whole_mib);
        let unpack = tools.map(|tools| unpack_command(tools_at, tools)).unwrap_or_default();
        let archives = self.base_and_script(work.path(), &format!("{unpack}{script}"))?;

        let commands = commands_text((MIB_BYTES, &kernel), (archives_at, &archives), marks);
        fs::write(work.path().join("commands"), commands)?;
        let start = grub(firmware, &prepare_grub(&self.cache(), firmware)?, work.path())?;

        let file = open(disk)?;
        file.write_all_at(&start, 0)?;
        file.write_all_at(&kernel, MIB_BYTES)?;
        file.write_all_at(tools.unwrap_or_default(), tools_at)?;
        file.write_all_at(&archives, archives_at)?;
        Ok(archives_at + whole_mib(&archives))
    }

    fn base_and_script(&self, work: &Path, script: &str) -> Result<Vec<u8>> {
        let (script_cpio, both) = (work.join("script.cpio"), work.join("both.cpio"));
        initramfs::script_archive(script, &script_cpio)?;
        initramfs::join(&[&self.base(), &script_cpio], &both)?;
        Ok(fs::read(both)?)
    }

    fn write_mark(&self, disk: &Path, number: usize) -> Result<()> {
        let work = tempfile::tempdir_in(self.cache())?;
        let archive = work.path().join("mark.cpio");
        initramfs::mark_archive(&format!("read-by-firmware/{number}"), &archive)?;
        let mark = fs::read(archive)?;
        ensure!(
            mark.len() as u64 <= MARK_BYTES,
            "the mark has {} bytes, but only {MARK_BYTES} fit",
            mark.len()
        );
        Ok(open(disk)?.write_all_at(&mark, MARK_AT_BYTES)?)
    }
}

fn open(disk: &Path) -> Result<File> {
    let file = File::options().write(true).open(disk);
    file.with_context(|| format!("cannot open {}", disk.display()))
}

/// The command with which the guest's shell unpacks the tools before it runs the script.
fn unpack_command(tools_at: u64, tools: &[u8]) -> String {
    let (skip, count) = (tools_at / MIB_BYTES, whole_mib(tools) / MIB_BYTES);
    format!("(cd / && dd if=/dev/vda bs=1M skip={skip} count={count} 2> /dev/null | cpio -idu)\n")
}

/// GRUB for one firmware: its package, its folder of modules, and the modules that only it needs.
struct Grub {
    kept_as: &'static str,
    package: &'static str,
    format: &'static str,
    modules: &'static [&'static str],
}

impl Grub {
    const fn of(firmware: Firmware) -> Self {
        match firmware {
            Firmware::SeaBios => {
                Self { kept_as: "grub", package: "grub-pc-bin", format: "i386-pc", modules: &["biosdisk"] }
            }
            Firmware::Ovmf => Self {
                kept_as: "grub-efi",
                package: "grub-efi-amd64-bin",
                format: "x86_64-efi",
                modules: &[],
            },
        }
    }
}

/// Debian's GRUB for the firmware, unpacked once.
fn prepare_grub(cache: &Path, firmware: Firmware) -> Result<PathBuf> {
    let _held_until_return = workspace::lock(cache)?;
    let Grub { kept_as, package, .. } = Grub::of(firmware);
    let grub = cache.join(kept_as);
    if grub.is_dir() {
        return Ok(grub);
    }
    packages::make_available(&["grub-common", package])?;
    let common = unpack_package(cache, "grub-common")?;
    let own = unpack_package(cache, package)?;
    fs::create_dir_all(own.join("usr/bin"))?;
    fs::copy(common.join("usr/bin/grub-mkimage"), own.join("usr/bin/grub-mkimage"))?;
    fs::remove_dir_all(common)?;
    fs::rename(own, &grub)?;
    Ok(grub)
}

/// The disk's first bytes: at most [`MARK_AT_BYTES`], or a whole FAT volume.
fn grub(firmware: Firmware, grub: &Path, work: &Path) -> Result<Vec<u8>> {
    let Grub { format, modules, .. } = Grub::of(firmware);
    let modules_in = grub.join("usr/lib/grub").join(format);
    let core = work.join("core.img");
    let mut mkimage = Command::new(grub.join("usr/bin/grub-mkimage"));
    // The prefix names no disk, so GRUB's root is the disk from which it started.
    mkimage.args(["--prefix=/", "--format", format, "--directory"]).arg(&modules_in);
    mkimage.arg("--config").arg(work.join("commands")).arg("--output").arg(&core).args(modules);
    command::output(mkimage.args(["linux", "boot"]))?;
    let core = fs::read(core)?;
    if firmware == Firmware::Ovmf {
        return fat::volume_with(&core);
    }
    let mut start = fs::read(modules_in.join("boot.img"))?;
    start.extend(core);
    ensure!(
        start.len() as u64 <= MARK_AT_BYTES,
        "GRUB has {} bytes, but only {MARK_AT_BYTES} fit",
        start.len()
    );
    Ok(start)
}

fn commands_text(kernel: (u64, &[u8]), archives: (u64, &[u8]), marks: &str) -> String {
    let [kernel, archives] = [kernel, archives].map(|(at, data)| sectors(at, data.len() as u64));
    format!("linux (${{root}}){kernel} {KERNEL_COMMAND_LINE}\ninitrd (${{root}}){archives}{marks}\nboot\n")
}

/// Formats a position in GRUB's syntax, `START+LENGTH`.
fn sectors(at_bytes: u64, length_bytes: u64) -> String {
    format!("{}+{}", at_bytes / SECTOR_BYTES, length_bytes.div_ceil(SECTOR_BYTES))
}

fn whole_mib(data: &[u8]) -> u64 {
    (data.len() as u64).next_multiple_of(MIB_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sector_list_rounds_the_length_up() {
        assert_eq!(sectors(MIB_BYTES, 513), "2048+2");
    }

    #[test]
    fn commands_name_kernel_then_archives_then_boot() {
        let text = commands_text((MIB_BYTES, &[0; 512]), (2 * MIB_BYTES, &[0; 1024]), " (hd0)7+1");
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("linux (${root})2048+1 console=ttyS0"));
        assert_eq!(lines[1..], ["initrd (${root})4096+2 (hd0)7+1", "boot"]);
    }
}
