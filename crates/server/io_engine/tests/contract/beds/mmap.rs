//! mmap on each kind of storage that mmap accepts: files in memory.

use disk_image::CacheMode;
use io_engine::{Engine, EngineConfig, MmapEngine};

use crate::bed::{Bed, config, on_file, ram_folder};

fn mmap() -> (Box<dyn Engine>, EngineConfig) {
    let config = config();
    (Box::new(MmapEngine::new(config.clone()).unwrap()), config)
}

pub fn mmap_tmpfs() -> Option<Bed> {
    on_file(mmap(), ram_folder(), CacheMode::Writeback)
}

pub fn mmap_tmpfs_direct() -> Option<Bed> {
    on_file(mmap(), ram_folder(), CacheMode::None)
}
