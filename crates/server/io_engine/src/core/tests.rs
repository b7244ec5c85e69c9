//! Tests the core over a backend that answers at random: no op is lost, and none is durable without its sync.
//!
//! `tests/contract` tests real backends.

#![allow(clippy::cast_possible_truncation)] // small numbers of our own

use std::os::fd::OwnedFd;
use std::sync::Arc;

use disk_image::{Alignment, CacheMode, HostOpener, Image, ImageOptions};
use guest_mem::{GuestAddress, GuestMemory, GuestRange, IoVecs, MemoryView, Region};
use proptest::prelude::*;

use super::*;
use crate::backend::{Buffers, Call, QueueFull, Target, Verb};
use crate::config::EngineConfig;
use crate::core::turn::{TURN_COST, Turn};
use crate::engine::{Durability, OpKind, Unmap, WatchId, WatchToken};

const DEPTH: usize = 24;
const IMAGE_BYTES: u64 = 1 << 20;

#[derive(Clone, Copy)]
struct Given {
    user_data: u64,
    file: u32,
    call: Call,
    at: u64,
}

/// A call's result, and the times at which the backend got and answered the call.
#[derive(Clone, Copy, Debug)]
struct Answer {
    file: u32,
    verb: Verb,
    offset_bytes: u64,
    given: u64,
    answered: u64,
    result: i32,
}

/// Answers in any order, and takes no more than `room` calls before the next `submit`.
struct Chance {
    state: u64,
    clock: u64,
    room: usize,
    queued: Vec<Given>,
    started: Vec<Given>,
    budget: usize,
    results: VecDeque<RawResult>,
    answers: Vec<Answer>,
    always: bool,
}

// SAFETY: 1. no thread follows the pointers in calls.
unsafe impl Send for Chance {}

impl Chance {
    fn new(seed: u64) -> Self {
        let (queued, started, results, answers) = (Vec::new(), Vec::new(), VecDeque::new(), Vec::new());
        Self {
            state: seed | 1,
            clock: 0,
            room: 4,
            queued,
            started,
            budget: 0,
            results,
            answers,
            always: false,
        }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 11) % end
    }

    fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn outcome(&mut self, call: &Call) -> i32 {
        let whole = match (call.verb, call.buffers) {
            (Verb::Write | Verb::Read, Buffers::One { len_bytes, .. }) => len_bytes as i32,
            _ => 0,
        };
        match self.below(16) {
            0 => -libc::EINTR,
            1 => -libc::EAGAIN,
            2 => -libc::EIO,
            3 | 4 => whole / 2,
            _ => whole,
        }
    }

    fn answer(&mut self, given: Given, result: i32) {
        let answered = self.now();
        let Call { verb, offset_bytes, .. } = given.call;
        self.answers.push(Answer { file: given.file, verb, offset_bytes, given: given.at, answered, result });
        self.results.push_back(RawResult { user_data: given.user_data, result });
    }
}

impl IoBackend for Chance {
    fn describe(&self) -> String {
        "chance".to_owned()
    }

    fn has_durable_writes(&self, _target: Target) -> bool {
        false
    }

    fn register_file(&mut self, index: u32, _spec: &FileSpec) -> io::Result<Target> {
        Ok(Target::Registered(index))
    }

    fn unregister_file(&mut self, _index: u32, _target: Target) {}

    unsafe fn queue(&mut self, user_data: u64, target: Target, call: &Call) -> Result<(), QueueFull> {
        if self.queued.len() >= self.room {
            return Err(QueueFull);
        }
        let Target::Registered(file) = target else { unreachable!("`register_file` says so") };
        let syncs = self
            .queued
            .iter()
            .chain(&self.started)
            .filter(|given| given.file == file && given.call.verb == Verb::Sync);
        assert!(call.verb != Verb::Sync || syncs.count() == 0, "two syncs of a file at once");
        let at = self.now();
        self.queued.push(Given { user_data, file, call: *call, at });
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        while !self.queued.is_empty() && (self.always || self.below(4) > 0) {
            let given = self.queued.remove(0);
            self.started.push(given);
        }
        Ok(())
    }

    fn begin_reap(&mut self) {
        while !self.started.is_empty() && (self.always || self.below(3) > 0) {
            let place = self.below(self.started.len() as u64) as usize;
            let given = self.started.swap_remove(place);
            let result = self.outcome(&given.call);
            self.answer(given, result);
        }
        self.budget = self.results.len();
    }

    fn pop(&mut self) -> Option<RawResult> {
        self.budget = self.budget.checked_sub(1)?;
        self.results.pop_front()
    }

    fn take_ready(&mut self, _events: &mut Vec<Event>) {}

    fn wait(&mut self, _timeout: Option<Duration>) -> io::Result<()> {
        self.submit()
    }

