//! A device on its own thread: it sleeps until its doorbell is rung, serves all requests, and signals if the driver
//! wants a signal.
//!
//! See also: a device that a test steps through (`rig`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use blk_driver::{Doorbell, EventFd};
use rustix::event::{PollFd, PollFlags, poll};

use crate::rig::Device;

/// Stops when dropped.
pub struct DeviceThread {
    bell: Arc<EventFd>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

pub fn start(mut device: Device, bell: &Arc<EventFd>) -> DeviceThread {
    let stop = Arc::new(AtomicBool::new(false));
    let (theirs, their_bell) = (Arc::clone(&stop), Arc::clone(bell));
    let thread = std::thread::spawn(move || {
        while !theirs.load(Ordering::Relaxed) {
            if device.serve() == 0 && !device.ring.enable_kicks().unwrap() {
                poll(&mut [PollFd::new(&*their_bell, PollFlags::IN)], None).unwrap();
                their_bell.clear();
            }
        }
    });
    DeviceThread { bell: Arc::clone(bell), stop, thread: Some(thread) }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed); // the doorbell's write orders it
        self.bell.ring();
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}
