//! A guest or front-end that disturbs its server as much as one thread can, and an ordinary busy guest for comparison.
//!
//! `start → a thread that repeats one action → dropped → the thread has ended`
//!
//! - Its thread never sleeps, like a virtual CPU that spins. The ordinary busy guest's thread polls for its completions
//!   and does not sleep either. The server is therefore the cause of any additional loss of the good guests.
//! - If its session ends or its queue stops, it connects again.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use guest_mem::{Address, MemoryView};
use virtqueue::split::{RawDescriptor, RawRing};
use workload::{Client, Quiet, RunError, Target, run};

use super::front_end::{HostileFrontEnd, MEMORY_BYTES, QUEUE_SIZE, RawQueue};
use crate::experiment::SampleError;
use crate::load::BlockJob;
use crate::load::disk::clients::timed;
use crate::runner::Xorshift;
use crate::stop::Stop;

/// Addresses of headers and status bytes.
const HEADERS: u64 = 0x1_0000;
const STATUS: u64 = 0x2_0000;
/// Address of a table that loops.
const TABLE: u64 = 0x3_0000;
/// Offsets of valid requests' headers and status bytes in their queue's area. All queues share the data.
const REQUEST_HEADERS: u64 = 0x1000;
const REQUEST_STATUS: u64 = 0x2000;
const REQUEST_DATA: u64 = 8 << 20;
/// Number of parts of a request: header, data, status.
const PARTS: u16 = 3;
const DATA_BYTES: u32 = 4096;
const BLOCK_BYTES: u64 = DATA_BYTES as u64;
const SECTORS_PER_BLOCK: u64 = BLOCK_BYTES / 512;
/// Random writes soon break a ring, so a new session starts after this time.
const SCRIBBLED: Duration = Duration::from_millis(5);
/// An attack that cannot start for this long has failed. [`PAUSE`] is the time between two attempts.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(1);
/// Depth of the ordinary busy guest.
pub(crate) const BUSY_DEPTH: u32 = 32;
/// Size of a large read.
const LARGE_BYTES: u32 = 4 << 20;
/// The runtime of a load, in seconds: longer than any sample.
const FOR_EVER_S: f64 = 3600.0;

/// `VIRTIO_BLK_T_IN` and `VIRTIO_BLK_T_OUT`.
mod kind {
    pub(crate) const READ: u32 = 0;
    pub(crate) const WRITE: u32 = 1;
}

/// The guest's behaviour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attack {
    /// No attack: an ordinary busy guest.
    Busy,
    /// A queue that is always full of invalid requests.
    InvalidRequests,
    /// A queue that is always full of chains that span the whole ring and then enter an endless table.
    Loops,
    /// Kicks without requests.
    Kicks,
    /// Descriptors, tables, headers and the available ring change while the server reads them.
    Scribble,
    /// Sessions that each start a queue and end.
    Reconnects,
    /// Messages that the server refuses, and may log.
    Refusals,
    /// The largest reads that the disk accepts, [`BUSY_DEPTH`] of them in flight.
    LargeReads,
    /// Announces the same memory repeatedly while a queue runs.
    MemoryTables,
    /// Random reads on this many queues, each of which is always full.
    Queues(u16),
    /// Requests a new in-flight log repeatedly, each time with a queue that starts and stops.
    Logs,
    /// A queue full of writes to storage that hangs.
    Hung,
}

/// The running guest, until it is dropped.
#[derive(Debug)]
pub(crate) struct HostileGuest {
    stop: Stop,
    done: Arc<AtomicU64>,
    thread: Option<JoinHandle<Result<(), String>>>,
}

