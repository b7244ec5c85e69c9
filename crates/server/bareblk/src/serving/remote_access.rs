//! How the server reaches other machines: NBD servers through the sandbox's helper, Ceph clusters through a thread of its
//! own.
//!
//! `image's location → NBD: the helper connects | RBD: the network thread → a thread for this call → librbd`
//!
//! - librbd connects itself, on threads that inherit the rights of the thread that calls it. Only the network thread
//!   and its threads may create sockets. It starts before the sandbox closes, and only if a disk needs it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, anyhow};
use disk_image::{Image, ImageError, ImageOptions, Location};
use nbd_client::Dial;
use rbd_client::{Host, RbdSpec};
use sandbox::{FileRules, Role, enter_apart};
use tracing::warn;

use crate::helper::client::Helper;
use crate::helper::dialer::Dialer;
use crate::helper::process_records::ProcessRecords;

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

/// How librbd is called.
#[derive(Debug)]
enum Clusters {
    /// There is no sandbox.
    Direct(Arc<ClusterHost>),
    /// The network thread starts the threads that call it.
    Confined(Arc<ClusterHost>),
    /// Not at all: no disk needed it at the start.
    Closed,
}

/// This process, as librbd's user.
#[derive(Debug)]
struct ClusterHost {
    /// `None`: `/proc` cannot be read, so no lock is known to belong to a process that has ended.
    records: Option<ProcessRecords>,
    /// The network thread's orders; `None`: every thread may do all that librbd does.
    network: Option<Mutex<Sender<Job>>>,
}

impl ClusterHost {
    fn new(helper: Option<Arc<Helper>>, network: Option<Sender<Job>>) -> Arc<Self> {
        let records = ProcessRecords::new(helper);
        let records =
            records.inspect_err(|error| warn!("the lock of a killed server cannot be recognized: {error}"));
        Arc::new(Self { records: records.ok(), network: network.map(Mutex::new) })
    }
}

impl Host for ClusterHost {
    fn own_record(&self) -> Option<String> {
        self.records.as_ref().map(ProcessRecords::own)
    }

    fn has_ended(&self, record: &str) -> bool {
        self.records.as_ref().is_some_and(|records| records.has_ended(record))
    }

    fn start_thread(&self, call: Job) -> io::Result<()> {
        match &self.network {
            None => start(call),
            Some(network) => {
                let sent = network.lock().unwrap_or_else(PoisonError::into_inner).send(call);
                sent.map_err(|_| io::Error::other("the thread that reaches clusters has ended"))
            }
        }
    }
}

impl RemoteAccess {
    /// Access with the rights of this process.
    pub fn direct() -> Self {
        Self { dial: Arc::new(Dialer::Host), clusters: Clusters::Direct(ClusterHost::new(None, None)) }
    }

    /// Access in a sandbox with this helper. `clusters`: the configurations of the clusters in which disks are. To be
    /// called before the sandbox closes.
    pub fn confined(helper: &Arc<Helper>, clusters: &[PathBuf]) -> Result<Self> {
        let dial = Arc::new(Dialer::Helper(Arc::clone(helper)));
        if clusters.is_empty() {
            return Ok(Self { dial, clusters: Clusters::Closed });
        }
        // In the sandbox, no thread may make memory executable.
        rbd_client::Library::load()?;
        let thread = start_network_thread(clusters)?;
        Ok(Self {
            dial,
            clusters: Clusters::Confined(ClusterHost::new(Some(Arc::clone(helper)), Some(thread))),
        })
    }

    /// Opens an image on another machine. May block for seconds.
    pub fn open(&self, options: &ImageOptions) -> Result<Image, ImageError> {
        match &options.location {
            Location::Nbd(uri) => Image::open_export(Arc::clone(&self.dial), uri, options),
            Location::Rbd(spec) => self.open_rbd(spec, options),
            Location::Host => Err(failed(options, "it is on this host")),
        }
    }

    fn open_rbd(&self, spec: &RbdSpec, options: &ImageOptions) -> Result<Image, ImageError> {
        let host = match &self.clusters {
            Clusters::Direct(host) => return Image::open_rbd(spec, options, Some(Arc::clone(host) as _)),
            Clusters::Confined(host) => host,
            Clusters::Closed => {
                let why = "the server was started without RBD disks, so its sandbox does not reach clusters: restart it \
                           with this disk in its configuration";
                return Err(failed(options, why));
            }
        };
        let (spec, own, used) = (spec.clone(), options.clone(), Arc::clone(host));
        let (done, opened) = sync_channel(1);
        let call = move || drop(done.send(Image::open_rbd(&spec, &own, Some(used as _))));
        let started = host.start_thread(Box::new(call));
        started.map_err(|error| failed(options, &error.to_string()))?;
        opened.recv().unwrap_or_else(|_| Err(failed(options, "the thread that opens it has ended")))
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
            if let Err(error) = start(job) {
                tracing::error!("cannot start a thread that calls librbd: {error}");
            }
        }
    };
    let thread = std::thread::Builder::new().name("bareblk-network".into()).spawn(run);
    thread.context("cannot start the thread that reaches clusters")?;
    let entered = entered.recv().map_err(|_| anyhow!(io::Error::from(io::ErrorKind::BrokenPipe)))?;
    entered.context("cannot set up the sandbox of the thread that reaches clusters")?;
    Ok(jobs)
}

fn start(call: Job) -> io::Result<()> {
    std::thread::Builder::new().name("bareblk-rbd".into()).spawn(call).map(drop)
}
