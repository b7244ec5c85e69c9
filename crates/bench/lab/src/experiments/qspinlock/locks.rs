//! The locks that `qspinlock` compares: this project's, the standard library's and others.

use std::marker::PhantomData;

use lock_api::Mutex;
use qspinlock::peers::{FutexLock, PthreadMutex, PthreadSpin};
use qspinlock::{Fair, Fifo, Hybrid, Policy, PvQSpinLock, QSpinLock, StdMutex, TicketLock};

use crate::experiment::Variant;
use crate::load::locks::exclusive::{Exclusive, Lines};

/// One of the locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Lock {
    Hybrid,
    Fair,
    Fifo,
    Native,
    Std,
    ParkingLot,
    ParkingLotFair,
    PthreadMutex,
    Futex,
    PthreadSpin,
    Spin,
    Ticket,
    SpinTicket,
    Mcs,
    McsYield,
    /// Like `Hybrid`, but a thread that takes the lock from the queue wakes the next waiter.
    HybridAhead,
    FairAhead,
    FifoAhead,
}

/// The compared locks, in the order of the tables: ours, those that sleep, those that only spin.
pub(crate) const COMPARED: [Lock; 15] = [
    Lock::Hybrid,
    Lock::Fair,
    Lock::Fifo,
    Lock::Native,
    Lock::Std,
    Lock::ParkingLot,
    Lock::ParkingLotFair,
    Lock::PthreadMutex,
    Lock::Futex,
    Lock::PthreadSpin,
    Lock::Spin,
    Lock::Ticket,
    Lock::SpinTicket,
    Lock::Mcs,
    Lock::McsYield,
];

/// The locks of other projects. The queued locks and their building blocks belong to this project.
pub(crate) const PEERS: [Lock; 11] = [
    Lock::Std,
    Lock::ParkingLot,
    Lock::ParkingLotFair,
    Lock::PthreadMutex,
    Lock::Futex,
    Lock::PthreadSpin,
    Lock::Spin,
    Lock::Ticket,
    Lock::SpinTicket,
    Lock::Mcs,
    Lock::McsYield,
];

/// Other projects' locks that serve in the order of arrival.
pub(crate) const FIFO_PEERS: [Lock; 5] =
    [Lock::Ticket, Lock::SpinTicket, Lock::Mcs, Lock::McsYield, Lock::ParkingLotFair];

