//! `cargo xtask ceph`: a Ceph cluster of one monitor and one OSD, from Debian's packages, for development and for readers
//! of docs/how-to/ceph.md.
//!
//! `up: packages (downloaded and unpacked, not installed) → configuration and keys → monitor → OSD → pool and image`
//!
//! Everything is below one folder. No root, no service manager and no manager daemon. Data is not replicated.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use xtask::command::output;

/// What is unpacked: the daemons, their tools, and the client library.
const PACKAGES: [&str; 4] = ["ceph-mon", "ceph-osd", "ceph-common", "librbd1"];
/// The folder of libraries in Debian's packages.
const LIBRARIES: &str = "root/usr/lib/x86_64-linux-gnu";
/// How long a daemon may take to end.
const PATIENCE: Duration = Duration::from_secs(30);
/// Seconds that a tool waits for the cluster, instead of minutes.
const CONNECT_S: &str = "10";

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum What {
    /// Starts a new cluster below a folder, with a pool `rbd` and an image `rbd/disk` of 1 GiB
    Up {
        /// The folder; data of an earlier cluster in it is removed
        folder: PathBuf,
        /// How the OSD stores data; memstore loses it when the OSD ends
        #[arg(long, value_enum, default_value_t = Store::Bluestore)]
        store: Store,
        /// The monitor's port on 127.0.0.1
        #[arg(long, default_value_t = 16789)]
        port: u16,
    },
    /// Stops the cluster below a folder: first the OSD, then the monitor
    Down {
        /// The folder
        folder: PathBuf,
    },
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Store {
    Bluestore,
    Memstore,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match &args.what {
        What::Up { folder, store, port } => {
            fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
            let cluster = Cluster { folder: fs::canonicalize(folder)? };
            // Checked before the clean-up, which must not stop a cluster that was there before.
            if let Some(pid) = cluster.pid("mon").or(cluster.pid("osd")) {
                let folder = folder.display();
                bail!(
                    "a cluster runs below {folder} (pid {pid}): stop it with `cargo xtask ceph down {folder}`"
                );
            }
            let started = cluster.up(*store, *port);
            if started.is_err() {
                let _ = cluster.down();
            }
            started
        }
        What::Down { folder } => {
            let folder =
                fs::canonicalize(folder).with_context(|| format!("no folder {}", folder.display()))?;
            Cluster { folder }.down()
        }
    }
}

struct Cluster {
    folder: PathBuf,
}

impl Cluster {
    fn up(&self, store: Store, port: u16) -> Result<()> {
        self.unpack()?;
        for old in ["mon", "osd"] {
            let _ = fs::remove_dir_all(self.path(old));
            fs::create_dir(self.path(old))?;
        }
        let id =
            || Ok::<_, anyhow::Error>(fs::read_to_string("/proc/sys/kernel/random/uuid")?.trim().to_owned());
        fs::write(self.path("ceph.conf"), self.configuration(&id()?, store, port))?;
        fs::write(self.path("keyring"), "")?;
        self.key("mon.", &["mon", "allow *"])?;
        self.key("client.admin", &["mon", "allow *", "osd", "allow *"])?;
        self.key("osd.0", &["mon", "allow profile osd", "osd", "allow *"])?;
        let keyring = self.shown("keyring");
        self.tool("ceph-mon", &["-i", "a", "--mkfs", "--keyring", &keyring])?;
        self.tool("ceph-mon", &["-i", "a"])?;
        let osd = id()?;
        self.ceph(&["osd", "new", &osd])?;
        self.tool("ceph-osd", &["-i", "0", "--mkfs", "--osd-uuid", &osd])?;
        self.tool("ceph-osd", &["-i", "0"])?;
        self.ceph(&["osd", "pool", "create", "rbd", "8"])?;
        self.tool("timeout", &["30", "rbd", "create", "rbd/disk", "--size", "1G"])?;
        let (conf, folder) = (self.shown("ceph.conf"), self.folder.display());
        println!("the cluster runs; serve its image with");
        println!("  bareblk serve rbd:rbd/disk --rbd-conf {conf} --socket /tmp/disk.sock");
        println!("its tools (rbd, ceph): . {folder}/env; stop it: cargo xtask ceph down {folder}");
        Ok(())
    }

    fn down(&self) -> Result<()> {
        for daemon in ["osd", "mon"] {
            let Some(pid) = self.pid(daemon) else { continue };
            kill_process(pid, Signal::TERM)?;
            let end = Instant::now() + PATIENCE;
            while test_kill_process(pid).is_ok() {
                if Instant::now() >= end {
                    bail!("{daemon} (pid {pid}) does not end");
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        Ok(())
    }

    /// Downloads and unpacks the packages, unless that was done before.
    fn unpack(&self) -> Result<()> {
        let (archives, done) = (self.path("debs"), self.path("debs/ok"));
        if done.exists() {
            return Ok(());
        }
        println!(
            "downloading {} (about 51 MB) into {}; nothing is installed",
            PACKAGES.join(", "),
            archives.display()
        );
        fs::create_dir_all(archives.join("partial"))?;
        let cache = format!("Dir::Cache::archives={}", archives.display());
        let mut fetch = Command::new("apt-get");
        fetch.args(["install", "-qq", "-y", "-d", "--no-install-recommends", "-o", &cache]);
        fetch.args(["-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=1"]).args(PACKAGES);
        output(&mut fetch).context("cannot download (does `apt-get update` work?)")?;
        for archive in fs::read_dir(&archives)? {
            let archive = archive?.path();
            if archive.extension().is_some_and(|end| end == "deb") {
                output(Command::new("dpkg").arg("-x").arg(&archive).arg(self.path("root")))?;
            }
        }
        Ok(fs::write(done, "")?)
    }

    fn configuration(&self, id: &str, store: Store, port: u16) -> String {
        let (folder, libraries) = (self.folder.display(), self.shown(LIBRARIES));
        let store = match store {
            Store::Bluestore => "bluestore",
            Store::Memstore => "memstore",
        };
        let environment = format!(
            "export CEPH_CONF={folder}/ceph.conf PATH={folder}/root/usr/bin:$PATH LD_LIBRARY_PATH={search} \
             PYTHONPATH={folder}/root/usr/lib/python3/dist-packages\n",
            search = self.search_path()
        );
        // Without this file, only the two lines that use the tools by hand are missing.
        let _ = fs::write(self.path("env"), environment);
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

    fn key(&self, name: &str, rights: &[&str]) -> Result<()> {
        let keyring = self.shown("keyring");
        let mut words = vec![keyring.as_str(), "--gen-key", "-n", name];
        rights.chunks(2).for_each(|right| words.extend(["--cap"].iter().chain(right)));
        self.tool("ceph-authtool", &words)
    }

    fn ceph(&self, words: &[&str]) -> Result<()> {
        self.tool("ceph", &[&["--connect-timeout", CONNECT_S], words].concat())
    }

    /// Runs a program of the packages.
    fn tool(&self, name: &str, words: &[&str]) -> Result<()> {
        let own = self.path("root/usr/bin").join(name);
        let mut command = Command::new(if own.exists() { own } else { name.into() });
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("CEPH_CONF", self.path("ceph.conf")).env("LD_LIBRARY_PATH", self.search_path());
        command.env("PATH", format!("{}:{path}", self.shown("root/usr/bin")));
        command.env("PYTHONPATH", self.path("root/usr/lib/python3/dist-packages"));
        // A daemon must not end with this program's process group.
        output(command.args(words).process_group(0)).map(drop)
    }

    /// The running daemon's process.
    fn pid(&self, daemon: &str) -> Option<Pid> {
        let text = fs::read_to_string(self.path(format!("{daemon}.pid"))).ok()?;
        let pid = Pid::from_raw(text.trim().parse().ok()?)?;
        // The number may belong to another program by now.
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        name.starts_with("ceph-").then_some(pid)
    }

    /// Where the programs find their libraries.
    fn search_path(&self) -> String {
        format!("{}:{}", self.shown(LIBRARIES), self.shown("root/lib/x86_64-linux-gnu"))
    }

    fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.folder.join(name)
    }

    fn shown(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }
}
