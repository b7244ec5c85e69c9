//! One queue of a guest: sends requests synchronously or in batches.

use std::os::fd::OwnedFd;
use std::time::Instant;

use guest_mem::{GuestRange, MemoryView};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtqueue::{DriverQueue, RingFeatures, RingLayout};

use super::{MIB, PATIENCE, kind};

/// The completion of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// `None`: the chain completed with length 0, so the device wrote nothing.
    pub status: Option<u8>,
    pub data: Vec<u8>,
    pub used_bytes: u32,
}

pub struct Guest {
    pub index: u16,
    pub layout: RingLayout,
    pub features: RingFeatures,
    pub view: MemoryView,
    pub ring: DriverQueue,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    pub err: OwnedFd,
    pub next_token: u64,
}

/// The requests of each queue start at 4 MiB, with one MiB per queue.
const DATA_BASE: u64 = 4 * MIB;

impl Guest {
    pub fn area(&self) -> u64 {
        DATA_BASE + u64::from(self.index) * MIB
    }

    pub fn kick(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// Sends header, data to the device, room for data from it, and status, each in its own descriptor.
    pub fn request(&mut self, kind: u32, sector: u64, out: &[u8], room: u32) -> Answer {
        let (header, data, status) = (self.area(), self.area() + 0x1000, self.area() + 0x800);
        self.view.store(header, &header_bytes(kind, sector)).unwrap();
        self.view.store(status, &[0xff]).unwrap();
        self.view.store(data, out).unwrap();
        let mut readable = vec![GuestRange { addr: header, len_bytes: 16 }];
        if !out.is_empty() {
            readable.push(GuestRange { addr: data, len_bytes: u32::try_from(out.len()).unwrap() });
        }
        let mut writable = vec![];
        if room > 0 {
            writable.push(GuestRange { addr: data, len_bytes: room });
        }
        writable.push(GuestRange { addr: status, len_bytes: 1 });
        self.exchange(&readable, &writable)
    }

    /// Sends any chain; its last writable byte is the status.
    pub fn exchange(&mut self, readable: &[GuestRange], writable: &[GuestRange]) -> Answer {
        let token = self.add(readable, writable);
        self.submit();
        let used_bytes = self.wait_for(token);
        self.answer(writable, used_bytes)
    }

    pub fn answer(&self, writable: &[GuestRange], used_bytes: u32) -> Answer {
        let mut data = vec![];
        for range in writable {
            let mut part = vec![0; range.len_bytes as usize];
            self.view.read(range.addr, &mut part).unwrap();
            data.extend_from_slice(&part);
        }
        let status = data.pop();
        Answer { status: status.filter(|_| used_bytes > 0), data, used_bytes }
    }

    pub fn add(&mut self, readable: &[GuestRange], writable: &[GuestRange]) -> u64 {
        self.next_token += 1;
        self.ring.add(readable, writable, self.next_token).unwrap();
        self.next_token
    }

    /// Publishes the requests, and kicks if the device requested kicks.
    pub fn submit(&mut self) {
        self.ring.publish();
        if self.ring.kick_needed() {
            self.kick();
        }
    }

    /// The used length of the request. No other request may complete meanwhile.
    pub fn wait_for(&mut self, token: u64) -> u32 {
        let used = self.next_used().expect("nothing completed");
        assert_eq!(used.token, token);
        used.written_bytes
    }

    /// Waits on the call fd for the next completed request.
    pub fn next_used(&mut self) -> Option<virtqueue::Used> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(used) = self.ring.pop_used().unwrap() {
                return Some(used);
            }
            if !self.ring.arm_interrupts().unwrap() && !wait_readable(&self.call, deadline) {
                return None;
            }
            let _ = rustix::io::read(&self.call, &mut [0u8; 8]);
        }
    }

    pub fn read(&mut self, sector: u64, bytes: u32) -> Answer {
        self.request(kind::IN, sector, &[], bytes)
    }

    pub fn write(&mut self, sector: u64, data: &[u8]) -> Answer {
        self.request(kind::OUT, sector, data, 0)
    }

    /// Whether the server reports a fault of this queue before the test's time limit.
    pub fn err_signalled(&self) -> bool {
        wait_readable(&self.err, Instant::now() + PATIENCE)
    }
}

pub fn header_bytes(kind: u32, sector: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}

pub fn wait_readable(fd: &OwnedFd, deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    let timeout =
        Timespec { tv_sec: left.as_secs().try_into().unwrap(), tv_nsec: left.subsec_nanos().into() };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).unwrap() == 1
}
