//! Reads the content of a batch's clusters from the lower layers, several at a time and while other copies are written.
//!
//! `announced → readers, in turn → taken by the copy, in any order → forgotten at the end of the batch`
//!
//! - Only slow storage is read ahead: a handover to a reader takes as long as a read from memory. The caller itself reads the
//!   first cluster of each batch, and times it.
//! - Nothing here fails a copy: what was not read ahead, or not well, is read again by the caller, who then gets the error.
//! - Between batches the readers have no jobs, and no file.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use qcow2::ReadAt;
use tracing::debug;

use crate::volume::table_file::TableFile;

const READERS: usize = 4;
/// The most memory for content, over which a single cluster may go.
const MOST_BYTES: usize = 4 << 20;
const ALIGNMENT: usize = 4096;
/// Slow storage takes more time for [`TIMED_BYTES`].
const FAST: Duration = Duration::from_micros(40);
const TIMED_BYTES: u32 = 64 << 10;
const STACK_BYTES: usize = 256 << 10;

/// Aligned memory for one read.
#[derive(Debug, Default)]
struct Buffer {
    memory: Vec<u8>,
    content: Range<usize>,
}

impl Buffer {
    fn resize(&mut self, len: usize) {
        if self.memory.len() < len + ALIGNMENT {
            self.memory = vec![0; len + ALIGNMENT];
        }
        // If the memory cannot be aligned, the file's calls copy.
        let start = self.memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        self.content = start..start + len;
    }

    fn content(&mut self) -> &mut [u8] {
        &mut self.memory[self.content.clone()]
    }
}

/// A read of one file.
#[derive(Debug)]
pub(super) struct Source {
    pub file: TableFile,
    pub offset: u64,
    /// What the file has of the content. The rest is zeroes.
    pub has_bytes: usize,
}

#[derive(Debug)]
struct Job {
    guest_offset: u64,
    source: Source,
    buffer: Buffer,
}

/// A read that is over.
#[derive(Debug)]
struct Content {
    guest_offset: u64,
    is_whole: bool,
    buffer: Buffer,
}

impl Job {
    /// Reads, and closes the file before the metadata thread gets the content.
    fn run(mut self) -> Content {
        let (inside, past) = self.buffer.content().split_at_mut(self.source.has_bytes);
        past.fill(0);
        let is_whole =
            self.source.file.read_at(self.source.offset, inside).is_ok_and(|read| read == inside.len());
        Content { guest_offset: self.guest_offset, is_whole, buffer: self.buffer }
    }

    fn refuse(self) -> Content {
        Content { guest_offset: self.guest_offset, is_whole: false, buffer: self.buffer }
    }
}

/// The readers of a disk's metadata thread.
#[derive(Debug)]
pub(super) struct ReadAhead {
    readers: Vec<Sender<Job>>,
    next_reader: usize,
    over: Receiver<Content>,
    /// Guest offsets of reads that are not known to be over.
    awaited: HashSet<u64>,
    /// Whether the last read of the caller was slow.
    is_slow: bool,
    /// The batch has announced a read.
    has_begun: bool,
    bytes: usize,
    contents: BTreeMap<u64, Buffer>,
    spare: Vec<Buffer>,
}

impl ReadAhead {
    /// Starts the readers. `enter` runs first on each of them; false: it must not run. With fewer readers, more is read by the
    /// caller.
    pub fn start(enter: impl Fn() -> bool + Clone + Send + 'static) -> Self {
        let (results, over) = channel();
        let start = |_| {
            let (sender, jobs) = channel::<Job>();
            let (enter, results) = (enter.clone(), results.clone());
            let run = move || {
                let may_run = enter();
                // The metadata thread may have ended before.
                jobs.into_iter()
                    .for_each(|job| _ = results.send(if may_run { job.run() } else { job.refuse() }));
            };
            let builder = std::thread::Builder::new().name("bareblk-copy".into()).stack_size(STACK_BYTES);
            match builder.spawn(run) {
                Ok(_) => Some(sender),
                Err(error) => {
                    debug!("a reader of lower layers cannot be started: {error}");
                    None
                }
            }
        };
        let readers = (0..READERS).filter_map(start).collect();
        Self {
            readers,
            next_reader: 0,
            over,
            awaited: HashSet::new(),
            is_slow: false,
            has_begun: false,
            bytes: 0,
            contents: BTreeMap::new(),
            spare: Vec::new(),
        }
    }

