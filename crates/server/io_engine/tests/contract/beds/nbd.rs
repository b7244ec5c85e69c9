//! The engine for exports of NBD servers, on real servers.

use std::path::Path;
use std::sync::Arc;

use disk_image::{Image, ImageOptions, Location};
use io_engine::{Engine, EngineConfig, NbdEngine};
use nbd_client::HostDialer;

use super::nbd_server::NbdServer;
use crate::bed::{Bed, IMAGE_BYTES, Storage, config, start};

/// Options for the server's default export.
pub fn options(server: &NbdServer) -> ImageOptions {
    let uri = server.uri();
    let location = Location::parse(Path::new(&uri)).unwrap();
    ImageOptions { location, ..ImageOptions::new(uri) }
}

/// Opens an export.
pub fn open(options: &ImageOptions) -> Arc<Image> {
    let Location::Nbd(uri) = &options.location else { panic!("{options:?}") };
    Arc::new(Image::open_export(Arc::new(HostDialer), uri, options).unwrap())
}

pub fn engine() -> (Box<dyn Engine>, EngineConfig) {
    let config = config();
    (Box::new(NbdEngine::new(&config).unwrap()), config)
}

fn on(server: Option<NbdServer>) -> Option<Bed> {
    let server = server?;
    let image = open(&options(&server));
    Some(start(engine(), image, Storage::Server { _server: server }, None))
}

pub fn nbd_memory() -> Option<Bed> {
    on(NbdServer::nbdkit(&["memory", "16M"]))
}

pub fn nbd_file() -> Option<Bed> {
    on(NbdServer::file(IMAGE_BYTES, &[]))
}

pub fn nbd_one_connection() -> Option<Bed> {
    on(NbdServer::file(IMAGE_BYTES, &["--filter=multi-conn", "multi-conn-mode=disable"]))
}

pub fn nbd_without_fua() -> Option<Bed> {
    on(NbdServer::file(IMAGE_BYTES, &["--filter=fua"]))
}

pub fn nbd_qemu() -> Option<Bed> {
    on(NbdServer::qemu_nbd(IMAGE_BYTES, &[]))
}
