//! Ceph's programs and libraries from Debian's packages, which are downloaded and unpacked, not installed.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What is unpacked: the daemons, their tools, and the client library.
const PACKAGES: [&str; 4] = ["ceph-mon", "ceph-osd", "ceph-common", "librbd1"];
/// The folder of libraries in Debian's packages.
const LIBRARIES: &str = "root/usr/lib/x86_64-linux-gnu";

/// A folder with the unpacked packages.
#[derive(Clone, Debug)]
pub(crate) struct Packages(PathBuf);

impl Packages {
    /// Packages that are below `folder` already, or will be.
    pub(crate) fn at(folder: &Path) -> Self {
        Self(folder.to_path_buf())
    }

    /// Downloads and unpacks the packages, unless that was done before.
    pub(crate) fn fetch(&self, tell: &mut dyn FnMut(&str)) -> io::Result<()> {
        let (archives, done) = (self.0.join("debs"), self.0.join("debs/ok"));
        if done.exists() {
            return Ok(());
        }
        let (names, place) = (PACKAGES.join(", "), archives.display());
        tell(&format!("downloading {names} (about 51 MB) into {place}; nothing is installed"));
        fs::create_dir_all(archives.join("partial"))?;
        let cache = format!("Dir::Cache::archives={place}");
        let mut fetch = Command::new("apt-get");
        fetch.args(["install", "-qq", "-y", "-d", "--no-install-recommends", "-o", &cache]);
        fetch.args(["-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=1"]).args(PACKAGES);
        let hint = |error| io::Error::other(format!("{error} (does `apt-get update` work?)"));
        output(&mut fetch).map_err(hint)?;
        for archive in fs::read_dir(&archives)? {
            let archive = archive?.path();
            if archive.extension().is_some_and(|end| end == "deb") {
                output(Command::new("dpkg").arg("-x").arg(&archive).arg(self.0.join("root")))?;
            }
        }
        fs::write(done, "")
    }

    /// A program of the packages, or of the system, for the cluster with this configuration.
    pub(crate) fn command(&self, name: &str, conf: &Path) -> Command {
        let own = self.programs().join(name);
        let mut command = Command::new(if own.exists() { own } else { name.into() });
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("CEPH_CONF", conf).env("LD_LIBRARY_PATH", self.search_path());
        command.env("PATH", format!("{}:{path}", self.programs().display()));
        command.env("PYTHONPATH", self.python());
        command
    }

    /// Lines for a shell that uses the tools by hand.
    pub(crate) fn environment(&self, conf: &Path) -> String {
        format!(
            "export CEPH_CONF={} PATH={}:$PATH LD_LIBRARY_PATH={} PYTHONPATH={}\n",
            conf.display(),
            self.programs().display(),
            self.search_path(),
            self.python().display()
        )
    }

    pub(crate) fn libraries(&self) -> PathBuf {
        self.0.join(LIBRARIES)
    }

    fn programs(&self) -> PathBuf {
        self.0.join("root/usr/bin")
    }

    fn python(&self) -> PathBuf {
        self.0.join("root/usr/lib/python3/dist-packages")
    }

    /// Where the programs find their libraries.
    fn search_path(&self) -> String {
        let more = self.0.join("root/lib/x86_64-linux-gnu");
        format!("{}:{}", self.libraries().display(), more.display())
    }
}

/// Runs a program to its end. A daemon that it starts does not end with this program's process group.
pub(crate) fn output(command: &mut Command) -> io::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let ended = command.stdin(Stdio::null()).process_group(0).output();
    let ended = ended.map_err(|error| io::Error::other(format!("cannot start `{name}`: {error}")))?;
    if ended.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    let words = command.get_args().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    Err(io::Error::other(format!("`{name} {words}` failed ({}): {}", ended.status, said.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_that_fails_is_reported_with_its_arguments_and_words() {
        let error = output(Command::new("/bin/sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err();
        let expected = "`/bin/sh -c echo why >&2; exit 3` failed (exit status: 3): why";
        assert_eq!(error.to_string(), expected);
        let missing = output(&mut Command::new("/no/such")).unwrap_err().to_string();
        assert!(missing.starts_with("cannot start `/no/such`: No such file"), "{missing}");
    }

    #[test]
    fn packages_that_were_unpacked_before_are_not_fetched_again() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("debs")).unwrap();
        fs::write(folder.path().join("debs/ok"), "").unwrap();
        let mut told = 0;
        Packages::at(folder.path()).fetch(&mut |_| told += 1).unwrap();
        assert_eq!(told, 0);
    }
}
