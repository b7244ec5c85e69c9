//! Measures of the code, and the highest allowed value of each (`xtask/measures.txt`).
//!
//! `cargo xtask tidy` prints them beside the first version's values and the goals. A measure with an allowed value may
//! only go down; `--tighten` records smaller values.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;

use anyhow::{Context, Result};
use xtask::workspace;

use super::imports::{Circle, circles};
use crate::source_text::SourceText;
use crate::source_tree::{SourceFile, is_test, product_part};

const FILE: &str = "xtask/measures.txt";

/// A value, and the places that it counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Measure {
    pub(super) name: &'static str,
    /// The value in the first version, if it was measured.
    pub(super) first: Option<usize>,
    pub(super) value: usize,
    pub(super) goal: Option<usize>,
    pub(super) places: Vec<String>,
}

/// The measures that may only go down.
pub(super) fn held(files: &[SourceFile], long_functions: &[String]) -> Vec<Measure> {
    let circle = circles(files).iter().map(Circle::files).max_by_key(Vec::len).unwrap_or_default();
    let (folder, in_folder) = fullest_folder(files);
    let programs = test_programs(files);
    let measure = |name, (first, value, goal), places| {
        let goal = Some(goal);
        Measure { name, first, value, goal, places }
    };
    let (circle_len, long, linked) = (circle.len(), long_functions.len(), programs.len());
    let readme = lines_of(files, "README.md");
    vec![
        measure("files in the largest circle of imports", (Some(22), circle_len, 0), circle),
        measure("files in one folder", (Some(41), in_folder, 15), vec![folder]),
        measure("functions over 60 lines", (None, long, 0), long_functions.to_vec()),
        measure("programs of integration tests", (Some(122), linked, 20), programs),
        measure("lines of README.md", (Some(156), readme, 80), Vec::new()),
    ]
}

/// The measures that are only printed.
pub(super) fn told(files: &[SourceFile]) -> Vec<Measure> {
    let measure = |name, first, value, goal| Measure { name, first, value, goal, places: Vec::new() };
    vec![
        measure("lines of product code", Some(62_500), product_lines(files), Some(50_000)),
        measure("test functions", None, test_functions(files), None),
    ]
}

/// A line per measure: first version, now, goal.
pub(super) fn table<'a>(measures: impl IntoIterator<Item = &'a Measure>) -> String {
    let mut text = format!("{:>6} {:>6} {:>6}\n", "first", "now", "goal");
    for Measure { name, first, value, goal, .. } in measures {
        let [first, goal] = [first, goal].map(|number| number.map_or("-".to_owned(), |n| n.to_string()));
        let _ = writeln!(text, "{first:>6} {value:>6} {goal:>6}  {name}");
    }
    text
}

/// The number of test functions, without those that a macro generates.
fn test_functions(files: &[SourceFile]) -> usize {
    let rust = files.iter().filter(|file| file.path.ends_with(".rs"));
    rust.map(|file| file.text.lines().filter(|line| line.trim() == "#[test]").count()).sum()
}

/// Lines of product code, without tests, comments and blank lines.
fn product_lines(files: &[SourceFile]) -> usize {
    let product = files.iter().filter(|file| file.path.contains("/src/") && file.path.ends_with(".rs"));
    let product = product.filter(|file| file.path.starts_with("crates/") && !is_test(&file.path));
    let code = product.map(|file| SourceText::new(product_part(&file.text)).code);
    code.map(|code| code.lines().filter(|line| !line.trim().is_empty()).count()).sum()
}

fn fullest_folder(files: &[SourceFile]) -> (String, usize) {
    let mut folders: BTreeMap<&str, usize> = BTreeMap::new();
    let product = files.iter().filter(|file| file.path.starts_with("crates/") && file.path.contains("/src/"));
    for file in product.filter(|file| file.path.ends_with(".rs") && !is_test(&file.path)) {
        *folders.entry(file.path.rsplit_once('/').map_or("", |(folder, _)| folder)).or_default() += 1;
    }
    let fullest = folders.into_iter().max_by_key(|(_, count)| *count).unwrap_or_default();
    (fullest.0.to_owned(), fullest.1)
}

