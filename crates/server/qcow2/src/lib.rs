//! The qcow2 format: headers, tables, mapping, compressed clusters, backing chains and checks.
//!
//! ```text
//! first cluster → header/ (Header, Geometry) → L1 table → L2 entries (tables/) → mapping.rs: runs of guest data
//!                                                                             └ compressed.rs: one cluster
//! image.rs: one file; chain.rs: a file and its backing files; check/: reference counts against references
//! create.rs: a new image, also over a backing file; write/: changes while a guest runs; repair/: corrections of what a check finds
//! ```
//!
//! - Each number of a file is checked before it is used; a file may be hostile.
//! - The crate does no I/O of its own: callers implement [`ReadAt`], and [`Opener`] for the names in images.
//! - A serving path keeps L2 tables itself and calls [`run_in_table`] on them, which does not allocate. [`Chain::read_at`]
//!   is for tools and tests.
//!
//! Source: QEMU, `docs/interop/qcow2.txt`.
#![forbid(unsafe_code)]

mod big_endian;
mod chain;
pub mod check;
mod compressed;
mod create;
mod error;
mod geometry;
mod header;
mod image;
mod mapping;
mod read_at;
pub mod repair;
mod snapshots;
mod tables;
#[cfg(test)]
mod tests;
mod write;

pub use chain::{
    Chain, ChainError, DiskFormat, FileId, Layer, LayerParts, MAX_LAYERS, MappedParts, Opened, Opener, Role,
};
pub use compressed::Decompressor;
pub use create::{NewImage, create, remove_backing};
pub use error::{DecompressError, FormatError, Limit};
pub use geometry::Geometry;
pub use header::extensions::{BitmapsExtension, Extensions, Feature, UnknownExtension};
pub use header::features::{Autoclear, Compatible, Incompatible};
pub use header::{Backing, Compression, Header, TableAt};
pub use image::Image;
pub use mapping::{L2Source, Run, RunKind, next_run, run_in_table};
pub use read_at::ReadAt;
pub use snapshots::{Snapshot, Snapshots};
pub use tables::refcounts::{RefcountTableEntry, refcount_at};
pub use tables::{
    BadEntry, CompressedCluster, EntryProblem, L1Entry, L2Entry, RawL2Entry, StandardCluster, Table,
};
pub use write::{Allocation, Below, ReclaimError, Reclaimed, Unlinked, View, WriteAt, WriteError, Writer};
