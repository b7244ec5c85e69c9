//! Integration tests: one binary, one module per subject. Folders without tests hold code that modules share.
#![allow(missing_docs)]

mod dirty_log;
mod file_mapping;
mod memory;
mod passed;
