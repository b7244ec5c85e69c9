//! How the server reaches other machines: NBD servers through the sandbox's helper, Ceph clusters through a thread of its
//! own.
//!
//! `image's location → NBD: the helper connects | RBD: the network thread → a thread for this image → Image`
//!
//! - librbd connects itself, on threads that inherit the rights of the thread that opens an image. Only the network thread
//!   and its threads may create sockets. It starts before the sandbox closes, and only if a disk needs it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, anyhow};
use disk_image::{Image, ImageError, ImageOptions, Location};
use nbd_client::Dial;
use sandbox::{FileRules, Role, enter_apart};

use crate::helper::dialer::Dialer;

/// What a client library reads to find a cluster, besides the cluster's own files.
const RESOLVER: [&str; 8] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/services",
    "/etc/gai.conf",
    "/etc/ceph",
    "/dev/urandom",
];

type Job = Box<dyn FnOnce() + Send>;

/// Access to other machines.
#[derive(Debug)]
pub struct RemoteAccess {
    dial: Arc<dyn Dial>,
    clusters: Clusters,
}

/// How images in clusters are opened.
#[derive(Debug)]
enum Clusters {
    /// On the calling thread: there is no sandbox.
    Direct,
    /// By the network thread.
    Thread(Mutex<Sender<Job>>),
    /// Not at all: no disk needed them at the start.
    Closed,
}

impl RemoteAccess {
    /// Access with the rights of this process.
    pub fn direct() -> Self {
        Self { dial: Arc::new(Dialer::Host), clusters: Clusters::Direct }
    }

    /// Access in a sandbox whose helper is `dial`. `clusters`: the configurations of the clusters in which disks are. To be
    /// called before the sandbox closes.
    pub fn confined(dial: Arc<dyn Dial>, clusters: &[PathBuf]) -> Result<Self> {
        if clusters.is_empty() {
            return Ok(Self { dial, clusters: Clusters::Closed });
        }
        // In the sandbox, no thread may make memory executable.
        rbd_client::Library::load()?;
        let thread = start_network_thread(clusters)?;
        Ok(Self { dial, clusters: Clusters::Thread(Mutex::new(thread)) })
    }

    /// Opens an image on another machine. May block for seconds.
    pub fn open(&self, options: &ImageOptions) -> Result<Image, ImageError> {
        match &options.location {
            Location::Nbd(uri) => Image::open_export(Arc::clone(&self.dial), uri, options),
            Location::Rbd(spec) => {
                let (spec, own) = (spec.clone(), options.clone());
                self.in_a_cluster(options, move || Image::open_rbd(&spec, &own))
            }
            Location::Host => Err(failed(options, "it is on this host")),
        }
    }

    fn in_a_cluster(
        &self,
        options: &ImageOptions,
        open: impl FnOnce() -> Result<Image, ImageError> + Send + 'static,
    ) -> Result<Image, ImageError> {
        let jobs = match &self.clusters {
            Clusters::Direct => return open(),
            Clusters::Thread(jobs) => jobs,
            Clusters::Closed => {
                let why = "the server was started without RBD disks, so its sandbox does not reach clusters: restart it \
                           with this disk in its configuration";
                return Err(failed(options, why));
            }
        };
        let (done, opened) = sync_channel(1);
        let job = move || drop(done.send(open()));
        let sent = jobs.lock().unwrap_or_else(PoisonError::into_inner).send(Box::new(job));
        let opened = sent.ok().and_then(|()| opened.recv().ok());
        opened.unwrap_or_else(|| Err(failed(options, "the thread that opens it has ended")))
    }
}

fn failed(options: &ImageOptions, why: &str) -> ImageError {
    ImageError::Remote { path: options.path.clone(), source: why.into() }
}

/// Starts the thread, which limits itself to its role, and then runs each job on a thread of its own.
fn start_network_thread(clusters: &[PathBuf]) -> Result<Sender<Job>> {
    let folder = |conf: &PathBuf| conf.parent().unwrap_or(Path::new("/")).to_path_buf();
    let readable = RESOLVER.iter().map(PathBuf::from).chain(clusters.iter().map(folder)).collect();
    let rules = FileRules { readable, connects: true, writable: Vec::new() };
    let (jobs, wanted) = channel::<Job>();
    let (ready, entered) = sync_channel(1);
    let run = move || {
        let outcome = enter_apart(Role::Network, &rules);
        let failed = outcome.is_err();
        let _ = ready.send(outcome);
        if failed {
            return;
        }
        for job in wanted {
            if let Err(error) = std::thread::Builder::new().name("bareblk-open".into()).spawn(job) {
                tracing::error!("cannot start the thread that opens an image in a cluster: {error}");
            }
        }
    };
    let thread = std::thread::Builder::new().name("bareblk-network".into()).spawn(run);
    thread.context("cannot start the thread that reaches clusters")?;
    let entered = entered.recv().map_err(|_| anyhow!(io::Error::from(io::ErrorKind::BrokenPipe)))?;
    entered.context("cannot set up the sandbox of the thread that reaches clusters")?;
    Ok(jobs)
}
