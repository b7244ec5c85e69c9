//! Disks that are added to a running server, by number; `Rig` already has the lowest numbers.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use blk_server::{AdminError, DiskConfig, DiskReport, Server, SocketConfig, Wce};
use disk_image::{HostOpener, Image, ImageOptions};

use super::{FrontEnd, Guest, MIB, PATIENCE, Rig, feature, numbered};

/// The time that the tests' removals wait for requests that hang.
pub const BRIEFLY: Duration = Duration::from_millis(300);

impl Rig {
    pub fn running(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    pub fn name(number: usize) -> String {
        format!("test{number}")
    }

    pub fn image_of(&self, number: usize) -> PathBuf {
        numbered(&self.image, number)
    }

    pub fn socket_of(&self, number: usize) -> PathBuf {
        numbered(&self.socket, number)
    }

    /// A disk like the server's first ones; makes a 16 MiB image if there is none.
    pub fn disk(&self, number: usize) -> (DiskConfig, SocketConfig) {
        let path = self.image_of(number);
        if !path.exists() {
            File::create(&path).unwrap().set_len(16 * MIB).unwrap();
        }
        let options = ImageOptions { lock_timeout: Duration::ZERO, ..ImageOptions::new(path) };
        let image = Image::open(&HostOpener, &options).unwrap();
        let (name, serial) = (Self::name(number), image.default_serial());
        let (queues, queue_size, wce) = (4, 256, Wce::Guest);
        let disk = DiskConfig {
            name,
            image,
            serial,
            queues,
            queue_size,
            wce,
            engine: None,
            workers: None,
            coalescing: None,
            park: None,
        };
        (disk, SocketConfig { path: self.socket_of(number), mode: 0o600, uid: None, gid: None })
    }

    pub fn add(&self, number: usize) -> Result<(), AdminError> {
        let (disk, socket) = self.disk(number);
        self.running().add_disk(disk, &socket)
    }

    pub fn remove(&self, number: usize) -> Result<(), AdminError> {
        self.running().remove_disk(&Self::name(number), true, PATIENCE)
    }

    /// A guest of disk `number` with one started queue.
    pub fn guest_of(&self, number: usize) -> (FrontEnd, Guest) {
        let mut front_end = self.connect_to(number);
        front_end.negotiate(feature::USUAL);
        front_end.share_memory(16 * MIB);
        let guest = front_end.start_queue(0, 256, feature::USUAL);
        (front_end, guest)
    }

    pub fn report_of(&self, number: usize) -> DiskReport {
        let disks = self.running().report().disks;
        disks.into_iter().find(|disk| disk.name == Self::name(number)).unwrap()
    }

    /// Bytes of the image of disk `number`.
    pub fn bytes_of(&self, number: usize, offset_bytes: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        File::open(self.image_of(number)).unwrap().read_exact_at(&mut bytes, offset_bytes).unwrap();
        bytes
    }
}

/// The number of entries in a folder, such as this process's descriptors or threads.
pub fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}
