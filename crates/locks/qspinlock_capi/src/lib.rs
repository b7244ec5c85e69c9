//! The queued locks for C: the calls of `qspinlock` behind `include/qspinlock.h`.
//!
//! `pointer (NULL? aligned?) → the lock that lies there → the call → 0 or an errno`
//!
//! - A call only translates. It first checks for the mistake that makes the lock panic in debug builds (releasing a
//!   free lock), and returns an error: nothing unwinds into C, and nothing ends the program.
//! - Results are those of `pthread_spin_*`: 0 or a positive errno, so a program can switch locks by changing names.
//!   Unlike in the block driver's interface, no call returns a count, so errors need not be negative.
//! - Each kind has a file of the same shape (`kinds_are_alike` in `tests/it/header.rs`): the header's generator sees
//!   neither macros nor generics.
//!
//! Items visible to C have their C names in Rust, too. See also: the locks (`qspinlock`), replacing a program's own
//! locks (`qspinlock_preload`).

#![allow(non_camel_case_types)]
// The comment above an exported function becomes text of the header, for C programmers. The header's first comment
// (`cbindgen.toml`) has the rules that callers must keep in every call. In SAFETY comments, "the rules of the header"
// (or "the caller's promise") are: a pointer that is not NULL points to a value of its type, which lives until the call
// returns.
#![allow(clippy::missing_safety_doc)]

mod native;

mod fifo;

mod fair;

mod hybrid;

mod rwlock;

mod calls;

mod deadline;

mod version;

pub use deadline::qspin_deadline_in;
pub use fair::*;
pub use fifo::*;
pub use hybrid::*;
pub use native::*;
pub use rwlock::*;
pub use version::*;
