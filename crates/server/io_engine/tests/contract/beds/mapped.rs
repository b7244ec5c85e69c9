//! Mapped disks over two engines, and the qcow2 images for them, made by QEMU's tools.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use disk_image::volume::metadata::MetadataThread;
use disk_image::{Access, CacheMode, HostOpener, Image, ImageOptions};
use io_engine::{Engine, EngineConfig, EngineKind, MappedEngine, make};
use xtask::skip::{Reason, skip};

use crate::bed::{Bed, DEPTH, IMAGE_BYTES, PATIENCE, Storage, config, disk_folder, make_on, start};

pub fn mapped_uring() -> Option<Bed> {
    allocated(EngineKind::IoUring)
}

pub fn mapped_threads() -> Option<Bed> {
    allocated(EngineKind::Threads)
}

/// An image all of whose clusters are allocated, so that each read goes to the file.
fn allocated(kind: EngineKind) -> Option<Bed> {
    let images = Images::new()?;
    images.img(&["create", "-q", "-f", "qcow2", "-o", "preallocation=full", "a", &IMAGE_BYTES.to_string()]);
    let image = images.open("a", CacheMode::Writeback, 1 << 20);
    let (engine, config) = mapped(kind);
    Some(make_on((engine, config), Arc::new(image), images.folder))
}

pub fn mapped_qcow2_uring() -> Option<Bed> {
    writable(EngineKind::IoUring, None)
}

pub fn mapped_qcow2_threads() -> Option<Bed> {
    writable(EngineKind::Threads, None)
}

/// Every first write of a cluster copies the rest of the cluster from a backing file.
pub fn mapped_qcow2_over_a_file() -> Option<Bed> {
    writable(EngineKind::IoUring, Some(IMAGE_BYTES / 2))
}

/// An empty image that is written, over a raw file of zeroes of this length.
fn writable(kind: EngineKind, backing_bytes: Option<u64>) -> Option<Bed> {
    let images = Images::new()?;
    let size = IMAGE_BYTES.to_string();
    match backing_bytes {
        Some(bytes) => {
            std::fs::File::create(images.path("base")).unwrap().set_len(bytes).unwrap();
            images.img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "a", &size]);
        }
        None => images.img(&["create", "-q", "-f", "qcow2", "a", &size]),
    }
    let (image, metadata) = images.open_writable("a", CacheMode::Writeback, 1 << 20);
    let storage = Storage::Writable { _metadata: metadata, _folder: images.folder };
    Some(start(mapped(kind), Arc::new(image), storage, None))
}

/// An engine for mapped disks.
pub fn mapped(kind: EngineKind) -> (Box<dyn Engine>, EngineConfig) {
    let config = config();
    let engine = MappedEngine::new(make(kind, &config).unwrap(), DEPTH);
    (Box::new(engine), config)
}

/// A folder for images.
pub struct Images {
    pub folder: tempfile::TempDir,
}

impl Images {
    /// `None`: QEMU's tools are not installed.
    pub fn new() -> Option<Self> {
        for tool in ["qemu-img", "qemu-io"] {
            if Command::new(tool).arg("--version").output().is_err() {
                skip(Reason::NoProgram(tool.into()), "Debian: package qemu-utils");
                return None;
            }
        }
        Some(Self { folder: disk_folder() })
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn img(&self, words: &[&str]) {
        self.tool("qemu-img", words);
    }

    /// Runs commands of `qemu-io`.
    pub fn io(&self, name: &str, commands: &[String]) {
        let words = commands.iter().flat_map(|command| ["-c", command]);
        let words: Vec<&str> =
            ["-f", "qcow2", "-d", "unmap", "-t", "unsafe"].into_iter().chain(words).chain([name]).collect();
        self.tool("qemu-io", &words);
    }

    fn tool(&self, tool: &str, words: &[&str]) {
        let start = Instant::now();
        loop {
            let output = Command::new(tool).args(words).current_dir(self.folder.path()).output().unwrap();
            // The kernel closes the files of a ring, and with them their locks, shortly after the ring.
            let is_locked =
                String::from_utf8_lossy(&output.stderr).contains("Is another process using the image");
            if !is_locked || start.elapsed() > PATIENCE {
                assert!(output.status.success(), "{tool} {words:?}: {output:?}");
                return;
            }
        }
    }

    /// What QEMU reads.
    pub fn content(&self, name: &str) -> Vec<u8> {
        self.img(&["convert", "-t", "unsafe", "-f", "qcow2", "-O", "raw", name, "content.raw"]);
        std::fs::read(self.path("content.raw")).unwrap()
    }

    /// Without its metadata thread.
    pub fn open_to_write(&self, name: &str, cache: CacheMode, table_cache_bytes: u64) -> Image {
        let options = ImageOptions {
            access: Access::ReadWrite,
            ..options(&self.path(name), self.folder.path(), cache)
        };
        Image::open_qcow2_with(&HostOpener, &options, table_cache_bytes).unwrap()
    }

    pub fn open_writable(
        &self,
        name: &str,
        cache: CacheMode,
        table_cache_bytes: u64,
    ) -> (Image, MetadataThread) {
        let image = self.open_to_write(name, cache, table_cache_bytes);
        let metadata = image.backing().start_metadata_thread(|| true).unwrap();
        (image, metadata.expect("the first thread of a writable disk"))
    }

    /// Neither errors nor leaks.
    pub fn assert_consistent(&self, name: &str) {
        self.img(&["check", "-q", "-f", "qcow2", name]);
    }

    pub fn open(&self, name: &str, cache: CacheMode, table_cache_bytes: u64) -> Image {
        let options = options(&self.path(name), self.folder.path(), cache);
        Image::open_qcow2_with(&HostOpener, &options, table_cache_bytes).unwrap()
    }
}

fn options(path: &Path, folder: &Path, cache: CacheMode) -> ImageOptions {
    ImageOptions {
        access: Access::ReadOnly,
        cache,
        backing_folders: vec![folder.to_owned()],
        ..ImageOptions::new(path)
    }
}
