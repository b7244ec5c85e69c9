//! The engine for images in a Ceph cluster, on a real cluster.

use std::path::Path;
use std::sync::Arc;

use disk_image::{Image, ImageOptions, Location, RbdOptions};
use io_engine::{Engine, EngineConfig, RbdEngine};
use rbd_client::ClusterOptions;

use super::ceph::CephImage;
use crate::bed::{Bed, IMAGE_BYTES, Storage, config, start};

/// Options for an image.
pub fn rbd_options(image: &CephImage) -> ImageOptions {
    let location = Location::parse(Path::new(&image.spec())).unwrap();
    let cluster = ClusterOptions { conf: image.conf(), ..ClusterOptions::default() };
    let rbd = RbdOptions { cluster, lock: true };
    ImageOptions { location, rbd, ..ImageOptions::new(image.spec()) }
}

/// Opens an image.
pub fn open_rbd(options: &ImageOptions) -> Arc<Image> {
    let Location::Rbd(spec) = &options.location else { panic!("{options:?}") };
    Arc::new(Image::open_rbd(spec, options, None).unwrap())
}

/// A bed on this image, which the case keeps.
pub fn rbd_on(options: &ImageOptions) -> Bed {
    let image = open_rbd(options);
    image.backing().begin_use(&|| true).unwrap();
    rbd_worker(image, config())
}

/// Another worker of a disk.
pub fn rbd_worker(image: Arc<Image>, config: EngineConfig) -> Bed {
    let engine: Box<dyn Engine> = Box::new(RbdEngine::new(&config).unwrap());
    start((engine, config), image, Storage::None, None)
}

pub fn rbd() -> Option<Bed> {
    let image = CephImage::new(IMAGE_BYTES)?;
    let options = rbd_options(&image);
    let mut bed = rbd_on(&options);
    bed.keep(Storage::Ceph { _image: image });
    Some(bed)
}
