//! Integration tests: one program, a module for each subject. Folders without tests are shared by modules.
#![allow(missing_docs)]

mod dirty_log;
mod file_mapping;
mod memory;
mod passed;
