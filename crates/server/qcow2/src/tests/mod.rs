//! Tests of the crate as its users see it: one module per subject.
#![allow(clippy::cast_possible_truncation)]

mod chains;
mod checks;
mod compressed;
mod created;
pub(crate) mod headers;
mod hostile;
mod mapping;
pub(crate) mod rig;
mod snapshots;