    /// Tells how long a read by the caller took.
    pub fn note_read(&mut self, len: usize, took: Duration) {
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        self.is_slow = took > FAST * len.div_ceil(TIMED_BYTES).max(1);
    }

    /// Reads a part of the guest's disk soon: if it is not the first one of the batch, the storage is slow, and there is
    /// memory for it.
    pub fn announce(&mut self, guest_offset: u64, len: usize, source: Source) {
        let has_room = self.bytes == 0 || self.bytes.saturating_add(len) <= MOST_BYTES;
        let is_known = self.awaited.contains(&guest_offset) || self.contents.contains_key(&guest_offset);
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        if is_first || !self.is_slow || self.readers.is_empty() || is_known || !has_room {
            return;
        }
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.resize(len);
        self.next_reader = (self.next_reader + 1) % self.readers.len();
        match self.readers[self.next_reader].send(Job { guest_offset, source, buffer }) {
            Ok(()) => {
                self.awaited.insert(guest_offset);
                self.bytes += len;
            }
            // The reader has panicked.
            Err(_) => drop(self.readers.swap_remove(self.next_reader)),
        }
    }

    /// Fills the start of `part` with what was read ahead there. Returns how many bytes; 0: none.
    pub fn take(&mut self, guest_offset: u64, part: &mut [u8]) -> usize {
        while self.awaited.contains(&guest_offset) && self.receive() {}
        let Some((start, buffer)) = self.contents.range_mut(..=guest_offset).next_back() else { return 0 };
        let start = *start;
        let skip = usize::try_from(guest_offset - start).unwrap_or(usize::MAX);
        let Some(found) = buffer.content().get(skip..).filter(|found| !found.is_empty()) else { return 0 };
        let (count, is_used_up) = (found.len().min(part.len()), found.len() <= part.len());
        part[..count].copy_from_slice(&found[..count]);
        if is_used_up && let Some(buffer) = self.contents.remove(&start) {
            self.put_back(buffer);
        }
        count
    }

    /// Waits for the next read. False: no reader is left.
    fn receive(&mut self) -> bool {
        let Ok(content) = self.over.recv() else {
            self.awaited.clear();
            return false;
        };
        self.awaited.remove(&content.guest_offset);
        if content.is_whole {
            self.contents.insert(content.guest_offset, content.buffer);
        } else {
            self.put_back(content.buffer);
        }
        true
    }

    fn put_back(&mut self, buffer: Buffer) {
        self.bytes -= buffer.content.len();
        self.spare.push(buffer);
    }

