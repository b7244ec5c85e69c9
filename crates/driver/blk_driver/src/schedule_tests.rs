//! Random schedules against a model: each request ends once, and is returned once if it ended early.

use std::collections::BTreeMap;
use std::time::Instant;

use proptest::prelude::*;
use virtqueue::RingFeatures;

use crate::queue::restart_tests::restart;
use crate::request::{Completion, Durability, Request, RequestError, Work};
use crate::rig::{self, Device, Rig, Seen};

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The kind of request, and whether its deadline has passed.
    Push(u8, bool),
    Submit,
    /// The device takes all available requests.
    Take,
    /// The device answers one of the requests that it took, with this status.
    Answer(usize, u8),
    /// Cancels one of the tokens used so far.
    Cancel(usize),
    /// Takes up to this many completions.
    Completions(usize),
    /// The back-end disconnects and another one connects.
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..6_u8, prop::bool::weighted(0.2)).prop_map(|(kind, late)| Step::Push(kind, late)),
        3 => Just(Step::Submit),
        3 => Just(Step::Take),
        6 => (any::<usize>(), prop_oneof![5 => Just(0_u8), 1 => 1..4_u8]).prop_map(|(at, status)| Step::Answer(at, status)),
        1 => any::<usize>().prop_map(Step::Cancel),
        3 => (0..9_usize).prop_map(Step::Completions),
        1 => Just(Step::Restart),
    ]
}

/// The history of one token.
#[derive(Debug, Default)]
struct Fate {
    ends: usize,
    with_device: bool,
    returns: usize,
}

struct Run {
    rig: Rig,
    taken: Vec<Seen>,
    fates: BTreeMap<u64, Fate>,
}

impl Run {
    fn new(queue_size: u16, features: RingFeatures) -> Self {
        Self { rig: rig::rig(queue_size, features), taken: Vec::new(), fates: BTreeMap::new() }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Push(kind, late) => self.push(kind, late),
            Step::Submit => self.rig.queue.submit(),
            Step::Take => self.taken.extend(self.rig.device.pop_all()),
            Step::Answer(at, status) => self.answer(at, status),
            Step::Cancel(at) => {
                let token = at % self.fates.len().max(1);
                let live = self.fates.get(&(token as u64)).is_some_and(|fate| fate.ends == 0);
                let cancelled = self.rig.queue.cancel(token as u64);
                assert!(live || !cancelled, "token {token} has ended and was cancelled");
            }
            Step::Completions(room) => _ = self.completions(room),
            Step::Restart => self.restart(),
        }
    }

    fn push(&mut self, kind: u8, late: bool) {
        let data = [self.rig.data(512), self.rig.data(1024)];
        let segments = [virtio_blk::Segment { sector: 0, sectors: 1, unmap: false }];
        let work = match kind {
            0 | 1 => Work::Read { sector: 1, data: &data[..1] },
            2 => Work::Write { sector: 1, data: &data, durability: Durability::Durable },
            3 => Work::Flush,
            4 => Work::Write { sector: 1, data: &data, durability: Durability::Cached },
            _ => Work::Discard { segments: &segments },
        };
        let (token, deadline) = (self.fates.len() as u64, late.then(Instant::now));
        let room = self.rig.queue.room(2);
        match self.rig.queue.push(&Request { work, token, deadline }) {
            Ok(()) => _ = self.fates.insert(token, Fate::default()),
            Err(refused) => assert_eq!(room, 0, "{refused} with room"),
        }
    }

    fn answer(&mut self, at: usize, status: u8) {
        if !self.taken.is_empty() {
            let seen = self.taken.swap_remove(at % self.taken.len());
            self.rig.device.answer(&seen, status);
        }
    }

    fn restart(&mut self) {
        let (device, _) = restart(&mut self.rig);
        // The owner calls the queue at once, so the old device does nothing in between.
        assert_eq!(self.rig.queue.completions(&mut []), Ok(0));
        self.rig.device = device;
        self.taken.clear();
    }

    fn completions(&mut self, room: usize) -> usize {
        let mut out = [Completion::default(); 8];
        let taken = self.rig.queue.completions(&mut out[..room.min(8)]).unwrap();
        for completion in &out[..taken] {
            let fate = self.fates.get_mut(&completion.token).unwrap();
            match completion.result {
                Err(RequestError::Returned) => {
                    assert!(fate.ends == 1 && fate.with_device && fate.returns == 0, "{completion:?}");
                    fate.returns += 1;
                }
                result => {
                    assert_eq!(fate.ends, 0, "{completion:?}");
                    fate.ends += 1;
                    fate.with_device = result.is_err_and(RequestError::is_with_device);
                }
            }
        }
        taken
    }

    /// Lets the device answer everything; then no request is in flight, and each one must have ended correctly.
    fn finish(mut self) {
        self.rig.queue.submit();
        for _ in 0..4 * self.fates.len() + 4 {
            self.taken.extend(self.rig.device.pop_all());
            let device: &mut Device = &mut self.rig.device;
            self.taken.drain(..).for_each(|seen| device.answer(&seen, 0));
            while self.completions(8) > 0 {}
        }
        assert_eq!(self.rig.queue.in_flight(), 0);
        let broken = self.fates.iter().find(|(_, f)| f.ends != 1 || f.returns != usize::from(f.with_device));
        assert!(broken.is_none(), "{broken:?}");
        let stats = self.rig.queue.stats();
        assert_eq!((stats.pushed, stats.completed), (self.fates.len() as u64, self.fates.len() as u64));
    }
}

proptest! {
    #[test]
    fn every_request_ends_once_and_returns_once_where_due(
        shift in 1..6_u32, event_idx: bool, indirect: bool, packed: bool,
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut run = Run::new(1 << shift, RingFeatures { event_idx, indirect, packed });
        steps.into_iter().for_each(|step| run.step(step));
        run.finish();
    }
}
