//! The guest's kernel: Debian's, unpacked from its package and never installed.
//!
//! `linux-image-cloud-amd64` has no content but depends on the package that contains the kernel. `apt-get download`
//! fetches that package, and `dpkg -x` unpacks it. The image keeps the kernel, and the modules that a guest with a
//! virtio disk and ext4 needs and that are not built in. Their order comes from the modules' `depends=` entries,
//! because the package has no `modules.dep`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::debian::DebianFolder;
use crate::{command, packages};

const META_PACKAGE: &str = "linux-image-cloud-amd64";

/// Modules that the guest needs; their dependencies are added. Which ones are built in differs between kernels (6.1:
/// all virtio modules are separate; 6.12: only `virtio_blk`). ext4 requests `crc32c` by its alias.
const MODULES: &[&str] = &["virtio_pci", "virtio_blk", "crc32c_generic", "crc32c_intel", "ext4", "loop"];

/// An unpacked kernel.
#[derive(Debug, Clone)]
pub(super) struct Kernel {
    /// A folder named after the package, with `vmlinuz` and `modules/`.
    pub(super) dir: PathBuf,
}

impl Kernel {
    /// The kernel in `cache`; fetches one only if there is none, even if a newer package exists.
    pub(super) fn prepare(cache: &Path, from: Source, progress: &mut dyn FnMut(&str)) -> Result<Self> {
        if let Some(dir) = newest_unpacked(cache)? {
            return Ok(Self { dir });
        }
        from.make_available(META_PACKAGE)?;
        let package = package_with_kernel(from)?;
        progress(&format!("fetching the guest's kernel ({package})"));
        let unpacked = unpack_package_from(cache, from, &package)?;
        progress("picking the guest's kernel modules");
        let kernel = Self::pick(cache, &package, &unpacked, MODULES)?;
        fs::remove_dir_all(&unpacked)?;
        Ok(kernel)
    }

    /// The kernel and these modules of an unpacked package, copied to the folder `package` in `cache`.
    pub(super) fn pick(cache: &Path, package: &str, unpacked: &Path, modules: &[&str]) -> Result<Self> {
        let dir = cache.join(package);
        let staged = cache.join(format!("{package}.new"));
        pick(unpacked, &staged, modules)?;
        fs::rename(&staged, &dir).with_context(|| format!("cannot rename to {}", dir.display()))?;
        Ok(Self { dir })
    }

    pub(super) fn image(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    pub(super) fn modules(&self) -> PathBuf {
        self.dir.join("modules")
    }

    pub(super) fn name(&self) -> String {
        self.dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// Where packages come from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source<'a> {
    /// This machine's Debian release.
    Host,
    /// The Debian release in that folder.
    Folder(&'a DebianFolder),
}

impl Source<'_> {
    fn program(self, name: &str) -> Command {
        match self {
            Self::Host => Command::new(name),
            Self::Folder(folder) => folder.command(name),
        }
    }

    /// Makes a package known to apt-get. A folder has package lists since its creation.
    fn make_available(self, package: &str) -> Result<()> {
        match self {
            Self::Host => packages::make_available(&[package]),
            Self::Folder(_) => Ok(()),
        }
    }

    fn update_lists(self) -> Result<()> {
        match self {
            Self::Host => packages::update_lists(),
            Self::Folder(folder) => {
                command::output(folder.command("apt-get").args(["update", "-q"])).map(drop)
            }
        }
    }
}

fn newest_unpacked(cache: &Path) -> Result<Option<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(cache)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("linux-image-") && path.join("modules/order").exists() && !name.ends_with(".new")
        {
            found.push(path);
        }
    }
    found.sort();
    Ok(found.pop())
}

fn package_with_kernel(from: Source) -> Result<String> {
    let depends =
        command::output(from.program("apt-cache").args(["depends", META_PACKAGE]).env("LC_ALL", "C"))?;
    let name = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
    let name = name.with_context(|| format!("{META_PACKAGE} depends on no kernel package"))?;
    Ok(format!("linux-image-{name}"))
}

/// Fetches a package of this machine's Debian release and unpacks it below `cache`; the caller renames or removes the
/// folder that is returned.
///
/// # Errors
/// apt-get or dpkg fails.
pub fn unpack_package(cache: &Path, package: &str) -> Result<PathBuf> {
    unpack_package_from(cache, Source::Host, package)
}

/// Fetches a package and unpacks it below `cache`; the caller removes the folder that is returned.
pub(super) fn unpack_package_from(cache: &Path, from: Source, package: &str) -> Result<PathBuf> {
    let dir = cache.join(format!("{package}.unpacked"));
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir)?;
    download(&dir, from, package)?;
    let archive = fs::read_dir(&dir)?.filter_map(Result::ok).map(|entry| entry.path());
    let archive = archive.into_iter().find(|path| path.extension().is_some_and(|e| e == "deb"));
    let archive = archive.with_context(|| format!("apt-get download {package} left no .deb file"))?;
    command::output(Command::new("dpkg").arg("-x").arg(&archive).arg(&dir))?;
    fs::remove_file(&archive)?;
    Ok(dir)
}