impl HostileGuest {
    /// Starts the guest on the disk behind `socket`. `job` is the load of an ordinary guest.
    pub fn start(attack: Attack, socket: &Path, job: &BlockJob) -> Result<Self, SampleError> {
        let (stop, done) = (Stop::default(), Arc::default());
        let mut thread = Thread {
            socket: socket.to_path_buf(),
            stop: stop.clone(),
            done: Arc::clone(&done),
            seed: job.seed,
            blocks: job.file_bytes / BLOCK_BYTES,
        };
        let job = BlockJob { depth: BUSY_DEPTH, jobs: 1, ..*job };
        let body = move || match attack {
            Attack::Busy => thread.be_busy(&job),
            Attack::LargeReads => thread.be_busy(&BlockJob { block_bytes: LARGE_BYTES, ..job }),
            attack => thread.attack(attack),
        };
        let thread = std::thread::Builder::new().name("lab-hostile".into()).spawn(body);
        let thread = thread.map_err(|error| SampleError::because("the tenth guest", &error))?;
        Ok(Self { stop, done, thread: Some(thread) })
    }

    /// Number of requests, kicks, sessions or tables so far. Not counted for a guest that only reads.
    pub fn done(&self) -> u64 {
        self.done.load(Relaxed)
    }

    /// Stops the guest.
    pub fn end(mut self) -> Result<(), SampleError> {
        self.join().map_err(|why| SampleError::because("the tenth guest", &why))
    }

    fn join(&mut self) -> Result<(), String> {
        self.stop.ask();
        let broken = |_| Err("the guest's thread panicked".to_owned());
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap_or_else(broken))
    }
}

impl Drop for HostileGuest {
    fn drop(&mut self) {
        let _ = self.join();
    }
}

struct Thread {
    socket: PathBuf,
    stop: Stop,
    done: Arc<AtomicU64>,
    seed: u64,
    /// Size of the disk.
    blocks: u64,
}

impl Thread {
    fn be_busy(&mut self, job: &BlockJob) -> Result<(), String> {
        let client = Client { poll: true, ..Client::default() };
        let target = Target::Socket(self.socket.clone());
        let end = Instant::now() + PATIENCE;
        loop {
            match run(&timed(job, FOR_EVER_S), &target, &client, &self.stop, &mut Quiet) {
                // A server that has created its socket may not listen on it yet.
                Err(RunError::Refused { .. }) if Instant::now() < end => std::thread::sleep(PAUSE),
                outcome => return outcome.map(drop).map_err(|error| error.to_string()),
            }
        }
    }

