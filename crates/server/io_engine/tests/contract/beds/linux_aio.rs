//! linux-aio on each kind of storage, with direct I/O, because linux-aio refuses other files.

use disk_image::{CacheMode, ImageOptions};
use io_engine::{Engine, EngineConfig, LinuxAioEngine};

use crate::bed::{Bed, config, disk_folder, on_file, on_loop_device, ram_folder};

fn engine() -> (Box<dyn Engine>, EngineConfig) {
    let config = config();
    (Box::new(LinuxAioEngine::new(config.clone()).unwrap()), config)
}

pub fn linux_aio_direct() -> Option<Bed> {
    on_file(engine(), disk_folder(), CacheMode::None)
}

pub fn linux_aio_tmpfs() -> Option<Bed> {
    on_file(engine(), ram_folder(), CacheMode::None)
}

pub fn linux_aio_loop_device() -> Option<Bed> {
    let direct = |device: &str| ImageOptions { cache: CacheMode::None, ..ImageOptions::new(device) };
    on_loop_device(engine(), &[], direct)
}
