//! The metadata thread of a writable disk: the only one that changes the tables, in the file and in memory.
//!
//! ```text
//! changes of all engines → batch: slices │ claims, together │ zeroes, a turn of each │ syncs │ a job's step → answers
//!                                        └ unlinked host clusters → grace (epochs.rs) → released
//! ```
//!
//! - The batch takes from each engine in turn, and a change does at most a turn's work. So no guest's queue waits for all
//!   of another one's.
//! - A claim that fails alone does not fail the others of its batch.
//! - When a guest's requests begin, the thread reads the tables, unless it has them. When they have ended, it returns the
//!   reserve and the unlinked clusters to the image, and forgets the tables. So another server may use the image in between.
//! - The thread ends when it is told to, or when the volume has gone. It refuses what was not answered.
//! - System calls: `pread64`, `pwrite64`, `fdatasync`, `fallocate`, `ftruncate`, `fstat`, `lseek`, `futex`, and `write` to
//!   engines' sockets. `thread.rs` in `blk_server` chooses the role.
//!
//! See also: jobs (`stream.rs`, `commit.rs`, `reclaim.rs`), what engines ask (`link.rs`), the changes themselves
//! (`qcow2::Writer`).

mod below;
mod change_error;
mod commit;
mod read_ahead;
mod reclaim;
pub(super) mod resize;
mod stream;

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use qcow2::{RawL2Entry, Unlinked, View, WriteError, Writer};
use rustix::io::Errno;
use tracing::{debug, error};

use self::below::{Lower, Memory};
use self::change_error::change_error;
use self::commit::Commit;
use self::read_ahead::ReadAhead;
use self::stream::joined;
use super::link::{Asked, Change, ChangeError, Done, Link, MergeStep, Peer, Progress, Use};
use super::table_file::TableFile;
use super::{Tables, Volume};
use crate::error::line;

/// Changes of a batch.
const BATCH: usize = 64;
/// Batches after which unlinked clusters are released although changes wait.
const BUSY_BATCHES: u32 = 8;
const EIO: i32 = Errno::IO.raw_os_error();
/// Callers undo what they began within seconds.
const MOST_NOT_BEGUN: usize = 256;
/// How often to check whether the ops that may use unlinked clusters have ended.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// A disk's metadata thread. Tells the thread to end when it is dropped.
#[derive(Debug)]
pub struct MetadataThread {
    link: Arc<Link>,
}

impl MetadataThread {
    /// Starts the thread, and its readers if there are lower layers. `enter` runs on each of them first; false: the thread
    /// must not run. `None`: the disk is read-only, or has had its thread.
    ///
    /// # Errors
    /// The thread cannot be started; all changes fail then.
    pub(crate) fn start(
        volume: &Arc<Volume>,
        enter: impl Fn() -> bool + Clone + Send + 'static,
    ) -> io::Result<Option<Self>> {
        let Some((link, tables)) = volume.take_tables() else { return Ok(None) };
        let writer = match tables {
            Tables::Read(writer) => Some(*writer),
            Tables::Theirs => None,
        };
        let ahead = (volume.layers() > 1).then(|| ReadAhead::start(enter.clone()));
        let (weak, own) = (Arc::downgrade(volume), Arc::clone(&link));
        let run = move || {
            let guard = CloseOnDrop(Arc::clone(&own));
            if enter() {
                Metadata::new(weak, own, writer, ahead).run();
            } else {
                own.close(Err("the thread could not take its role".to_owned()));
            }
            drop(guard);
        };
        let started = std::thread::Builder::new().name("bareblk-meta".into()).spawn(run);
        if let Err(error) = started {
            link.close(Err(error.to_string()));
            return Err(error);
        }
        Ok(Some(Self { link }))
    }

