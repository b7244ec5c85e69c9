//! Converts a call to a submission entry.

use io_uring::types::{Fd, Fixed, FsyncFlags};
use io_uring::{opcode, squeue};

use crate::backend::{Buffers, Call, Target, Verb};

/// A macro, because `io-uring` seals the trait that covers both ways to identify a file.
macro_rules! entry {
    ($file:expr, $call:expr, $piece:expr) => {{
        let Call { verb, flags, offset_bytes, len_bytes, buffers } = *$call;
        match (verb, buffers, $piece) {
            (Verb::Read, Buffers::One { base, len_bytes }, None) => {
                opcode::Read::new($file, base, len_bytes).offset(offset_bytes).rw_flags(flags).build()
            }
            (Verb::Read, Buffers::One { base, len_bytes }, Some(piece)) => {
                let read = opcode::ReadFixed::new($file, base, len_bytes, piece);
                read.offset(offset_bytes).rw_flags(flags).build()
            }
            (Verb::Read, Buffers::Many { first, count }, _) => {
                opcode::Readv::new($file, first, count).offset(offset_bytes).rw_flags(flags).build()
            }
            (Verb::Write, Buffers::One { base, len_bytes }, None) => {
                opcode::Write::new($file, base, len_bytes).offset(offset_bytes).rw_flags(flags).build()
            }
            (Verb::Write, Buffers::One { base, len_bytes }, Some(piece)) => {
                let write = opcode::WriteFixed::new($file, base, len_bytes, piece);
                write.offset(offset_bytes).rw_flags(flags).build()
            }
            (Verb::Write, Buffers::Many { first, count }, _) => {
                opcode::Writev::new($file, first, count).offset(offset_bytes).rw_flags(flags).build()
            }
            (Verb::Allocate, ..) => {
                opcode::Fallocate::new($file, len_bytes).offset(offset_bytes).mode(flags).build()
            }
            (Verb::Sync, ..) => opcode::Fsync::new($file).flags(FsyncFlags::DATASYNC).build(),
            (Verb::Discard, ..) => unreachable!("files of this host punch holes instead"),
            (Verb::Read | Verb::Write, Buffers::None, _) => unreachable!("a transfer has buffers"),
        }
    }};
}

/// `piece`: the registered buffer that contains the call's only buffer.
#[inline]
pub(super) fn entry(target: Target, call: &Call, piece: Option<u16>) -> squeue::Entry {
    match target {
        Target::Registered(index) => entry!(Fixed(index), call, piece),
        Target::Fd(fd) => entry!(Fd(fd), call, piece),
    }
}
