//! Reads `bareblk.toml` and the tables of `ctl add`: many disks, their defaults, and the process that serves them.
//!
//! `file → TOML → words of each table (defaults, then the disk's own) → DiskSettings → checked together → Configuration`
//!
//! The whole file is checked before anything is opened. The error lists all mistakes, each with its line.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use blk_server::{DEFAULT_WEIGHT, LimitSettings, WorkerOptions, format_cpus};
use clap::{Args, FromArgMatches};
use disk_image::Opener;
use serde_json::Value;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::args::limit_args::{self, GROUP, LimitArgs};
use crate::args::serve_args::{DiskArgs, ServerArgs};
use crate::args::values;
use crate::args::worker_args::{MAX_WORKERS, WorkerArgs, WorkersArgs};
use crate::config::config_words::{Problem, Schema, Source, Words, one_line};
use crate::config::configuration::{Configuration, ServerSettings};
use crate::config::disk_settings::{DiskSettings, ImageIdentity, WorkerChoice, real_path};
use crate::helper::policy::MAX_CONFIGURATION_BYTES;

/// Keys that disks cannot share.
const OWN_KEYS: [&str; 3] = ["image", "name", "socket"];
const TABLES: [&str; 4] = ["defaults", "disk", GROUP, "worker"];
/// Maximum number of mistakes that an error lists: one wrong default may cause a mistake in each of many disks.
const SHOWN_PROBLEMS: usize = 50;

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InvalidFile {
    #[error("configuration {} cannot be read", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("configuration {} is longer than {max} bytes", path.display())]
    TooLong { path: PathBuf, max: u64 },
    /// All mistakes in one line, for a log and for `ctl reload`.
    #[error("{}", self.lines().join("; "))]
    Problems { path: PathBuf, problems: Vec<Problem> },
}

impl InvalidFile {
    /// The mistakes, one a line, in the order of the file.
    pub fn lines(&self) -> Vec<String> {
        let Self::Problems { path, problems } = self else { return vec![self.to_string()] };
        let line = |problem: &Problem| format!("{}:{}: {}", path.display(), problem.line, problem.text);
        let mut lines: Vec<String> = problems.iter().take(SHOWN_PROBLEMS).map(line).collect();
        match problems.len().saturating_sub(SHOWN_PROBLEMS) {
            0 => {}
            1 => lines.push(format!("{}: 1 more mistake", path.display())),
            more => lines.push(format!("{}: {more} more mistakes", path.display())),
        }
        lines
    }
}

/// A `[[disk]]` table.
#[derive(Debug, Args)]
struct FileDisk {
    #[arg(long)]
    image: PathBuf,
    #[arg(long)]
    socket: PathBuf,
    #[arg(long)]
    workers: Option<WorkerChoice>,
    #[arg(long)]
    group: Option<String>,
    #[arg(long, value_parser = limit_args::weight, default_value_t = DEFAULT_WEIGHT)]
    weight: u32,
    #[command(flatten)]
    disk: DiskArgs,
}

/// A `[[group]]` table.
#[derive(Debug, Args)]
struct FileGroup {
    #[arg(long, value_parser = values::disk_name)]
    name: String,
    #[command(flatten)]
    limits: LimitArgs,
}

/// The keys outside the tables.
#[derive(Debug, Args)]
struct FileServer {
    #[command(flatten)]
    server: ServerArgs,
}

/// Reads and checks a file. `running`: the numbers of the workers that run now, which a disk may also name.
pub fn read(path: &Path, running: &[u32], opener: &dyn Opener) -> Result<Configuration, InvalidFile> {
    let unreadable = |source| InvalidFile::Unreadable { path: path.to_owned(), source };
    let file = File::from(opener.open_configuration(path).map_err(unreadable)?);
    let mut text = String::new();
    let length = file.take(MAX_CONFIGURATION_BYTES + 1).read_to_string(&mut text).map_err(unreadable)?;
    if u64::try_from(length).unwrap_or(u64::MAX) > MAX_CONFIGURATION_BYTES {
        return Err(InvalidFile::TooLong { path: path.to_owned(), max: MAX_CONFIGURATION_BYTES });
    }
    let mut configuration = read_text(path, &text, opener, running)?;
    configuration.file = Some(path.to_owned());
    Ok(configuration)
}

