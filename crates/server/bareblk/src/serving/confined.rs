//! Sets up the sandbox of `bareblk serve` at the start, as the configuration demands.
//!
//! `(GnuTLS loaded for disks with TLS) → helper started → locked memory allowed → another user, no capabilities → landlock → (images, sockets) → list of calls`

use std::collections::BTreeSet;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use disk_image::{Access, HostOpener, Location, Opener};
use io_engine::EngineKind;
use nbd_client::NbdUri;
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use sandbox::{Enforcement, EngineCalls, FileRules, Identity, Kept};
use tls_client::Library;
use tracing::{debug, warn};

use crate::args::serve_args::{Confinement, Switch};
use crate::args::usage::Contradiction;
use crate::config::configuration::{Configuration, ServerSettings};
use crate::helper::client;
use crate::helper::files_of;
use crate::helper::policy::Policy;
use crate::helper::server_address::ServerAddress;
use crate::logging::LogArgs;
use crate::serving::remote_access::RemoteAccess;

const NOT_UP: &str = "cannot set up the sandbox (--sandbox off serves without it)";

/// The rights that the process keeps.
#[derive(Debug)]
pub struct Confined {
    /// The server's access to the file system.
    pub opener: Arc<dyn Opener>,
    /// The server's access to other machines.
    pub remote: Arc<RemoteAccess>,
    identity: Identity,
    /// `None`: there is no sandbox.
    files: Option<Enforcement>,
}

impl Confined {
    /// Restricts system calls: the last step before any other thread starts.
    pub fn limit_calls(&self) -> Result<()> {
        if self.files.is_some() {
            sandbox::confine().context(NOT_UP)?;
        }
        Ok(())
    }

    /// Logs which rights remain. To be called once disks are served, so that a failed start writes only its error.
    pub fn log(&self) {
        let Identity { user, group } = self.identity;
        match self.files {
            None => warn!("--sandbox off: the server keeps all rights of the user who started it"),
            Some(Enforcement::None) => {
                warn!(
                    "the sandbox does not restrict files: the kernel has no landlock, or its lsm= parameter leaves it out"
                );
            }
            Some(files) => debug!(%files, user, group, "in the sandbox"),
        }
    }
}

/// Gives up rights as configured. To be called before the server opens anything, while the process has one thread.
pub fn give_up_rights(configuration: &Configuration, adopts: bool, log: &LogArgs) -> Result<Confined> {
    let server = &configuration.server;
    let confinement = &server.options.confinement;
    check(confinement, server.options.control.is_some())?;
    if confinement.sandbox == Switch::Off {
        let opener = Arc::new(HostOpener);
        let remote = Arc::new(RemoteAccess::direct());
        return Ok(Confined { opener, remote, identity: Identity::default(), files: None });
    }
    if exports(configuration).any(|uri| uri.tls.is_some()) {
        Library::load()?;
    }
    let opener = client::start(&policy(configuration, adopts), log)?;
    let locked_memory = !allow_locked_memory();
    let identity = identity(confinement);
    sandbox::drop_privileges(identity, kept(server, locked_memory)).context(NOT_UP)?;
    sandbox::keep_out_of_core_files().context(NOT_UP)?;
    let remote = Arc::new(RemoteAccess::confined(&opener, &clusters(configuration))?);
    let files = sandbox::restrict_files(&file_rules(server)).context(NOT_UP)?;
    Ok(Confined { opener, remote, identity, files: Some(files) })
}

pub fn check(confinement: &Confinement, control: bool) -> Result<()> {
    let Confinement { sandbox, user, group, allow_folders } = confinement;
    let sandbox = *sandbox == Switch::On;
    if !sandbox && (user.is_some() || group.is_some()) {
        bail!(Contradiction(
            "--user and --group need --sandbox on: only the sandbox's helper can open images and sockets \
             for another user"
        ));
    }
    if allow_folders.is_some() && !(sandbox && control) {
        bail!(Contradiction("--allow-folders has no effect without --control and --sandbox on"));
    }
    if user.is_some_and(|user| user.group.is_none()) && group.is_none() {
        bail!(Contradiction(
            "--user is a number that belongs to no user, so its group is unknown: add --group"
        ));
    }
    Ok(())
}

