//! The limits in effect for one disk: a lane for each quantity that the disk or its group limits.
//!
//! `Limits of disk and group → Buckets → DiskThrottle`; a change creates new ones, which take over the buckets' state

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::bucket::Bucket;
use super::lane::Lane;
use super::limits::{LimitKind, LimitSettings, RateSettings};
use super::usage::Usage;

/// Number of quantities that can be limited.
pub(crate) const KINDS: usize = LimitKind::ALL.len();
/// Length of a burst if the operator gives none, in seconds.
const DEFAULT_LENGTH_S: u64 = 1;
/// Credit of a bucket without a burst: the units of 1/10 s.
const CREDITS_PER_S: u64 = 10;
/// The smallest credit of a bucket of bytes: the longest request that a typical guest sends. With less credit, such a
/// request would wait although the disk was idle before.
const LEAST_CREDIT_BYTES: u64 = 1 << 20;
/// A turn of a disk that shares no limit: the units of 1 ms.
const TURNS_PER_S: u64 = 1000;
/// A turn in a group is at least the units of 125 µs, so that a worker is not woken more often.
const MOST_TURNS_PER_S: u64 = 8000;
/// Units that a queue books at once: one request, or this many bytes.
const QUANTUM_BYTES: u64 = 64 << 10;
const LEAST_QUANTUM_BYTES: u64 = 512;
/// Parts of a request that lanes count in, because a queue's share of a turn may be a few requests and a fraction.
const PARTS: u64 = 1024;

/// The buckets of a quantity: one for its rate, which has the credit of a burst, and one for the rate of the burst, if
/// any.
#[derive(Clone, Debug)]
struct Buckets {
    settings: RateSettings,
    rate: u64,
    fastest: u64,
    all: Vec<Arc<Bucket>>,
}

impl Buckets {
    fn new(kind: LimitKind, settings: RateSettings) -> Option<Self> {
        let rate = settings.rate?;
        let least = if kind.is_bytes() { LEAST_CREDIT_BYTES } else { 1 };
        let short = |rate: u64| (rate / CREDITS_PER_S).max(least);
        let mut all = Vec::new();
        match settings.max {
            None => all.push(Bucket::new(rate, short(rate))),
            Some(max) => {
                let burst = max.saturating_mul(settings.max_length.unwrap_or(DEFAULT_LENGTH_S));
                all.push(Bucket::new(rate, burst.max(short(rate))));
                all.push(Bucket::new(max, short(max)));
            }
        }
        let (all, fastest) = (all.into_iter().map(Arc::new).collect(), settings.max.unwrap_or(rate));
        Some(Self { settings, rate, fastest, all })
    }

    /// Takes over the state of the buckets that these replace.
    fn take_over(&self, before: &[u64], now: u64) {
        self.all.iter().zip(before).for_each(|(bucket, paid_at)| bucket.take_over(*paid_at, now));
    }

    fn paid_at(&self) -> Vec<u64> {
        self.all.iter().map(|bucket| bucket.paid_at()).collect()
    }

    fn report(&self, kind: LimitKind, used: u64, now: u64) -> LimitReport {
        // The last bucket limits the rate of a burst; the credit of the first bucket limits its length.
        let (credit, capacity) = self.all.first().map_or((0, 0), |all| (all.credit(now), all.capacity()));
        LimitReport { kind, settings: self.settings, credit, capacity, used }
    }
}

/// The buckets of a disk or a group.
#[derive(Clone, Debug, Default)]
pub(crate) struct BucketSet {
    settings: LimitSettings,
    kinds: [Option<Buckets>; KINDS],
}

/// The state of buckets, for another process: by quantity, the instants at which they are paid for.
pub(crate) type PaidAt = Vec<(usize, Vec<u64>)>;

impl BucketSet {
    pub(crate) fn new(settings: LimitSettings) -> Self {
        let of = |kind: LimitKind| Buckets::new(kind, settings.rates[kind as usize]);
        Self { settings, kinds: LimitKind::ALL.map(of) }
    }

    pub(crate) fn settings(&self) -> &LimitSettings {
        &self.settings
    }

    /// Returns the buckets for new settings. Quantities whose settings are unchanged keep their buckets.
    pub(crate) fn changed_to(&self, settings: LimitSettings, now: u64) -> Self {
        let mut new = Self::new(settings);
        for (new, old) in new.kinds.iter_mut().zip(&self.kinds) {
            match (&new, old) {
                (Some(made), Some(old)) if made.settings == old.settings => *new = Some(old.clone()),
                (Some(made), Some(old)) => {
                    // A turn that was booked ahead no longer counts, so that the change takes effect immediately.
                    let paid_at: Vec<u64> =
                        old.paid_at().into_iter().map(|paid_at| paid_at.min(now)).collect();
                    made.take_over(&paid_at, now);
                }
                _ => {}
            }
        }
        new
    }

    pub(crate) fn paid_at(&self) -> PaidAt {
        let kinds = self.kinds.iter().enumerate();
        kinds.filter_map(|(kind, buckets)| Some((kind, buckets.as_ref()?.paid_at()))).collect()
    }

    /// Takes over the state from another process, for each quantity that both processes limit.
    pub(crate) fn take_over(&self, state: &PaidAt, now: u64) {
        for (kind, paid_at) in state {
            if let Some(Some(buckets)) = self.kinds.get(*kind) {
                buckets.take_over(paid_at, now);
            }
        }
    }

    /// `used`: units used, by quantity.
    pub(crate) fn reports(&self, used: &[u64; KINDS], now: u64) -> Vec<LimitReport> {
        let kinds = LimitKind::ALL.into_iter().zip(&self.kinds).zip(used);
        kinds.filter_map(|((kind, buckets), used)| Some(buckets.as_ref()?.report(kind, *used, now))).collect()
    }
}

