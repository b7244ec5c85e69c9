//! Integration tests: one program, a module for each subject. Folders without tests are shared by modules.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod conditions;
mod lifetimes;
mod locks;
mod preloaded;
mod programs;
