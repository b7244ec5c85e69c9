//! A job's end of the link to the metadata thread: jobs merge a disk's layers, or free leaked clusters, while guests use the disk.
//!
//! ```text
//! begin: the thread reads the tables, unless it has them
//! stream: steps from 0 to the end → end
//! reclaim: begin_reclaim → reclaim until it has ended → end
//! commit: begin_commit → commit until nothing is left → end_commit: the image below → end
//! ```
//!
//! - Each call is one small step of the thread, which serves guests in between.
//! - A job is like an engine without ops ([`Member`]). While it has begun, the thread keeps the tables, so no other server may
//!   use the image.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::Volume;
use super::commit_target::CommitTarget;
use super::link::{Change, Done, Member, MergeStep, Progress, Use};

/// How often a job that waits for the thread looks whether the thread has ended.
const LOOK_AGAIN: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A job that merges a disk's layers, or frees leaked clusters of its top.
#[derive(Debug)]
pub struct Merge {
    volume: Arc<Volume>,
    member: Member,
    woken: Arc<OwnedFd>,
    next_token: u64,
    /// The image to which a commit copies.
    target: Option<Arc<File>>,
    has_ended: bool,
}

/// Why a step fails, for people.
pub type MergeError = String;

const CLOSED: &str = "the disk's metadata thread has ended: restart the server";
const NO_ANSWER: &str =
    "the disk's metadata thread does not answer: check the storage, or restart the server";

impl Merge {
    /// Begins a job. Waits until the thread has the tables.
    ///
    /// # Errors
    /// The disk is read-only; the tables cannot be read.
    pub fn begin(volume: &Arc<Volume>, timeout: Duration) -> Result<Self, MergeError> {
        let (number, begun) = volume.begin().ok_or("the disk is read-only")?;
        let undo = |why: String| {
            volume.undo_begin(number);
            why
        };
        match begun.recv_timeout(timeout) {
            Ok(outcome) => outcome?,
            Err(_) => return Err(undo(NO_ANSWER.to_owned())),
        }
        let woken = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let woken = Arc::new(woken.map_err(|error| undo(io::Error::from(error).to_string()))?);
        let member = volume.join(Arc::clone(&woken)).ok_or("the disk is read-only")?;
        Ok(Self { volume: Arc::clone(volume), member, woken, next_token: 0, target: None, has_ended: false })
    }

    /// Copies up to 1 MiB of what lies below the top into the top, from this offset of the guest on.
    ///
    /// # Errors
    /// [`MergeError`].
    pub fn stream(&mut self, from: u64) -> Result<Progress, MergeError> {
        self.step(MergeStep::Stream { from })
    }

    pub(crate) fn begin_commit(&mut self, target: Box<CommitTarget>) -> Result<(), MergeError> {
        let Some(link) = self.volume.link() else { return Err(CLOSED.to_owned()) };
        self.target = Some(Arc::clone(&target.file));
        link.give_target(target);
        self.step(MergeStep::BeginCommit).map(drop)
    }

    /// Copies a part of what the top has into the image below.
    ///
    /// # Errors
    /// [`MergeError`].
    pub fn commit(&mut self) -> Result<Progress, MergeError> {
        self.step(MergeStep::Commit)
    }

    /// Makes durable what has been copied. The thread serves guests meanwhile.
    ///
    /// # Errors
    /// Copies may be lost.
    pub fn sync_commit(&self) -> Result<(), MergeError> {
        let synced = self.target.as_ref().map_or(Ok(()), |file| file.sync_data());
        synced.map_err(|error| {
            self.volume.note_lost_commit();
            format!("cannot sync the backing file: {error}")
        })
    }

    /// `None`: there is no such image, or the thread has ended without returning it.
    pub(crate) fn end_commit(&mut self) -> Option<Box<CommitTarget>> {
        let _ = self.step(MergeStep::EndCommit);
        self.volume.link()?.take_target()
    }

    /// Begins to look for leaked clusters.
    ///
    /// # Errors
    /// [`MergeError`]: the image does not allow it.
    pub fn begin_reclaim(&mut self) -> Result<(), MergeError> {
        self.step(MergeStep::BeginReclaim).map(drop)
    }

    /// Looks for leaked clusters, or frees some, until the result says that the reclaim has ended.
    ///
    /// # Errors
    /// [`MergeError`].
    pub fn reclaim(&mut self) -> Result<Progress, MergeError> {
        self.step(MergeStep::Reclaim)
    }

    /// Ends the job. The thread closes the tables, unless a guest's requests need them.
    ///
    /// # Errors
    /// The tables could not be closed within the time limit: the image may have leaks.
    pub fn end(mut self, timeout: Duration) -> Result<(), MergeError> {
        self.has_ended = true;
        match self.volume.order(Use::Ends).map(|ended| ended.recv_timeout(timeout)) {
            Some(Ok(outcome)) => outcome,
            Some(Err(_)) => Err(NO_ANSWER.to_owned()),
            None => Ok(()),
        }
    }

    fn step(&mut self, step: MergeStep) -> Result<Progress, MergeError> {
        self.next_token += 1;
        let closed = |_| CLOSED.to_owned();
        self.member.ask(self.next_token, Change::Merge(step)).map_err(closed)?;
        loop {
            self.member.take_news();
            match self.member.next_answer().map(|answer| answer.result) {
                Some(Ok(Done::Merged(merged))) => return merged,
                // The tables are closed.
                Some(_) => {
                    return Err(
                        "the disk's metadata thread has closed its tables: start the job again".to_owned()
                    );
                }
                None if self.member.is_closed() => return Err(CLOSED.to_owned()),
                None => self.wait(),
            }
        }
    }

    fn wait(&self) {
        let _ = poll(&mut [PollFd::new(&self.woken, PollFlags::IN)], Some(&LOOK_AGAIN));
        let _ = rustix::io::read(&self.woken, &mut [0; 8]);
    }
}

impl Drop for Merge {
    fn drop(&mut self) {
        if !self.has_ended {
            drop(self.volume.order(Use::Abandons));
        }
    }
}