/// Like [`read`], but from the file's contents. `path` only appears in messages.
pub fn read_text(
    path: &Path,
    text: &str,
    opener: &dyn Opener,
    running: &[u32],
) -> Result<Configuration, InvalidFile> {
    parse(text, opener, running).map_err(|mut problems| {
        problems.sort_by_key(|problem| problem.line);
        InvalidFile::Problems { path: path.to_owned(), problems }
    })
}

/// One disk from the keys of a `[[disk]]` table and their values in JSON, for `ctl add`.
pub fn disk(keys: &serde_json::Map<String, Value>, opener: &dyn Opener) -> anyhow::Result<DiskSettings> {
    let line = |(key, value): (&String, &Value)| match value {
        Value::String(text) => format!("{} = {}\n", quoted(key), quoted(text)),
        // TOML writes numbers, booleans and lists of them like JSON.
        other => format!("{} = {other}\n", quoted(key)),
    };
    let table: String = keys.iter().map(line).collect();
    let mut reader = Reader::new(&table, opener);
    let document = reader.document(&table).map_err(texts)?;
    let disk = reader.disk(document.get_ref(), 1, &Words::new());
    disk.filter(|_| reader.problems.is_empty())
        .map(|disk| disk.settings)
        .ok_or_else(|| texts(reader.problems))
}

/// Writes the text as a basic string of TOML.
fn quoted(text: &str) -> String {
    let escaped = text.chars().map(|c| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\U{:08X}", u32::from(c)),
        c => c.to_string(),
    });
    format!("\"{}\"", escaped.collect::<String>())
}

fn texts(problems: Vec<Problem>) -> anyhow::Error {
    let texts: Vec<String> = problems.into_iter().map(|problem| problem.text).collect();
    let none = "the settings describe no disk".to_owned();
    anyhow::Error::msg(if texts.is_empty() { none } else { texts.join("; ") })
}

/// Parses and checks the text; returns all mistakes, in any order.
pub fn parse(text: &str, opener: &dyn Opener, running: &[u32]) -> Result<Configuration, Vec<Problem>> {
    let mut reader = Reader::new(text, opener);
    let document = reader.document(text)?;
    let server = reader.server(document.get_ref());
    let workers = server.as_ref().map(|server| server.workers.len());
    let groups = reader.groups(document.get_ref());
    let disks = reader.disks(document.get_ref());
    reader.refuse_missing_groups(&disks, &groups);
    reader.refuse_clashes(&disks);
    reader.refuse_missing_workers(&disks, workers, running);
    let Some(server) = server.filter(|_| reader.problems.is_empty()) else { return Err(reader.problems) };
    let disks = disks.into_iter().map(|disk| disk.settings).collect();
    Ok(Configuration { disks, server, groups, file: None })
}

/// A disk, with the lines of its keys.
#[derive(Debug)]
struct ReadDisk {
    settings: DiskSettings,
    line: usize,
    words: Words,
}

impl ReadDisk {
    fn line_of(&self, key: &str) -> usize {
        self.words.get(key).map_or(self.line, |word| word.line)
    }

    fn shown(&self, key: &str) -> String {
        self.words.get(key).map(|word| word.shown.clone()).unwrap_or_default()
    }
}

