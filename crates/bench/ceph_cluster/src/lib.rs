//! A Ceph cluster of one monitor and one OSD below a folder, for development and measurements.
//!
//! `start: packages (downloaded and unpacked, not installed) → configuration and keys → monitor → OSD → pool`
//!
//! No root, no service manager and no manager daemon. Data is not replicated.
//!
//! Not here: clients of a cluster (`rbd_client`).
#![forbid(unsafe_code)]

mod packages;

use std::fs;
use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use packages::{Packages, output};

/// How long a daemon may take to end.
const PATIENCE: Duration = Duration::from_secs(30);
/// Seconds that a tool waits for the cluster, instead of minutes.
const CONNECT_S: &str = "10";

/// How the OSD stores data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// On the disk of the cluster's folder.
    Bluestore,
    /// In the OSD's memory: the data is lost when the OSD ends.
    Memstore,
}

/// A cluster, running or not.
#[derive(Clone, Debug)]
pub struct Cluster {
    folder: PathBuf,
    packages: Packages,
}

impl Cluster {
    /// The cluster that was started below `folder`, to stop it.
    ///
    /// # Errors
    /// There is no such folder.
    pub fn at(folder: &Path) -> io::Result<Self> {
        let named = |error| io::Error::other(format!("no folder {}: {error}", folder.display()));
        let folder = fs::canonicalize(folder).map_err(named)?;
        Ok(Self { packages: Packages::at(&folder), folder })
    }

    /// Starts a new cluster below `folder`, with an empty pool `rbd`; data of an earlier one is removed. The packages are
    /// unpacked below `packages` unless they are there. The monitor listens on this port of 127.0.0.1, or on a free one.
    ///
    /// # Errors
    /// A cluster runs below the folder, the packages cannot be downloaded, or a daemon does not start.
    pub fn start(
        folder: &Path,
        packages: &Path,
        store: Store,
        port: Option<u16>,
        tell: &mut dyn FnMut(&str),
    ) -> io::Result<Self> {
        for made in [folder, packages] {
            let named = |error| io::Error::other(format!("cannot make {}: {error}", made.display()));
            fs::create_dir_all(made).map_err(named)?;
        }
        let packages = Packages::at(&fs::canonicalize(packages)?);
        let cluster = Self { folder: fs::canonicalize(folder)?, packages };
        // Checked before the clean-up, which must not stop a cluster that was there before.
        if let Some(pid) = cluster.pids().first() {
            let folder = folder.display();
            return Err(io::Error::other(format!(
                "a cluster runs below {folder} (pid {pid}): stop it with `cargo xtask ceph down {folder}`"
            )));
        }
        let started = cluster.up(store, port, tell);
        if started.is_err() {
            let _ = cluster.stop();
        }
        started.map(|()| cluster)
    }

    fn up(&self, store: Store, port: Option<u16>, tell: &mut dyn FnMut(&str)) -> io::Result<()> {
        self.packages.fetch(tell)?;
        tell("starting a Ceph cluster");
        let port = port.map_or_else(free_port, Ok)?;
        self.remove_data();
        for new in ["mon", "osd"] {
            fs::create_dir(self.path(new))?;
        }
        let id = || Ok::<_, io::Error>(fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned());
        fs::write(self.configuration(), self.configured(&id()?, store, port))?;
        fs::write(self.path("env"), self.packages.environment(&self.configuration()))?;
        fs::write(self.path("keyring"), "")?;
        self.key("mon.", &["mon", "allow *"])?;
        self.key("client.admin", &["mon", "allow *", "osd", "allow *"])?;
        self.key("osd.0", &["mon", "allow profile osd", "osd", "allow *"])?;
        let keyring = self.path("keyring").display().to_string();
        self.tool("ceph-mon", &["-i", "a", "--mkfs", "--keyring", &keyring])?;
        self.tool("ceph-mon", &["-i", "a"])?;
        let osd = id()?;
        self.ceph(&["osd", "new", &osd])?;
        self.tool("ceph-osd", &["-i", "0", "--mkfs", "--osd-uuid", &osd])?;
        self.tool("ceph-osd", &["-i", "0"])?;
        self.ceph(&["osd", "pool", "create", "rbd", "8"])
    }

