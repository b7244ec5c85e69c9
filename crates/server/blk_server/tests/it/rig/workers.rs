//! Servers with several workers, of which the first may hang, and time limits for their tests.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blk_server::{AdminError, Server, WorkerId};
use io_engine::{Engine, EngineConfig, FakeHandle, ThreadsEngine};

use super::passed::faulty;
use super::{FrontEnd, Guest, MIB, Options, PATIENCE, Rig, eventually};

/// Long enough for requests in flight on a busy machine.
pub const ENOUGH: Duration = PATIENCE;
/// For requests that never complete.
pub const SHORT: Duration = Duration::from_millis(50);

pub fn server(rig: &Rig) -> &Server {
    rig.running()
}

/// Waits until a queue of the first disk, on the first worker, is stopping with requests in flight. From then on even
/// an attach to its own worker fails.
pub fn wait_for_stop(rig: &Rig, queue: u16) {
    let stays = || server(rig).attach("test0", queue, WorkerId(0), SHORT);
    assert!(eventually(|| matches!(stays(), Err(AdminError::NotDrained { .. }))), "no stop");
}

/// Starts `count` queues of one guest.
pub fn guests(front_end: &mut FrontEnd, features: u64, count: u16) -> Vec<Guest> {
    front_end.negotiate(features);
    front_end.share_memory(16 * MIB);
    (0..count).map(|index| front_end.start_queue(index, 256, features)).collect()
}

/// The first worker has the fake engine; the others have plain ones, without faults.
pub fn fake_in_the_first_worker() -> (Options, FakeHandle) {
    let (options, handle) = faulty();
    let fake = options.engine.unwrap();
    let first = AtomicBool::new(true);
    let engine = move || {
        if first.swap(false, Ordering::Relaxed) {
            return fake();
        }
        Ok(Box::new(ThreadsEngine::new(EngineConfig::default())?) as Box<dyn Engine>)
    };
    (Options { engine: Some(Box::new(engine)), workers: 2, ..Options::default() }, handle)
}
