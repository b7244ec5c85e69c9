//! A disk that a PC's firmware boots: GRUB in the first sectors, then kernel and file system as plain sectors.
//!
//! ```text
//! sector 0    boot.img   loads the sector after it
//! sector 1    core.img   GRUB with one embedded command list
//! 2048        the kernel
//! then        base archive + script archive, at the next MiB
//! then        free, at the next MiB: the offset that is returned
//! ```
//!
//! No partitions and no file system: GRUB reads `(hd0)START+LENGTH`. The guest has no `/tools` here, only
//! busybox, because firmware reads slowly under emulation. GRUB is unpacked like the kernel, not installed.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::image::{GuestImage, lock};
use super::initramfs;
use super::kernel::unpack_package;
use super::vm::KERNEL_COMMAND_LINE;
use crate::{command, packages};

const SECTOR_BYTES: u64 = 512;
const MIB_BYTES: u64 = 1 << 20;

impl GuestImage {
    /// Makes the existing file `disk` boot this guest and run `script`, and returns the offset in bytes
    /// from which on the disk is free. For [`Vm::boot_from_disk`](super::Vm::boot_from_disk).
    ///
    /// # Errors
    /// If GRUB's packages cannot be fetched or the file cannot be written.
    pub fn write_boot_disk(&self, disk: &Path, script: &str) -> Result<u64> {
        let grub = prepare_grub(&self.cache())?;
        let work = tempfile::tempdir_in(self.cache())?;
        let kernel = fs::read(self.kernel())?;
        let archives = self.base_and_script(work.path(), script)?;
        let kernel_at = MIB_BYTES;
        let archives_at = kernel_at + whole_mib(&kernel);
        let free_at = archives_at + whole_mib(&archives);

        let commands = work.path().join("commands");
        fs::write(&commands, commands_text((kernel_at, &kernel), (archives_at, &archives)))?;
        let core = make_core(&grub, work.path(), &commands)?;

        let file = File::options().write(true).open(disk);
        let file = file.with_context(|| format!("cannot open {}", disk.display()))?;
        file.write_all_at(&fs::read(grub.join("usr/lib/grub/i386-pc/boot.img"))?, 0)?;
        file.write_all_at(&core, SECTOR_BYTES)?;
        file.write_all_at(&kernel, kernel_at)?;
        file.write_all_at(&archives, archives_at)?;
        Ok(free_at)
    }

    fn base_and_script(&self, work: &Path, script: &str) -> Result<Vec<u8>> {
        let (script_cpio, both) = (work.join("script.cpio"), work.join("both.cpio"));
        initramfs::script_archive(script, &script_cpio)?;
        initramfs::join(&[&self.base(), &script_cpio], &both)?;
        Ok(fs::read(both)?)
    }
}

/// Debian's GRUB for PC firmware, unpacked once.
fn prepare_grub(cache: &Path) -> Result<PathBuf> {
    let _held_until_return = lock(cache)?;
    let grub = cache.join("grub");
    if grub.is_dir() {
        return Ok(grub);
    }
    packages::make_available(&["grub-common", "grub-pc-bin"])?;
    let common = unpack_package(cache, "grub-common")?;
    let pc = unpack_package(cache, "grub-pc-bin")?;
    fs::create_dir_all(pc.join("usr/bin"))?;
    fs::copy(common.join("usr/bin/grub-mkimage"), pc.join("usr/bin/grub-mkimage"))?;
    fs::remove_dir_all(common)?;
    fs::rename(pc, &grub)?;
    Ok(grub)
}

fn make_core(grub: &Path, work: &Path, commands: &Path) -> Result<Vec<u8>> {
    let core = work.join("core.img");
    let mut mkimage = Command::new(grub.join("usr/bin/grub-mkimage"));
    mkimage
        .args(["--format=i386-pc", "--prefix=(hd0)", "--directory"])
        .arg(grub.join("usr/lib/grub/i386-pc"));
    mkimage.arg("--config").arg(commands).arg("--output").arg(&core).args(["biosdisk", "linux", "boot"]);
    command::output(&mut mkimage)?;
    Ok(fs::read(core)?)
}

fn commands_text(kernel: (u64, &[u8]), archives: (u64, &[u8])) -> String {
    let (kernel, archives) = (sectors(kernel.0, kernel.1), sectors(archives.0, archives.1));
    format!("linux (hd0){kernel} {KERNEL_COMMAND_LINE}\ninitrd (hd0){archives}\nboot\n")
}

/// GRUB's `START+LENGTH`.
fn sectors(at_bytes: u64, data: &[u8]) -> String {
    format!("{}+{}", at_bytes / SECTOR_BYTES, (data.len() as u64).div_ceil(SECTOR_BYTES))
}

fn whole_mib(data: &[u8]) -> u64 {
    (data.len() as u64).next_multiple_of(MIB_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sector_list_rounds_the_length_up() {
        assert_eq!(sectors(MIB_BYTES, &[0; 513]), "2048+2");
    }

    #[test]
    fn commands_name_kernel_then_archives_then_boot() {
        let text = commands_text((MIB_BYTES, &[0; 512]), (2 * MIB_BYTES, &[0; 1024]));
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("linux (hd0)2048+1 console=ttyS0"));
        assert_eq!(lines[1..], ["initrd (hd0)4096+2", "boot"]);
    }
}
