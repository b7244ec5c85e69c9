//! The repository's files, as git knows them.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use xtask::{command, workspace};

/// A file of the repository; `path` is relative to its root.
#[derive(Debug, Clone)]
pub(crate) struct SourceFile {
    pub(crate) path: String,
    pub(crate) text: String,
}

/// Every text file that git tracks or would add.
pub(crate) fn read_tree() -> Result<Vec<SourceFile>> {
    let root = workspace::root();
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(&root);
    let listing = command::output(&mut git).context("cannot list the repository's files with git")?;
    let paths = listing.split('\0').filter(|path| !path.is_empty());
    Ok(paths.filter_map(|path| read_text(&root, path)).collect())
}

/// `None` if the file is not text, or if it is deleted and the deletion is not committed yet.
fn read_text(root: &Path, path: &str) -> Option<SourceFile> {
    let text = fs::read_to_string(root.join(path)).ok()?;
    Some(SourceFile { path: path.to_owned(), text })
}

/// A complaint with its position.
pub(crate) fn at(file: &SourceFile, line: usize, complaint: &str) -> String {
    format!("{}:{line}: {complaint}", file.path)
}

/// Whether the file contains tests, by its name: `tests.rs`, `log_tests.rs`, `test_bed.rs`.
pub(crate) fn is_test(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.ends_with("tests.rs") || name.starts_with("test_") || path.contains("/tests/")
}

/// The part of a file before the tests at its end.
pub(crate) fn product_part(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text)
}
