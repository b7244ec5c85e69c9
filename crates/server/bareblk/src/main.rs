//! The program's entry. All of it is in the library of the same name (`lib.rs`).
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    bareblk::main()
}
