//! What the xtask commands share with the project's tests: real guests, and the programs that they need.
//!
//! - `workspace`: where things are.
//! - `command`: run a program, fail with what it said.
//! - `packages`: which programs come from which Debian package, and how to install them.
//! - `programs`: programs of other crates, for tests.
//! - `sizes`: how large the slow checks are, short and long.
//! - `skip`: how a test says that it cannot run here.
//! - `cli_page`: the reference page of a program's command line.
//! - `config_page`: the manual page of the configuration file.
//! - `guest`: a stock Linux guest in stock QEMU, for tests and for the demo.
//!
//! Not here: the commands themselves (`main.rs`, one module per subcommand).
#![forbid(unsafe_code)]

pub mod cli_page;
pub mod command;
pub mod config_page;
pub mod guest;
pub mod packages;
pub mod programs;
pub mod sizes;
pub mod skip;
pub mod workspace;
