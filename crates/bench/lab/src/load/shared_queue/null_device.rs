//! A device in this process that completes at once and requests every notification, and its doorbell.
//!
//! `driver: Kick::notify → ExitBell::ring: spin for the notify cost → the device's work → return`
//!
//! The parts of an exit to the host, and how this file imitates them:
//! - **The CPU is away.** When a guest writes to the notify register, the virtual CPU leaves the guest and does nothing
//!   until the host resumes it. Meanwhile, the host uses the physical CPU. Here, the thread spins for the notify cost,
//!   so no other driver thread gets the core. A sleep would give the core away.
//! - **The host does something.** With QEMU's own loop, the host does the device's work itself; with an eventfd, it
//!   wakes the thread that does the work. [`By::Notifier`] is the first: the notifying thread does the device's work
//!   before it returns. It needs no third thread, which two cores could run only instead of a driver's thread, and no
//!   sleep and wake, whose 5–50 µs would hide the 0–10 µs under test. In return, a locked kick holds the lock during
//!   the device's work, about 0.1 µs per request. [`By::Thread`] is the second: after the spin an eventfd is written,
//!   and a thread that slept in `poll` does the work.
//! - **One device.** Two virtual CPUs may be in an exit for the same queue at once, and one device serves it. Here, the
//!   second thread leaves its work to the first, and returns: [`ExitBell::wanted`] counts rings, and the thread at the
//!   device repeats until it has seen all of them. No thread waits for another, and no ring is missed.
//!
//! **Every request is notified**: without EVENT_IDX the device never sets NO_NOTIFY (virtio 1.3 §2.7.10), so each
//! submission must notify, under either policy. With EVENT_IDX the device re-arms after every chain, but a request
//! needs no notification of its own if another one is still in progress and the device has not looked yet. So an
//! unlocked kick also saves kicks, which is a different gain and has its own workload.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blk_driver::{DeviceEnd, Doorbell, EventFd};
use guest_mem::{AccessError, GuestRange, MemoryView};
use rustix::event::{PollFd, PollFlags, poll};
use virtio_blk::Status;
use virtqueue::{Chain, DeviceQueue, PopError, RingFault};

/// Which thread does the device's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// The notifying thread does the device's work before it returns.
    Notifier,
    /// A separate thread of the device, which sleeps until it is notified.
    Thread,
}

