//! io_uring with its options: a kernel thread that submits, a second ring that is polled, pinned guest memory.
//!
//! Few machines have a device that can be polled. `uring_iopoll` polls if the device allows it. `uring_two_rings` uses
//! the second ring on every machine, completed by interrupt. `uring_all_options` has all options at once. See also:
//! io_uring without options (`bed.rs`).

use std::time::Duration;

use disk_image::CacheMode;
use io_engine::{EngineConfig, IoUringEngine, IoUringOptions};

use crate::bed::{Bed, config, disk_folder, on_file};

/// Short, so that the kernel's thread is asleep in some cases and awake in others.
const SQPOLL_IDLE: Duration = Duration::from_millis(2);

fn bed(engine: IoUringEngine, config: EngineConfig) -> Option<Bed> {
    println!("{}", engine.features());
    let mut bed = on_file((Box::new(engine), config), disk_folder(), CacheMode::None)?;
    bed.engine.use_memory(bed.view.memory());
    Some(bed)
}

fn with(options: &IoUringOptions) -> Option<Bed> {
    let config = config();
    bed(IoUringEngine::with(options, &config).unwrap(), config)
}

fn as_if_polled(options: &IoUringOptions) -> Option<Bed> {
    let config = config();
    bed(IoUringEngine::as_if_polled(options, config.clone()).unwrap(), config)
}

pub fn uring_sqpoll() -> Option<Bed> {
    with(&IoUringOptions { sqpoll_idle: Some(SQPOLL_IDLE), ..IoUringOptions::default() })
}

pub fn uring_iopoll() -> Option<Bed> {
    with(&IoUringOptions { iopoll: true, ..IoUringOptions::default() })
}

pub fn uring_two_rings() -> Option<Bed> {
    as_if_polled(&IoUringOptions { iopoll: true, ..IoUringOptions::default() })
}

pub fn uring_pinned() -> Option<Bed> {
    with(&IoUringOptions { pin_guest_memory: true, ..IoUringOptions::default() })
}

pub fn uring_all_options() -> Option<Bed> {
    as_if_polled(&IoUringOptions { sqpoll_idle: Some(SQPOLL_IDLE), iopoll: true, pin_guest_memory: true })
}