struct Reader<'a> {
    source: Source<'a>,
    opener: &'a dyn Opener,
    schema: Schema,
    problems: Vec<Problem>,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str, opener: &'a dyn Opener) -> Self {
        Self { source: Source::new(text), opener, schema: Schema::of::<FileDisk>(&[]), problems: Vec::new() }
    }

    fn document<'t>(&self, text: &'t str) -> Result<Spanned<DeTable<'t>>, Vec<Problem>> {
        let (document, errors) = DeTable::parse_recoverable(text);
        let problem = |error: &toml::de::Error| {
            let line = error.span().map_or(1, |span| self.source.line(&span));
            Problem { line, text: error.message().replace('\n', "; ") }
        };
        if errors.is_empty() { Ok(document) } else { Err(errors.iter().map(problem).collect()) }
    }

    fn problem(&mut self, line: usize, text: impl Into<String>) {
        self.problems.push(Problem { line, text: one_line(&text.into()) });
    }

    /// The settings of the process; `None` after a mistake.
    fn server(&mut self, document: &DeTable<'_>) -> Option<ServerSettings> {
        let mut schema = Schema::of::<FileServer>(&TABLES);
        let before = self.problems.len();
        let words = schema.words(document, &self.source, &mut self.problems);
        let tables = self.tables(document, "worker");
        let workers = self.workers(&tables, &words);
        if self.problems.len() > before {
            return None;
        }
        let read = schema
            .matches(&words)
            .and_then(|matches| Ok((FileServer::from_arg_matches(&matches)?, schema.effective(&matches))));
        match read {
            Ok((FileServer { server }, words)) => {
                let mut settings = ServerSettings { words, ..ServerSettings::new(server) };
                if !workers.is_empty() {
                    settings.workers = workers;
                }
                Some(settings)
            }
            Err(error) => {
                self.problem(1, error.to_string().replace('\n', " "));
                None
            }
        }
    }

    /// The options of each `[[worker]]` table; empty if the top-level keys describe the workers.
    fn workers(&mut self, tables: &[(usize, DeTable<'_>)], top: &Words) -> Vec<WorkerOptions> {
        let alike: Vec<String> = Schema::of::<WorkersArgs>(&[]).keys().map(str::to_owned).collect();
        let given = top.iter().find(|(key, _)| alike.contains(key));
        if let (Some((line, _)), Some((key, word))) = (tables.first(), given) {
            let text = format!(
                "`{key}` (line {}) describes all workers, [[worker]] one of them: use either that key or [[worker]] tables",
                word.line
            );
            self.problem(*line, text);
        }
        if let Some((line, _)) = tables.get(usize::from(MAX_WORKERS)) {
            self.problem(
                *line,
                format!("too many [[worker]] tables: a server has at most {MAX_WORKERS} workers"),
            );
        }
        let mut schema = Schema::of::<WorkerArgs>(&[]);
        tables.iter().filter_map(|(line, table)| self.worker(&mut schema, *line, table)).collect()
    }

    fn worker(&mut self, schema: &mut Schema, line: usize, table: &DeTable<'_>) -> Option<WorkerOptions> {
        let before = self.problems.len();
        let words = schema.words(table, &self.source, &mut self.problems);
        if self.problems.len() > before {
            return None;
        }
        let read = schema.matches(&words).and_then(|matches| WorkerArgs::from_arg_matches(&matches));
        let options = read.map(WorkerOptions::from).map_err(anyhow::Error::from);
        match options.and_then(|options| options.check().map(|()| options).map_err(Into::into)) {
            Ok(options) => Some(options),
            Err(error) => {
                self.problem(line, format!("[[worker]]: {error:#}"));
                None
            }
        }
    }

    fn groups(&mut self, document: &DeTable<'_>) -> Vec<(String, LimitSettings)> {
        let is_key = |(key, value): (&Spanned<_>, &Spanned<DeValue<'_>>)| {
            key.get_ref() == GROUP && !matches!(value.get_ref(), DeValue::Array(_))
        };
        if document.iter().any(is_key) {
            // This key is the Unix group that the server runs as.
            return Vec::new();
        }
        let mut schema = Schema::of::<FileGroup>(&[]);
        let mut groups: Vec<(String, LimitSettings)> = Vec::new();
        for (line, table) in self.tables(document, GROUP) {
            let Some((name, limits)) = self.group(&mut schema, line, &table) else { continue };
            if groups.iter().any(|(known, _)| *known == name) {
                self.problem(
                    line,
                    format!("two [[group]] tables are named {name}: give each group its own name"),
                );
            }
            groups.push((name, limits));
        }
        groups
    }

    fn group(
        &mut self,
        schema: &mut Schema,
        line: usize,
        table: &DeTable<'_>,
    ) -> Option<(String, LimitSettings)> {
        let before = self.problems.len();
        let words = schema.words(table, &self.source, &mut self.problems);
        if !words.contains_key("name") && self.problems.len() == before {
            self.problem(line, "[[group]] has no `name`: give each group a name");
        }
        if self.problems.len() > before {
            return None;
        }
        let read = schema.matches(&words).and_then(|matches| FileGroup::from_arg_matches(&matches));
        let read = read.map_err(anyhow::Error::from);
        match read.and_then(|FileGroup { name, limits }| Ok((name, limits.settings()?))) {
            Ok(group) => Some(group),
            Err(error) => {
                let text = format!("{error:#}");
                let line = options_in(&text).find_map(|key| words.get(key)).map_or(line, |word| word.line);
                self.problem(line, without_dashes(&text));
                None
            }
        }
    }

    fn refuse_missing_groups(&mut self, disks: &[ReadDisk], groups: &[(String, LimitSettings)]) {
        for disk in disks {
            let Some(group) = &disk.settings.limits.group else { continue };
            if !groups.iter().any(|(known, _)| known == group) {
                let text = format!(
                    "group = {}: there is no [[group]] table with this name: add such a table, or remove this key",
                    disk.shown(GROUP)
                );
                self.problem(disk.line_of(GROUP), text);
            }
        }
    }

    /// The tables named `name`, with their lines.
    fn tables<'t>(&mut self, document: &DeTable<'t>, name: &str) -> Vec<(usize, DeTable<'t>)> {
        let Some((key, value)) = document.iter().find(|(key, _)| key.get_ref() == name) else {
            return Vec::new();
        };
        let line = self.source.line(&key.span());
        let wrong = Problem {
            line,
            text: format!("`{name}` is not a list of tables: write [[{name}]] tables, one for each {name}"),
        };
        let DeValue::Array(array) = value.get_ref() else {
            self.problems.push(wrong);
            return Vec::new();
        };
        let mut tables = Vec::new();
        for value in array.iter() {
            match value.get_ref() {
                DeValue::Table(table) => tables.push((self.source.line(&value.span()), table.clone())),
                _ => self.problems.push(wrong.clone()),
            }
        }
        tables
    }

    fn disks(&mut self, document: &DeTable<'_>) -> Vec<ReadDisk> {
        let defaults = self.defaults(document);
        let tables = self.tables(document, "disk");
        if tables.is_empty() && !document.iter().any(|(key, _)| key.get_ref() == "disk") {
            self.problem(1, "there is no disk: write a [[disk]] table with image and socket for each disk");
        }
        tables.iter().filter_map(|(line, table)| self.disk(table, *line, &defaults)).collect()
    }

    fn defaults(&mut self, document: &DeTable<'_>) -> Words {
        let Some((key, value)) = document.iter().find(|(key, _)| key.get_ref() == "defaults") else {
            return Words::new();
        };
        let DeValue::Table(table) = value.get_ref() else {
            let line = self.source.line(&key.span());
            self.problem(line, "`defaults` is not a table: write it as [defaults]");
            return Words::new();
        };
        let mut words = self.schema.words(table, &self.source, &mut self.problems);
        for key in OWN_KEYS {
            if let Some(word) = words.remove(key) {
                self.problem(
                    word.line,
                    format!(
                        "[defaults] must not set {key} = {}, because disks cannot share this value: set {key} in each [[disk]]",
                        word.shown
                    ),
                );
            }
        }
        words
    }

    /// `None` without an image or a socket, or if the keys contradict each other. After any other mistake the disk
    /// keeps its valid keys, so that they are also checked.
    fn disk(&mut self, table: &DeTable<'_>, line: usize, defaults: &Words) -> Option<ReadDisk> {
        let own = self.schema.words(table, &self.source, &mut self.problems);
        let has = |key: &str| table.iter().any(|(known, _)| known.get_ref() == key);
        for key in ["image", "socket"] {
            if !has(key) {
                self.problem(line, format!("[[disk]] has no `{key}`: each disk needs image and socket"));
            }
        }
        // If `create` itself was refused, a missing image is not a further mistake.
        let lacks_size = has("create") && !own.contains_key("create");
        let mut words = defaults.clone();
        words.extend(own);
        if !words.contains_key("image") || !words.contains_key("socket") {
            return None;
        }
        match self.settings(&words) {
            Ok(settings) => {
                let disk = ReadDisk { settings, line, words };
                self.check_paths(&disk, lacks_size);
                Some(disk)
            }
            Err(error) => {
                let text = format!("{error:#}");
                // The line of the first option that the error names.
                let line = options_in(&text).find_map(|key| words.get(key)).map_or(line, |word| word.line);
                self.problem(line, without_dashes(&text));
                None
            }
        }
    }

    /// Looks up the image and the socket's folder.
    fn check_paths(&mut self, disk: &ReadDisk, lacks_size: bool) {
        let image = disk.settings.check_image_path(self.opener).map_err(anyhow::Error::from);
        let socket = disk.settings.socket.check(self.opener).map_err(anyhow::Error::from);
        for (key, checked) in [("image", image), ("socket", socket)] {
            match checked {
                Err(error) if !(key == "image" && lacks_size) => {
                    self.problem(disk.line_of(key), without_dashes(&format!("{error:#}")));
                }
                _ => {}
            }
        }
    }

    fn settings(&mut self, words: &Words) -> anyhow::Result<DiskSettings> {
        let matches = self.schema.matches(words)?;
        let FileDisk { image, socket, workers, group, weight, disk } = FileDisk::from_arg_matches(&matches)?;
        let mut settings = DiskSettings::new(image, socket, disk)?;
        settings.workers = workers;
        (settings.limits.group, settings.limits.weight) = (group, weight);
        // The disk's workers may get disks with other engines later.
        settings.engine_config.pollable = true;
        settings.words = self.schema.effective(&matches);
        // An existing image is not created again: the server reads the file at each start.
        if !settings.is_remote() && self.opener.file_kind(&settings.image.path).is_ok() {
            settings.image.create_bytes = None;
        }
        Ok(settings)
    }

    fn refuse_clashes(&mut self, disks: &[ReadDisk]) {
        let (mut names, mut sockets) = (HashMap::new(), HashMap::new());
        let mut images: HashMap<_, Vec<&ReadDisk>> = HashMap::new();
        for disk in disks {
            let settings = &disk.settings;
            if let Some(name) = &settings.options.name
                && let Some(other) = names.insert(name, disk)
            {
                self.clash(disk, "name", other);
            }
            let socket = real_path(self.opener, &settings.socket.path);
            if let Some(other) = sockets.insert(socket, disk) {
                self.clash(disk, "socket", other);
            }
            let same = images.entry(ImageIdentity::of(self.opener, &settings.image)).or_default();
            let writes = |other: &&&ReadDisk| !(settings.read_only() && other.settings.read_only());
            if let Some(other) = same.iter().find(writes).copied() {
                self.clash(disk, "image", other);
            }
            same.push(disk);
        }
    }

    fn clash(&mut self, disk: &ReadDisk, key: &str, other: &ReadDisk) {
        let readers = if key == "image" { ", and they are not both readonly" } else { "" };
        let text = format!(
            "{key} = {}: the disk in line {} has the same {key}{readers}",
            disk.shown(key),
            other.line_of(key)
        );
        self.problem(disk.line_of(key), text);
    }

    /// Refuses workers that are neither in the file nor running now.
    fn refuse_missing_workers(&mut self, disks: &[ReadDisk], workers: Option<usize>, running: &[u32]) {
        let Some(count) = workers.and_then(|count| u32::try_from(count).ok()) else { return };
        let mut known: Vec<u32> = (0..count).chain(running.iter().copied()).collect();
        known.sort_unstable();
        known.dedup();
        for disk in disks {
            let beyond = disk.settings.workers.as_ref().and_then(|choice| choice.beyond(&known));
            if let Some(beyond) = beyond {
                let text = format!(
                    "workers = {}: {beyond}, but the server has {} workers, numbered {}",
                    disk.shown("workers"),
                    known.len(),
                    format_cpus(&known)
                );
                self.problem(disk.line_of("workers"), text);
            }
        }
    }
}

/// The names of the options in a text: "--cache none or --iopoll" → "cache", "iopoll".
fn options_in(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
    words.filter_map(|word| word.strip_prefix("--"))
}

/// Turns the options that an error names into keys.
fn without_dashes(text: &str) -> String {
    let mut words = text.split(' ').map(|word| word.strip_prefix("--").unwrap_or(word));
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |line, word| line + " " + word)
}

#[cfg(test)]
#[path = "config_file_tests.rs"]
mod tests;