/// The test programs that cargo links: files in `tests/`, and folders with a `main.rs`.
fn test_programs(files: &[SourceFile]) -> Vec<String> {
    let in_tests = files.iter().filter_map(|file| Some((&file.path, file.path.split_once("/tests/")?.1)));
    let programs = in_tests.filter(|(path, inner)| {
        let is_one = !inner.contains('/') || inner.ends_with("/main.rs") && inner.matches('/').count() == 1;
        inner.ends_with(".rs") && is_one && !path.contains("/src/")
    });
    programs.map(|(path, _)| path.clone()).collect()
}

fn lines_of(files: &[SourceFile], path: &str) -> usize {
    files.iter().find(|file| file.path == path).map_or(0, |file| file.text.lines().count())
}

/// Complaints about values that went up. With `tighten`, records those that went down.
pub(super) fn check(measures: &[Measure], tighten: bool) -> Result<Vec<String>> {
    let path = workspace::root().join(FILE);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {FILE}"))?;
    let allowed = parse(&text)?;
    if tighten {
        let lower =
            |measure: &Measure| measure.value.min(allowed.get(measure.name).copied().unwrap_or(usize::MAX));
        let lines: String =
            measures.iter().map(|measure| format!("{} {}\n", lower(measure), measure.name)).collect();
        fs::write(&path, lines)?;
    }
    Ok(measures.iter().flat_map(|measure| over(measure, &allowed)).collect())
}

fn parse(text: &str) -> Result<BTreeMap<String, usize>> {
    let line = |line: &str| {
        let (value, name) =
            line.split_once(' ').with_context(|| format!("{FILE}: `{line}` is not `NUMBER NAME`"))?;
        Ok((name.to_owned(), value.parse().with_context(|| format!("{FILE}: `{value}` is not a number"))?))
    };
    text.lines().map(line).collect()
}

fn over(measure: &Measure, allowed: &BTreeMap<String, usize>) -> Vec<String> {
    let Some(most) = allowed.get(measure.name) else {
        return vec![format!("{FILE} has no line for {}", measure.name)];
    };
    if measure.value <= *most {
        return Vec::new();
    }
    let summary = format!("{} {}, at most {most} allowed by {FILE}", measure.value, measure.name);
    measure.places.iter().cloned().chain([summary]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn number_that_went_up_is_named_with_its_places() {
        let allowed = parse("2 cups\n").unwrap();
        let measure = |name, value, places| Measure { name, first: Some(9), value, goal: None, places };
        let cups = |value| measure("cups", value, vec!["shelf".to_owned()]);
        assert_eq!(over(&cups(2), &allowed), Vec::<String>::new());
        assert_eq!(over(&cups(3), &allowed), ["shelf", "3 cups, at most 2 allowed by xtask/measures.txt"]);
        assert_eq!(over(&measure("plates", 0, vec![]), &allowed).len(), 1);
        assert!(parse("cups 2").is_err());
        assert_eq!(table([&cups(3)]), " first    now   goal\n     9      3      -  cups\n");
    }

    #[test]
    fn files_of_tests_are_no_product() {
        let files = [
            file("crates/a/b/src/lib.rs", "1\n// 2\n\n3\n#[cfg(test)]\nmod tests {\n}\n"),
            file("crates/a/b/src/lib_tests.rs", "1\n"),
            file("crates/a/b/tests/it/main.rs", "1\n"),
            file("crates/a/b/tests/it/one.rs", "#[test]\nfn one() {}\n// #[test]\n"),
            file("crates/a/b/tests/two.rs", "1\n"),
        ];
        assert_eq!(product_lines(&files), 2, "comments are none");
        assert_eq!(test_programs(&files), ["crates/a/b/tests/it/main.rs", "crates/a/b/tests/two.rs"]);
        assert_eq!(test_functions(&files), 1);
        assert_eq!(fullest_folder(&files), ("crates/a/b/src".to_owned(), 1));
    }
}
