//! Checks an image, read only: reference counts against references, and each table's entries.
//!
//! ```text
//! walk.rs: all references ─▶ counts.rs: a window of counters ─▶ compared with the refcount blocks (refcounts.rs)
//!    └ bad entries, references past the end, wrong copied bits ─▶ Finding
//! ```
//!
//! - The result has the numbers of `qemu-img check`. Beyond these, clusters that two tables share are corruptions, also
//!   if their reference counts are right.
//! - Memory: 64 MiB of counters for 2^24 clusters (1 TiB of file, at 64 KiB), which move along a larger file; 8 MiB for
//!   the refcount table; up to 8 MiB for tables. Each window reads all L1 and L2 tables once.
//! - Time grows with the references, of which a hostile image has many without being large.

mod bitmaps;
mod counts;
mod finding;
mod lenient;
mod refcounts;
mod walk;

use crate::error::FormatError;
use crate::image::Image;
use crate::read_at::ReadAt;

use counts::Counts;
use walk::Walk;

pub use finding::{CheckReport, Finding, Severity};

/// Checks an image. `found` is called for each finding.
///
/// # Errors
/// The file's length cannot be read. Other errors are findings.
pub fn check<F: ReadAt>(
    image: &Image<F>,
    found: &mut dyn FnMut(&Finding),
) -> Result<CheckReport, FormatError> {
    let read = |source| FormatError::Read { what: "length", offset: 0, source };
    let file_bytes = image.file().len_bytes().map_err(read)?;
    let cluster_bytes = image.header().geometry.cluster_bytes();
    let clusters = file_bytes.div_ceil(cluster_bytes);
    let total_clusters = image.header().size_bytes.div_ceil(cluster_bytes);
    let mut report = CheckReport { total_clusters, ..CheckReport::default() };
    let mut walk = Walk::new(image, file_bytes, Counts::new(clusters), &mut report, found);
    let mut window = Some(0);
    while let Some(start) = window {
        walk.counts.move_to(start);
        walk.references();
        walk.compare();
        let next = [walk.counts.next_window(), walk.next_window_with_counts()];
        window = next.into_iter().flatten().min();
    }
    Ok(report)
}