    /// Ends the thread, and waits until it has returned its reserve to the image. Ops that need changes fail from now on, so
    /// the guest's requests should have ended.
    ///
    /// # Errors
    /// The image could not be closed: it has leaks, and no other damage. [`io::ErrorKind::TimedOut`]: the thread goes on.
    pub fn close(&self, timeout: Duration) -> io::Result<()> {
        self.link.tell_to_close();
        match self.link.wait_for_end(timeout) {
            Some(outcome) => outcome.map_err(io::Error::other),
            None => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

impl Drop for MetadataThread {
    fn drop(&mut self) {
        self.link.tell_to_close();
    }
}

/// If the thread panics, closes the link, so that its callers get an error.
struct CloseOnDrop(Arc<Link>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.close(Err("the thread has panicked".to_owned()));
        }
    }
}

struct Metadata {
    volume: Weak<Volume>,
    link: Arc<Link>,
    /// `None`: the disk is not in use, and another server may change its tables.
    writer: Option<Writer<TableFile>>,
    users: usize,
    /// Uses that could not begin, and that their callers may still undo.
    not_begun: VecDeque<u64>,
    below: Memory,
    /// A job that copies the top into the layer below it.
    commit: Option<Commit>,
    /// Of a job that frees leaked clusters.
    scanned: Option<reclaim::Scanned>,
    peers: Vec<Peer>,
    /// The engine whose changes are taken first.
    first_peer: usize,
    /// With the engine's index.
    batch: Vec<(usize, Asked)>,
    /// Clusters that are released once every op in flight began in this epoch or later.
    unlinked: Option<(u64, Unlinked)>,
    busy_batches: u32,
    is_told: bool,
}

/// The volume's tables in memory.
struct Shown<'a> {
    volume: &'a Volume,
    link: &'a Link,
    commit: Option<&'a mut Commit>,
}

impl View for Shown<'_> {
    fn file_grew(&mut self, len_bytes: u64) {
        self.volume.grow_top(len_bytes);
    }

    fn l1_changed(&mut self, index: u64, entry: u64) {
        self.link.set_dirty(true);
        self.volume.set_l1(index, entry);
    }

    fn l2_changed(&mut self, cluster_index: u64, entry: RawL2Entry) {
        if let Some(commit) = &mut self.commit {
            commit.changed(cluster_index);
        }
        self.link.set_dirty(true);
        self.volume.set_l2(cluster_index, entry);
    }

    fn l2_unknown(&mut self, cluster_index: u64) {
        if let Some(commit) = &mut self.commit {
            commit.changed(cluster_index);
        }
        self.volume.forget_l2(cluster_index);
    }
}

impl Metadata {
    fn new(
        volume: Weak<Volume>,
        link: Arc<Link>,
        writer: Option<Writer<TableFile>>,
        ahead: Option<ReadAhead>,
    ) -> Self {
        Self {
            volume,
            link,
            writer,
            users: 0,
            not_begun: VecDeque::new(),
            below: Memory::with(ahead),
            commit: None,
            scanned: None,
            peers: Vec::new(),
            first_peer: 0,
            batch: Vec::with_capacity(BATCH),
            unlinked: None,
            busy_batches: 0,
            is_told: false,
        }
    }

    fn run(mut self) {
        self.link.register();
        while !self.link.is_told_to_close() {
            let Some(volume) = self.volume.upgrade() else { break };
            self.link.update(&mut self.peers);
            if let Some(order) = self.link.next_order() {
                let outcome = self.carry_out(order.what, &volume);
                if outcome.is_err() && order.what == Use::Begins {
                    self.note_not_begun(order.number);
                }
                order.answer(outcome);
                continue;
            }
            self.take_batch();
            let is_idle = self.batch.is_empty();
            self.answer_batch(&volume);
            self.release(is_idle);
            drop(volume);
            if is_idle {
                match self.unlinked {
                    Some(_) => std::thread::park_timeout(LOOK_AGAIN),
                    None => std::thread::park(),
                }
            }
        }
        self.close();
    }

    fn carry_out(&mut self, what: Use, volume: &Volume) -> Result<(), String> {
        match what {
            Use::Begins => {
                if self.writer.is_none() {
                    self.writer = Some(volume.read_tables()?);
                    // The other server may have been killed before it made its changes durable.
                    self.link.set_dirty(true);
                }
                self.users += 1;
                // What a commit unlinked in this image: those that used it have gone.
                if self.unlinked.is_none()
                    && let Some(unlinked) = volume.take_unlinked()
                {
                    self.unlinked = Some((self.link.epochs.begin_next(), unlinked));
                }
                Ok(())
            }
            Use::Ends => {
                self.users = self.users.saturating_sub(1);
                if self.users == 0 { self.close_tables() } else { Ok(()) }
            }
            Use::Continues => Ok(()),
            Use::Undoes(number) if self.not_begun.contains(&number) => Ok(()),
            Use::Undoes(_) => self.carry_out(Use::Ends, volume),
            Use::Closes if self.users == 0 => self.close_tables(),
            Use::Closes => Err("an earlier job has not ended yet: try again".to_owned()),
            Use::Abandons => {
                self.abandon_job();
                self.carry_out(Use::Ends, volume)
            }
        }
    }

