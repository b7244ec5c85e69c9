//! Integration tests: one binary, one module per subject. Folders without tests hold code that modules share.
#![allow(missing_docs)]

mod any_layout;
mod requests;
