//! Images in a Ceph cluster (RBD), through librados and librbd.
//!
//! ```text
//! spec.rs → library.rs (loaded at run time) → cluster.rs (a connection) → open_image.rs (handles)
//!   → RbdImage (image.rs), shared by a disk's workers
//!       ├ Lane: one engine's requests and completions
//!       └ lock.rs: the exclusive lock, while a guest uses the image
//! ```
//!
//! - The libraries are loaded only when a disk asks for them, and never closed.
//! - librbd's own threads do the network I/O. A request cannot be cancelled: while the cluster does not answer, it waits.
//! - Opening blocks for seconds if the cluster does not answer. All other functions return at once, unless they say so.
//!
//! Source: `rados/librados.h` and `rbd/librbd.h` of Ceph 16.

mod cluster;
mod completed;
mod error;
mod host;
mod image;
mod in_flight_bytes;
mod lane;
mod library;
mod lock;
mod lock_check;
mod open_image;
mod spec;

pub use cluster::ClusterOptions;
pub use error::RbdError;
pub use host::Host;
pub use image::{RbdImage, Reservation};
pub use lane::{Lane, Request};
pub use library::{Library, is_loaded};
pub use open_image::OpenOptions;
pub use spec::{RbdSpec, SpecError};