    fn note_not_begun(&mut self, number: u64) {
        if self.not_begun.len() == MOST_NOT_BEGUN {
            self.not_begun.pop_front();
        }
        self.not_begun.push_back(number);
    }

    fn abandon_job(&mut self) {
        self.writer.iter_mut().for_each(Writer::end_reclaim);
        if let Some(commit) = self.commit.take()
            && let Err(why) = commit.into_target().close()
        {
            debug!("a commit has ended early, and its image has leaks: {why}");
        }
    }

    /// Takes changes of all engines in turn.
    fn take_batch(&mut self) {
        let engines = self.peers.len();
        if engines == 0 {
            return;
        }
        self.first_peer = (self.first_peer + 1) % engines;
        let most = (BATCH / engines).max(1);
        for index in (0..engines).map(|index| (self.first_peer + index) % engines) {
            let room = most.min(BATCH - self.batch.len());
            let taken = std::iter::from_fn(|| self.peers[index].next()).take(room);
            self.batch.extend(taken.map(|asked| (index, asked)));
        }
    }

    fn answer_batch(&mut self, volume: &Volume) {
        let mut batch = std::mem::take(&mut self.batch);
        if let Some(mut writer) = self.writer.take() {
            self.load(&mut writer, volume, &batch);
            self.claim(&mut writer, volume, &batch);
            self.zero(&mut writer, volume, &batch);
            self.sync(&mut writer, &batch);
            self.merge(&mut writer, volume, &batch);
            self.writer = Some(writer);
        } else {
            batch.iter().for_each(|(peer, asked)| {
                self.answer(*peer, asked.token, Err(ChangeError::Errno(EIO)));
            });
        }
        batch.clear();
        self.batch = batch;
    }

    fn answer(&self, peer: usize, token: u64, result: Result<Done, ChangeError>) {
        self.peers[peer].answer(token, result);
    }

    fn load(&mut self, writer: &mut Writer<TableFile>, volume: &Volume, batch: &[(usize, Asked)]) {
        let mut loaded: Vec<(u64, Box<[u64]>)> = Vec::new();
        for (peer, asked) in batch {
            let Change::Load { slice } = asked.change else { continue };
            let words = match loaded.iter().find(|(number, _)| *number == slice) {
                Some((_, words)) => Ok(words.clone()),
                None => self.read_slice(writer, volume, slice),
            };
            if let Ok(words) = &words {
                volume.keep(volume.loaded(slice, words));
                loaded.push((slice, words.clone()));
            }
            self.answer(*peer, asked.token, words.map(|words| Done::Loaded { slice, words }));
        }
    }

    fn read_slice(
        &mut self,
        writer: &mut Writer<TableFile>,
        volume: &Volume,
        slice: u64,
    ) -> Result<Box<[u64]>, ChangeError> {
        if !volume.has_slice(slice) {
            return Err(ChangeError::Damaged);
        }
        let (first, count) = volume.clusters_of_slice(slice);
        let mut entries = vec![RawL2Entry::default(); count];
        let mut view = Shown { volume, link: &self.link, commit: self.commit.as_mut() };
        let read = writer.slice(first, &mut entries, &mut view);
        read.map_err(|error| self.failed(volume, &error))?;
        if let Some(commit) = &self.commit {
            commit.protect_read(first, &mut entries);
        }
        let extended = volume.has_extended_l2();
        let words = entries.iter().flat_map(|entry| {
            [Some(entry.cluster), extended.then_some(entry.subclusters)].into_iter().flatten()
        });
        Ok(words.collect())
    }

