//! The engines of `doubles.rs`, on a file in the page cache.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use io_engine::{Core, IoUringEngine};

use crate::bed::{Bed, DEPTH, IMAGE_BYTES, config, disk_folder, make_on, on_file};
use crate::doubles::layer::{CLUSTER_BYTES, Layer, table};
use crate::doubles::remote::Remote;

pub fn remote() -> Option<Bed> {
    let config = config();
    let engine = Core::over(Remote::new().unwrap(), &config);
    on_file((Box::new(engine), config), disk_folder(), CacheMode::Writeback)
}

/// The table is beyond the part of the file that the guest sees.
pub fn layer() -> Option<Bed> {
    let folder = disk_folder();
    let path = folder.path().join("formatted.raw");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(IMAGE_BYTES + CLUSTER_BYTES).unwrap();
    file.write_all_at(&table(IMAGE_BYTES / CLUSTER_BYTES), IMAGE_BYTES).unwrap();
    let options = ImageOptions { cache: CacheMode::Writeback, ..ImageOptions::new(&path) };
    let image = Arc::new(Image::open(&HostOpener, &options).unwrap());
    let config = config();
    let inner = Box::new(IoUringEngine::new(config.clone()).unwrap());
    let engine = Layer::new(inner, Arc::clone(&image), IMAGE_BYTES, DEPTH);
    Some(make_on((Box::new(engine), config), image, folder))
}
