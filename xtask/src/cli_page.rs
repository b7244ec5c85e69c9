//! The reference page of a program's command line, rendered from clap's definition.
//!
//! `## command → what it does → usage → arguments and options, in the order and groups of --help → its notes`
//!
//! A test in each program compares the page with the program (`check`), or writes the page if `BAREBLK_WRITE_PAGE` is
//! set.

use std::fs;

use clap::{Arg, Command};

use crate::workspace;

/// If this variable is set, the test writes the page.
pub const WRITE: &str = "BAREBLK_WRITE_PAGE";
/// The name of the test in each program.
pub const TEST_NAME: &str = "reference_page_is_what_the_command_line_says";

/// Compares the page at `path`, from the workspace's root, with `program`.
///
/// # Panics
/// If they differ, or the page cannot be written.
pub fn check(path: &str, program: Command) {
    let file = workspace::root().join(path);
    let wanted = page(program);
    if std::env::var_os(WRITE).is_some() {
        assert!(fs::write(&file, &wanted).is_ok(), "cannot write {}", file.display());
    }
    let complaint = difference(path, &fs::read_to_string(&file).unwrap_or_default(), &wanted);
    assert!(complaint.is_none(), "{}", complaint.unwrap_or_default());
}

fn difference(path: &str, found: &str, wanted: &str) -> Option<String> {
    let same = found.lines().zip(wanted.lines()).take_while(|(found, wanted)| found == wanted).count();
    (found != wanted).then(|| format!("{path} differs from line {} on: run `cargo xtask docs`", same + 1))
}

/// The page, with one section for each command that is not hidden.
#[must_use]
pub fn page(program: Command) -> String {
    let mut program =
        program.disable_help_subcommand(true).disable_help_flag(true).disable_version_flag(true);
    program.build();
    let name = program.get_name().to_owned();
    let mut text = format!(
        "# Command line of `{name}`\n\nThis page is generated from the program by `cargo xtask docs`. `{name} COMMAND --help` shows \
         the same.\n"
    );
    add(&mut text, &program, None);
    text
}

fn add(text: &mut String, command: &Command, parent: Option<&Command>) {
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name());
    *text += &format!("\n## `{name}`\n");
    let about = command.get_long_about().or_else(|| command.get_about()).map(ToString::to_string);
    paragraph(text, &about.map(|about| sentence(&about)).unwrap_or_default());
    let usage = command.clone().render_usage().to_string();
    *text += &format!("\n```text\n{}\n```\n", usage.trim_start_matches("Usage:").trim());
    for (heading, arguments) in groups(command, parent) {
        *text += &format!("\n**{heading}**\n\n");
        arguments.iter().for_each(|argument| *text += &item(argument));
    }
    let shown: Vec<_> = command.get_subcommands().filter(|command| !command.is_hide_set()).collect();
    if !shown.is_empty() {
        *text += "\n**Commands**\n\n";
        shown.iter().for_each(|command| *text += &line(command));
    }
    if let Some(notes) = command.get_after_help() {
        *text += &format!("\n```text\n{}\n```\n", notes.to_string().trim_end());
    }
    shown.iter().for_each(|subcommand| add(text, subcommand, Some(command)));
}

fn line(command: &Command) -> String {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name());
    let anchor = name.replace(' ', "-");
    format!("- [`{name}`](#{anchor}): {}\n", prose(&about))
}

/// Arguments by their heading in `--help`, in the order of each heading's first argument. Leaves out options that a
/// command inherits: they are in the parent's section.
fn groups<'c>(command: &'c Command, parent: Option<&Command>) -> Vec<(String, Vec<&'c Arg>)> {
    let of_parent = |argument: &&Arg| {
        let id = argument.get_id();
        parent.is_some_and(|parent| {
            parent.get_arguments().any(|known| known.get_id() == id && known.is_global_set())
        })
    };
    let mut groups: Vec<(String, Vec<&Arg>)> = Vec::new();
    let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
    for argument in shown.filter(|argument| !of_parent(argument)) {
        let usual = if argument.is_positional() { "Arguments" } else { "Options" };
        let heading = argument.get_help_heading().unwrap_or(usual);
        match groups.iter_mut().find(|(name, _)| name == heading) {
            Some((_, arguments)) => arguments.push(argument),
            None => groups.push((heading.to_owned(), vec![argument])),
        }
    }
    groups
}