    /// Claims the ranges of all, and each alone if that fails.
    fn claim(&mut self, writer: &mut Writer<TableFile>, volume: &Volume, batch: &[(usize, Asked)]) {
        let claims = || {
            batch.iter().filter_map(|(peer, asked)| match &asked.change {
                Change::Claim(range) => Some((*peer, asked.token, range)),
                _ => None,
            })
        };
        let ranges = joined(claims().map(|(.., range)| range.clone()).collect());
        if ranges.is_empty() {
            return;
        }
        let all = self.claim_ranges(writer, volume, &ranges);
        let is_alone = claims().nth(1).is_none();
        for (peer, token, range) in claims() {
            let result = match all {
                Err(error) if !is_alone && !matches!(error, ChangeError::SyncFailed(_)) => {
                    self.claim_ranges(writer, volume, std::slice::from_ref(range))
                }
                all => all,
            };
            self.answer(peer, token, result.map(|()| Done::Claimed));
        }
        self.note_unlinked(writer);
    }

    fn claim_ranges(
        &mut self,
        writer: &mut Writer<TableFile>,
        volume: &Volume,
        ranges: &[Range<u64>],
    ) -> Result<(), ChangeError> {
        let mut lower = Lower { volume, first: 1, memory: &mut self.below };
        let mut view = Shown { volume, link: &self.link, commit: self.commit.as_mut() };
        let claimed = writer.claim(ranges, &mut lower, &mut view);
        lower.forget();
        claimed.map_err(|error| self.failed(volume, &error))
    }

    fn zero(&mut self, writer: &mut Writer<TableFile>, volume: &Volume, batch: &[(usize, Asked)]) {
        for (peer, asked) in batch {
            let Change::Zero { range, unmap } = &asked.change else { continue };
            let mut lower = Lower { volume, first: 1, memory: &mut self.below };
            let mut view = Shown { volume, link: &self.link, commit: self.commit.as_mut() };
            let zeroed = writer.zero(range.clone(), *unmap, &mut lower, &mut view);
            let result = zeroed.map(|to| Done::Zeroed { to }).map_err(|error| self.failed(volume, &error));
            self.answer(*peer, asked.token, result);
            self.note_unlinked(writer);
        }
    }

    fn sync(&mut self, writer: &mut Writer<TableFile>, batch: &[(usize, Asked)]) {
        let syncs = || batch.iter().filter(|(_, asked)| asked.change == Change::Sync);
        if syncs().next().is_none() {
            return;
        }
        let result = writer.sync();
        match &result {
            Ok(()) => self.link.set_dirty(false),
            Err(error) => self.note_failed_sync(error),
        }
        for (peer, asked) in syncs() {
            let result = result.as_ref().map(|()| Done::Synced).map_err(|error| match change_error(error) {
                // Whatever has stopped the writer, this op cannot be made durable.
                ChangeError::Errno(errno) => ChangeError::SyncFailed(errno),
                other => other,
            });
            self.answer(*peer, asked.token, result);
        }
    }

    fn merge(&mut self, writer: &mut Writer<TableFile>, volume: &Volume, batch: &[(usize, Asked)]) {
        for (peer, asked) in batch {
            let Change::Merge(step) = asked.change else { continue };
            let merged = self.merge_step(writer, volume, step);
            self.answer(*peer, asked.token, Ok(Done::Merged(merged)));
            self.note_unlinked(writer);
        }
    }

    fn merge_step(
        &mut self,
        writer: &mut Writer<TableFile>,
        volume: &Volume,
        step: MergeStep,
    ) -> Result<Progress, String> {
        match step {
            MergeStep::Stream { from } => {
                let mut lower = Lower { volume, first: 1, memory: &mut self.below };
                let mut view = Shown { volume, link: &self.link, commit: None };
                let streamed = stream::stream(writer, &mut lower, &mut view, from);
                streamed.inspect_err(|error| self.note_failed_sync(error)).map_err(|error| line(&error))
            }
            MergeStep::BeginCommit => {
                let mut target = self.link.take_target().ok_or("there is no image to commit to")?;
                let mut lower = Lower { volume, first: 2, memory: &mut self.below };
                let (size_bytes, below_bytes) = (volume.size_bytes(), volume.size_of_layer(2));
                let known = volume.file_below_top();
                if let Err(why) = target.grow(size_bytes, known, &mut lower, below_bytes) {
                    let _ = target.close();
                    return Err(why);
                }
                self.commit = Commit::new(target, writer);
                self.commit
                    .as_ref()
                    .map(|_| Progress::default())
                    .ok_or("there is no memory for so large a disk".to_owned())
            }
            MergeStep::Commit => {
                let commit = self.commit.as_mut().ok_or("no commit runs")?;
                commit.step(writer, volume, &self.link, &mut self.peers, &mut self.below)
            }
            MergeStep::EndCommit => {
                if let Some(commit) = self.commit.take() {
                    self.link.give_target(commit.into_target());
                }
                Ok(Progress::default())
            }
            MergeStep::BeginReclaim => {
                self.scanned = None;
                let waiting = self.unlinked.as_ref().map(|(_, unlinked)| unlinked);
                reclaim::begin(writer, volume, &self.link, waiting)
            }
            MergeStep::Reclaim => {
                let mut view = Shown { volume, link: &self.link, commit: None };
                reclaim::step(writer, volume, &mut view, &self.link, &mut self.peers, &mut self.scanned)
            }
        }
    }

