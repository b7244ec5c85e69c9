//! The roles of threads.

use std::fmt;

/// A thread's job, which determines its system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Signals, control clients, reloads, the balancer, and starting other threads: every call that the
    /// process may make.
    Control,
    /// Talks to one front-end.
    Session,
    /// Serves queues with its engine.
    Worker,
    /// A thread of an engine, which makes blocking calls.
    EngineThread,
    /// Changes the tables of one image, beside the workers that write the data.
    Metadata,
    /// Opens images on other machines through a client library, whose own threads inherit this role. It may connect to
    /// other machines, unlike the rest of the process ([`crate::enter_apart`]).
    Network,
    /// Does the handshake of one TLS connection, then encrypts and decrypts: parses bytes of a server that is not trusted.
    TlsRelay,
}

impl Role {
    pub(crate) const ALL: [Self; 7] = [
        Self::Control,
        Self::Session,
        Self::Worker,
        Self::EngineThread,
        Self::Metadata,
        Self::Network,
        Self::TlsRelay,
    ];

    /// The role's number, which fits its four bits in a filter's verdict.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::Control => 1,
            Self::Session => 2,
            Self::Worker => 3,
            Self::EngineThread => 4,
            Self::Network => 5,
            Self::TlsRelay => 6,
            Self::Metadata => 7,
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
            Self::Metadata => "metadata",
            Self::Network => "network",
            Self::TlsRelay => "tls",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The kinds of calls that the workers' engines may need.
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
