//! `cargo xtask tidy`: checks the rules for source files that a program can check.
//!
//! Each rule is one function from a file to complaints. A long file causes only a note. Counted measures may only go
//! down (`measures.rs`).

mod imports;
pub(crate) mod links;
mod measures;
mod named_files;

use anyhow::{Result, bail};

use crate::source_text::{SourceText, functions, words};
use crate::source_tree::{SourceFile, at, read_tree};

/// Crates that may contain `unsafe`; the others forbid it.
const UNSAFE_HOMES: &[&str] = &[
    "guest_mem",
    "io_engine",
    "qspinlock",
    "rbd_client",
    "sandbox",
    "tls_client",
    "blk_driver_capi",
    "qspinlock_capi",
    "qspinlock_preload",
];
const LONGEST_FILE_LINES: usize = 600;
const LONGEST_FUNCTION_LINES: usize = 60;
/// Only summaries of results are kept; their commands make samples and drawings again.
const KEPT_RESULTS: &str = "bench_results/";
const KEPT_RESULTS_BYTES: usize = 1_000_000;

/// Paths that only the authors' machines have.
const MACHINE_PATHS: &[&str] = &[concat!("/wo", "rk/"), concat!("/fa", "rm/")];

/// Options of `cargo xtask tidy`.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Args {
    /// Record measures that have become smaller as the new limits
    #[arg(long)]
    tighten: bool,
    /// List only the circles of files that import each other, with the names that they import
    #[arg(long, conflicts_with = "tighten")]
    circles: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let files = read_tree()?;
    if args.circles {
        imports::circles(&files).iter().for_each(|circle| print!("{circle}"));
        return Ok(());
    }
    let report = check(&files);
    for warning in &report.warnings {
        println!("note: {warning}");
    }
    let mut complaints = report.complaints;
    let held = measures::held(&files, &report.long_functions);
    print!("{}", measures::table(held.iter().chain(&measures::told(&files))));
    complaints.extend(measures::check(&held, args.tighten)?);
    for complaint in &complaints {
        println!("{complaint}");
    }
    if !complaints.is_empty() {
        bail!("{} places are untidy", complaints.len());
    }
    println!("tidy: all {} files follow the rules", report.files);
    Ok(())
}

#[derive(Debug, Default)]
struct Report {
    files: usize,
    complaints: Vec<String>,
    warnings: Vec<String>,
    long_functions: Vec<String>,
}

fn check(files: &[SourceFile]) -> Report {
    let mut report = Report { files: files.len(), ..Report::default() };
    for file in files {
        report.complaints.extend(machine_paths(file));
        if file.path.ends_with(".rs") {
            check_rust(file, &mut report);
        }
    }
    report.complaints.extend(kept_results(files));
    report.complaints.extend(links::broken(files));
    report.complaints.extend(links::missing_in_the_book(files));
    report.complaints.extend(named_files::missing(files));
    report
}

fn check_rust(file: &SourceFile, report: &mut Report) {
    let source = SourceText::new(&file.text);
    report.complaints.extend(missing_header(file));
    report.complaints.extend(missing_forbid(file, &source));
    report.complaints.extend(unsafe_away_from_home(file, &source));
    report.complaints.extend(leftovers(file, &source));
    report.complaints.extend(skips_that_do_not_count(file));
    report.complaints.extend(citations_without_version(file, &source));
    report.warnings.extend(long_file(file));
    report.long_functions.extend(long_functions(file, &source));
}

fn kept_results(files: &[SourceFile]) -> Option<String> {
    let kept = files.iter().filter(|file| file.path.starts_with(KEPT_RESULTS));
    let bytes: usize = kept.map(|file| file.text.len()).sum();
    (bytes > KEPT_RESULTS_BYTES).then(|| {
        format!("{KEPT_RESULTS} has {bytes} bytes, at most {KEPT_RESULTS_BYTES}: keep README.md and summary.json only")
    })
}

fn machine_paths(file: &SourceFile) -> Vec<String> {
    let named = |line: &str| MACHINE_PATHS.iter().any(|path| line.contains(path));
    let lines = file.text.lines().enumerate().filter(|(_, line)| named(line));
    lines.map(|(index, _)| at(file, index + 1, "a path that exists only on the author's machine")).collect()
}

fn missing_header(file: &SourceFile) -> Option<String> {
    let has_header = file.text.starts_with("//!");
    (!has_header).then(|| at(file, 1, "does not begin with a `//!` comment that says what the file does"))
}

