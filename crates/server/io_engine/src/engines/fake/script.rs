//! The script of the fake engine: which calls fail, and how. A test may change it from any thread.
//!
//! For each call, the first matching rule that is not used up applies.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use crate::backend::{Call, Verb};

/// The calls that a rule applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum When {
    /// Every call.
    Always,
    /// Every call of a kind.
    Verb(Verb),
    /// Calls of a kind that touch a range of the file.
    Overlaps(Verb, Range<u64>),
    /// The n-th call of the engine, counted from 0.
    Call(u64),
}

/// The fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call fails with this errno.
    Errno(Errno),
    /// The call moves at most this many bytes.
    Short(u64),
    /// The call hangs until it is released or cancelled.
    Hang,
    /// The call hangs until it is released. It cannot be cancelled.
    Stick,
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Which calls the rule applies to.
    pub when: When,
    /// The fault to inject.
    pub fault: Fault,
    /// How many calls the rule applies to before it is used up.
    pub times: u64,
}

/// The outcome of a call.
#[derive(Debug)]
pub(super) enum Verdict {
    Run { at_most_bytes: Option<u64> },
    Fail(Errno),
    Hang { stuck: bool },
}

#[derive(Debug, Default)]
struct Script {
    rules: Vec<Rule>,
    calls: u64,
    hanging: usize,
    release: bool,
    shuffle: Option<u64>,
    space_left_bytes: Option<u64>,
}

/// Injects faults into a [`FakeEngine`](crate::FakeEngine).
#[derive(Clone, Debug)]
pub struct FakeHandle {
    script: Arc<Mutex<Script>>,
    wake: Arc<OwnedFd>,
}

impl FakeHandle {
    pub(super) fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { script: Arc::default(), wake: Arc::new(wake) })
    }

    /// Adds a rule.
    pub fn inject(&self, when: When, fault: Fault, times: u64) {
        self.with(|script| script.rules.push(Rule { when, fault, times }));
    }

    /// Removes all rules.
    pub fn clear(&self) {
        self.with(|script| script.rules.clear());
    }

    /// Returns results in an order that depends on `seed` only.
    pub fn shuffle(&self, seed: u64) {
        self.with(|script| script.shuffle = Some(seed | 1));
    }

    /// Writes fail with `ENOSPC` after this many bytes; `None`: the file system decides.
    pub fn set_space_left(&self, bytes: Option<u64>) {
        self.with(|script| script.space_left_bytes = bytes);
    }

    /// Number of calls made so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.with(|script| script.calls)
    }

    /// Number of calls that currently hang.
    #[must_use]
    pub fn hanging(&self) -> usize {
        self.with(|script| script.hanging)
    }

    /// Releases every call that hangs, and wakes the engine.
    ///
    /// # Errors
    /// Errors of the wake-up.
    pub fn release(&self) -> io::Result<()> {
        self.with(|script| script.release = true);
        rustix::io::write(&self.wake, &1_u64.to_ne_bytes())?;
        Ok(())
    }

    pub(super) fn wake_fd(&self) -> &OwnedFd {
        &self.wake
    }

    pub(super) fn take_release(&self) -> bool {
        self.with(|script| std::mem::take(&mut script.release))
    }

    pub(super) fn set_hanging(&self, hanging: usize) {
        self.with(|script| script.hanging = hanging);
    }

    /// A number below `count`.
    pub(super) fn pick(&self, count: usize) -> usize {
        self.with(|script| {
            let Some(state) = &mut script.shuffle else { return 0 };
            // Marsaglia's xorshift64.
            *state ^= *state << 13;
            *state ^= *state >> 7;
            *state ^= *state << 17;
            usize::try_from(*state % count as u64).unwrap_or(0)
        })
    }

    pub(super) fn judge(&self, call: &Call) -> Verdict {
        self.with(|script| {
            let number = script.calls;
            script.calls += 1;
            let rule = script.rules.iter_mut().find(|rule| rule.times > 0 && rule.when.matches(call, number));
            match rule.map(Rule::take) {
                Some(Fault::Errno(errno)) => Verdict::Fail(errno),
                Some(Fault::Short(bytes)) => Verdict::Run { at_most_bytes: Some(bytes) },
                Some(Fault::Hang) => Verdict::Hang { stuck: false },
                Some(Fault::Stick) => Verdict::Hang { stuck: true },
                None => script.take_space(call),
            }
        })
    }

    fn with<R>(&self, act: impl FnOnce(&mut Script) -> R) -> R {
        act(&mut self.script.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Script {
    fn take_space(&mut self, call: &Call) -> Verdict {
        match &mut self.space_left_bytes {
            Some(0) if call.verb == Verb::Write => Verdict::Fail(Errno::NOSPC),
            Some(left) if call.verb == Verb::Write => {
                let at_most_bytes = call.len_bytes.min(*left);
                *left -= at_most_bytes;
                Verdict::Run { at_most_bytes: Some(at_most_bytes) }
            }
            _ => Verdict::Run { at_most_bytes: None },
        }
    }
}

impl Rule {
    fn take(&mut self) -> Fault {
        self.times -= 1;
        self.fault
    }
}

impl When {
    fn matches(&self, call: &Call, number: u64) -> bool {
        match self {
            Self::Always => true,
            Self::Verb(verb) => call.verb == *verb,
            Self::Overlaps(verb, range) => {
                let end_bytes = call.offset_bytes + call.len_bytes;
                call.verb == *verb && call.offset_bytes < range.end && range.start < end_bytes
            }
            Self::Call(n) => number == *n,
        }
    }
}
