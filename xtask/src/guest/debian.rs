//! A folder with a Debian of its own, made by debootstrap: programs of another release than this machine's.
//!
//! `debootstrap (base) → apt-get install, inside → command(program): private mounts, chroot, program`
//!
//! - Kept below `target/guest`; nothing is installed on this machine, and no service starts inside.
//! - A program inside sees this machine's `/dev` and `/proc`, `/sys` without its control groups, the temporary files and `target/guest` at their usual paths.
//!   The mounts are private to the program and end with it.
//! - Needs root and the right to mount, so [`DebianFolder::prepare`] says why a machine cannot have one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::skip::Reason;
use crate::{command, packages, workspace};

/// What is installed inside: QEMU with its firmware, and libvirt.
const PACKAGES: &[&str] = &[
    "qemu-system-x86",
    "ovmf",
    "libvirt-daemon-system", // its user, groups and configuration
    "libvirt-daemon-driver-qemu",
    "libvirt-clients",
];

/// Raise when what is installed inside changes.
const LAYOUT: u32 = 1;

/// Mounts for one program, then the program: ROOT, `HOST:INSIDE` …, `--`, program and arguments. The first process of a
/// process namespace inherits all orphans; the shell stays that one, because it waits for them and a daemon may not. The root
/// is a mount of its own, because libvirt changes how mounts below it propagate.
const ENTER: &str = r#"
root=$1; shift
mount --bind "$root" "$root" && mount -t proc proc "$root/proc" &&
    mount -t sysfs -o ro sysfs "$root/sys" && mount --rbind /dev "$root/dev" || exit 126
while [ "$1" != -- ]; do
    mkdir -p "${1%%:*}" "$root${1#*:}" && mount --bind "${1%%:*}" "$root${1#*:}" || exit 126
    shift
done
shift
[ $$ = 1 ] || exec chroot "$root" "$@"
chroot "$root" "$@"
exit $?
"#;

/// A Debian release in a folder; cheap to clone.
#[derive(Debug, Clone)]
pub struct DebianFolder {
    /// Holds `root`, and what is made for guests of this release.
    cache: PathBuf,
    binds: Vec<(PathBuf, PathBuf)>,
}

/// A folder that can be used, or why this machine cannot have one.
#[derive(Debug, Clone)]
pub enum Prepared {
    /// It is there.
    Ready(DebianFolder),
    /// For the test's `skip`, and a line in words.
    NotHere(Reason, String),
}

impl DebianFolder {
    /// Makes the folder of `suite` (`trixie`), or finds the one made earlier. Making it takes a minute or two
    /// and fetches 200 MB; `progress` is told each step.
    ///
    /// # Errors
    /// If the machine allows it and it fails: the mirror cannot be reached, or a package does not install.
    pub fn prepare(suite: &str, progress: &mut dyn FnMut(&str)) -> Result<Prepared> {
        if let Some((reason, why)) = hindrance() {
            return Ok(Prepared::NotHere(reason, why));
        }
        let cache = workspace::guest_dir().join(format!("debian-{suite}"));
        fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
        let _held_until_return = workspace::lock(&cache)?;
        let folder = Self { binds: usual_binds(), cache };
        let stamp = folder.cache.join(format!("installed-{LAYOUT}"));
        if !stamp.exists() {
            folder.make(suite, progress)?;
            fs::write(stamp, PACKAGES.join("\n"))?;
        }
        Ok(Prepared::Ready(folder))
    }

    /// Where the release's own `/` lies on this machine.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.cache.join("root")
    }

    /// Another folder of this machine, visible at `inside` to the programs that are started from now on.
    #[must_use]
    pub fn with_folder(mut self, folder: &Path, inside: &str) -> Self {
        self.binds.push((folder.to_path_buf(), inside.into()));
        self
    }

    /// A program of the release, to which arguments can be added. Its process id is the child's.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        self.entered(Command::new("unshare"), program)
    }

    /// The same for a daemon without a network: what it starts ends with it, and it ends with the thread that starts it.
    #[must_use]
    pub fn daemon(&self, program: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--net"]);
        self.entered(command, program)
    }

    /// The image's kernel and archives are kept here.
    pub(super) fn cache(&self) -> &Path {
        &self.cache
    }

    fn entered(&self, mut command: Command, program: &str) -> Command {
        command.args(["--mount", "--propagation", "private", "sh", "-c", ENTER, "sh"]).arg(self.root());
        for (folder, inside) in &self.binds {
            let mut pair = folder.clone().into_os_string();
            pair.push(":");
            pair.push(inside);
            command.arg(pair);
        }
        command.args(["--", program]);
        command.env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive").env("PATH", INSIDE_PATH);
        command
    }

    fn make(&self, suite: &str, progress: &mut dyn FnMut(&str)) -> Result<()> {
        let root = self.root();
        if root.exists() {
            fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))?;
        }
        progress(&format!("making a folder with Debian's {suite} (a minute)"));
        let mut debootstrap = Command::new("debootstrap");
        command::output(debootstrap.args(["--variant=minbase", suite]).arg(&root))?;
        refuse_services(&root)?;
        progress(&format!("installing into it: {}", PACKAGES.join(", ")));
        let install = ["install", "-y", "-q", "--no-install-recommends"];
        command::output(self.command("apt-get").args(install).args(PACKAGES))?;
        command::output(self.command("apt-get").arg("clean")).map(drop)
    }
}

/// chroot looks the program up, and so does the shell before it: both find theirs.
const INSIDE_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Sockets lie among the temporary files, kernels and archives below `target/guest`.
fn usual_binds() -> Vec<(PathBuf, PathBuf)> {
    [std::env::temp_dir(), workspace::guest_dir()].map(|folder| (folder.clone(), folder)).to_vec()
}

/// What Debian's package scripts ask before they start a service.
fn refuse_services(root: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let policy = root.join("usr/sbin/policy-rc.d");
    fs::write(&policy, "#!/bin/sh\nexit 101\n")?;
    Ok(fs::set_permissions(policy, fs::Permissions::from_mode(0o755))?)
}

/// Why this machine cannot have such a folder.
fn hindrance() -> Option<(Reason, String)> {
    if !rustix::process::geteuid().is_root() {
        return Some((Reason::NotRoot, "a folder with another Debian release".to_owned()));
    }
    if packages::find_program("debootstrap").is_none() {
        return Some((
            Reason::NoProgram("debootstrap".to_owned()),
            "run `cargo xtask setup --long`".to_owned(),
        ));
    }
    let mut mounts = Command::new("unshare");
    mounts.args(["--mount", "--pid", "--fork", "--net", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]);
    let refused = command::output(&mut mounts).err()?;
    Some((Reason::NoPrivateMounts, format!("{refused:#}")))
}
