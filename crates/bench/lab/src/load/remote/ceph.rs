//! A Ceph cluster of one node for a run. The cluster and its data are gone afterwards; its programs stay in a cache.

use std::path::{Path, PathBuf};

use ceph_cluster::{Cluster, RunningCluster, Store};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::experiment::{SampleError, Setup};
use crate::load::server::process::{Keeper, Storage};

const POOL: &str = "rbd";

/// A running cluster. Dropping it stops the cluster.
pub(crate) struct Ceph {
    // Must be dropped first: see `ServerProcess`.
    _keepers: Vec<Keeper>,
    cluster: RunningCluster,
    conf: PathBuf,
    _folder: TempDir,
}

impl Ceph {
    /// Starts a cluster whose data is in the storage folder.
    pub fn start(setup: &Setup, store: Store, tell: &mut dyn FnMut(&str, f64)) -> Result<Self, SampleError> {
        let failed = |error| SampleError::because("no Ceph cluster", &error);
        let folder = tempfile::Builder::new().prefix(".bareblk-lab-").tempdir_in(&setup.storage);
        let folder = folder.map_err(failed)?;
        let packages = packages(&setup.scratch);
        let started = Cluster::start(folder.path(), &packages, store, None, &mut |step| tell(step, 0.0));
        let cluster = started.map_err(failed)?.until_dropped();
        cluster.disable_client_cache().map_err(failed)?;
        let pids = cluster.pids().into_iter().map(|pid| pid.as_raw_nonzero().get().unsigned_abs());
        let keepers = pids.map(Keeper::of).collect::<Result<_, _>>().map_err(failed)?;
        Ok(Self { conf: cluster.configuration(), _keepers: keepers, cluster, _folder: folder })
    }

    pub fn create_image(&self, name: &str, size_bytes: u64) -> Result<(), SampleError> {
        self.cluster.create_image(name, size_bytes).map_err(|error| SampleError::because("an image", &error))
    }

    pub fn image<'s>(&'s self, name: &'s str) -> Storage<'s> {
        Storage::Rbd { pool: POOL, image: name, conf: &self.conf }
    }

    /// The storage daemon's process.
    pub fn osd(&self) -> Option<Pid> {
        self.cluster.pids().last().map(|pid| Pid::from_raw(pid.as_raw_nonzero().get()))
    }

    pub fn configuration(&self) -> &Path {
        &self.conf
    }
}

/// The folder of Ceph's unpacked packages: the user's cache, so that a later run does not download them again.
fn packages(scratch: &Path) -> PathBuf {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
    cache.unwrap_or_else(|| scratch.to_path_buf()).join("bareblk/ceph")
}