/// A limit, and how much of it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitReport {
    /// The limited quantity.
    pub kind: LimitKind,
    /// The limit's settings.
    pub settings: RateSettings,
    /// Units that may be used immediately.
    pub credit: u64,
    /// The credit after a long pause.
    pub capacity: u64,
    /// Units used since the disk was added.
    pub used: u64,
}

/// A disk's membership in a group.
#[derive(Clone, Debug)]
pub(crate) struct Membership {
    pub(crate) buckets: BucketSet,
    /// Number of disks in the group.
    pub(crate) disks: u64,
    pub(crate) weight: u64,
    /// The smallest weight of the group's disks.
    pub(crate) least_weight: u64,
}

/// The limits of one disk in effect.
#[derive(Debug)]
pub(crate) struct DiskThrottle {
    lanes: [Option<Lane>; KINDS],
    iops_size: Option<u64>,
    own: BucketSet,
    usage: Arc<Usage>,
}

impl DiskThrottle {
    /// `None` if nothing is limited.
    pub(crate) fn new(own: BucketSet, member: Option<&Membership>, usage: &Arc<Usage>) -> Option<Self> {
        let lane = |kind: LimitKind| {
            let own = own.kinds[kind as usize].as_ref();
            let shared =
                member.and_then(|member| Some((member.buckets.kinds[kind as usize].as_ref()?, member)));
            lane(kind, own, shared)
        };
        let lanes = LimitKind::ALL.map(lane);
        let group_size = || member.and_then(|member| member.buckets.settings.iops_size);
        let iops_size = own.settings.iops_size.or_else(group_size);
        let limits_any = lanes.iter().any(Option::is_some);
        limits_any.then(|| Self { lanes, iops_size, own, usage: Arc::clone(usage) })
    }

    #[inline]
    pub(crate) fn lane(&self, kind: LimitKind) -> Option<&Lane> {
        self.lanes[kind as usize].as_ref()
    }

    pub(crate) fn lanes(&self) -> impl Iterator<Item = Option<&Lane>> {
        self.lanes.iter().map(Option::as_ref)
    }

    /// How many bytes of a request count as one request.
    pub(crate) fn iops_size(&self) -> Option<u64> {
        self.iops_size
    }

    pub(crate) fn usage(&self) -> &Usage {
        &self.usage
    }

    /// Takes over the debt of the throttle that this one replaces. Queues that wait book again.
    pub(crate) fn replace(&self, old: &Self) {
        for (lane, old) in self.lanes.iter().zip(&old.lanes) {
            if let (Some(lane), Some(old)) = (lane, old) {
                lane.owe(old.unpaid());
            }
        }
    }

    /// Takes over the disk's debt, or the units that its queues have left, from another process.
    pub(crate) fn take_over(&self, debts: &[i64; KINDS]) {
        for (lane, debt) in self.lanes.iter().zip(debts) {
            if let Some(lane) = lane {
                lane.take_over(*debt);
            }
        }
    }

    pub(crate) fn debts(&self) -> [i64; KINDS] {
        std::array::from_fn(|kind| self.lanes[kind].as_ref().map_or(0, Lane::state))
    }

    pub(crate) fn own(&self) -> &BucketSet {
        &self.own
    }
}

fn lane(kind: LimitKind, own: Option<&Buckets>, shared: Option<(&Buckets, &Membership)>) -> Option<Lane> {
    let slowest =
        own.into_iter().chain(shared.map(|(buckets, _)| buckets)).map(|buckets| buckets.rate).min()?;
    let fastest =
        own.into_iter().chain(shared.map(|(buckets, _)| buckets)).map(|buckets| buckets.fastest).min()?;
    let quantum = if kind.is_bytes() { slowest.clamp(LEAST_QUANTUM_BYTES, QUANTUM_BYTES) } else { 1 };
    // In a group the ratio of the turns counts, so the disk's own rate shortens no turn, except a very long one.
    let own_turns_per_s = if shared.is_some() { CREDITS_PER_S } else { TURNS_PER_S };
    let own_turn = own.map(|buckets| buckets.rate / own_turns_per_s);
    let shared_turn = shared.map(|(buckets, member)| member.turn(buckets.rate, quantum));
    let turn = own_turn.into_iter().chain(shared_turn).min()?;
    let all = own.into_iter().chain(shared.map(|(buckets, _)| buckets)).flat_map(|buckets| &buckets.all);
    let parts = if kind.is_bytes() { 1 } else { PARTS };
    Some(Lane::new(parts, (quantum, turn), fastest, all.map(Arc::clone).collect()))
}

impl Membership {
    /// Units of a turn in a bucket with this rate. All disks of the group get turns equally often, so the sizes of
    /// their turns have the ratio of their weights, as long as no turn exceeds 100 ms.
    fn turn(&self, rate: u64, quantum: u64) -> u64 {
        let turns_per_s = TURNS_PER_S.saturating_mul(self.disks.max(1)).min(MOST_TURNS_PER_S);
        let least = (rate / turns_per_s).max(quantum);
        let longest = (rate / CREDITS_PER_S).max(quantum);
        let weighted = u128::from(least) * u128::from(self.weight) / u128::from(self.least_weight.max(1));
        u64::try_from(weighted).unwrap_or(u64::MAX).min(longest)
    }
}

/// The state of a disk's limits, for another process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ThrottleState {
    /// The state of the disk's own buckets.
    pub(crate) own: PaidAt,
    /// The state of the buckets of the disk's group.
    pub(crate) group: PaidAt,
    /// By quantity, the disk's debt or the units that its queues have left.
    pub(crate) debts: [i64; KINDS],
}
