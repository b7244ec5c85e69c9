//! A guest image: kernel and file system archives, made once and kept below `target/guest`.
//!
//! The archives' folder is named by a hash of their sources (kernel package, `/init`, each program's path, size and
//! time of change), so a change makes new archives and never damages those in use. With a lock file, processes that
//! prepare an image at the same time take turns.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use super::debian::DebianFolder;
use super::initramfs;
use super::kernel::{Kernel, Source};
use crate::workspace;

/// Increase it when `initramfs.rs` or `kernel.rs` put other content into the archives.
const LAYOUT: u32 = 2;

/// A bootable image; cheap to clone.
#[derive(Debug, Clone)]
pub struct GuestImage {
    kernel: Kernel,
    /// Holds `base.cpio` and `tools.cpio`.
    archives: PathBuf,
}

impl GuestImage {
    /// Makes the image, or finds the one made earlier (a few milliseconds).
    ///
    /// `progress` receives each slow step as it starts.
    ///
    /// # Errors
    /// This is not an x86-64 machine, a program is missing, or the kernel package cannot be fetched.
    pub fn prepare(mut progress: impl FnMut(&str)) -> Result<Self> {
        if !cfg!(target_arch = "x86_64") {
            bail!(
                "the guest has this machine's programs and Debian's amd64 kernel, so it needs an x86-64 machine"
            );
        }
        Self::prepare_in(&workspace::guest_dir(), Source::Host, &mut progress)
    }

    /// Like [`prepare`](Self::prepare), with the kernel of another Debian release and this machine's programs.
    ///
    /// # Errors
    /// Those of [`prepare`](Self::prepare).
    pub fn prepare_with_kernel_of(folder: &DebianFolder, progress: &mut dyn FnMut(&str)) -> Result<Self> {
        Self::prepare_in(folder.cache(), Source::Folder(folder), progress)
    }

    /// An image below `cache` with the kernel and exactly these modules of an unpacked package.
    ///
    /// # Errors
    /// The package lacks the kernel, or a program is missing.
    pub fn of_unpacked(cache: &Path, package: &str, unpacked: &Path, modules: &[&str]) -> Result<Self> {
        let _ = fs::remove_dir_all(cache.join(package));
        Self::pack(cache, Kernel::pick(cache, package, unpacked, modules)?, &mut |_| ())
    }

    fn prepare_in(cache: &Path, from: Source, progress: &mut dyn FnMut(&str)) -> Result<Self> {
        fs::create_dir_all(cache).with_context(|| format!("cannot create {}", cache.display()))?;
        let _held_until_return = workspace::lock(cache)?;
        let kernel = Kernel::prepare(cache, from, progress)?;
        Self::pack(cache, kernel, progress)
    }

    fn pack(cache: &Path, kernel: Kernel, progress: &mut dyn FnMut(&str)) -> Result<Self> {
        let archives = cache.join(key(&kernel)?);
        if !archives.is_dir() {
            progress("packing the guest's file system");
            let staged = tempfile::tempdir_in(cache)?;
            initramfs::write_base(&kernel, &staged.path().join("base.cpio"))?;
            initramfs::write_tools(&staged.path().join("tools.cpio"))?;
            fs::rename(staged.keep(), &archives)?;
        }
        Ok(Self { kernel, archives })
    }

    /// The kernel, for QEMU's `-kernel`.
    #[must_use]
    pub fn kernel(&self) -> PathBuf {
        self.kernel.image()
    }

    /// The Debian package that the kernel came from; its name contains the version.
    #[must_use]
    pub fn kernel_package(&self) -> String {
        self.kernel.name()
    }

    /// Writes a file for QEMU's `-initrd`: the guest runs `script` and has all tools.
    ///
    /// # Errors
    /// `to` cannot be written.
    pub fn write_initrd(&self, script: &str, to: &Path) -> Result<()> {
        self.write_initrd_with(script, &[], &[], to)
    }

    pub(super) fn write_initrd_with(
        &self,
        script: &str,
        programs: &[(PathBuf, PathBuf)],
        files: &[(PathBuf, PathBuf)],
        to: &Path,
    ) -> Result<()> {
        let script_cpio = to.with_extension("script");
        initramfs::run_archive(script, programs, files, &script_cpio)?;
        initramfs::join(&[&self.base(), &self.tools(), &script_cpio], to)?;
        Ok(fs::remove_file(script_cpio)?)
    }

    pub(super) fn base(&self) -> PathBuf {
        self.archives.join("base.cpio")
    }

    pub(super) fn tools(&self) -> PathBuf {
        self.archives.join("tools.cpio")
    }

    /// The folder for files of one run.
    pub(super) fn cache(&self) -> PathBuf {
        self.archives.parent().unwrap_or(&self.archives).to_path_buf()
    }
}

fn key(kernel: &Kernel) -> Result<String> {
    let mut hash = Sha256::new();
    hash.update(format!("{LAYOUT}\n{}\n{}\n", kernel.name(), initramfs::INIT));
    let mut programs = initramfs::programs(&["busybox"])?;
    programs.extend(initramfs::programs(initramfs::TOOLS)?);
    for (name, path) in programs {
        let metadata = fs::metadata(&path)?;
        let changed_s = metadata.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        hash.update(format!("{name} {} {} {changed_s}\n", path.display(), metadata.len()));
    }
    let digest = hash.finalize();
    let hex: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("image-{hex}"))
}
