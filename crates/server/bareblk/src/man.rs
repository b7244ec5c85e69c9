//! `bareblk man FOLDER`: the manual pages, generated from the definition of the command line.
//!
//! `bareblk.1`, `bareblk-serve.1`, …, `bareblk-ctl-add.1`, …; for `cargo xtask man` and the packages.
//!
//! - `bareblk-bench man` writes the pages of its commands in the same way.
//! - The text below a command's options in `--help` becomes sections: a line that ends with a colon is a heading.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result};
use clap::Command;
use clap::builder::Resettable;
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, line_break, roman};

/// Headings that have another name in manual pages.
const HEADINGS: [(&str, &str); 1] = [("Exit codes", "Exit status")];

/// Writes one page for each command that is not hidden, at any depth. Of `command` itself and the commands directly
/// below it, writes only those that `is_wanted`.
///
/// # Errors
/// A page cannot be written.
pub fn write(command: Command, folder: &Path, is_wanted: impl Fn(&str) -> bool) -> Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let pages = || {
        for subcommand in command.get_subcommands().filter(|subcommand| is_wanted(subcommand.get_name())) {
            write_with_subcommands(subcommand, folder)?;
        }
        if is_wanted(command.get_name()) { write_page(&command, folder) } else { Ok(()) }
    };
    pages().with_context(|| format!("cannot write the manual pages into {}", folder.display()))
}

fn write_with_subcommands(command: &Command, folder: &Path) -> io::Result<()> {
    if command.is_hide_set() {
        return Ok(());
    }
    command.get_subcommands().try_for_each(|subcommand| write_with_subcommands(subcommand, folder))?;
    write_page(command, folder)
}

fn write_page(command: &Command, folder: &Path) -> io::Result<()> {
    let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let page = Man::new(command.clone().after_help(Resettable::Reset));
    let mut text = Vec::new();
    page.render(&mut text)?;
    let mut rest = Roff::new();
    sections(&after).iter().for_each(|(heading, lines)| add_section(&mut rest, heading, lines));
    rest.to_writer(&mut text)?;
    fs::write(folder.join(page.get_filename()), text)
}

/// The headings, each with its lines without their indentation.
fn sections(text: &str) -> Vec<(String, Vec<&str>)> {
    let mut sections: Vec<(String, Vec<&str>)> = Vec::new();
    for line in text.lines() {
        let heading = (!line.starts_with(' ')).then(|| line.split_once(':')).flatten();
        match (heading, sections.last_mut()) {
            (Some((heading, rest)), _) => {
                let rest = rest.trim();
                let lines = if rest.is_empty() { vec![] } else { vec![rest] };
                sections.push((heading.to_owned(), lines));
            }
            (None, Some((_, lines))) => lines.push(line.strip_prefix("  ").unwrap_or(line)),
            (None, None) => sections.push(("Notes".to_owned(), vec![line])),
        }
    }
    sections
}

/// Keeps columns and line breaks.
fn add_section(roff: &mut Roff, heading: &str, lines: &[&str]) {
    let renamed = HEADINGS.iter().find(|(from, _)| *from == heading).map_or(heading, |(_, to)| to);
    roff.control("SH", [renamed.to_uppercase().as_str()]);
    roff.control("nf", []);
    let kept = lines.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1);
    for line in lines.iter().take(kept) {
        let text: Vec<Inline> = if line.is_empty() { vec![line_break()] } else { vec![roman(*line)] };
        roff.text(text);
    }
    roff.control("fi", []);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{command_line, second_program};

    fn write_all(folder: &Path) -> Result<()> {
        write(command_line::command(), folder, second_program::is_documented_here)
    }

    fn pages() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        write_all(folder.path()).unwrap();
        folder
    }

    /// The page without roff's escapes.
    fn page(folder: &tempfile::TempDir, name: &str) -> String {
        fs::read_to_string(folder.path().join(name)).unwrap().replace('\\', "")
    }

    /// The text from this heading to the next.
    fn section<'p>(page: &'p str, heading: &str) -> &'p str {
        let begin = format!(".SH \"{heading}\"\n");
        let begin = if page.contains(&begin) { begin } else { format!(".SH {heading}\n") };
        let (_, rest) = page.split_once(&begin).unwrap_or_else(|| panic!("no {heading}: {page}"));
        rest.split(".SH ").next().unwrap()
    }

    #[test]
    fn every_command_that_can_be_seen_has_a_page_with_its_options() {
        let pages = pages();
        assert!(page(&pages, "bareblk.1").contains("bareblk-serve(1)"), "{}", page(&pages, "bareblk.1"));
        assert!(page(&pages, "bareblk-serve.1").contains("queue-size"));
        let add = page(&pages, "bareblk-ctl-add.1");
        assert!(add.contains("bareblk ctl add"), "{add}");
        assert!(
            !pages.path().join("bareblk-man.1").exists() && !pages.path().join("bareblk-helper.1").exists()
        );
        let of_the_other_program = page(&pages, "bareblk.1").contains("bareblk-lab(1)");
        assert!(of_the_other_program && !pages.path().join("bareblk-lab.1").exists());
    }

    #[test]
    fn exit_codes_signals_and_environment_have_sections_of_their_own() {
        let serve = page(&pages(), "bareblk-serve.1");
        let environment = section(&serve, "ENVIRONMENT");
        let variables = [
            "RUST_LOG",
            "NO_COLOR",
            "NOTIFY_SOCKET",
            "WATCHDOG_USEC",
            "WATCHDOG_PID",
            "LISTEN_FDS",
            "LISTEN_PID",
            "LISTEN_FDNAMES",
        ];
        let missing: Vec<_> = variables.iter().filter(|name| !environment.contains(**name)).collect();
        assert!(missing.is_empty(), "{missing:?} not in {environment}");
        let codes = section(&serve, "EXIT STATUS");
        let of = |code: i32| codes.lines().any(|line| line.starts_with(&format!("{code} ")));
        assert!(of(0) && of(1) && of(2) && of(sandbox::EXIT_CODE) && codes.contains("130, 143"), "{codes}");
        assert!(section(&serve, "SIGNALS").contains("SIGHUP"));
        assert!(section(&serve, "EXAMPLES").contains("bareblk serve disk.raw"));
        assert!(!serve.contains("SH EXTRA"), "{serve}");
    }

    #[test]
    fn heading_may_have_its_text_beside_it_and_columns_stay() {
        let text = "Begin\nTable:\n  a    b\n\n  c    d\n\nExit codes: 0 done";
        assert_eq!(
            sections(text),
            [
                ("Notes".to_owned(), vec!["Begin"]),
                ("Table".to_owned(), vec!["a    b", "", "c    d", ""]),
                ("Exit codes".to_owned(), vec!["0 done"]),
            ]
        );
    }

    #[test]
    fn folder_that_is_not_there_is_named() {
        let error = write_all(Path::new("/nowhere/at/all")).unwrap_err();
        assert!(format!("{error:#}").contains("/nowhere/at/all"), "{error:#}");
    }
}