    fn arm(&mut self) -> io::Result<bool> {
        self.submit().map(|()| false)
    }

    fn disarm(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn descriptor(&mut self) -> io::Result<std::os::fd::BorrowedFd<'_>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn cancel(&mut self, user_data: u64) {
        for place in (0..self.queued.len()).rev() {
            if self.queued[place].user_data == user_data && self.below(2) == 0 {
                let given = self.queued.remove(place);
                self.answer(given, -libc::ECANCELED);
            }
        }
    }

    fn watch(&mut self, _fd: Arc<OwnedFd>, _token: WatchToken) -> io::Result<WatchId> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn unwatch(&mut self, _id: WatchId) {}
}

struct Rig {
    core: Core<Chance>,
    /// The files to which ops are pushed in turn.
    files: Vec<FileId>,
    image: Image,
    view: MemoryView,
    /// For each token: the kind of the op, when it was pushed, and whether it has ended.
    pushed: Vec<(OpKind, u64, bool)>,
    _folder: tempfile::TempDir,
}

impl Rig {
    fn new(seed: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (create_bytes, cache) = (Some(IMAGE_BYTES), CacheMode::Writeback);
        let path = folder.path().join("disk.raw");
        let image =
            Image::open(&HostOpener, &ImageOptions { create_bytes, cache, ..ImageOptions::new(path) });
        let image = image.unwrap();
        let region = Region::from_memfd(GuestAddress(0), 1 << 20).unwrap();
        let view = MemoryView::new(Arc::new(GuestMemory::new(vec![Arc::new(region)]).unwrap()));
        let config = EngineConfig { depth: DEPTH as u32, ..EngineConfig::default() };
        let mut core = Core::over(Chance::new(seed), &config);
        let alignment = Alignment { memory_bytes: 512, offset_bytes: 512 };
        let file = core.attach_file(FileSpec::of_file(Arc::clone(image.file().unwrap()), alignment)).unwrap();
        // Two calls: most ops wait for their turn.
        core.submission = Submission::first(9000);
        Self { core, files: vec![file], image, view, pushed: Vec::new(), _folder: folder }
    }

    /// Two disks. One busy disk has a window of four calls, two busy disks have two each, so most ops wait for another
    /// op's result.
    fn beside_another(seed: u64) -> Self {
        let mut rig = Self::new(seed);
        let alignment = Alignment { memory_bytes: 512, offset_bytes: 512 };
        let spec = FileSpec::of_file(Arc::clone(rig.image.file().unwrap()), alignment);
        rig.files.push(rig.core.attach_file(spec).unwrap());
        rig.core.windows = Windows::of(20_480, 10_240);
        rig.core.windows.are_kept = true;
        rig.core.submission = Submission::first(TURN_COST);
        rig
    }

    /// Each token has its own blocks, so that a call's offset identifies its op. The buffers of odd tokens are
    /// misaligned.
    fn push(&mut self, choice: u8) {
        let token = self.pushed.len() as u64;
        let range = self.image.check(token * 2, 1024).unwrap();
        let file = self.files[token as usize / 2 % self.files.len()];
        let kind = match choice {
            0 => OpKind::Flush,
            1 => OpKind::Discard { range, durability: Durability::Durable },
            2 => OpKind::Read { range },
            3 => OpKind::Write { range, durability: Durability::Cached },
            _ => OpKind::Write { range, durability: Durability::Durable },
        };
        let mut buffers = IoVecs::with_capacity(1);
        if kind.moves_data() {
            let addr = token % 2;
            buffers.fill(&self.view, [GuestRange { addr, len_bytes: 1024 }]).unwrap();
        }
        let at = self.core.backend.now();
        if self.core.push(Op { token, file, kind, buffers }).is_ok() {
            self.pushed.push((kind, at, false));
        }
    }

    fn reap(&mut self) {
        let mut events = Vec::new();
        self.core.reap(&mut events);
        for event in events {
            let Event::Completed(Completion { token, result, .. }) = event else { unreachable!() };
            let (kind, at, ended) = &mut self.pushed[token as usize];
            assert!(!std::mem::replace(ended, true), "op {token} ended twice");
            if result.is_ok() {
                let file = self.files[token as usize / 2 % self.files.len()];
                check(*kind, *at, file, &self.core.backend.answers);
            }
        }
    }
}