fn item(argument: &Arg) -> String {
    let help = argument.get_long_help().or_else(|| argument.get_help()).map(ToString::to_string);
    let help = help.map(|help| sentence(&help)).unwrap_or_default();
    let mut notes = Vec::new();
    let shows_values = !argument.is_hide_possible_values_set() && argument.get_action().takes_values();
    let values = if shows_values { argument.get_possible_values() } else { Vec::new() };
    let values: Vec<_> = values.iter().filter(|value| !value.is_hide_set()).collect();
    let defaults: Vec<_> =
        argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if !defaults.is_empty() && !argument.is_hide_default_value_set() && argument.get_action().takes_values() {
        notes.push(format!("Default: `{}`.", defaults.join(" ")));
    }
    if !values.is_empty() && values.iter().all(|value| value.get_help().is_none()) {
        let names: Vec<_> = values.iter().map(|value| format!("`{}`", value.get_name())).collect();
        notes.push(format!("One of {}.", names.join(", ")));
    }
    let notes = if notes.is_empty() { String::new() } else { format!(" {}", notes.join(" ")) };
    let mut text = format!("- `{}`: {}{notes}\n", form(argument), prose(&help).replace("\n\n", "\n\n  "));
    for value in values.iter().filter(|value| value.get_help().is_some()) {
        let help = value.get_help().map(ToString::to_string).unwrap_or_default();
        text += &format!("  - `{}`: {}\n", value.get_name(), prose(&help));
    }
    text
}

/// The argument as a user types it: `-v`, `--socket <PATH>`, `<IMAGE>`.
fn form(argument: &Arg) -> String {
    let short = argument.get_short().map(|short| format!("-{short}"));
    let long = argument.get_long().map(|long| format!("--{long}"));
    let names: Vec<_> = short.into_iter().chain(long).collect();
    let shown = argument.to_string();
    if names.len() < 2 { shown } else { shown.replacen(&names[1], &names.join(", "), 1) }
}

fn paragraph(text: &mut String, words: &str) {
    if !words.is_empty() {
        *text += &format!("\n{}\n", prose(words));
    }
}

/// Adds the full stop that clap removes from the end of a comment.
fn sentence(text: &str) -> String {
    let text = text.trim_end();
    if text.ends_with(['.', ']', ':']) || text.is_empty() { text.to_owned() } else { format!("{text}.") }
}

/// Escapes characters that have a meaning in Markdown, except in `code`.
fn prose(text: &str) -> String {
    let parts = text
        .split('`')
        .enumerate()
        .map(|(place, part)| if place % 2 == 1 { format!("`{part}`") } else { escaped(part) });
    parts.collect()
}

fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for character in text.chars() {
        if matches!(character, '<' | '>' | '*' | '[' | ']') {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program() -> Command {
        let rate =
            Arg::new("rate").short('r').long("rate").value_name("N").help("How fast").default_value("5");
        let mode = Arg::new("mode").long("mode").value_parser(["a", "b"]).help("Which").help_heading("More");
        let everywhere = Arg::new("json").long("json").global(true).num_args(0).help("In JSON");
        let hidden = Command::new("inner").hide(true);
        let run =
            Command::new("run").about("Does <it>").arg(rate).arg(mode).after_help("Examples:\n  p run  *");
        Command::new("p").about("A program").arg(everywhere).subcommand(run).subcommand(hidden)
    }

    #[test]
    fn every_command_that_is_shown_has_its_usage_options_and_notes() {
        let page = page(program());
        let (_, begin) = page.split_once("the same.\n").unwrap();
        let expected = "\n## `p`\n\nA program.\n\n```text\np [OPTIONS] [COMMAND]\n```\n\n**Options**\n\n- `--json`: In JSON.\n\n**Commands**\n\n- [`p run`](#p-run): Does \\<it\\>\n\
             \n## `p run`\n\nDoes \\<it\\>.\n\n```text\np run [OPTIONS]\n```\n\n**Options**\n\n- `-r, --rate <N>`: How fast. Default: `5`.\n\
             \n**More**\n\n- `--mode <mode>`: Which. One of `a`, `b`.\n\n```text\nExamples:\n  p run  *\n```\n";
        assert_eq!(begin, expected);
    }

    #[test]
    fn page_that_differs_is_named_with_its_first_line() {
        assert_eq!(difference("a.md", "x\ny\n", "x\ny\n"), None);
        let complaint = difference("a.md", "x\ny\n", "x\nz\n").unwrap();
        assert!(complaint.starts_with("a.md differs from line 2 on"), "{complaint}");
    }
}