    /// Repeats the attack. A session may end as part of the attack; the attack fails only if no new one starts for
    /// [`PATIENCE`].
    fn attack(&mut self, attack: Attack) -> Result<(), String> {
        let mut last = Instant::now();
        while !self.stop.is_asked() {
            let before = self.done.load(Relaxed);
            let ended = self.session(attack);
            if self.done.load(Relaxed) != before {
                last = Instant::now();
            } else if last.elapsed() > PATIENCE {
                return Err(ended
                    .err()
                    .map_or_else(|| "the guest made no progress".to_owned(), |error| error.to_string()));
            } else {
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    fn session(&mut self, attack: Attack) -> io::Result<()> {
        let front_end = HostileFrontEnd::connect(&self.socket)?;
        if attack == Attack::Refusals {
            front_end.negotiate_acks()?;
            while !self.stop.is_asked() && front_end.nonsense()? {
                self.count(1);
            }
            return Ok(());
        }
        match attack {
            Attack::Logs => return self.renew_logs(&front_end),
            Attack::Queues(count) => return self.keep_full(&front_end, count, kind::READ),
            Attack::Hung => return self.keep_full(&front_end, 1, kind::WRITE),
            _ => {}
        }
        let guest = Guest::of(front_end.start_queue()?)?;
        match attack {
            Attack::MemoryTables => {
                self.while_wanted(|| front_end.announce_memory(&guest.queue.view).map(|()| 1))
            }
            Attack::Kicks => self.while_wanted(|| guest.kick().map(|()| 1)),
            Attack::InvalidRequests => {
                guest.prepare_invalid()?;
                self.while_wanted(|| guest.fill_up())
            }
            Attack::Loops => {
                guest.prepare_loops()?;
                self.while_wanted(|| guest.fill_up())
            }
            Attack::Scribble => {
                guest.prepare_invalid()?;
                self.seed = self.seed.wrapping_add(1);
                let (mut random, end) = (Xorshift::new(self.seed), Instant::now() + SCRIBBLED);
                self.while_wanted(|| {
                    if Instant::now() > end {
                        Err(io::ErrorKind::TimedOut.into())
                    } else {
                        guest.scribble(&mut random)
                    }
                })
            }
            _ => {
                self.count(1);
                Ok(())
            }
        }
    }

    fn renew_logs(&self, front_end: &HostileFrontEnd) -> io::Result<()> {
        let view = front_end.negotiate_log()?;
        self.while_wanted(|| {
            let _queue = front_end.start_with_new_log(&view)?;
            front_end.stop_queue().map(|()| 1)
        })
    }

    fn keep_full(&self, front_end: &HostileFrontEnd, count: u16, kind: u32) -> io::Result<()> {
        let mut random = Xorshift::new(self.seed);
        let mut block = || random.below(self.blocks);
        let mut guests =
            front_end.start_queues(count)?.into_iter().map(Guest::of).collect::<Result<Vec<_>, _>>()?;
        for guest in &mut guests {
            self.count(guest.fill_with(kind, &mut block)?);
        }
        self.while_wanted(|| guests.iter_mut().map(|guest| guest.refill(&mut block)).sum())
    }

    fn while_wanted(&self, mut act: impl FnMut() -> io::Result<u64>) -> io::Result<()> {
        while !self.stop.is_asked() {
            self.count(act()?);
        }
        Ok(())
    }

    fn count(&self, more: u64) {
        self.done.fetch_add(more, Relaxed); // a count
    }
}

/// A queue that the guest writes byte by byte.
struct Guest {
    queue: RawQueue,
    ring: RawRing,
    /// Number of answers taken so far.
    taken: u16,
}

impl Guest {
    fn of(queue: RawQueue) -> io::Result<Self> {
        let ring = RawRing::new(&queue.view, queue.layout).map_err(io::Error::other)?;
        Ok(Self { queue, ring, taken: 0 })
    }

    /// Fills the ring with requests, and returns the number of requests.
    fn fill_with(&mut self, kind: u32, block: &mut impl FnMut() -> u64) -> io::Result<u64> {
        let area = self.queue.layout.descriptors.raw_value();
        let (headers, status) = (area + REQUEST_HEADERS, area + REQUEST_STATUS);
        let data_flags = if kind == kind::READ { RawDescriptor::WRITE } else { 0 };
        let requests = QUEUE_SIZE / PARTS;
        for slot in 0..requests {
            let (head, at) = (slot * PARTS, u64::from(slot));
            let part = |addr, len_bytes, flags, next| RawDescriptor { addr, len_bytes, flags, next };
            let header = part(headers + 16 * u64::from(head), 16, RawDescriptor::NEXT, head + 1);
            let data_addr = REQUEST_DATA + BLOCK_BYTES * at;
            self.store(header.addr, &kind.to_le_bytes())?;
            self.store(header.addr + 8, &(block() * SECTORS_PER_BLOCK).to_le_bytes())?;
            self.ring.set_descriptor(head, header);
            let data = part(data_addr, DATA_BYTES, data_flags | RawDescriptor::NEXT, head + 2);
            self.ring.set_descriptor(head + 1, data);
            self.ring.set_descriptor(head + 2, part(status + at, 1, RawDescriptor::WRITE, 0));
            self.ring.set_avail_entry(slot, head);
        }
        self.ring.set_avail_idx(requests);
        self.kick()?;
        Ok(requests.into())
    }

    /// Sends each answered request again, for a different block. Returns the number of these requests.
    fn refill(&mut self, block: &mut impl FnMut() -> u64) -> io::Result<u64> {
        let (from, new) = (self.ring.avail_idx(), self.ring.used_idx().wrapping_sub(self.taken));
        if new == 0 {
            return Ok(0);
        }
        let headers = self.queue.layout.descriptors.raw_value() + REQUEST_HEADERS;
        for at in 0..new {
            let (head, _) = self.ring.used_entry(self.taken.wrapping_add(at));
            self.store(headers + 16 * u64::from(head) + 8, &(block() * SECTORS_PER_BLOCK).to_le_bytes())?;
            self.ring.set_avail_entry(from.wrapping_add(at), u16::try_from(head).unwrap_or(0));
        }
        self.taken = self.taken.wrapping_add(new);
        self.ring.set_avail_idx(from.wrapping_add(new));
        self.kick()?;
        Ok(new.into())
    }

    fn view(&self) -> &MemoryView {
        &self.queue.view
    }

    fn kick(&self) -> io::Result<()> {
        rustix::io::write(&self.queue.kick, &1u64.to_ne_bytes()).map(drop).map_err(Into::into)
    }

    fn store(&self, addr: u64, bytes: &[u8]) -> io::Result<()> {
        self.view().store(addr, bytes).map_err(io::Error::other)
    }

    /// Makes each pair of descriptors a request: of an unknown type, past the end of any disk, or with an incomplete
    /// header.
    fn prepare_invalid(&self) -> io::Result<()> {
        for (at, head) in (0..QUEUE_SIZE).step_by(2).enumerate() {
            let header = HEADERS + 16 * u64::from(head);
            let (kind, len_bytes) = [(0xffff_u32, 16), (0, 16), (1, 7)][at % 3];
            self.store(header, &kind.to_le_bytes())?;
            self.store(header + 8, &u64::MAX.to_le_bytes())?;
            let next = RawDescriptor { addr: header, len_bytes, flags: RawDescriptor::NEXT, next: head + 1 };
            let status = RawDescriptor {
                addr: STATUS + u64::from(head),
                len_bytes: 1,
                flags: RawDescriptor::WRITE,
                next: 0,
            };
            self.ring.set_descriptor(head, next);
            self.ring.set_descriptor(head + 1, status);
        }
        Ok(())
    }

    /// Links each descriptor to the next one. The last one refers to a table whose last entry links to its first.
    fn prepare_loops(&self) -> io::Result<()> {
        let part = |at: u16| RawDescriptor {
            addr: HEADERS,
            len_bytes: 16,
            flags: RawDescriptor::NEXT,
            next: (at + 1) % QUEUE_SIZE,
        };
        for at in 0..QUEUE_SIZE {
            self.ring.set_table_descriptor(TABLE, at, part(at)).map_err(io::Error::other)?;
            self.ring.set_descriptor(at, part(at));
        }
        let len_bytes = u32::from(QUEUE_SIZE) * 16;
        let table = RawDescriptor { addr: TABLE, len_bytes, flags: RawDescriptor::INDIRECT, next: 0 };
        self.ring.set_descriptor(QUEUE_SIZE - 1, table);
        Ok(())
    }

    /// Makes as many chains available as the ring can hold. Returns the number of new ones.
    fn fill_up(&self) -> io::Result<u64> {
        let (from, to) = (self.ring.avail_idx(), self.ring.used_idx().wrapping_add(QUEUE_SIZE / 2));
        let new = to.wrapping_sub(from);
        if new == 0 || new > QUEUE_SIZE {
            std::hint::spin_loop();
            return Ok(0);
        }
        for at in 0..new {
            let index = from.wrapping_add(at);
            self.ring.set_avail_entry(index, (index % (QUEUE_SIZE / 2)) * 2);
        }
        self.ring.set_avail_idx(to);
        self.kick()?;
        Ok(new.into())
    }

    /// Writes random values wherever the server may read, then makes a few more chains available.
    fn scribble(&self, random: &mut Xorshift) -> io::Result<u64> {
        for _ in 0..64 {
            let word = random.next();
            let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
            let (slot, next) = (u16::from(a), u16::from(b));
            let descriptor = RawDescriptor {
                addr: (u64::from(c) << 12 | u64::from(d) << 4) % MEMORY_BYTES,
                len_bytes: u32::from(e) << (f & 7),
                flags: u16::from(g & 7),
                next,
            };
            self.ring.set_descriptor(slot, descriptor);
            self.ring.set_table_descriptor(TABLE, u16::from(h), descriptor).map_err(io::Error::other)?;
            self.store(HEADERS + 16 * u64::from(slot), &[f & 15])?;
        }
        let word = random.next();
        self.ring.set_avail_entry(self.ring.avail_idx(), u16::from(word.to_le_bytes()[0]));
        self.fill_up()
    }
}
