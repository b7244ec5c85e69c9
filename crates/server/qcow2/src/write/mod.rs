//! Changes an image: makes the guest's clusters writable in place, zeroes them and frees them.
//!
//! ```text
//! claim/  ─┐ space/: host clusters with durable counts, which read as zeroes
//! zero.rs ─┴▶ link.rs: L1 and L2 entries, then the view ─▶ unlinked ─▶ space/release.rs: sync, punch, counts
//! claim/merge.rs: whole clusters for jobs that merge layers
//! space/reclaim/: what an earlier life leaked ─▶ space/release.rs
//! space/counts.rs: refcounts; space/grow.rs: a larger disk; metadata.rs: what is a table; blocks.rs: the file in blocks of 4 KiB
//! ```
//!
//! - **References never exceed the stored counts**, at no instant and in no subset of the unsynced writes: counts rise
//!   durably before an entry is written, and fall after the entry's change is durable. A crash leaks clusters, and needs
//!   no repair.
//! - **An allocation never changes what the guest reads**: old content is copied and synced before an entry leads to it,
//!   or is zeroes and the new cluster durably reads as zeroes.
//! - The guest's data are not written here, except by `claim/merge.rs`: their writer looks up the entry after the claim.
//! - The format's promises are not trusted. An entry that leads into a table, a count that is too low or a table that
//!   is not the active table's own ends all changes ([`WriteError::Damaged`]). What a wrong copied bit of the guest's
//!   data harms is that image's data.
//! - Memory: the L1 table (32 MiB), the refcount table (8 MiB), the numbers of all clusters with tables (64 MiB at the
//!   limit), 2 MiB of kept blocks, 1,024 entries of a batch, four clusters; during a reclaim two bits for each cluster of the file.

mod blocks;
mod claim;
mod error;
mod interface;
mod link;
mod metadata;
mod open;
mod space;
#[cfg(test)]
pub(crate) mod tests;
mod writer;
mod zero;

pub use claim::merge::Allocation;
pub use error::WriteError;
pub use interface::{Below, View, WriteAt};
pub use space::reclaim::{ReclaimError, Reclaimed};
pub use writer::{Unlinked, Writer};
