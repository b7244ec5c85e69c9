//! Reads one table with clap: the keys of a configuration file and of `ctl add` are the names of options.
//!
//! `TOML table → words (key, text, line) → each alone through clap: its value parser, its limits → arguments`

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::ops::Range;

use clap::builder::PossibleValue;
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgAction, ArgMatches, Args, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// An error suggests a known key only if it is at least this similar.
const MIN_LIKENESS: f64 = 0.7;
/// An error shows at most this much of a value.
const SHOWN_CHARS: usize = 80;

/// A mistake and its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub line: usize,
    pub text: String,
}

/// The file's text, from which lines and the spelling of values are taken.
#[derive(Debug)]
pub struct Source<'a> {
    text: &'a str,
    line_starts: Vec<usize>,
}

impl<'a> Source<'a> {
    pub fn new(text: &'a str) -> Self {
        let breaks = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
        let line_starts = std::iter::once(0).chain(breaks.map(|(at, _)| at + 1)).collect();
        Self { text, line_starts }
    }

    /// Returns the line of the span, counted from 1.
    pub fn line(&self, span: &Range<usize>) -> usize {
        self.line_starts.partition_point(|start| *start <= span.start).max(1)
    }

    /// The value as written, on one line, cut if it is long.
    pub fn shown(&self, span: &Range<usize>) -> String {
        let written = self.text.get(span.clone()).unwrap_or_default();
        let start: String = written.chars().take(SHOWN_CHARS).collect();
        let mut shown = one_line(&start);
        if written.chars().nth(SHOWN_CHARS).is_some() {
            shown.push('…');
        }
        shown
    }
}

/// The text with its control characters escaped, because a path in an error may contain some.
pub fn one_line(text: &str) -> String {
    let shown = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect()
}

/// The value of a key, as on the command line and as written, and the key's line.
#[derive(Clone, Debug)]
pub struct Word {
    pub text: String,
    pub shown: String,
    pub line: usize,
}

/// The values of a table that are not the defaults, by key. A server keeps one set for each disk, so the set is small.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyValues(Box<[(Box<str>, Box<str>)]>);

impl KeyValues {
    /// Gives a key another value.
    pub fn set(&mut self, key: &str, value: &str) {
        let others = self.0.iter().filter(|(known, _)| **known != *key).cloned();
        self.0 = others.chain([(key.into(), value.into())]).collect();
    }

    /// The keys whose values differ, sorted.
    pub fn differing<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = &'a str> {
        let keys: BTreeSet<&str> = self.0.iter().chain(&other.0).map(|(key, _)| &**key).collect();
        keys.into_iter().filter(|key| self.get(key) != other.get(key))
    }

    /// Each key with its value.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (&**key, &**value))
    }

    /// The value of this key, unless it is the default.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| **known == *key).map(|(_, value)| &**value)
    }
}

/// The valid keys of one table.
pub type Words = BTreeMap<String, Word>;

/// The keys that a table may have: the options of a clap struct.
#[derive(Debug)]
pub struct Schema {
    command: Command,
    /// Names of the table's subtables, which `config_file.rs` reads.
    tables: &'static [&'static str],
}

