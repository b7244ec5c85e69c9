//! Integration tests: one program, a module for each subject. Folders without tests are shared by modules.
#![allow(missing_docs)]

mod conditions;
mod lifetimes;
mod locks;
mod preloaded;
mod programs;
