//! The demo's disk in a Ceph cluster of one node below `target/demo/ceph`. Dropping it stops the cluster.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use ceph_cluster::{Cluster, RunningCluster, Store};
use xtask::workspace;

use super::fio::Job;
use super::progress::Progress;

const IMAGE: &str = "demo";
/// How the table names fio's side.
pub(super) const HOST: &str =
    "fio: libaio with O_DIRECT in the guest, engine rbd on the host; Ceph's daemons run on this machine too";
pub(super) const NO_HOST: &str =
    "fio on this host has no engine rbd, so the table has no figures of the host (Debian's fio has one)";

/// An image in a running cluster.
pub(super) struct CephDisk(RunningCluster);

impl CephDisk {
    /// Starts a cluster, and copies `file` into it.
    pub(super) fn create(file: &Path, progress: &Progress) -> Result<Self> {
        let folder = workspace::root().join("target/demo/ceph");
        let cluster =
            Cluster::start(&folder, &folder, Store::Bluestore, None, &mut |step| progress.step(step))?;
        let cluster = cluster.until_dropped();
        cluster.disable_client_cache()?;
        progress.step("copying the disk image into the cluster");
        cluster.import_image(IMAGE, file)?;
        Ok(Self(cluster))
    }

    /// What `bareblk serve` serves.
    pub(super) fn served(&self) -> Vec<String> {
        let conf = self.0.configuration().display().to_string();
        vec![format!("rbd:rbd/{IMAGE}"), "--rbd-conf".to_owned(), conf]
    }

    /// fio on the image, without a server.
    pub(super) fn fio(&self, job: &Job, seconds: u32) -> Command {
        let engine = "--ioengine=rbd --clientname=admin --pool=rbd --rbdname=".to_owned() + IMAGE;
        let mut fio = Command::new("fio");
        fio.args(job.on(&engine, seconds)).env("CEPH_CONF", self.0.configuration());
        fio
    }
}

/// Whether fio can reach images in a cluster.
pub(super) fn fio_has_rbd() -> Result<bool> {
    let engines = Command::new("fio").arg("--enghelp").output().context("cannot start fio")?;
    Ok(String::from_utf8_lossy(&engines.stdout).lines().any(|engine| engine.trim() == "rbd"))
}