impl Schema {
    pub fn of<T: Args>(tables: &'static [&'static str]) -> Self {
        let command = Command::new("table").no_binary_name(true).disable_help_flag(true);
        // clap parses each key alone; `config_file.rs` checks that no required key is missing.
        let command = T::augment_args(command.disable_version_flag(true)).mut_args(|arg| arg.required(false));
        Self { command, tables }
    }

    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.command.get_arguments().filter_map(Arg::get_long)
    }

    fn option(&self, key: &str) -> Option<&Arg> {
        let has_alias = |arg: &Arg| arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&key));
        self.command.get_arguments().find(|arg| arg.get_long() == Some(key) || has_alias(arg))
    }

    /// Whether `config_file.rs` reads the key. A key may be both an option and the name of tables.
    fn is_table(&self, key: &str, value: &DeValue<'_>) -> bool {
        self.tables.contains(&key) && (self.option(key).is_none() || matches!(value, DeValue::Array(_)))
    }

    /// The table's keys with their values. A key that clap refuses becomes a problem.
    pub fn words(&mut self, table: &DeTable<'_>, source: &Source<'_>, problems: &mut Vec<Problem>) -> Words {
        let mut words = Words::new();
        let own = table.iter().filter(|(key, value)| !self.is_table(key.get_ref(), value.get_ref()));
        for (key, value) in own.collect::<Vec<_>>() {
            let line = source.line(&key.span());
            let key: &str = key.get_ref();
            match self.word(key, value, source) {
                Ok(word) => drop(words.insert(key.to_owned(), Word { line, ..word })),
                Err(text) => problems.push(Problem { line, text }),
            }
        }
        words
    }

    fn word(&mut self, key: &str, value: &Spanned<DeValue<'_>>, source: &Source<'_>) -> Result<Word, String> {
        let Some(option) = self.option(key) else {
            return Err(unknown_key(key, self.keys().chain(self.tables.iter().copied())));
        };
        let (flag, on_off) = (is_flag(option), takes_on_off(option));
        let shown = source.shown(&value.span());
        let wrong = |why: &str| format!("{key} = {shown} is invalid: {why}");
        let text = match value.get_ref() {
            DeValue::Boolean(on) if on_off => if *on { "on" } else { "off" }.to_owned(),
            DeValue::Boolean(on) => on.to_string(),
            _ if flag => return Err(wrong("give true or false")),
            // The integer's radix and sign are kept, so that the option refuses them: 0o600 must not become 384.
            DeValue::Integer(number) => number.to_string(),
            DeValue::String(text) => text.clone().into_owned(),
            DeValue::Array(_) if key == "workers" => shown.clone(),
            DeValue::Array(_) => return Err(wrong("give one value, not a list")),
            DeValue::Float(_) | DeValue::Datetime(_) => {
                return Err(wrong("give a whole number, or text in quotes"));
            }
            DeValue::Table(_) => return Err(format!("`{key}` is a table here: give it one value instead")),
        };
        let word = Word { text, shown: shown.clone(), line: 0 };
        let checked = self.command.try_get_matches_from_mut(argument(key, &word, flag));
        checked.map_err(|error| wrong(&reason(&error)))?;
        Ok(word)
    }

    /// All words together, parsed by clap.
    pub fn matches(&mut self, words: &Words) -> Result<ArgMatches, clap::Error> {
        let arguments = words.iter().flat_map(|(key, word)| {
            let flag = self.option(key).is_some_and(is_flag);
            argument(key, word, flag)
        });
        let arguments: Vec<_> = arguments.collect();
        self.command.try_get_matches_from_mut(arguments)
    }

    /// Every key whose value is not its default.
    pub fn effective(&self, matches: &ArgMatches) -> KeyValues {
        let value = |arg: &Arg| {
            let value = matches.get_raw(arg.get_id().as_str())?.next()?;
            let is_default =
                arg.get_default_values().first().is_some_and(|default| default.as_os_str() == value);
            let key = arg.get_long().filter(|_| !is_default)?;
            Some((key.into(), value.to_string_lossy().into()))
        };
        KeyValues(self.command.get_arguments().filter_map(value).collect())
    }
}

fn is_flag(option: &Arg) -> bool {
    matches!(option.get_action(), ArgAction::SetTrue)
}

fn takes_on_off(option: &Arg) -> bool {
    let is = |word| move |value: &PossibleValue| value.matches(word, false);
    !is_flag(option) && option.get_possible_values().iter().any(is("on"))
}

/// The option and its value, joined by `=` so that clap accepts a value that begins with a dash.
fn argument(key: &str, word: &Word, flag: bool) -> Option<String> {
    match (flag, word.text.as_str()) {
        (true, "true") => Some(format!("--{key}")),
        (true, _) => None,
        (false, text) => Some(format!("--{key}={text}")),
    }
}

/// clap's reason for refusing a value, without the option and the value.
fn reason(error: &clap::Error) -> String {
    if let Some(source) = error.source() {
        return source.to_string();
    }
    match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(valid)) if !valid.is_empty() => format!("use {}", valid.join(", ")),
        _ => "a value is needed".to_owned(),
    }
}

/// Suggests the most similar known key.
fn unknown_key<'k>(key: &str, known: impl Iterator<Item = &'k str>) -> String {
    let likeness = |known: &'k str| (strsim::jaro(key, known), known);
    let nearest = known.map(likeness).max_by(|(a, _), (b, _)| a.total_cmp(b));
    let start: String = key.chars().take(SHOWN_CHARS).collect();
    let shown = one_line(&start);
    match nearest {
        Some((likeness, nearest)) if likeness > MIN_LIKENESS => {
            format!("there is no key `{shown}`: did you mean `{nearest}`?")
        }
        _ => format!("there is no key `{shown}`"),
    }
}