fn crate_of(path: &str) -> Option<&str> {
    let mut parts = path.split('/');
    match parts.next()? {
        "crates" => parts.nth(1),
        first => Some(first),
    }
}

fn may_be_unsafe(path: &str) -> bool {
    crate_of(path).is_some_and(|name| UNSAFE_HOMES.contains(&name))
}

fn missing_forbid(file: &SourceFile, source: &SourceText) -> Option<String> {
    let is_root = file.path.ends_with("src/lib.rs") || file.path.ends_with("src/main.rs");
    let forbids = source.code.contains("#![forbid(unsafe_code)]");
    (is_root && !forbids && !may_be_unsafe(&file.path))
        .then(|| at(file, 1, "lacks `#![forbid(unsafe_code)]`"))
}

fn unsafe_away_from_home(file: &SourceFile, source: &SourceText) -> Vec<String> {
    if may_be_unsafe(&file.path) {
        return Vec::new();
    }
    places(
        file,
        &source.code,
        "unsafe",
        &format!("`unsafe` outside the crates that may contain it ({})", UNSAFE_HOMES.join(", ")),
    )
}

fn leftovers(file: &SourceFile, source: &SourceText) -> Vec<String> {
    let mut found = Vec::new();
    for name in ["todo", "dbg", "unimplemented"] {
        let called = words(&source.code)
            .filter(|(at, word)| *word == name && source.code[at + name.len()..].starts_with('!'));
        found.extend(called.map(|(offset, _)| {
            at(file, line_of(&source.code, offset), &format!("`{name}!` must be removed before the commit"))
        }));
    }
    for mark in ["FIXME", "XXX"] {
        found.extend(places(
            file,
            &source.code_and_comments,
            mark,
            &format!("{mark} must be resolved before the commit"),
        ));
    }
    found
}

/// A test that only prints that it is skipped would count as passed.
fn skips_that_do_not_count(file: &SourceFile) -> Vec<String> {
    const HOME: &str = "xtask/src/skip.rs";
    const COMPLAINT: &str = "a test that cannot run must call `xtask::skip::skip`, which counts the skip";
    let says = |text: &str| ["\"skip", "\"not run"].iter().any(|words| text.trim_start().starts_with(words));
    let printed = file.text.match_indices("println!(");
    let skips = printed.filter(|(start, found)| file.path != HOME && says(&file.text[start + found.len()..]));
    skips.map(|(start, _)| at(file, line_of(&file.text, start), COMPLAINT)).collect()
}

fn places(file: &SourceFile, text: &str, wanted: &str, complaint: &str) -> Vec<String> {
    let found = words(text).filter(|(_, word)| *word == wanted);
    found.map(|(offset, _)| at(file, line_of(text, offset), complaint)).collect()
}

fn line_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count() + 1
}

/// A section number alone is ambiguous a year later; "virtio 1.3 §2.7" does.
fn citations_without_version(file: &SourceFile, source: &SourceText) -> Vec<String> {
    let lines = source.code_and_comments.lines().enumerate();
    let bad =
        lines.filter(|(_, line)| line.match_indices('§').any(|(offset, _)| lacks_version(&line[..offset])));
    bad.map(|(index, _)| at(file, index + 1, "the standard is cited without its version (virtio 1.3 §…)"))
        .collect()
}

fn lacks_version(before: &str) -> bool {
    const NAMES: &[&str] = &["virtio", "spec", "specification", "standard"];
    let last = before.split_whitespace().next_back().unwrap_or_default().to_lowercase();
    let last = last.trim_start_matches(|c: char| !c.is_alphanumeric());
    NAMES.contains(&last.trim_end_matches([':', ',']))
}

fn long_file(file: &SourceFile) -> Option<String> {
    let lines = file.text.lines().count();
    (lines > LONGEST_FILE_LINES)
        .then(|| format!("{} has {lines} lines (more than {LONGEST_FILE_LINES})", file.path))
}

fn long_functions(file: &SourceFile, source: &SourceText) -> Vec<String> {
    let long =
        functions(&source.code).into_iter().filter(|function| function.length_lines > LONGEST_FUNCTION_LINES);
    let describe =
        |lines: usize, name: &str| format!("`{name}` has {lines} lines (more than {LONGEST_FUNCTION_LINES})");
    long.map(|function| at(file, function.line, &describe(function.length_lines, &function.name))).collect()
}

#[cfg(test)]
mod tests;