    /// Stops the OSD, then the monitor.
    ///
    /// # Errors
    /// A daemon does not end, or belongs to another user.
    pub fn stop(&self) -> io::Result<()> {
        for daemon in ["osd", "mon"] {
            let Some(pid) = self.pid(daemon) else { continue };
            kill_process(pid, Signal::TERM)?;
            let end = Instant::now() + PATIENCE;
            while test_kill_process(pid).is_ok() {
                if Instant::now() >= end {
                    return Err(io::Error::other(format!("{daemon} (pid {pid}) does not end")));
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        Ok(())
    }

    /// The cluster as a value that stops it, and removes its data, when dropped.
    #[must_use]
    pub fn until_dropped(self) -> RunningCluster {
        RunningCluster(self)
    }

    /// Makes the image `rbd/NAME`.
    ///
    /// # Errors
    /// The image exists, or the cluster does not answer.
    pub fn create_image(&self, name: &str, size_bytes: u64) -> io::Result<()> {
        let (image, size) = (format!("rbd/{name}"), format!("{size_bytes}B"));
        self.tool("timeout", &["30", "rbd", "create", &image, "--size", &size])
    }

    /// Makes the image `rbd/NAME` from a file.
    ///
    /// # Errors
    /// The image exists, or the cluster does not answer.
    pub fn import_image(&self, name: &str, file: &Path) -> io::Result<()> {
        let (image, file) = (format!("rbd/{name}"), file.display().to_string());
        self.tool("timeout", &["300", "rbd", "import", "--no-progress", &file, &image])
    }

    /// Switches librbd's cache off for clients that do not choose for themselves, such as fio.
    ///
    /// # Errors
    /// The configuration cannot be written.
    pub fn disable_client_cache(&self) -> io::Result<()> {
        let text = fs::read_to_string(self.configuration())?;
        fs::write(self.configuration(), text + "[client]\nrbd_cache = false\n")
    }

    /// The cluster's folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The configuration file for clients.
    #[must_use]
    pub fn configuration(&self) -> PathBuf {
        self.path("ceph.conf")
    }

    /// The daemons' processes.
    #[must_use]
    pub fn pids(&self) -> Vec<Pid> {
        ["mon", "osd"].iter().filter_map(|daemon| self.pid(daemon)).collect()
    }

    fn configured(&self, id: &str, store: Store, port: u16) -> String {
        let (folder, libraries) = (self.folder.display(), self.packages.libraries());
        let libraries = libraries.display();
        let store = match store {
            Store::Bluestore => "bluestore",
            Store::Memstore => "memstore",
        };
        format!(
            "[global]
fsid = {id}
mon_host = [v2:127.0.0.1:{port}/0]
ms_bind_msgr1 = false
keyring = {folder}/keyring
run_dir = {folder}
plugin_dir = {libraries}/ceph
erasure_code_dir = {libraries}/ceph/erasure-code
osd_class_dir = {libraries}/rados-classes
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
[mon.a]
public_addr = v2:127.0.0.1:{port}/0
mon_data = {folder}/mon
pid_file = {folder}/mon.pid
log_file = {folder}/mon.log
mon_allow_pool_size_one = true
mon_data_avail_warn = 2
mon_data_avail_crit = 1
paxos_propose_interval = 0.05
[osd]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
osd_data = {folder}/osd
pid_file = {folder}/osd.pid
log_file = {folder}/osd.log
osd_objectstore = {store}
osd_client_watch_timeout = 5
memstore_page_set = true
memstore_device_bytes = 3G
bluestore_block_size = 8G
bluestore_fsck_on_mkfs = false
bluestore_cache_autotune = false
bluestore_cache_size = 64M
osd_min_pg_log_entries = 10
osd_max_pg_log_entries = 10
osd_pg_log_dups_tracked = 10
osd_pg_log_trim_min = 5
"
        )
    }

    fn key(&self, name: &str, rights: &[&str]) -> io::Result<()> {
        let keyring = self.path("keyring").display().to_string();
        let mut words = vec![keyring.as_str(), "--gen-key", "-n", name];
        rights.chunks(2).for_each(|right| words.extend(["--cap"].iter().chain(right)));
        self.tool("ceph-authtool", &words)
    }

    fn ceph(&self, words: &[&str]) -> io::Result<()> {
        self.tool("ceph", &[&["--connect-timeout", CONNECT_S], words].concat())
    }

    fn tool(&self, name: &str, words: &[&str]) -> io::Result<()> {
        output(self.packages.command(name, &self.configuration()).args(words))
    }

    /// The running daemon's process.
    fn pid(&self, daemon: &str) -> Option<Pid> {
        let text = fs::read_to_string(self.path(&format!("{daemon}.pid"))).ok()?;
        let pid = Pid::from_raw(text.trim().parse().ok()?)?;
        // The number may belong to another program by now.
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        name.starts_with("ceph-").then_some(pid)
    }

    /// Removes the data of a cluster that does not run.
    fn remove_data(&self) {
        for old in ["mon", "osd"] {
            let _ = fs::remove_dir_all(self.path(old));
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// A cluster that is stopped when this value is dropped; its data is then removed.
#[derive(Debug)]
pub struct RunningCluster(Cluster);

impl std::ops::Deref for RunningCluster {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.0
    }
}

impl Drop for RunningCluster {
    fn drop(&mut self) {
        if self.0.stop().is_ok() {
            self.0.remove_data();
        }
    }
}

/// A port of 127.0.0.1 that no program listens on now.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_names_store_port_and_the_folders_of_data_and_packages() {
        let cluster = Cluster { folder: "/c".into(), packages: Packages::at(Path::new("/p")) };
        let text = cluster.configured("id", Store::Memstore, 7400);
        for line in [
            "fsid = id",
            "mon_host = [v2:127.0.0.1:7400/0]",
            "mon_data = /c/mon",
            "plugin_dir = /p/root/usr/lib/x86_64-linux-gnu/ceph",
            "osd_objectstore = memstore",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }

    #[test]
    fn process_of_another_program_is_not_taken_for_a_daemon() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("osd.pid"), std::process::id().to_string()).unwrap();
        let cluster = Cluster::at(folder.path()).unwrap();
        assert_eq!(cluster.pids(), []);
        cluster.stop().unwrap();
    }

    #[test]
    fn folder_that_is_not_there_is_named() {
        assert!(Cluster::at(Path::new("/no/such")).unwrap_err().to_string().contains("no folder /no/such"));
    }
}
