//! A folder with a different Debian release, made by debootstrap. Tests run its programs.
//!
//! `debootstrap (base) → apt-get install, inside → command(program): private mounts, chroot, program`
//!
//! - The folder is below `target/guest`; nothing is installed on this machine, and no service starts inside.
//! - A program inside sees this machine's `/dev` and `/proc`, `/sys` without its control groups, and the temporary
//!   files and `target/guest` at their usual paths. The mounts are private to the program and end with it.
//! - The folder needs root and the right to mount. [`DebianFolder::prepare`] returns the reason if a machine cannot
//!   have one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::skip::Reason;
use crate::{command, packages, workspace};

/// The packages installed inside: QEMU with its firmware, and libvirt.
const PACKAGES: &[&str] = &[
    "qemu-system-x86",
    "ovmf",
    "libvirt-daemon-system", // its user, groups and configuration
    "libvirt-daemon-driver-qemu",
    "libvirt-clients",
];

/// Increase it when the packages or the layout inside change.
const LAYOUT: u32 = 1;

/// Makes the mounts for one program, then starts it. Arguments: ROOT, `HOST:INSIDE` …, `--`, the program and its
/// arguments. The shell remains the first process of the process namespace, because that process inherits orphans and
/// must wait for them, which a daemon may not do. The root is a separate mount, because libvirt changes how mounts
/// below it propagate.
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
    /// Holds `root`, and the images for guests of this release.
    cache: PathBuf,
    binds: Vec<(PathBuf, PathBuf)>,
}

/// A usable folder, or the reason why this machine cannot have one.
#[derive(Debug, Clone)]
pub enum Prepared {
    /// The folder is ready.
    Ready(DebianFolder),
    /// The reason for the test's `skip`, and a line that describes it.
    NotHere(Reason, String),
}

impl DebianFolder {
    /// Makes the folder of `suite` (`trixie`), or finds the one made earlier. Making it takes a minute or two and
    /// fetches 200 MB. `progress` receives each step.
    ///
    /// # Errors
    /// The mirror cannot be reached, or a package does not install.
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

    /// The path of the release's `/` on this machine.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.cache.join("root")
    }

    /// Makes a folder of this machine visible at `inside` to programs that start from now on.
    #[must_use]
    pub fn with_folder(mut self, folder: &Path, inside: &str) -> Self {
        self.binds.push((folder.to_path_buf(), inside.into()));
        self
    }

    /// A program of the release, to which the caller adds arguments. The child's process id is the program's.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        self.entered(Command::new("unshare"), program)
    }

    /// Like [`command`](Self::command), for a daemon without network. The daemon's children end with it, and it ends
    /// with the thread that starts it.
    #[must_use]
    pub fn daemon(&self, program: &str) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--net"]);
        self.entered(command, program)
    }

    /// The folder for the image's kernel and archives.
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
        progress(&format!("making a folder with Debian {suite} (takes a minute)"));
        let mut debootstrap = Command::new("debootstrap");
        command::output(debootstrap.args(["--variant=minbase", suite]).arg(&root))?;
        refuse_services(&root)?;
        progress(&format!("installing into the folder: {}", PACKAGES.join(", ")));
        let install = ["install", "-y", "-q", "--no-install-recommends"];
        command::output(self.command("apt-get").args(install).args(PACKAGES))?;
        command::output(self.command("apt-get").arg("clean")).map(drop)
    }
}

/// The PATH inside, where chroot, and the shell before it, look up programs.
const INSIDE_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The temporary folder, for sockets, and `target/guest`, for kernels and archives.
fn usual_binds() -> Vec<(PathBuf, PathBuf)> {
    [std::env::temp_dir(), workspace::guest_dir()].map(|folder| (folder.clone(), folder)).to_vec()
}

/// Installs the program that Debian's package scripts call before they start a service; it refuses.
fn refuse_services(root: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let policy = root.join("usr/sbin/policy-rc.d");
    fs::write(&policy, "#!/bin/sh\nexit 101\n")?;
    Ok(fs::set_permissions(policy, fs::Permissions::from_mode(0o755))?)
}

/// The reason why this machine cannot have such a folder, if there is one.
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
