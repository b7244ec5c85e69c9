//! Changes stored counts where they are, to the number of references.

use crate::check::walk::Walk;
use crate::check::{Scope, each_window};
use crate::geometry::Geometry;
use crate::image::Image;
use crate::repair::error::{RepairError, expect_known, expect_read};
use crate::repair::sectors::{Target, read, sync, write_changed};
use crate::tables::refcounts::{refcount_at, store_refcount};

/// Which counts are changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// Those that are too low.
    Raise,
    /// Those that are too high.
    Lower,
}

impl Direction {
    const fn corrects(self, stored: u64, references: u64) -> bool {
        match self {
            Self::Raise => stored < references,
            Self::Lower => stored > references,
        }
    }
}

/// What was done with counts.
#[derive(Debug, Clone, Copy, Default)]
struct Done {
    is_changed: bool,
    /// A count cannot be as high as the number of references.
    has_limit: bool,
}

/// Corrects counts, for each window of clusters in this order, with a sync after each direction. Returns whether no count
/// is left that the image's width does not allow.
pub(super) fn correct<F: Target>(file: &F, directions: &[Direction]) -> Result<bool, RepairError> {
    let image = Image::open(file)?;
    let mut is_complete = true;
    each_window(&image, Scope::All, &mut |_| {}, |walk| {
        expect_read(walk.obstacles)?;
        if directions.contains(&Direction::Lower) {
            expect_known(walk.obstacles)?;
        }
        for direction in directions {
            let done = blocks(walk, *direction)?;
            is_complete &= !done.has_limit;
            if done.is_changed {
                sync(file)?;
            }
        }
        Ok::<_, RepairError>(())
    })?;
    Ok(is_complete)
}

/// The highest count of an image's width.
pub(super) const fn most(geometry: &Geometry) -> u64 {
    u64::MAX >> (64 - geometry.refcount_bits())
}

/// Corrects the counts in the window.
fn blocks<F: Target>(walk: &Walk<'_, F>, direction: Direction) -> Result<Done, RepairError> {
    let (range, bits) = (walk.counts.range(), walk.image.header().geometry.refcount_block_bits());
    let mut done = Done::default();
    for index in range.start >> bits..range.end.div_ceil(1 << bits).min(walk.refcounts.entries()) {
        if let Some(offset) = walk.refcounts.block_offset(index) {
            let more = block(walk, index, offset, direction)?;
            done.is_changed |= more.is_changed;
            done.has_limit |= more.has_limit;
        }
    }
    Ok(done)
}

fn block<F: Target>(
    walk: &Walk<'_, F>,
    index: u64,
    offset: u64,
    direction: Direction,
) -> Result<Done, RepairError> {
    let (file, geometry) = (walk.image.file(), walk.image.header().geometry);
    let old = read(file, "refcount block", offset, geometry.cluster_bytes())?;
    let mut new = old.clone();
    let (first, range) = (index << geometry.refcount_block_bits(), walk.counts.range());
    let end = (first + geometry.refcount_block_entries()).min(range.end);
    let mut has_limit = false;
    for cluster in first.max(range.start)..end {
        let at = usize::try_from(cluster - first).unwrap_or(usize::MAX);
        let stored = refcount_at(&old, at, &geometry).unwrap_or_default();
        match walk.counts.exact(cluster).filter(|references| *references <= most(&geometry)) {
            Some(references) if direction.corrects(stored, references) => {
                store_refcount(&mut new, at, &geometry, references);
            }
            Some(_) => {}
            None => has_limit = true,
        }
    }
    let is_changed = write_changed(file, "refcount block", offset, &old, &new)?;
    Ok(Done { is_changed, has_limit })
}