/// Checks that the backend got a sync for each durable op after the op's data call had ended.
fn check(kind: OpKind, pushed: u64, file: FileId, answers: &[Answer]) {
    let data_at = match kind {
        OpKind::Flush => pushed,
        OpKind::Write { durability: Durability::Durable, range }
        | OpKind::Discard { durability: Durability::Durable, range } => {
            let of_it = |answer: &&Answer| {
                answer.verb != Verb::Sync
                    && (range.offset_bytes()..range.end_bytes()).contains(&answer.offset_bytes)
                    && answer.result >= 0
            };
            answers.iter().filter(of_it).map(|answer| answer.answered).max().unwrap()
        }
        _ => return,
    };
    let synced = |answer: &Answer| {
        answer.file == file.0 && answer.verb == Verb::Sync && answer.given > data_at && answer.result == 0
    };
    assert!(answers.iter().any(synced), "{kind:?} is done without its sync: {answers:?}");
}

#[test]
fn ops_that_wait_for_a_buffer_stay_there_while_their_turn_is_spent() {
    let mut rig = Rig::new(1);
    rig.core.submission = Submission::first(1 << 20);
    rig.core.backend.room = DEPTH;
    (0..DEPTH).for_each(|_| rig.push(2));
    assert_eq!(rig.core.waiting, 4, "twelve are misaligned, and eight have buffers");
    let (mut turn, spent) = (Turn::new(), Submission::first(1));
    assert!(turn.take(spent, 1));
    rig.core.submission = spent;
    rig.core.files.at(rig.files[0]).turn = turn;
    let bounce = rig.core.memory.ops.iter_mut().find_map(|(_, op)| op.bounce.take()).unwrap();
    rig.core.memory.bounce.give_back(bounce, rig.files[0]);
    rig.core.issue_waiting();
    assert_eq!((rig.core.waiting, rig.core.lines.len()), (3, 1));
    rig.core.backend.always = true;
    (0..400).for_each(|_| {
        rig.core.wait(None).unwrap();
        rig.reap();
    });
    assert!(rig.pushed.iter().all(|(_, _, ended)| *ended));
}

#[test]
fn zeroes_that_are_written_out_are_short_calls_within_the_window_and_the_turn() {
    let mut rig = Rig::beside_another(1);
    rig.core.windows = Windows::new();
    rig.core.windows.are_kept = true;
    let file = rig.files[0];
    let range = rig.image.check(0, IMAGE_BYTES).unwrap();
    let kind = OpKind::WriteZeroes { range, unmap: Unmap::Forbidden, durability: Durability::Cached };
    rig.core.files.at(file).cannot_zero_range = true;
    assert!(rig.core.push(Op { token: 0, file, kind, buffers: IoVecs::with_capacity(0) }).is_ok());
    let (call, used) = (rig.core.backend.queued[0].call, rig.core.files.at(file).window_used);
    assert_eq!((call.verb, call.len_bytes, used), (Verb::Write, 128 << 10, 132 << 10));
    rig.core.cancel(None);
}

#[test]
fn bounced_transfer_beside_another_disk_is_a_short_call() {
    let mut rig = Rig::beside_another(1);
    rig.core.windows = Windows::new();
    rig.core.windows.are_kept = true;
    let range = rig.image.check(0, 512 << 10).unwrap();
    let mut buffers = IoVecs::with_capacity(1);
    buffers.fill(&rig.view, [GuestRange { addr: 1, len_bytes: 512 << 10 }]).unwrap();
    let kind = OpKind::Read { range };
    assert!(rig.core.push(Op { token: 0, file: rig.files[0], kind, buffers }).is_ok());
    assert_eq!(rig.core.backend.queued[0].call.len_bytes, 128 << 10);
    rig.core.cancel(None);
}

fn every_op_ends(mut rig: Rig, steps: Vec<u8>) {
    for step in steps {
        match step {
            0..9 => rig.push(step),
            9 | 10 => rig.core.submit().unwrap(),
            11 | 12 => rig.reap(),
            _ => rig.core.cancel(None),
        }
    }
    rig.core.backend.always = true;
    for _ in 0..400 {
        rig.core.wait(None).unwrap();
        rig.reap();
    }
    assert_eq!(rig.core.memory.ops.len(), 0);
    assert!(rig.pushed.iter().all(|(_, _, ended)| *ended));
    assert_eq!(rig.core.windows.busy, 0, "every call gave its part of the window back");
    for file in rig.files {
        assert_eq!(rig.core.files.at(file).window_used, 0);
        rig.core.detach_file(file);
    }
}

proptest! {
    #[test]
    fn every_op_ends_once_and_durable_ones_after_a_sync_that_began_after_their_data(
        seed in any::<u64>(),
        steps in prop::collection::vec(0_u8..14, 0..200),
    ) {
        every_op_ends(Rig::new(seed), steps);
    }

    #[test]
    fn every_op_ends_once_beside_another_disk_and_gives_its_part_of_the_window_back(
        seed in any::<u64>(),
        steps in prop::collection::vec(0_u8..14, 0..200),
    ) {
        every_op_ends(Rig::beside_another(seed), steps);
    }
}
