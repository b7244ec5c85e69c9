//! `bareblk image check --repair`: the first check, what was repaired, and the second check.

use std::fmt::Write;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;

use anyhow::{Context, Result};
use qcow2::repair::{Event, Note, RepairError, Repaired, Scope, repair};
use qcow2::{ReadAt, WriteAt};
use serde::Serialize;

use crate::args::image_args::{OneImage, Repair};
use crate::command_line;
use crate::image::open::open_for_repair;
use crate::image::report::{Findings, Report, SHOWN_FINDINGS, exit_code};

/// A locked image.
struct ImageFile(File);

impl ReadAt for ImageFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        ReadAt::read_at(&self.0, offset, buffer)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        ReadAt::len_bytes(&self.0)
    }
}

impl WriteAt for ImageFile {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.0.set_len(len_bytes)
    }

    /// A repair frees no space of the file system.
    fn punch_hole(&self, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// All of it, or what there was before an error; there are notes also then.
#[derive(Debug, Default, Serialize)]
struct Both {
    before: Option<Report>,
    repair: Option<Sums>,
    after: Option<Report>,
}

#[derive(Debug, Default, Serialize)]
struct Sums {
    leaks_freed: Option<u64>,
    corruptions_repaired: Option<u64>,
    /// What the sums do not say; the first of them.
    notes: Vec<String>,
}

/// Repairs the image while no other program uses it.
pub fn run(args: &OneImage, what: Repair) -> Result<ExitCode> {
    let file = ImageFile(open_for_repair(&args.path)?);
    let mut both = Both::default();
    let result = repaired(args, &file, what, &mut both);
    if both.before.is_some() {
        let text = if args.json {
            serde_json::to_string_pretty(&both).context("cannot write JSON")? + "\n"
        } else {
            text(&both)
        };
        command_line::print(&text)?;
    }
    let repaired = result.with_context(|| format!("image {}", args.path.display()))?;
    Ok(exit_code(&repaired.after))
}

fn repaired(
    args: &OneImage,
    file: &ImageFile,
    what: Repair,
    both: &mut Both,
) -> Result<Repaired, RepairError> {
    let (mut found, mut left) = (Findings::default(), Findings::default());
    let mut sums = Sums::default();
    let scope = match what {
        Repair::Leaks => Scope::Leaks,
        Repair::All => Scope::All,
    };
    let result = repair(file, scope, &mut |event| match event {
        Event::Found(finding) => found.note(finding),
        Event::Checked(report) => {
            both.before = Some(Report::new(&args.path, report, std::mem::take(&mut found)));
        }
        Event::Note(note) => note_of(note, &mut sums.notes),
        Event::Left(finding) => left.note(finding),
    });
    if let Ok(Repaired { leaks_freed, corruptions_repaired, after }) = &result {
        sums.leaks_freed = Some(*leaks_freed);
        sums.corruptions_repaired = Some(*corruptions_repaired);
        both.after = Some(Report::new(&args.path, *after, left));
    }
    both.repair = Some(sums);
    result
}

fn note_of(note: Note, notes: &mut Vec<String>) {
    if notes.len() < SHOWN_FINDINGS {
        notes.push(note.to_string());
    }
}

fn text(both: &Both) -> String {
    let mut text = String::new();
    if let Some(before) = &both.before {
        let _ = write!(text, "before the repair:\n{}", before.text());
    }
    if let Some(Sums { leaks_freed, corruptions_repaired, notes }) = &both.repair {
        notes.iter().for_each(|note| _ = writeln!(text, "note: {note}"));
        if let (Some(leaks), Some(corruptions)) = (leaks_freed, corruptions_repaired) {
            let _ = writeln!(text, "leaks freed: {leaks}, corruptions repaired: {corruptions}");
        }
    }
    if let Some(after) = &both.after {
        let _ = write!(text, "after the repair:\n{}", after.text());
    }
    text
}
