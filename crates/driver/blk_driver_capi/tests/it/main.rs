//! Integration tests: one program, a module for each subject. Folders without tests are shared by modules.
#![allow(missing_docs)]

mod allocations;
mod c_programs;
mod calls;
mod compiler;
mod connected;
mod header;
mod server;
