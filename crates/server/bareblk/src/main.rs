//! The program's entry; the library of the same name does the work (`lib.rs`).
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    bareblk::main()
}
