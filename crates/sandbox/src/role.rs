//! Who asks the kernel for something.
//!
//! Not here: what each may ask for (`calls.rs`).

use std::fmt;

/// What a thread does, hence what it may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Signals, control clients, reloads, the balancer, and whoever starts other threads: all that the process may.
    Control,
    /// Talks with one front-end.
    Session,
    /// Serves queues with its engine.
    Worker,
    /// A thread of an engine: it carries out calls that wait.
    EngineThread,
}

impl Role {
    pub(crate) const ALL: [Self; 4] = [Self::Control, Self::Session, Self::Worker, Self::EngineThread];

    /// Fits the four bits that it has in a filter's verdict.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Control => 1,
            Self::Session => 2,
            Self::Worker => 3,
            Self::EngineThread => 4,
        }
    }

    pub(crate) fn of_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.number() == number)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Session => "session",
            Self::Worker => "worker",
            Self::EngineThread => "engine",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which kinds of calls the engines of workers may need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineCalls {
    /// Rings of io_uring.
    pub io_uring: bool,
    /// Contexts of Linux AIO.
    pub linux_aio: bool,
}

impl EngineCalls {
    /// For a server that may get disks with any engine.
    pub const ALL: Self = Self { io_uring: true, linux_aio: true };
}
