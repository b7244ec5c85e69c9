//! Memory regions and descriptors that a front-end passes, requests that hang or are in flight together, and figures
//! from /proc about this process.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use guest_mem::{GuestAddress, GuestMemory, GuestRange, Region, RegionSpec};
use io_engine::{EngineConfig, FakeEngine, FakeHandle, Fault, When};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};

use super::{FrontEnd, Guest, MIB, Options, Rig, code, feature, header_bytes, kind, ready, region_bytes};

/// A server whose requests hang, or fail, when the test says so.
pub fn faulty() -> (Options, FakeHandle) {
    let config = EngineConfig { drain_timeout: Duration::from_millis(100), ..EngineConfig::default() };
    let (engine, handle) = FakeEngine::new(config).unwrap();
    let engine = Mutex::new(Some(engine));
    let factory = move || Ok(Box::new(engine.lock().unwrap().take().unwrap()) as Box<dyn io_engine::Engine>);
    (Options { engine: Some(Box::new(factory)), ..Options::default() }, handle)
}

/// Every request hangs from now on, until `let_go`.
pub fn hold(handle: &FakeHandle) {
    handle.inject(When::Always, Fault::Hang, u64::MAX);
}

pub fn let_go(handle: &FakeHandle) {
    handle.clear();
    handle.release().unwrap();
}

/// Whether the server serves a well-behaved front-end.
pub fn works(rig: &Rig) -> bool {
    let (_front_end, mut guest) = ready(rig, feature::USUAL);
    serves(&mut guest)
}

/// Whether a queue can write and read back.
pub fn serves(guest: &mut Guest) -> bool {
    let data: Vec<u8> = (0..4096u32).map(|i| (i % 241) as u8).collect();
    guest.write(64, &data).status == Some(0) && guest.read(64, 4096).data == data
}

pub fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// Reads and resets the number of signals so far.
pub fn take_signals(fd: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(fd, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

pub fn memfd(bytes: u64) -> OwnedFd {
    let fd = memfd_create("bareblk-test", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    fd
}

/// Guest addresses `addr` to `addr + bytes`, at `offset` of the file.
pub fn region(fd: &OwnedFd, addr: u64, bytes: u64, offset: u64) -> Arc<Region> {
    let spec = RegionSpec {
        guest_addr: GuestAddress(addr),
        size_bytes: bytes,
        user_addr: addr,
        file_offset_bytes: offset,
    };
    Arc::new(Region::map(spec, Arc::new(fd.try_clone().unwrap())).unwrap())
}

/// The body of SET_MEM_TABLE for regions of 32 bytes each.
pub fn table_of(regions: &[Vec<u8>]) -> Vec<u8> {
    let count = u32::try_from(regions.len()).unwrap().to_ne_bytes();
    [count.to_vec(), vec![0; 4], regions.concat()].concat()
}

/// SET_MEM_TABLE with NEED_REPLY.
pub fn share(front_end: &mut FrontEnd, regions: Vec<Arc<Region>>) {
    let body = table_of(&regions.iter().map(|region| region_bytes(region)).collect::<Vec<_>>());
    let fds: Vec<_> = regions.iter().map(|region| region.fd().as_fd()).collect();
    front_end.ok(code::SET_MEM_TABLE, &body, &fds);
    front_end.memory = Arc::new(GuestMemory::new(regions).unwrap());
}

/// The number of mappings of the file in this process, by the test and the server.
pub fn mappings(fd: &OwnedFd) -> usize {
    let inode = rustix::fs::fstat(fd).unwrap().st_ino.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.split_whitespace().nth(4) == Some(&inode)).count()
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
pub struct Pending {
    pub token: u64,
    status_addr: u64,
}

impl Pending {
    /// 0xff until the device answers.
    pub fn status(&self, guest: &Guest) -> u8 {
        let mut byte = [0];
        guest.view.read(self.status_addr, &mut byte).unwrap();
        byte[0]
    }
}

/// Adds a request for `bytes` at `sector`, with data at guest address `addr`, without making it available.
pub fn add_transfer(guest: &mut Guest, verb: u32, sector: u64, addr: u64, bytes: u32) -> Pending {
    let header = (4 + u64::from(guest.index)) * MIB + 0x8_0000 + (guest.next_token % 1024) * 32;
    let status_addr = header + 16;
    guest.view.store(header, &header_bytes(verb, sector)).unwrap();
    guest.view.store(status_addr, &[0xff]).unwrap();
    let range = |addr, len_bytes| GuestRange { addr, len_bytes };
    let (head, data, status) = (range(header, 16), range(addr, bytes), range(status_addr, 1));
    let token = match verb {
        kind::IN => guest.add(&[head], &[data, status]),
        kind::OUT => guest.add(&[head, data], &[status]),
        _ => guest.add(&[head], &[status]),
    };
    Pending { token, status_addr }
}

/// The data address of the requests of `Guest::request`.
pub fn data_addr(guest: &Guest) -> u64 {
    (4 + u64::from(guest.index)) * MIB + 0x1000
}

/// Performs one whole transfer, and returns its status.
pub fn transfer(guest: &mut Guest, verb: u32, sector: u64, addr: u64, bytes: u32) -> u8 {
    let pending = add_transfer(guest, verb, sector, addr, bytes);
    guest.submit();
    guest.wait_for(pending.token);
    pending.status(guest)
}
