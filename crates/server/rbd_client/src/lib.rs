//! Images in a Ceph cluster (RBD), through librados and librbd.
//!
//! ```text
//! spec.rs → library.rs (loaded at run time) → cluster.rs (a connection) → RbdImage, shared by a disk's workers
//!                                                                   └ Lane: one engine's requests and completions
//! ```
//!
//! - The libraries are loaded only when a disk asks for them, and never closed.
//! - librbd's own threads do the network I/O. A request cannot be cancelled: while the cluster does not answer, it waits.
//! - Opening blocks for seconds if the cluster does not answer. All other functions return at once, unless they say so.
//!
//! Source: `rados/librados.h` and `rbd/librbd.h` of Ceph 16.

mod cluster;
mod error;
mod image;
mod lane;
mod library;
mod spec;

pub use cluster::ClusterOptions;
pub use error::RbdError;
pub use image::{OpenOptions, RbdImage};
pub use lane::{Lane, Request};
pub use library::{Library, is_loaded};
pub use spec::{RbdSpec, SpecError};
