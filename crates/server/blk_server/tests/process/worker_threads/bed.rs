//! A server whose workers report where they run: when it creates its engine, each records its /proc entry and touches
//! memory.

use std::fs;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use blk_server::{
    Balance, DiskConfig, EngineFactory, EngineSource, Server, ServerConfig, ServerError, SocketConfig, Wce,
    WorkerOptions,
};
use disk_image::{HostOpener, Image, ImageOptions, Opener};
use io_engine::{EngineConfig, IoUringEngine};

use crate::rig::{MIB, Rig};

/// Small enough to come from the thread's own arena. There are enough blocks to fill most of the arena.
const BLOCK_BYTES: usize = 64 << 10;
const BLOCKS: usize = 64;

/// A thread's properties from /proc.
#[derive(Clone, Debug)]
pub struct Seen {
    pub name: String,
    pub thread_id: u32,
    pub cpus: String,
    pub nice: i64,
    pub policy: u64,
    pub priority: u64,
    pub group: String,
    /// Addresses of memory that the thread allocated and wrote: on its heap, and on its stack.
    pub heap_addr: usize,
    pub stack_addr: usize,
}

impl Seen {
    /// The calling thread.
    pub fn here() -> Self {
        Self::of("/proc/thread-self")
    }

    pub fn again(&self) -> Self {
        Self::of(&format!("/proc/self/task/{}", self.thread_id))
    }

    fn of(task: &str) -> Self {
        let read = |file: &str| fs::read_to_string(format!("{task}/{file}")).unwrap();
        let status = read("status");
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().to_owned()
        };
        let stat = read("stat");
        // From the third field (the state) on, because names may contain anything.
        let fields: Vec<i64> = stat
            .rsplit_once(')')
            .unwrap()
            .1
            .split_whitespace()
            .map(|word| word.parse().unwrap_or(0))
            .collect();
        let unsigned = |number: usize| u64::try_from(fields[number - 3]).unwrap();
        let group = read("cgroup").lines().find_map(|line| line.strip_prefix("0::").map(str::to_owned));
        Self {
            name: read("comm").trim().to_owned(),
            thread_id: field("Pid:").parse().unwrap(),
            cpus: field("Cpus_allowed_list:"),
            nice: fields[19 - 3],
            policy: unsigned(41),
            priority: unsigned(40),
            group: group.unwrap_or_default(),
            heap_addr: 0,
            stack_addr: 0,
        }
    }

    /// The NUMA nodes of the pages in the mapping that contains `addr`, with their counts.
    pub fn pages_by_node(addr: usize) -> Vec<(u32, u64)> {
        let maps = fs::read_to_string("/proc/self/numa_maps").unwrap();
        let start = |line: &str| usize::from_str_radix(line.split(' ').next().unwrap(), 16).unwrap();
        let line = maps.lines().filter(|line| start(line) <= addr).max_by_key(|line| start(line)).unwrap();
        let pages = line.split(' ').filter_map(|word| {
            let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
            Some((node.parse().ok()?, pages.parse().ok()?))
        });
        pages.collect()
    }
}

/// A disk with four queues; queue `i` goes to worker `i` if there are as many workers.
pub struct Bed {
    pub rig: Rig,
    pub seen: Vec<Seen>,
}

/// Starts a server with these workers, which serves only one disk in `CARGO_TARGET_TMPDIR`.
pub fn start(workers: Vec<WorkerOptions>) -> Result<Bed, ServerError> {
    let folder = tempfile::Builder::new().prefix("rig-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = folder.path().join("disk.raw");
    fs::File::create(&image).unwrap().set_len(16 * MIB).unwrap();
    let name = format!("{}.sock", folder.path().file_name().unwrap().display());
    let socket = std::env::temp_dir().join(name);
    let mut rig = Rig { folder, image, socket, server: None };

    let opener: Arc<dyn Opener> = Arc::new(HostOpener);
    let options = ImageOptions { lock_timeout: Duration::ZERO, ..ImageOptions::new(&rig.image) };
    let image = Image::open(opener.as_ref(), &options).unwrap();
    let serial = image.default_serial();
    let name = "disk".to_owned();
    let disk = DiskConfig {
        name,
        image,
        serial,
        queues: 4,
        queue_size: 256,
        wce: Wce::Guest,
        engine: None,
        workers: None,
        coalescing: None,
        park: None,
    };
    let socket = SocketConfig { path: rig.socket.clone(), mode: 0o600, uid: None, gid: None };

    let count = workers.len();
    let (engine, told) = telling_engine();
    let config = ServerConfig { engine, workers, poll: Duration::from_micros(50), balance: Balance::Off };
    rig.server = Some(Server::start(&config, &opener, vec![(disk, socket)])?);
    let mut seen: Vec<Seen> = told.try_iter().collect();
    seen.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(seen.len(), count, "each worker makes its engine, before the server is there");
    Ok(Bed { rig, seen })
}

fn telling_engine() -> (Arc<EngineSource>, Receiver<Seen>) {
    let (tell, told) = channel();
    let (tell, kept) = (Mutex::new(tell), Mutex::new(Vec::new()));
    let config = EngineConfig::default();
    let depth = config.depth;
    let make: EngineFactory = Box::new(move || {
        let blocks: Vec<Vec<u8>> = (0..BLOCKS).map(|_| vec![1; BLOCK_BYTES]).collect();
        let heap_addr = blocks[BLOCKS - 1].as_ptr().addr();
        kept.lock().unwrap().push(blocks);
        let seen = Seen { heap_addr, stack_addr: touch_stack(), ..Seen::here() };
        tell.lock().unwrap().send(seen).unwrap();
        Ok(Box::new(IoUringEngine::new(config.clone())?) as Box<dyn io_engine::Engine>)
    });
    (EngineSource::new("telling", depth, make), told)
}

#[inline(never)]
fn touch_stack() -> usize {
    let mut bytes = [1u8; 256 << 10];
    std::hint::black_box(&mut bytes).as_ptr().addr()
}
