//! Integration tests: one program, one module per subject. It uses the `rig` of `bareblk`'s tests.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod exporter;
mod exporter_hostile;
mod http;
mod load;
mod prometheus;
#[path = "../../../bareblk/tests/it/rig/mod.rs"]
mod rig;
mod second_program;
mod top;
mod top_hostile;
mod top_terminal;