/// An error that ended the device.
#[derive(Debug, thiserror::Error)]
enum DeviceError {
    #[error(transparent)]
    Pop(#[from] PopError),
    #[error(transparent)]
    Ring(#[from] RingFault),
    #[error("a request has no writable byte for its status")]
    NoStatus,
    #[error(transparent)]
    Status(#[from] AccessError),
}

/// The device half: takes chains, reports OK, and moves no data.
#[derive(Debug)]
struct NullDevice {
    queue: DeviceQueue,
    view: MemoryView,
    chain: Chain,
}

impl NullDevice {
    fn new(end: &DeviceEnd) -> Result<Self, RingFault> {
        let view = MemoryView::new(Arc::clone(&end.memory));
        Ok(Self { queue: end.device()?, view, chain: Chain::with_capacity(end.layout.queue_size) })
    }

    /// Completes all available chains one by one, and requests a notification after each.
    fn serve(&mut self) -> Result<(), DeviceError> {
        loop {
            while let Some(tag) = self.queue.pop(&mut self.chain)? {
                self.complete(tag)?;
                if !self.queue.enable_kicks()? {
                    return Ok(());
                }
            }
            if !self.queue.enable_kicks()? {
                return Ok(());
            }
        }
    }

    /// Reports the full length as written, because a driver that counts bytes checks it.
    fn complete(&mut self, tag: u16) -> Result<(), DeviceError> {
        let last = self.chain.writable().last().ok_or(DeviceError::NoStatus)?;
        let GuestRange { addr, len_bytes } = *last;
        self.view.store(addr + u64::from(len_bytes) - 1, &[Status::Ok as u8])?;
        let written_bytes = u32::try_from(self.chain.writable_bytes()).unwrap_or(u32::MAX);
        self.queue.push_used(tag, written_bytes);
        self.queue.publish();
        // The call eventfd is not used, because the drivers in this experiment poll.
        let _ = self.queue.needs_notification();
        Ok(())
    }
}

/// The doorbell of the device.
#[derive(Debug)]
pub(crate) struct ExitBell {
    cost: Duration,
    /// Number of rings that the thread at the device has not handled yet.
    wanted: AtomicU32,
    device: OnceLock<Mutex<NullDevice>>,
    fault: OnceLock<String>,
    /// Signalled after the spin, for [`By::Thread`].
    sleeper: Option<EventFd>,
    ended: AtomicBool,
}

impl ExitBell {
    pub fn new(cost: Duration, by: By) -> io::Result<Arc<Self>> {
        let sleeper = (by == By::Thread).then(EventFd::new).transpose()?;
        let (device, fault) = (OnceLock::new(), OnceLock::new());
        let (wanted, ended) = (AtomicU32::new(0), AtomicBool::new(false));
        Ok(Arc::new(Self { cost, wanted, device, fault, sleeper, ended }))
    }

    /// Attaches the device. Dropping the result ends the device's thread, if it has one.
    pub fn attach(self: &Arc<Self>, end: &DeviceEnd) -> io::Result<DeviceThread> {
        let device = NullDevice::new(end).map_err(io::Error::other)?;
        let _ = self.device.set(Mutex::new(device));
        // Before the first request, the device must enable notifications.
        self.work();
        let bell = Arc::clone(self);
        let thread = match self.sleeper {
            Some(_) => {
                Some(std::thread::Builder::new().name("lab-device".into()).spawn(move || bell.sleep())?)
            }
            None => None,
        };
        Ok(DeviceThread { bell: Arc::clone(self), thread })
    }

    /// The error that ended the device early.
    pub fn fault(&self) -> Option<&str> {
        self.fault.get().map(String::as_str)
    }

    /// Does the device's work, unless another thread is doing it and will include this work.
    fn work(&self) {
        // AcqRel: the chain was made available before this count, and the thread that handles the count must see it.
        if self.wanted.fetch_add(1, AcqRel) != 0 {
            return;
        }
        let mut seen = 1;
        loop {
            self.serve();
            // Leaves the device only if no other thread rang in the meantime. Acquire: this thread must see the chains
            // of a thread that rang the bell.
            match self.wanted.compare_exchange(seen, 0, AcqRel, Acquire) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    fn serve(&self) {
        let Some(device) = self.device.get() else { return };
        // This lock never waits: `wanted` admits one thread at a time.
        let served = device.lock().unwrap_or_else(PoisonError::into_inner).serve();
        if let Err(error) = served {
            let _ = self.fault.set(error.to_string());
        }
    }

    /// The loop of the device's own thread.
    fn sleep(&self) {
        let Some(sleeper) = &self.sleeper else { return };
        // Relaxed: the eventfd orders the flag.
        while !self.ended.load(Relaxed) {
            let _ = poll(&mut [PollFd::new(sleeper, PollFlags::IN)], None);
            let _ = rustix::io::read(sleeper.as_fd(), &mut [0; 8]);
            self.work();
        }
    }
}

impl Doorbell for ExitBell {
    fn ring(&self) {
        if !self.cost.is_zero() {
            let back = Instant::now() + self.cost;
            while Instant::now() < back {
                std::hint::spin_loop();
            }
        }
        match &self.sleeper {
            Some(sleeper) => sleeper.ring(),
            None => self.work(),
        }
    }
}

/// The device's own thread, if it has one.
#[derive(Debug)]
pub(crate) struct DeviceThread {
    bell: Arc<ExitBell>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        self.bell.ended.store(true, Relaxed); // read after the eventfd
        self.bell.sleeper.iter().for_each(EventFd::ring);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
