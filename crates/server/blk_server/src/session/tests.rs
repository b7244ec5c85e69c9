//! Tests a session from inside: however it ends, it releases its queues and its disk.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use disk_image::{CacheMode, HostOpener, Image, ImageOptions, Opener};
use guest_mem::{Budget, GuestAddress, GuestMemory, Limits, Region};
use io_engine::{EngineConfig, FakeEngine};
use rustix::event::{EventfdFlags, eventfd};
use virtio_blk::Negotiated;

use super::Session;
use super::shared::SessionShared;
use super::vring::{UserAddresses, Vring};
use crate::data_path::assignment::WorkerSet;
use crate::data_path::disk::engine_source::EngineSource;
use crate::data_path::disk::write_cache::Wce;
use crate::data_path::disk::{Disk, DiskConfig};
use crate::data_path::worker::worker_options::WorkerOptions;
use crate::data_path::worker::workers::SharedSettings;

const VERSION_1: u64 = 1 << 32;

fn disk(image: &tempfile::NamedTempFile) -> Arc<Disk> {
    let opener: Arc<dyn Opener> = Arc::new(HostOpener);
    let options = ImageOptions { cache: CacheMode::Writeback, ..ImageOptions::new(image.path()) };
    let config = DiskConfig {
        name: "test".into(),
        image: Image::open(opener.as_ref(), &options).unwrap(),
        serial: "test".into(),
        queues: 2,
        queue_size: 256,
        wce: Wce::Guest,
        engine: None,
        workers: None,
        coalescing: None,
        park: None,
    };
    Arc::new(Disk::new(config, &opener, &Budget::new(Limits::of_process())).unwrap())
}

fn workers() -> Arc<WorkerSet> {
    let make = || Ok(Box::new(FakeEngine::new(EngineConfig::default())?.0) as Box<dyn io_engine::Engine>);
    let base = EngineSource::new("test", EngineConfig::default().depth, Box::new(make));
    let shared = SharedSettings { base, poll: Duration::ZERO, meter: None, balancer_wakeup: None };
    WorkerSet::start(&[WorkerOptions::default()], shared).unwrap()
}

/// A session whose queue 0 runs in fresh memory.
fn serving(disk: &Arc<Disk>, workers: &Arc<WorkerSet>) -> Session {
    let (socket, _peer) = UnixStream::pair().unwrap();
    let shared = SessionShared::new(1).unwrap();
    let mut session =
        Session::new(Arc::clone(disk), Arc::clone(workers), Arc::new(socket.into()), shared, None);
    let region = Region::from_memfd(GuestAddress(0), 1 << 20).unwrap();
    session.memory = Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap());
    session.negotiated = Some(Negotiated::accept(session.offered, VERSION_1).unwrap());
    let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    session.vrings[0] = Vring {
        queue_size: Some(16),
        addresses: Some(UserAddresses { descriptors: 0, avail: 0x1000, used: 0x2000 }),
        kick: Some(disk.quota().admit(kick).unwrap()),
        enabled: true,
        ..Vring::default()
    };
    session.reconcile_all().unwrap();
    session
}

/// Like a rebuilt session that fails after its first queue has started.
#[test]
fn session_that_is_given_up_with_a_running_queue_leaves_neither_queue_nor_use_of_the_disk_behind() {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let (disk, workers) = (disk(&image), workers());
    let session = serving(&disk, &workers);
    assert_eq!(workers.queue_reports(disk.id()).len(), 1);
    assert!(!disk.retire(false), "the disk is in use");
    drop(session);
    assert_eq!(workers.queue_reports(disk.id()).len(), 0);
    assert!(disk.retire(false), "the disk is still in use");
}
