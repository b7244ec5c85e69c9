//! The sync engine on each kind of storage. Each kind makes its calls in a different way.

use disk_image::{CacheMode, ImageOptions};
use io_engine::{Engine, EngineConfig, SyncEngine};

use crate::bed::{Bed, config, disk_folder, on_file, on_loop_device, ram_folder};

fn engine() -> (Box<dyn Engine>, EngineConfig) {
    let config = config();
    (Box::new(SyncEngine::new(config.clone()).unwrap()), config)
}

pub fn sync_direct() -> Option<Bed> {
    on_file(engine(), disk_folder(), CacheMode::None)
}

pub fn sync_buffered() -> Option<Bed> {
    on_file(engine(), disk_folder(), CacheMode::Writeback)
}

pub fn sync_tmpfs() -> Option<Bed> {
    on_file(engine(), ram_folder(), CacheMode::Writeback)
}

pub fn sync_loop_device() -> Option<Bed> {
    on_loop_device(engine(), &[], |device| ImageOptions::new(device))
}
