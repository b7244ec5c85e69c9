//! The kernel for which the module is built: headers, image and `vhost.h`, unpacked from Debian's packages.
//!
//! `vhost.h` is only in the kernel's source package. pahole is unpacked too if it is not installed.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use xtask::{command, packages};

/// Packages that depend on the headers of one kernel version. Debian 12 has Linux 6.12 only under the first name.
const HEADERS: &[&str] = &["linux-headers-6.12-cloud-amd64", "linux-headers-cloud-amd64"];
/// pahole and the libraries that it needs besides the C library and zlib.
const PAHOLE: &[&str] = &["pahole", "libbpf1", "libdw1", "libelf1"];
/// Programs that the build and the guest need, and the packages that contain them.
const PROGRAMS: &[(&str, &str)] = &[
    ("apt-get", "apt"),
    ("dpkg-deb", "dpkg"),
    ("gcc", "gcc"),
    ("make", "make"),
    ("tar", "tar"),
    ("xz", "xz-utils"),
    ("cpio", "cpio"),
    ("busybox", "busybox-static"),
    ("qemu-system-x86_64", "qemu-system-x86"),
];

/// An unpacked kernel with its headers.
#[derive(Debug)]
pub(super) struct Kernel {
    /// For example `6.12.117+deb12-cloud-amd64`.
    pub(super) release: String,
    /// The kernel's folder below the cache.
    pub(super) dir: PathBuf,
}

impl Kernel {
    /// The root of the unpacked packages.
    pub(super) fn tree(&self) -> PathBuf {
        self.dir.join("tree")
    }

    fn headers(&self) -> PathBuf {
        self.tree().join("usr/src").join(format!("linux-headers-{}", self.release))
    }

    /// Variables of `kmod/vhost_blk/Makefile`.
    pub(super) fn make_variables(&self) -> Vec<OsString> {
        let variable = |name: &str, path: PathBuf| {
            let mut text = OsString::from(format!("{name}="));
            text.push(path);
            text
        };
        let modules =
            ["lib/modules", "usr/lib/modules"].map(|place| self.tree().join(place).join(&self.release));
        let modules = modules.into_iter().find(|place| place.is_dir()).unwrap_or_default();
        let vhost = modules.join("kernel/drivers/vhost/vhost.ko");
        let compressed = vhost.with_extension("ko.xz");
        vec![
            variable("KDIR", self.headers()),
            variable("VHOST_H", self.dir.join("vhost.h")),
            variable("VHOST_KO", if compressed.exists() { compressed } else { vhost }),
        ]
    }

    /// The search paths for programs and libraries with the unpacked pahole.
    pub(super) fn pahole_environment(&self) -> (OsString, PathBuf) {
        let mut path = OsString::from(self.tree().join("usr/bin"));
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        (path, self.tree().join("usr/lib/x86_64-linux-gnu"))
    }
}

/// Fetches and unpacks the newest kernel that the module supports, or finds it in the cache.
pub(super) fn prepare(cache: &Path, progress: &mut dyn FnMut(&str)) -> Result<Kernel> {
    let missing: Vec<&str> = PROGRAMS
        .iter()
        .filter(|(program, _)| packages::find_program(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    if !missing.is_empty() {
        bail!("the module cannot be built and tested here without these packages: {}", missing.join(", "));
    }
    if !cfg!(target_arch = "x86_64") {
        bail!("the module is built and tested only on x86-64, because the guest has Debian's amd64 kernel");
    }
    if let Some(kernel) = cached(cache)? {
        return Ok(kernel);
    }
    let headers = headers_package()?;
    let release = headers.trim_start_matches("linux-headers-").to_owned();
    let kernel = Kernel { dir: cache.join(&release), release };
    progress(&format!("fetching headers, image and source of Linux {}", kernel.release));
    let _ = fs::remove_dir_all(&kernel.dir);
    fetch(&kernel, &headers)?;
    fs::write(kernel.dir.join("complete"), "")?;
    Ok(kernel)
}

/// The newest kernel that an earlier run has unpacked, even if a newer package exists.
fn cached(cache: &Path) -> Result<Option<Kernel>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(cache)? {
        let dir = entry?.path();
        if dir.join("complete").exists() {
            found.push(dir);
        }
    }
    found.sort();
    let kernel = |dir: PathBuf| {
        let release = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Kernel { release, dir }
    };
    Ok(found.pop().map(kernel))
}

/// The package with the headers of Linux 6.12 or newer.
fn headers_package() -> Result<String> {
    packages::make_available(&HEADERS[..1]).ok();
    for meta in HEADERS {
        let depends = dependencies(meta);
        let headers = depends.iter().find(|name| name.starts_with("linux-headers-"));
        if let Some(headers) = headers.filter(|name| is_new_enough(name)) {
            return Ok(headers.clone());
        }
    }
    bail!("this machine's package sources have no headers of Linux 6.12 or newer ({})", HEADERS.join(", "))
}

/// `linux-headers-6.12.117+deb12-cloud-amd64` is; versions before 6.12 lack functions that the module uses.
fn is_new_enough(headers: &str) -> bool {
    let version = headers.trim_start_matches("linux-headers-");
    let mut numbers = version.split(['.', '+', '-']).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 12)
}