/// Allows the files that the configuration names and, with a control socket, their folders, for disks that clients add.
/// `adopts`: whether this start is a live upgrade.
fn policy(configuration: &Configuration, adopts: bool) -> Policy {
    let Configuration { disks, server, file, .. } = configuration;
    let on_this_host = || disks.iter().filter(|disk| !disk.is_remote());
    let images: Vec<&Path> = on_this_host().map(|disk| disk.image.path.as_path()).collect();
    let files: Vec<&Path> = images.iter().copied().filter(|image| !is_device(image)).collect();
    let with = |access: Access| {
        let disks = on_this_host().filter(move |disk| disk.image.access == access);
        disks.map(|disk| disk.image.path.as_os_str().to_owned()).collect()
    };
    let sockets: Vec<&Path> = disks
        .iter()
        .map(|disk| &disk.socket.path)
        .chain(&server.options.control)
        .chain(&server.options.monitor)
        .map(PathBuf::as_path)
        .collect();
    let named = |paths: &[&Path]| paths.iter().map(|path| path.as_os_str().to_owned()).collect();
    let folders = |paths: &[&Path]| match server.options.control {
        Some(_) => {
            let beside = paths.iter().flat_map(|path| [Some(path.to_path_buf()), path.canonicalize().ok()]);
            let beside = beside.flatten().map(|path| folder(&path));
            let more =
                server.options.confinement.allow_folders.iter().flat_map(|more| more.0.iter().cloned());
            beside.chain(more).collect::<BTreeSet<_>>().into_iter().map(PathBuf::into_os_string).collect()
        }
        None => Vec::new(),
    };
    Policy {
        images: with(Access::ReadWrite),
        readonly_images: with(Access::ReadOnly),
        sockets: named(&sockets),
        servers: exports(configuration).map(|uri| ServerAddress::from(&uri.address)).collect(),
        credentials: exports(configuration).flat_map(files_of).collect(),
        configuration: file.clone().map(PathBuf::into_os_string),
        image_folders: folders(&files),
        backing_folders: disks
            .iter()
            .flat_map(|disk| &disk.image.backing_folders)
            .map(|folder| folder.as_os_str().to_owned())
            .collect(),
        socket_folders: folders(&sockets),
        adopts,
        complete: true,
    }
}

/// The disks on NBD servers.
fn exports(configuration: &Configuration) -> impl Iterator<Item = &NbdUri> {
    configuration.disks.iter().filter_map(|disk| match &disk.image.location {
        Location::Nbd(uri) => Some(uri),
        Location::Host | Location::Rbd(_) => None,
    })
}

/// The configuration files of the clusters that have images.
fn clusters(configuration: &Configuration) -> Vec<PathBuf> {
    let disks = configuration.disks.iter();
    let clusters = disks.filter(|disk| matches!(disk.image.location, Location::Rbd(_)));
    clusters.map(|disk| disk.image.rbd.cluster.conf.clone()).collect()
}

/// Whether the image is a device. Clients may not name the files beside a device: these are other disks of the host,
/// and devices that are not disks.
fn is_device(image: &Path) -> bool {
    let below_dev = |path: &Path| path.canonicalize().is_ok_and(|real| real.starts_with("/dev"));
    let is_block_device = image.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device());
    is_block_device || below_dev(image) || below_dev(&folder(image))
}

/// The path's folder: "." if the path is only a name.
fn folder(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new(".")).to_path_buf()
}

fn identity(confinement: &Confinement) -> Identity {
    let user = confinement.user;
    Identity { user: user.map(|user| user.id), group: confinement.group.or(user.and_then(|user| user.group)) }
}

/// Workers set classes and nice values later, on their own threads.
fn kept(server: &ServerSettings, locked_memory: bool) -> Kept {
    let scheduled = server.workers.iter().any(|worker| worker.nice.is_some() || worker.class.is_some());
    Kept::Server { scheduling: scheduled || server.options.control.is_some(), locked_memory }
}

/// Raises the limit of locked memory, which limits io_uring's rings and pinned guest memory, before the process loses
/// CAP_IPC_LOCK. Returns false if the limit stays, as for a container's root that may not raise it.
fn allow_locked_memory() -> bool {
    if !capabilities(None).is_ok_and(|now| now.effective.contains(CapabilitySet::IPC_LOCK)) {
        return true;
    }
    let unlimited = Rlimit { current: None, maximum: None };
    let raised = setrlimit(Resource::Memlock, unlimited);
    if let Err(error) = raised {
        debug!("cannot raise the limit of locked memory, so it stays as it is: {error}");
    }
    raised.is_ok()
}

/// The files that workers write to join their control groups: those named at the start and, for groups that clients
/// name, those of all groups that the kernel would let them join.
fn file_rules(server: &ServerSettings) -> FileRules {
    let groups = server.workers.iter().filter_map(|worker| worker.cgroup.as_deref());
    let named = groups.filter_map(blk_server::threads_file);
    let own = server.options.control.as_ref().and_then(|_| blk_server::own_domain());
    FileRules { writable: named.chain(own).collect(), ..FileRules::default() }
}

/// Leaves out the system calls of engines that no worker will use.
pub fn limit_engines(server: &ServerSettings, has_file: bool, kinds: impl Iterator<Item = EngineKind>) {
    if server.options.control.is_some() || has_file {
        return;
    }
    let kinds: Vec<EngineKind> = kinds.collect();
    sandbox::limit_workers(EngineCalls {
        io_uring: kinds.contains(&EngineKind::IoUring),
        linux_aio: kinds.contains(&EngineKind::LinuxAio),
    });
}
