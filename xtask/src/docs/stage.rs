//! Copies the book's pages, and the files that they link to, into the folder that mdBook reads.
//!
//! - Each page keeps its path in the repository, so links stay as they are on GitHub. A README.md becomes index.md.
//! - A link to a folder leads to the folder's page. If the book has none, only the link's text remains.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use xtask::workspace;

use super::pages::{Book, is_local, resolved, staged};
use crate::source_tree::SourceFile;

/// Empties `folder`, then fills it.
pub(super) fn stage(book: &Book, files: &[SourceFile], folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    let mut linked = BTreeSet::new();
    for page in files.iter().filter(|file| book.pages.contains(&file.path)) {
        let text = with_links(page, book, &mut linked);
        write(&folder.join(staged(&page.path)), text.as_bytes())?;
    }
    write(&folder.join("SUMMARY.md"), book.summary.as_bytes())?;
    for path in linked {
        let bytes = fs::read(workspace::root().join(&path))
            .with_context(|| format!("cannot read {}", path.display()))?;
        write(&folder.join(&path), &bytes)?;
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::create_dir_all(path.parent().context("the file's path has no folder")?)?;
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// The page's text in the book; adds the files to which it links.
fn with_links(page: &SourceFile, book: &Book, linked: &mut BTreeSet<PathBuf>) -> String {
    let mut text = String::new();
    let mut in_code = false;
    for line in page.text.split_inclusive('\n') {
        in_code ^= line.trim_start().starts_with("```");
        if in_code { text += line } else { text += &line_with_links(line, &page.path, book, linked) }
    }
    text
}

fn line_with_links(line: &str, page: &str, book: &Book, linked: &mut BTreeSet<PathBuf>) -> String {
    let mut parts = line.split("](");
    let mut done = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let link = part.split_once(')').filter(|(target, _)| is_local(target));
        let Some((target, rest)) = link else {
            done += &format!("]({part}");
            continue;
        };
        match in_the_book(page, target, book, linked) {
            Some(target) => done += &format!("]({target}){rest}"),
            None => {
                unlink(&mut done);
                done += rest;
            }
        }
    }
    done
}

/// Removes the bracket before the last link's text.
fn unlink(text: &mut String) {
    if let Some(bracket) = text.rfind('[') {
        text.remove(bracket);
    }
}

/// The target of a page's link in the book; `None` if the book lacks it.
fn in_the_book(page: &str, target: &str, book: &Book, linked: &mut BTreeSet<PathBuf>) -> Option<String> {
    let folder = Path::new(page).parent().unwrap_or(Path::new(""));
    let path = resolved(folder, target)?;
    let (file, anchor) = target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
    let anchor = anchor.map(|anchor| format!("#{anchor}")).unwrap_or_default();
    let has_page = |path: &Path| book.pages.iter().any(|page| Path::new(page) == path);
    if has_page(&path) {
        return Some(staged(file) + &anchor);
    }
    if has_page(&path.join("README.md")) {
        return Some(format!("{}/index.md{anchor}", file.trim_end_matches('/')));
    }
    let is_file = workspace::root().join(&path).is_file() && path.extension().is_none_or(|end| end != "md");
    if !is_file {
        return None;
    }
    linked.insert(path);
    Some(target.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(line: &str) -> (String, Vec<PathBuf>) {
        let pages = ["README.md", "docs/a.md", "crates/x/README.md"].map(str::to_owned).to_vec();
        let mut linked = BTreeSet::new();
        let book = Book { summary: String::new(), pages };
        (line_with_links(line, "docs/b.md", &book, &mut linked), linked.into_iter().collect())
    }

    #[test]
    fn links_to_pages_and_to_folders_with_a_page_lead_there() {
        let line = "[a](a.md#x), [b](../README.md#y) and [c](../crates/x/): [d](https://x.org/) [e](#here)\n";
        let expected =
            "[a](a.md#x), [b](../index.md#y) and [c](../crates/x/index.md): [d](https://x.org/) [e](#here)\n";
        assert_eq!(shown(line), (expected.to_owned(), vec![]));
    }

    #[test]
    fn link_to_a_file_brings_the_file() {
        assert_eq!(shown("[t](../Cargo.toml)"), ("[t](../Cargo.toml)".to_owned(), vec!["Cargo.toml".into()]));
    }

    #[test]
    fn link_to_what_the_book_lacks_becomes_text() {
        assert_eq!(
            shown("see [the crates](../crates), [x](c.md)."),
            ("see the crates, x.".to_owned(), vec![])
        );
    }
}