/// The packages that `package` depends on; none if apt does not know the package.
fn dependencies(package: &str) -> Vec<String> {
    let text = command::output(Command::new("apt-cache").args(["depends", package]).env("LC_ALL", "C"));
    let names = text.unwrap_or_default();
    let name = |line: &str| Some(line.trim().trim_start_matches('|').strip_prefix("Depends: ")?.to_owned());
    names.lines().filter_map(name).collect()
}

/// The version of a package, for example `6.12.117-1~deb12u1`.
fn version(package: &str) -> Result<String> {
    let text = command::output(Command::new("apt-cache").args(["show", "--no-all-versions", package]))?;
    let version = text.lines().find_map(|line| line.strip_prefix("Version: "));
    version.map(str::to_owned).with_context(|| format!("apt knows no version of {package}"))
}

fn fetch(kernel: &Kernel, headers: &str) -> Result<()> {
    let debs = kernel.dir.join("debs");
    fs::create_dir_all(&debs)?;
    let mut wanted = vec![headers.to_owned(), format!("linux-image-{}", kernel.release)];
    let of_headers = dependencies(headers).into_iter();
    wanted.extend(of_headers.filter(|name| name.ends_with("-common") || name.starts_with("linux-kbuild-")));
    if packages::find_program("pahole").is_none() {
        wanted.extend(PAHOLE.iter().map(|name| (*name).to_owned()));
    }
    let source = source_package(&kernel.release);
    download(&debs, &wanted)?;
    for deb in files_in(&debs)? {
        command::output(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(kernel.tree()))?;
        fs::remove_file(deb)?;
    }
    // The source must have the same version as the headers.
    download(&debs, &[format!("{source}={}", version(headers)?)])?;
    let deb = files_in(&debs)?.pop().context("apt-get left no source package")?;
    let member = r#"dpkg-deb --fsys-tarfile "$1" | tar -xO "./usr/src/$2.tar.xz" | tar -xJO "$2/drivers/vhost/vhost.h" > "$3""#;
    let vhost_h = kernel.dir.join("vhost.h");
    command::output(Command::new("sh").args(["-c", member, "sh"]).arg(&deb).arg(&source).arg(&vhost_h))?;
    if fs::metadata(&vhost_h)?.len() == 0 {
        bail!("{source} does not contain drivers/vhost/vhost.h");
    }
    fs::remove_dir_all(&debs)?;
    relocate(kernel)
}

/// `linux-source-6.12` for the release `6.12.117+deb12-cloud-amd64`.
fn source_package(release: &str) -> String {
    let numbers: Vec<&str> = release.split('.').take(2).collect();
    format!("linux-source-{}", numbers.join("."))
}

fn download(to: &Path, names: &[String]) -> Result<()> {
    let mut apt = Command::new("apt-get");
    command::output(apt.args(["download", "-q"]).args(names).current_dir(to)).map(drop)
}

fn files_in(dir: &Path) -> Result<Vec<PathBuf>> {
    fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect()
}

/// The headers' Makefile includes another one by its installed path.
fn relocate(kernel: &Kernel) -> Result<()> {
    let makefile = kernel.headers().join("Makefile");
    let text =
        fs::read_to_string(&makefile).with_context(|| format!("cannot read {}", makefile.display()))?;
    let inside = format!("include {}/usr/src/", kernel.tree().display());
    Ok(fs::write(&makefile, text.replace("include /usr/src/", &inside))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_before_6_12_are_too_old() {
        assert!(is_new_enough("linux-headers-6.12.117+deb12-cloud-amd64"));
        assert!(is_new_enough("linux-headers-7.2.13+deb14-cloud-amd64"));
        assert!(!is_new_enough("linux-headers-6.1.0-40-cloud-amd64"));
    }

    #[test]
    fn source_package_is_named_by_two_numbers() {
        assert_eq!(source_package("6.12.117+deb12-cloud-amd64"), "linux-source-6.12");
    }
}