fn download(dir: &Path, from: Source, package: &str) -> Result<()> {
    // apt-get writes to the current folder, but a program inside another root starts at `/`.
    let fetch = || {
        let mut shell = from.program("sh");
        shell.args(["-c", r#"cd "$1" && exec apt-get download -q "$2""#, "sh"]).arg(dir).arg(package);
        command::output(&mut shell)
    };
    if fetch().is_err() {
        // The mirror may have deleted files that old package lists name.
        from.update_lists()?;
        fetch()?;
    }
    Ok(())
}

/// Copies the kernel image and the wanted modules from an unpacked package to `to`.
fn pick(unpacked: &Path, to: &Path, wanted: &[&str]) -> Result<()> {
    let _ = fs::remove_dir_all(to);
    fs::create_dir_all(to.join("modules"))?;
    let image = files_below(&unpacked.join("boot"))?;
    let image = image.iter().find(|path| file_name(path).starts_with("vmlinuz"));
    fs::copy(image.context("the kernel package has no vmlinuz")?, to.join("vmlinuz"))?;

    let modules = module_files(unpacked)?;
    let mut order = String::new();
    for name in load_order(&modules, to, wanted)? {
        order.push_str(&name);
        order.push_str(".ko\n");
    }
    fs::write(to.join("modules/order"), order)?;
    Ok(())
}

fn module_files(unpacked: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let places = [unpacked.join("lib/modules"), unpacked.join("usr/lib/modules")];
    let place = places.iter().find(|place| place.is_dir()).context("the kernel package has no modules")?;
    let files = files_below(place)?.into_iter();
    Ok(files.filter_map(|path| Some((module_name(&file_name(&path))?, path))).collect())
}

/// `virtio-rng.ko.xz` is the module `virtio_rng`.
fn module_name(file: &str) -> Option<String> {
    let (stem, rest) = file.split_once(".ko")?;
    matches!(rest, "" | ".xz" | ".zst" | ".gz").then(|| stem.replace('-', "_"))
}

/// Unpacks the wanted modules to `to/modules`, and returns their names, dependencies first.
fn load_order(modules: &BTreeMap<String, PathBuf>, to: &Path, wanted: &[&str]) -> Result<Vec<String>> {
    let mut order = Vec::new();
    let mut waiting: Vec<(String, bool)> =
        wanted.iter().rev().map(|name| ((*name).to_owned(), false)).collect();
    while let Some((name, dependencies_done)) = waiting.pop() {
        let Some(path) = modules.get(&name).filter(|_| !order.contains(&name)) else { continue };
        if dependencies_done {
            order.push(name);
            continue;
        }
        let bytes = read_module(path)?;
        fs::write(to.join("modules").join(format!("{name}.ko")), &bytes)?;
        waiting.push((name, true));
        waiting.extend(dependencies(&bytes).into_iter().map(|dependency| (dependency, false)));
    }
    Ok(order)
}

fn read_module(path: &Path) -> Result<Vec<u8>> {
    let unpacker = match path.extension().and_then(|extension| extension.to_str()) {
        Some("ko") => return Ok(fs::read(path)?),
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => "gzip",
    };
    let result = Command::new(unpacker).arg("-dc").arg(path).output();
    let result = result.with_context(|| format!("cannot start `{unpacker}`"))?;
    if !result.status.success() {
        bail!("`{unpacker} -dc {}` failed ({})", path.display(), result.status);
    }
    Ok(result.stdout)
}

/// The modules named in the `depends=` entry of a module's `.modinfo` section.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let value = module[at + KEY.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let names = String::from_utf8_lossy(value).into_owned();
    names.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

fn files_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut dirs = vec![dir.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))? {
            let entry = entry?;
            if entry.file_type()?.is_dir() { dirs.push(entry.path()) } else { files.push(entry.path()) }
        }
    }
    Ok(files)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(dir: &Path, name: &str, depends: &str) -> (String, PathBuf) {
        let path = dir.join(format!("{name}.ko"));
        fs::write(&path, format!("\x7fELF\0license=GPL\0depends={depends}\0intree=Y\0")).unwrap();
        (name.to_owned(), path)
    }

    #[test]
    fn modules_load_after_what_they_depend_on_and_once() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("modules")).unwrap();
        let modules = BTreeMap::from([
            module(dir.path(), "virtio_pci", "virtio,virtio_ring"),
            module(dir.path(), "virtio_ring", ""),
            module(dir.path(), "virtio", "virtio_ring"),
            module(dir.path(), "virtio_blk", "virtio,virtio_ring"),
            module(dir.path(), "unwanted", ""),
        ]);

        let order = load_order(&modules, dir.path(), MODULES).unwrap();

        assert_eq!(order, ["virtio_ring", "virtio", "virtio_pci", "virtio_blk"]);
        assert!(dir.path().join("modules/virtio.ko").exists());
        assert!(!dir.path().join("modules/unwanted.ko").exists());
    }

    #[test]
    fn built_in_dependency_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("modules")).unwrap();
        let modules = BTreeMap::from([module(dir.path(), "virtio_blk", "virtio,virtio_ring")]);

        assert_eq!(load_order(&modules, dir.path(), MODULES).unwrap(), ["virtio_blk"]);
    }

    #[test]
    fn module_without_entry_depends_on_nothing() {
        assert_eq!(dependencies(b"\x7fELF\0license=GPL\0"), Vec::<String>::new());
    }

    #[test]
    fn file_name_with_dash_and_compression_gives_the_module_name() {
        assert_eq!(module_name("crc32c-intel.ko.xz").as_deref(), Some("crc32c_intel"));
        assert_eq!(module_name("modules.order"), None);
    }
}
