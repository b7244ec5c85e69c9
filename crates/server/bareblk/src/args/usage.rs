//! Reports wrong usage in one line: clap's message and advice, and which help to read.

use std::error::Error as _;
use std::ffi::OsString;

use clap::Command;
use clap::error::{ContextKind, ContextValue, Error, ErrorKind};

/// The exit code of wrong usage, as in most programs.
pub const EXIT_CODE: u8 = 2;

/// Options that cannot be combined.
#[derive(Debug)]
pub struct Contradiction(pub &'static str);

impl std::fmt::Display for Contradiction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Contradiction {}

/// A value that is impossible, or that contradicts other options.
#[derive(Debug)]
pub struct Wrong(pub String);

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Wrong {}

/// The line for standard error about `error`, which clap found in the `words` given to `command`. The line refers to
/// the help of the innermost subcommand among the words.
pub fn line(mut command: Command, error: &Error, words: impl IntoIterator<Item = OsString>) -> String {
    let mut path = command.get_bin_name().unwrap_or_else(|| command.get_name()).to_owned();
    for word in words {
        let Some(subcommand) = command.find_subcommand(&word).cloned() else { break };
        path = format!("{path} {}", subcommand.get_name());
        command = subcommand;
    }
    let tip = if misses_form_of_settings(&command, error) {
        "; tip: a setting is written KEY=VALUE, without dashes"
    } else {
        ""
    };
    format!("{}{tip} (see {path} --help)", reason(error))
}

/// Whether an option is unknown, resembles none, and belongs to a command that takes settings as `KEY=VALUE`.
fn misses_form_of_settings(command: &Command, error: &Error) -> bool {
    let takes_settings = command.get_positionals().any(|word| {
        word.get_value_names().is_some_and(|names| names.iter().any(|name| name.ends_with("KEY=VALUE")))
    });
    error.kind() == ErrorKind::UnknownArgument
        && error.get(ContextKind::SuggestedArg).is_none()
        && takes_settings
}

fn reason(error: &Error) -> String {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let (option, value) = (text(ContextKind::InvalidArg), text(ContextKind::InvalidValue));
    match (error.kind(), option, value, error.source()) {
        // clap's wording, with the value escaped so that it stays on one line.
        (ErrorKind::ValueValidation, Some(option), Some(value), Some(source)) => {
            format!("invalid value '{}' for '{option}': {source}", value.escape_debug())
        }
        _ => first_paragraphs(&error.render().to_string()),
    }
}

/// `text` without the usage and the hint at `--help` at its end.
fn first_paragraphs(text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let end = text.rfind("\n\nUsage:").or_else(|| text.rfind("\n\nFor more information"));
    let text = text.get(..end.unwrap_or(text.len())).unwrap_or(text);
    // Drops one kind of advice: that a positional argument could take a mistyped option as its value. This
    // advice never helps.
    let is_help = |paragraph: &&str| !paragraph.contains(" as a value, use '-- ");
    let paragraphs = text.split("\n\n").filter(is_help).map(|paragraph| {
        paragraph.split('\n').map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
    });
    paragraphs.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::cli::Cli;

    fn refusal(arguments: &[&str]) -> String {
        let words = std::iter::once("bareblk").chain(arguments.iter().copied());
        line(Cli::command(), &Cli::try_parse_from(words).unwrap_err(), arguments.iter().map(OsString::from))
    }

    #[test]
    fn missing_option_is_named_in_one_line() {
        let line = refusal(&["serve", "disk.raw"]);
        assert_eq!(
            line,
            "the following required arguments were not provided: --socket <PATH> (see bareblk serve --help)"
        );
    }

    #[test]
    fn unknown_option_comes_with_the_similar_one() {
        let line = refusal(&["serve", "disk.raw", "--socket", "s", "--qeues", "4"]);
        assert!(line.starts_with("unexpected argument '--qeues' found; tip: "), "{line}");
        assert!(line.ends_with("'--queues' (see bareblk serve --help)"), "{line}");
    }

    #[test]
    fn unknown_word_comes_with_the_known_ones() {
        let line = refusal(&["serve", "disk.raw", "--socket", "s", "--cache", "maybe"]);
        assert!(line.contains("'maybe' for '--cache <MODE>'"), "{line}");
        assert!(line.contains("[possible values: none, writeback, writethrough, directsync, unsafe] (see bareblk serve --help)"), "{line}");
    }

    #[test]
    fn unknown_command_is_not_sent_to_its_own_help() {
        let line = refusal(&["sevre"]);
        assert!(line.starts_with("unrecognized subcommand 'sevre'"), "{line}");
        assert!(line.ends_with("(see bareblk --help)"), "{line}");
    }

    #[test]
    fn wrong_option_of_a_nested_command_is_sent_to_the_help_that_has_it() {
        let line = refusal(&["ctl", "add", "--name", "x", "--queues", "0"]);
        assert!(line.ends_with("(see bareblk ctl add --help)"), "{line}");
        let line = refusal(&["ctl", "ad"]);
        assert!(line.ends_with("(see bareblk ctl --help)"), "{line}");
    }

    #[test]
    fn setting_that_is_given_as_an_option_comes_with_the_form_of_settings() {
        let tip = "tip: a setting is written KEY=VALUE, without dashes (see bareblk ctl limit --help)";
        let line = refusal(&["ctl", "limit", "root", "--iops", "1000"]);
        assert_eq!(line, format!("unexpected argument '--iops' found; {tip}"));
        let others = [&["ctl", "limit", "--gruop", "x"][..], &["ctl", "show", "root", "--iops"]].map(refusal);
        assert!(others.iter().all(|line| !line.contains("KEY=VALUE")), "{others:?}");
    }

    #[test]
    fn value_with_line_breaks_stays_in_one_line() {
        let line = refusal(&["serve", "disk.raw", "--socket", "s", "--serial", "a\n\nUsage: b"]);
        assert!(line.starts_with(r"invalid value 'a\n\nUsage: b' for '--serial <TEXT>': "), "{line}");
        assert!(!line.contains('\n'), "{line}");
    }
}
