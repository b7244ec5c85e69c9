//! posix-aio on each kind of storage.

use disk_image::{CacheMode, ImageOptions};
use io_engine::{Engine, EngineConfig, OpKind, PosixAioEngine, PosixAioOptions};

use crate::bed::{Bed, DEPTH, config, disk_folder, on_file, on_loop_device, pattern, ram_folder};

fn posix_aio(fd_pool: u32) -> (Box<dyn Engine>, EngineConfig) {
    let config = config();
    (Box::new(PosixAioEngine::with(&PosixAioOptions { fd_pool }, &config).unwrap()), config)
}

pub fn posix_aio_direct() -> Option<Bed> {
    on_file(posix_aio(4), disk_folder(), CacheMode::None)
}

pub fn posix_aio_buffered() -> Option<Bed> {
    on_file(posix_aio(4), disk_folder(), CacheMode::Writeback)
}

pub fn posix_aio_tmpfs() -> Option<Bed> {
    on_file(posix_aio(4), ram_folder(), CacheMode::Writeback)
}

pub fn posix_aio_loop_device() -> Option<Bed> {
    on_loop_device(posix_aio(4), &[], |device| ImageOptions::new(device))
}

pub fn posix_aio_without_fd_pool() -> Option<Bed> {
    on_file(posix_aio(1), disk_folder(), CacheMode::None)
}

/// The engine has its depth plus 128 control blocks, and a call uses up to 16.
#[test]
fn more_pieces_in_flight_than_control_blocks_all_go_through() {
    let mut bed = posix_aio_tmpfs().unwrap();
    let (count, piece) = (40, 512);
    let data = pattern(1, (count * piece) as usize);
    bed.write(0, &data);
    let range = bed.range(0, count * piece);
    for token in 0..u64::from(DEPTH) {
        let at = |i| (token * count * piece * 2 + i * 2 * piece, piece);
        let pieces: Vec<(u64, u64)> = (0..count).map(at).collect();
        bed.push(token, OpKind::Read { range }, &pieces);
    }
    let done = bed.finish(DEPTH as usize);
    assert!(done.iter().all(|c| c.result == Ok(()) && c.stored_bytes == count * piece), "{done:?}");
    let last = u64::from(DEPTH - 1) * count * piece * 2 + (count - 1) * 2 * piece;
    assert_eq!(bed.load(last, piece), data[((count - 1) * piece) as usize..]);
}
