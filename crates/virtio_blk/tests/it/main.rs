//! Integration tests: one program, a module for each subject. Folders without tests are shared by modules.
#![allow(missing_docs)]

mod any_layout;
mod requests;
