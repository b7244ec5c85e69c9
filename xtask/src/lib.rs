//! Code that the xtask commands share with the project's tests: real guests, and the programs that they need.
//!
//! - `workspace`: paths.
//! - `command`: runs a program, and fails with its output.
//! - `packages`: which Debian package contains a program, and how to install it.
//! - `programs`: programs of other crates, for tests.
//! - `sizes`: the sizes of slow checks, short and long.
//! - `skip`: how a test reports that it cannot run on this machine.
//! - `cli_page`: the reference page of a program's command line.
//! - `config_page`: the manual page of the configuration file.
//! - `unpacked`: programs of packages that are not installed.
//! - `guest`: a stock Linux guest in stock QEMU, for tests and for the demo.
#![forbid(unsafe_code)]

pub mod cli_page;
pub mod command;
pub mod config_page;
pub mod guest;
pub mod packages;
pub mod programs;
pub mod sizes;
pub mod skip;
pub mod unpacked;
pub mod workspace;