impl Lock {
    /// The lock's id: a short name without spaces.
    pub fn id(self) -> &'static str {
        self.names().0
    }

    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Hybrid => ("hybrid", "queued, hybrid"),
            Self::Fair => ("fair", "queued, fair"),
            Self::Fifo => ("fifo", "queued, strict order"),
            Self::Native => ("native", "queued, only spins"),
            Self::Std => ("std", "std"),
            Self::ParkingLot => ("parking_lot", "parking_lot"),
            Self::ParkingLotFair => ("parking_lot-fair", "parking_lot, fair"),
            Self::PthreadMutex => ("pthread_mutex", "pthread_mutex"),
            Self::Futex => ("futex", "plain futex"),
            Self::PthreadSpin => ("pthread_spin", "pthread_spin"),
            Self::Spin => ("spin", "spin"),
            Self::Ticket => ("ticket", "ticket (ours)"),
            Self::SpinTicket => ("spin-ticket", "spin, ticket"),
            Self::Mcs => ("mcs", "mcslock"),
            Self::McsYield => ("mcs-yield", "mcslock, yields"),
            Self::HybridAhead => ("hybrid-ahead", "queued, hybrid, wakes ahead"),
            Self::FairAhead => ("fair-ahead", "queued, fair, wakes ahead"),
            Self::FifoAhead => ("fifo-ahead", "queued, strict order, wakes ahead"),
        }
    }

    pub fn variant(self) -> Variant {
        let (id, label) = self.names();
        Variant::new(id, label)
    }

    /// Whether waiters spin in order, so that an acquisition waits for threads that may be preempted. Such a lock is
    /// not suitable for many threads.
    pub fn spins_in_order(self) -> bool {
        matches!(self, Self::Native | Self::Ticket | Self::SpinTicket | Self::Mcs)
    }

    /// Whether the lock counts its events.
    pub fn is_counted(self) -> bool {
        matches!(
            self,
            Self::Hybrid
                | Self::Fair
                | Self::Fifo
                | Self::Native
                | Self::HybridAhead
                | Self::FairAhead
                | Self::FifoAhead
        )
    }

    /// Runs `what` with this lock.
    pub fn with<W: WithLock>(self, what: W) -> W::Out {
        match self {
            Self::Hybrid => what.with::<Mutex<PvQSpinLock<Hybrid>, Lines>>(),
            Self::Fair => what.with::<Mutex<PvQSpinLock<Fair>, Lines>>(),
            Self::Fifo => what.with::<Mutex<PvQSpinLock<Fifo>, Lines>>(),
            Self::Native => what.with::<Mutex<QSpinLock, Lines>>(),
            Self::Std => what.with::<Mutex<StdMutex, Lines>>(),
            Self::ParkingLot => what.with::<Mutex<parking_lot::RawMutex, Lines>>(),
            Self::ParkingLotFair => what.with::<Mutex<parking_lot::RawFairMutex, Lines>>(),
            Self::PthreadMutex => what.with::<Mutex<PthreadMutex, Lines>>(),
            Self::Futex => what.with::<Mutex<FutexLock, Lines>>(),
            Self::PthreadSpin => what.with::<Mutex<PthreadSpin, Lines>>(),
            Self::Spin => what.with::<spin::mutex::SpinMutex<Lines>>(),
            Self::Ticket => what.with::<Mutex<TicketLock, Lines>>(),
            Self::SpinTicket => what.with::<spin::mutex::TicketMutex<Lines>>(),
            Self::Mcs => what.with::<mcslock::raw::spins::Mutex<Lines>>(),
            Self::McsYield => what.with::<mcslock::raw::yields::Mutex<Lines>>(),
            Self::HybridAhead => what.with::<Mutex<PvQSpinLock<Ahead<Hybrid>>, Lines>>(),
            Self::FairAhead => what.with::<Mutex<PvQSpinLock<Ahead<Fair>>, Lines>>(),
            Self::FifoAhead => what.with::<Mutex<PvQSpinLock<Ahead<Fifo>>, Lines>>(),
        }
    }
}

/// An operation that works with any lock.
pub(crate) trait WithLock {
    /// The operation's result.
    type Out;

    fn with<L: Exclusive>(self) -> Self::Out;
}

/// `P`, but wakes twice: a thread that takes the lock from the queue wakes the next waiter, which may fall
/// asleep again before its turn.
#[derive(Debug)]
pub(crate) struct Ahead<P>(PhantomData<P>);

impl<P: Policy> Policy for Ahead<P> {
    const SLEEPS: bool = P::SLEEPS;
    const PASS_LIMIT: u32 = P::PASS_LIMIT;
    const SERVES_THE_AWAKE: bool = P::SERVES_THE_AWAKE;
    const NEWCOMER_LOOKS: u32 = P::NEWCOMER_LOOKS;
    const WAITER_LOOKS: u32 = P::WAITER_LOOKS;
    const WAITER_LOOKS_BEHIND_A_SLEEPER: u32 = P::WAITER_LOOKS_BEHIND_A_SLEEPER;
    const HEIR_LOOKS: u32 = P::HEIR_LOOKS;
    const HEIR_NAP_NS: u64 = P::HEIR_NAP_NS;
    const WAKE_AHEAD: bool = true;

    fn newcomer_pause(look: u32) -> u32 {
        P::newcomer_pause(look)
    }
}

/// The ids of `locks`.
pub(crate) fn ids(locks: &[Lock]) -> Vec<String> {
    locks.iter().map(|lock| lock.id().to_owned()).collect()
}
