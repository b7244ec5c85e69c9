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
pub(crate) mod lenient;
pub(crate) mod obstacles;
pub(crate) mod refcounts;
pub(crate) mod walk;

use crate::error::FormatError;
use crate::image::Image;
use crate::read_at::ReadAt;

use obstacles::Obstacles;
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
    survey(image, found).map(|(report, _)| report)
}

/// Checks an image, and finds out how it can be repaired.
pub(crate) fn survey<F: ReadAt>(
    image: &Image<F>,
    found: &mut dyn FnMut(&Finding),
) -> Result<(CheckReport, Obstacles), FormatError> {
    each_window(image, Scope::All, found, |walk| {
        walk.compare();
        Ok(())
    })
}

/// Which references are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// All.
    All,
    /// Not those of the refcount table, which is to be built anew.
    WithoutRefcounts,
}

/// Counts references, and calls `visit` for each window of clusters that have some, or that have stored counts.
pub(crate) fn each_window<'a, F: ReadAt, E: From<FormatError>>(
    image: &'a Image<F>,
    scope: Scope,
    found: &'a mut dyn FnMut(&Finding),
    mut visit: impl FnMut(&mut Walk<'a, F>) -> Result<(), E>,
) -> Result<(CheckReport, Obstacles), E> {
    let read = |source| FormatError::Read { what: "length", offset: 0, source };
    let file_bytes = image.file().len_bytes().map_err(read)?;
    let mut walk = Walk::new(image, file_bytes, found);
    let mut window = Some(0);
    while let Some(start) = window {
        walk.counts.move_to(start);
        walk.references();
        let mut with_counts = None;
        if scope == Scope::All {
            walk.refcount_references();
            with_counts = walk.next_window_with_counts();
        }
        visit(&mut walk)?;
        window = [walk.counts.next_window(), with_counts].into_iter().flatten().min();
    }
    Ok((walk.report, walk.obstacles))
}
