//! Measures the cost of choosing an engine for a disk: probing the file, creating an engine, and trying it.
//!
//! `cargo bench -p io_engine --bench choose`
//!
//! See also: what requests cost (`request.rs`).
#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use criterion::{Criterion, criterion_group, criterion_main};
use disk_image::{CacheMode, HostOpener, Image, ImageOptions};
use io_engine::{EngineConfig, FileSpec, choose};

fn choosing(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("choose_engine");
    let disk = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let cases = [
        ("disk, past the page cache", disk, CacheMode::None),
        ("disk, page cache", disk, CacheMode::Writeback),
        ("memory", Path::new("/dev/shm"), CacheMode::Writeback),
    ];
    for (name, folder, cache) in cases {
        let folder = tempfile::tempdir_in(folder).unwrap();
        let path = folder.path().join("disk.raw");
        let options = ImageOptions { create_bytes: Some(1 << 20), cache, ..ImageOptions::new(&path) };
        let Ok(image) = Image::open(&HostOpener, &options) else { continue };
        let file = FileSpec::of(&image);
        let config = EngineConfig::default();
        group.bench_function(name, |bencher| {
            bencher.iter(|| choose(None, &file, &config).unwrap());
        });
    }
    group.finish();
}

criterion_group!(benches, choosing);
criterion_main!(benches);
