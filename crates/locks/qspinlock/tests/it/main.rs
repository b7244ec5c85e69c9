//! Integration tests: one program, a module for each subject. Folders without tests are shared by modules.
#![allow(missing_docs)]

#[cfg(feature = "misuse")]
mod checked;
mod contract;
mod few_threads;
mod odd_policies;
mod order;
mod queued;
mod rwlock;
mod unwanted;
