//! Checks that files named in comments and pages exist: `queue/mod.rs` in backticks must be the end of some file's
//! path.
//!
//! See also: links (`links.rs`). Decisions and the changelog may name files that no longer exist.

use std::collections::HashSet;

use super::{SourceFile, at};

/// Pages about the past, which are not checked.
const HISTORY: [&str; 3] = ["docs/decisions/", "CHANGELOG.md", "bench_results/"];

/// A complaint for each Rust file that is named and does not exist.
pub(super) fn missing(files: &[SourceFile]) -> Vec<String> {
    let known: HashSet<&str> = files.iter().flat_map(|file| ends(&file.path)).collect();
    files.iter().filter(|file| is_read(&file.path)).flat_map(|file| missing_in(file, &known)).collect()
}

fn is_read(path: &str) -> bool {
    let is_history = HISTORY.iter().any(|begin| path.starts_with(begin));
    path.ends_with(".rs") || path.ends_with(".md") && !is_history
}

/// The path, and all shorter forms without its first folders.
fn ends(path: &str) -> impl Iterator<Item = &str> {
    let folders = path.match_indices('/').map(|(at, _)| &path[at + 1..]);
    std::iter::once(path).chain(folders)
}

fn missing_in(file: &SourceFile, known: &HashSet<&str>) -> Vec<String> {
    let is_page = file.path.ends_with(".md");
    let lines =
        file.text.lines().enumerate().filter(|(_, line)| is_page || line.trim_start().starts_with("//"));
    let named = lines.flat_map(|(index, line)| names(line).map(move |name| (index + 1, name)));
    let missing = named.filter(|(_, name)| !known.contains(name.trim_start_matches("../")));
    missing.map(|(line, name)| at(file, line, &format!("there is no file `{name}`"))).collect()
}

/// The Rust files that a line names in backticks.
fn names(line: &str) -> impl Iterator<Item = &str> {
    let quoted = line.split('`').skip(1).step_by(2);
    quoted.filter(|text| text.ends_with(".rs") && !text.starts_with('.') && text.bytes().all(is_of_path))
}

fn is_of_path(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_-./".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaints(path: &str, text: &str) -> Vec<String> {
        let file = |path: &str, text: &str| SourceFile { path: path.to_owned(), text: text.to_owned() };
        missing(&[file("crates/server/io_engine/src/core/mod.rs", ""), file(path, text)])
    }

    #[test]
    fn file_that_is_gone_is_named_with_its_line() {
        let found = complaints("a.md", "first\nsee `core/op.rs` and `core/mod.rs`\n");
        assert_eq!(found, ["a.md:2: there is no file `core/op.rs`"]);
        assert_eq!(complaints("b.rs", "    // `old.rs` does it\n").len(), 1);
    }

    #[test]
    fn end_of_a_path_begins_at_a_folder() {
        assert!(complaints("a.md", "`mod.rs`, `io_engine/src/core/mod.rs`").is_empty());
        assert_eq!(complaints("a.md", "`engine/src/core/mod.rs`").len(), 1);
    }

    #[test]
    fn code_and_history_are_not_read() {
        assert!(complaints("b.rs", "let path = \"`old.rs`\";\n").is_empty());
        assert!(complaints("docs/decisions/0001-x.md", "`old.rs`").is_empty());
        assert!(complaints("a.md", "`*.rs` and `old.rs as it was` and `.rs`").is_empty());
    }
}