    /// Forgets all content, and waits for the reads that are not over.
    pub fn forget(&mut self) {
        self.has_begun = false;
        while !self.awaited.is_empty() && self.receive() {}
        while let Some((_, buffer)) = self.contents.pop_first() {
            self.put_back(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    use super::*;
    use crate::geometry::Alignment;

    const PART: usize = 64 << 10;

    /// A file in which each 64 KiB have the byte of their number.
    fn file(parts: u8) -> Arc<File> {
        let file = tempfile::tempfile().unwrap();
        (0..parts)
            .for_each(|part| file.write_all_at(&vec![part; PART], u64::from(part) * PART as u64).unwrap());
        Arc::new(file)
    }

    fn announce(ahead: &mut ReadAhead, file: &Arc<File>, part: u64, has_bytes: usize) {
        let file = TableFile::new(Arc::clone(file), Alignment::BUFFERED);
        let offset = part * PART as u64;
        ahead.announce(offset, PART, Source { file, offset, has_bytes });
    }

    fn take(ahead: &mut ReadAhead, offset: usize, len: usize) -> Vec<u8> {
        let mut part = vec![0xff; len];
        let count = ahead.take(offset as u64, &mut part);
        part.truncate(count);
        part
    }

    fn slow_with(may_run: bool) -> ReadAhead {
        let mut ahead = ReadAhead::start(move || may_run);
        ahead.note_read(PART, Duration::from_secs(1));
        ahead.has_begun = true;
        ahead
    }

    fn slow() -> ReadAhead {
        slow_with(true)
    }

    #[test]
    fn caller_reads_from_fast_storage_itself_and_the_first_cluster_of_each_batch() {
        let (file, mut ahead) = (file(4), slow());
        ahead.forget();
        (0..2).for_each(|part| announce(&mut ahead, &file, part, PART));
        assert!(take(&mut ahead, 0, PART).is_empty(), "the first one");
        assert_eq!(take(&mut ahead, PART, PART), vec![1; PART]);
        ahead.note_read(2 * PART, 2 * FAST);
        announce(&mut ahead, &file, 2, PART);
        assert!(take(&mut ahead, 2 * PART, PART).is_empty(), "fast storage");
        ahead.note_read(512, 2 * FAST);
        announce(&mut ahead, &file, 3, PART);
        assert_eq!(take(&mut ahead, 3 * PART, PART), vec![3; PART]);
    }

    #[test]
    fn content_is_taken_in_any_order_and_in_pieces() {
        let (file, mut ahead) = (file(8), slow());
        (0..8).for_each(|part| announce(&mut ahead, &file, part, PART));
        assert_eq!(take(&mut ahead, 7 * PART, PART), vec![7; PART]);
        assert_eq!(take(&mut ahead, 2 * PART, 512), [2; 512]);
        assert_eq!(
            take(&mut ahead, 2 * PART + 512, 2 * PART),
            vec![2; PART - 512],
            "up to the end of what was read"
        );
        assert!(take(&mut ahead, 2 * PART, 512).is_empty(), "used up");
        assert!(take(&mut ahead, 8 * PART, 512).is_empty(), "not announced");
    }

    #[test]
    fn past_the_files_end_are_zeroes_and_a_file_that_was_cut_off_gives_nothing() {
        let (file, mut ahead) = (file(2), slow());
        announce(&mut ahead, &file, 1, 512);
        let mut expected = vec![1; 512];
        expected.resize(PART, 0);
        assert_eq!(take(&mut ahead, PART, PART), expected);
        announce(&mut ahead, &file, 2, PART);
        assert!(take(&mut ahead, 2 * PART, PART).is_empty());
    }

    #[test]
    fn later_batch_sees_later_content() {
        let (file, mut ahead) = (file(2), slow());
        (0..2).for_each(|part| announce(&mut ahead, &file, part, PART));
        ahead.forget();
        assert_eq!(Arc::strong_count(&file), 1, "the readers have closed it");
        file.write_all_at(&[9; PART], 0).unwrap();
        assert!(take(&mut ahead, 0, PART).is_empty());
        ahead.has_begun = true;
        announce(&mut ahead, &file, 0, PART);
        assert_eq!(take(&mut ahead, 0, PART), vec![9; PART]);
        assert_eq!(ahead.bytes, 0);
    }

    #[test]
    fn memory_is_bounded_and_one_cluster_of_any_size_fits() {
        let (file, mut ahead) = (file(1), slow());
        (0..1000).for_each(|part| announce(&mut ahead, &file, part, 0));
        assert_eq!(ahead.bytes, MOST_BYTES);
        ahead.forget();
        ahead.has_begun = true;
        let large = MOST_BYTES + PART;
        let source = TableFile::new(Arc::clone(&file), Alignment::BUFFERED);
        ahead.announce(0, large, Source { file: source, offset: 0, has_bytes: 0 });
        assert_eq!(take(&mut ahead, 0, large), vec![0; large]);
    }

    #[test]
    fn readers_without_their_role_read_nothing() {
        let (file, mut ahead) = (file(8), slow_with(false));
        (0..8).for_each(|part| announce(&mut ahead, &file, part, PART));
        (0..8).for_each(|part| assert!(take(&mut ahead, part * PART, PART).is_empty()));
        ahead.forget();
    }
}
