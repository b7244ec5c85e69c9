//! The threads engine on each kind of storage.

use disk_image::{CacheMode, ImageOptions};
use io_engine::{Engine, EngineConfig, ThreadsEngine};

use crate::bed::{Bed, config, disk_folder, on_file, on_loop_device, ram_folder};

fn engine(threads: u32) -> (Box<dyn Engine>, EngineConfig) {
    let config = EngineConfig { threads, ..config() };
    (Box::new(ThreadsEngine::new(config.clone()).unwrap()), config)
}

pub fn threads_direct() -> Option<Bed> {
    on_file(engine(64), disk_folder(), CacheMode::None)
}

pub fn threads_buffered() -> Option<Bed> {
    on_file(engine(64), disk_folder(), CacheMode::Writeback)
}

pub fn threads_tmpfs() -> Option<Bed> {
    on_file(engine(64), ram_folder(), CacheMode::Writeback)
}

pub fn threads_loop_device() -> Option<Bed> {
    on_loop_device(engine(64), &[], |device| ImageOptions::new(device))
}

/// All calls share one thread, so each waits for the others. None may wait forever.
pub fn threads_one_thread() -> Option<Bed> {
    on_file(engine(1), disk_folder(), CacheMode::None)
}
