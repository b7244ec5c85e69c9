//! Integration tests: one program, a module for each subject. Folders without tests are shared by modules.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

#[cfg(feature = "misuse")]
mod checked;
mod contract;
mod few_threads;
mod odd_policies;
mod order;
mod queued;
mod rwlock;
mod unwanted;
