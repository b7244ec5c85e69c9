//! Tracks which parts of a file on tmpfs have all their pages, so that a copy through the mapping allocates none.
//!
//! `a chunk is unknown → (first access) mincore → present: copied from now on | has holes: system calls`
//!
//! - A system call reads a hole without filling it, and reports a full file system as an error. A copy would fill the
//!   hole, or raise a SIGBUS.
//! - A write by system call makes a chunk with holes unknown again, because it may have filled the last hole. Punching
//!   a hole marks its chunks as having holes.
//! - All mappings of a file in this process share one [`Presence`], because one worker's discard affects the others.
//! - The states are only hints about memory use: the data is correct whatever they say. So accesses to them need no
//!   ordering.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use guest_mem::FileMapping;
use rustix::fs::fstat;

/// A chunk is copied only if all of it is present.
pub(super) const CHUNK_BYTES: u64 = 64 << 10;
/// Chunks per leaf: 256 MiB of the file, 4 KiB of memory.
const LEAF_CHUNKS: usize = 4096;

const UNKNOWN: u8 = 0;
const PRESENT: u8 = 1;
const HAS_HOLES: u8 = 2;

type Leaf = Box<[AtomicU8]>;

/// The states of a file's chunks.
#[derive(Debug)]
pub(super) struct Presence {
    /// Allocated by the first access to their part of the file.
    leaves: Box<[OnceLock<Leaf>]>,
}

/// The [`Presence`] of each file that this process has mapped, by device and inode.
static FILES: Mutex<Vec<(FileName, Weak<Presence>)>> = Mutex::new(Vec::new());

type FileName = (u64, u64);

impl Presence {
    /// The shared [`Presence`] of the first `len_bytes` of `file`.
    pub fn of_file(file: &File, len_bytes: u64) -> io::Result<Arc<Self>> {
        let stat = fstat(file)?;
        #[allow(clippy::unnecessary_cast)] // the types differ between architectures
        let name = (stat.st_dev as u64, stat.st_ino as u64);
        let leaves = usize::try_from(len_bytes.div_ceil(CHUNK_BYTES * LEAF_CHUNKS as u64))
            .map_err(|_| io::ErrorKind::FileTooLarge)?;
        let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|(_, known)| known.strong_count() > 0);
        let known = files.iter().filter(|(known, _)| *known == name).find_map(|(_, known)| known.upgrade());
        if let Some(known) = known.filter(|known| known.leaves.len() >= leaves) {
            return Ok(known);
        }
        let new = Arc::new(Self { leaves: (0..leaves).map(|_| OnceLock::new()).collect() });
        // A value for a shorter length of this file lasts until all mappings that use it have grown too.
        files.retain(|(known, _)| *known != name);
        files.push((name, Arc::downgrade(&new)));
        Ok(new)
    }

    /// Whether the whole range is known to be present.
    #[inline]
    pub fn has(&self, offset_bytes: u64, len_bytes: u64) -> bool {
        chunks(offset_bytes, len_bytes).all(|chunk| self.state(chunk) == PRESENT)
    }

    /// Whether the whole range is present. Asks the kernel about unknown chunks of `mapping`.
    #[cold]
    pub fn find_out(&self, mapping: &FileMapping, offset_bytes: u64, len_bytes: u64) -> bool {
        chunks(offset_bytes, len_bytes).all(|chunk| {
            if self.state(chunk) == UNKNOWN {
                let present = mapping.has_pages(chunk as u64 * CHUNK_BYTES, CHUNK_BYTES);
                self.set(chunk, if present { PRESENT } else { HAS_HOLES });
            }
            self.state(chunk) == PRESENT
        })
    }

    /// A system call has written the range.
    pub fn written(&self, offset_bytes: u64, len_bytes: u64) {
        let with_holes = chunks(offset_bytes, len_bytes).filter(|&chunk| self.state(chunk) == HAS_HOLES);
        with_holes.for_each(|chunk| self.set(chunk, UNKNOWN));
    }

    /// A hole is about to be punched.
    pub fn punched(&self, offset_bytes: u64, len_bytes: u64) {
        let mut rest = chunks(offset_bytes, len_bytes);
        // A hole may be as long as the file, so this loop visits leaves, not chunks. A missing leaf's chunks are
        // unknown: the next access asks the kernel.
        while let Some(first) = rest.clone().next() {
            let end = rest.end.min((first / LEAF_CHUNKS + 1) * LEAF_CHUNKS);
            if let Some(leaf) = self.leaves.get(first / LEAF_CHUNKS).and_then(OnceLock::get) {
                let in_leaf = &leaf[first % LEAF_CHUNKS..][..end - first];
                in_leaf.iter().for_each(|chunk| chunk.store(HAS_HOLES, Relaxed));
            }
            rest.start = end;
        }
    }

    /// The file was truncated.
    pub fn forget(&self) {
        self.leaves
            .iter()
            .filter_map(OnceLock::get)
            .flatten()
            .for_each(|chunk| chunk.store(UNKNOWN, Relaxed));
    }

    #[inline]
    fn state(&self, chunk: usize) -> u8 {
        let leaf = self.leaves.get(chunk / LEAF_CHUNKS).and_then(OnceLock::get);
        leaf.map_or(UNKNOWN, |leaf| leaf[chunk % LEAF_CHUNKS].load(Relaxed))
    }

    fn set(&self, chunk: usize, state: u8) {
        let Some(leaf) = self.leaves.get(chunk / LEAF_CHUNKS) else { return };
        let leaf = leaf.get_or_init(|| (0..LEAF_CHUNKS).map(|_| AtomicU8::new(UNKNOWN)).collect());
        leaf[chunk % LEAF_CHUNKS].store(state, Relaxed);
    }
}

#[inline]
#[allow(clippy::cast_possible_truncation)] // chunks of files that are mapped
fn chunks(offset_bytes: u64, len_bytes: u64) -> Range<usize> {
    let end_bytes = offset_bytes.saturating_add(len_bytes);
    (offset_bytes / CHUNK_BYTES) as usize..end_bytes.div_ceil(CHUNK_BYTES) as usize
}