    fn note_failed_sync(&self, error: &WriteError) {
        if matches!(error, WriteError::Sync(_)) {
            self.link.note_failed_sync();
        }
    }

    /// Says why changes fail: all of it once, because a guest can ask again and again.
    fn failed(&mut self, volume: &Volume, error: &WriteError) -> ChangeError {
        self.note_failed_sync(error);
        let path = || volume.top_path().display();
        let why = line(error);
        if self.is_told {
            debug!(image = %path(), "a change of the tables fails: {why}");
        } else {
            self.is_told = true;
            error!(image = %path(), "a change of the tables fails: {why}; further errors of this image are not logged");
        }
        change_error(error)
    }

    /// Takes over unlinked clusters, unless others wait for their release: the writer then collects them.
    fn note_unlinked(&mut self, writer: &mut Writer<TableFile>) {
        if self.unlinked.is_none()
            && let Some(unlinked) = writer.take_unlinked()
        {
            self.unlinked = Some((self.link.epochs.begin_next(), unlinked));
        }
    }

    /// Releases clusters that no op knows any more.
    fn release(&mut self, is_idle: bool) {
        self.busy_batches = if is_idle { 0 } else { self.busy_batches + 1 };
        let Some((epoch, unlinked)) = self.unlinked.take() else { return };
        let Some(mut writer) = self.writer.take() else { return };
        // An engine that has joined meanwhile may know them.
        self.link.update(&mut self.peers);
        let is_over = self.peers.iter().all(|peer| peer.is_since(epoch));
        if !is_over || !is_idle && self.busy_batches < BUSY_BATCHES {
            self.unlinked = Some((epoch, unlinked));
        } else {
            self.busy_batches = 0;
            self.release_now(&mut writer, unlinked);
            self.note_unlinked(&mut writer);
        }
        self.writer = Some(writer);
    }

    fn release_now(&self, writer: &mut Writer<TableFile>, unlinked: Unlinked) {
        if let Err(error) = writer.release(unlinked) {
            self.note_failed_sync(&error);
            // They are a leak. If the writer has stopped, the next change says so.
            debug!("unlinked clusters are not released: {}", line(&error));
        }
    }

    fn close(mut self) {
        // No op looks anything up any more that a change could free.
        self.link.refuse();
        self.abandon_job();
        let closed = self.close_tables();
        let link = Arc::clone(&self.link);
        // Releases the file's lock before waiters learn that the thread has ended.
        drop(self);
        link.close(closed);
    }

    /// Returns the reserve and the unlinked clusters to the image. Nothing of the tables is kept. After an error the image
    /// has leaks.
    fn close_tables(&mut self) -> Result<(), String> {
        let Some(mut writer) = self.writer.take() else { return Ok(()) };
        let unlinked = self.unlinked.take().map(|(_, unlinked)| unlinked);
        for unlinked in [unlinked, writer.take_unlinked()].into_iter().flatten() {
            self.give_back(&mut writer, unlinked);
        }
        writer.close().map_err(|error| {
            self.note_failed_sync(&error);
            line(&error)
        })
    }

    /// Releases unlinked clusters at the end, if no op knows them.
    fn give_back(&mut self, writer: &mut Writer<TableFile>, unlinked: Unlinked) {
        let epoch = self.link.epochs.begin_next();
        self.link.update(&mut self.peers);
        if self.peers.iter().all(|peer| peer.is_since(epoch)) {
            self.release_now(writer, unlinked);
        }
    }
}
