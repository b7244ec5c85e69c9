//! The virtio-blk driver for C: the calls of `blk_driver` behind `include/bareblk_driver.h`.
//!
//! `pointers (NULL? aligned? lengths?) → values of blk_driver → the call → code, and a line of text for `bareblk_last_error``
//!
//! - A call only translates: `blk_driver` decides what is possible.
//! - A panic does not leave a call: the call returns `BAREBLK_ERR_BUG`, and its queue accepts no more calls.
//! - Nothing is allocated per request: lists are copied into vectors that the queue's handle keeps, and the text of an
//!   error into the thread's memory.
//! - The caller promises what a call cannot check: a pointer that is not NULL points to what the header says, and a
//!   handle is not used after it was freed, nor by two threads at once if the header forbids that.
//! - Items that C sees have their C names in Rust too.
//!
//! The header is generated (`tests/it/header.rs`).

#![allow(non_camel_case_types)]
// The comment above an exported function becomes the header's text, for C programmers. The start of the header
// (`cbindgen.toml`) has the rules that callers must keep in every call. SAFETY comments refer to them as "the rules of
// the header" or "the caller's promise".
#![allow(clippy::missing_safety_doc)]

mod failure;

mod call;

mod pointers;

mod options;

mod device;

mod event;

mod buffer;

mod queue;

mod request;

mod kick;

mod completion;

mod blocking;

mod version;

pub use blocking::*;
pub use buffer::*;
pub use completion::*;
pub use device::*;
pub use event::*;
pub use failure::{bareblk_code, bareblk_code_text, bareblk_last_error};
pub use kick::*;
pub use options::*;
pub use queue::*;
pub use request::*;
pub use version::*;
