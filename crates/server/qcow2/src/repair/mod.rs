//! Repairs an image that no other program uses: frees leaked clusters, and corrects counts, copied bits and entries.
//!
//! ```text
//! check ─▶ entries.rs: entries to zeroes ─▶ counts.rs: counts raised, sync, lowered │ rebuild.rs: all counts anew
//!                                           ─▶ entries.rs: copied bits ─▶ check ─▶ header.rs: dirty and corrupt bits
//! ```
//!
//! - **A repair that is cut off at any instant leaves no cluster with fewer counts than references that had enough
//!   before.** No reference is added. A count falls only to the number of references, after all changes of entries are
//!   durable. A new refcount table is durable before the header names it.
//! - **No cluster is freed, and no copied bit set, while an entry or a table is not understood**: it may refer to any
//!   cluster. `qemu-img` frees what such an entry meant.
//! - A table is changed only if nothing else uses its clusters.
//! - Writes are multiples of 512 bytes at multiples of 512 bytes: the file must not be open for direct I/O.
//! - Before the first change, all that the check has read is made durable.
//! - Memory: that of the check, two L2 tables or refcount blocks, and up to 32 MiB for a new refcount table: which blocks
//!   there are, before and after the new ones are placed, the table, and its old content.

mod counts;
mod entries;
mod error;
mod header;
mod prepared;
mod rebuild;
mod report;
mod sectors;
#[cfg(test)]
mod tests;

use crate::check::obstacles::Obstacles;
use crate::check::{CheckReport, Finding, survey};
use crate::image::Image;
use crate::repair::counts::Direction;
use crate::repair::entries::Bits;
use crate::repair::prepared::Prepared;
use crate::repair::sectors::Target;
use crate::write::WriteAt;

pub use error::RepairError;
pub use report::{Event, Note, Repaired, Scope};

/// Checks an image, repairs what `scope` allows, and checks it again. The file must be locked.
///
/// # Errors
/// The image cannot be read or written, or needs a repair that is not built. It is not worse than before.
pub fn repair<F: WriteAt>(
    file: &F,
    scope: Scope,
    tell: &mut dyn FnMut(Event<'_>),
) -> Result<Repaired, RepairError> {
    let file = &Prepared::new(file);
    let before = State::of(file, &mut |finding| tell(Event::Found(finding)))?;
    tell(Event::Checked(before.report));
    let count = before.report.check_errors;
    if count > 0 || before.obstacles.unreadable {
        return Err(RepairError::Unreadable { count: count.max(1) });
    }
    if before.report.corruptions > 0 || before.report.leaks > 0 {
        match scope {
            Scope::Leaks => leaks(file, &before, tell)?,
            Scope::All => all(file, before, tell)?,
        }
    }
    let State { report: after, obstacles, .. } = State::of(file, &mut |finding| tell(Event::Left(finding)))?;
    let is_sound = after.corruptions == 0 && after.check_errors == 0 && !obstacles.unreadable;
    if scope == Scope::All && is_sound && header::clear_marks(file)? {
        tell(Event::Note(Note::MarksCleared));
    }
    Ok(Repaired {
        leaks_freed: before.report.leaks.saturating_sub(after.leaks),
        corruptions_repaired: before.report.corruptions.saturating_sub(after.corruptions),
        after,
    })
}

/// What a check found.
#[derive(Debug, Clone, Copy)]
struct State {
    report: CheckReport,
    obstacles: Obstacles,
    /// All corruptions are wrong copied bits.
    only_copied: bool,
}

impl State {
    fn of<F: Target>(file: &F, found: &mut dyn FnMut(&Finding)) -> Result<Self, RepairError> {
        let mut copied = 0;
        let (report, obstacles) = survey(&Image::open(file)?, &mut |finding| {
            copied += u64::from(matches!(finding, Finding::Copied { .. }));
            found(finding);
        })?;
        Ok(Self { report, obstacles, only_copied: report.corruptions == copied })
    }
}

/// Lowers counts. A count that falls to 1 makes a clear copied bit wrong, so such bits are set if that is safe.
fn leaks<F: Target>(file: &F, before: &State, tell: &mut dyn FnMut(Event<'_>)) -> Result<(), RepairError> {
    let Obstacles { unknown_references, unusable_counts, .. } = before.obstacles;
    if unknown_references || unusable_counts {
        tell_of_leaks(before, tell);
        return Ok(());
    }
    let are_right = counts::correct(file, &[Direction::Lower])?;
    if are_right && before.only_copied {
        entries::correct_copied(file, Bits { set: true, clear: false })?;
    }
    Ok(())
}

fn all<F: Target>(file: &F, mut state: State, tell: &mut dyn FnMut(Event<'_>)) -> Result<(), RepairError> {
    if state.obstacles.unknown_references && entries::zero(file, tell)? {
        state = State::of(file, &mut |_| {})?;
        error::expect_read(state.obstacles)?;
    }
    let Obstacles { unknown_references, unusable_counts, missing_blocks, .. } = state.obstacles;
    let are_right = match (unusable_counts || missing_blocks, unknown_references) {
        (true, true) => return Err(RepairError::NotRebuilt),
        (true, false) => rebuild::rebuild(file, tell).map(|()| true)?,
        (false, false) => counts::correct(file, &[Direction::Raise, Direction::Lower])?,
        (false, true) => {
            tell_of_leaks(&state, tell);
            counts::correct(file, &[Direction::Raise]).map(|_| false)?
        }
    };
    entries::correct_copied(file, Bits { set: are_right, clear: true })
}

fn tell_of_leaks(state: &State, tell: &mut dyn FnMut(Event<'_>)) {
    if state.report.leaks > 0 {
        tell(Event::Note(Note::LeaksKept { leaks: state.report.leaks }));
    }
}
