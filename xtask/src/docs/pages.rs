//! The book's pages: those that docs/SUMMARY.md lists, and every page of the folders that it lists as a whole.

use std::path::{Component, Path, PathBuf};

use crate::source_tree::SourceFile;

/// The book's table of contents; its links are relative to its own folder.
pub(crate) const SUMMARY: &str = "docs/SUMMARY.md";
/// The summary has one line for each of these folders, for its README.md; the folder's other pages follow below it.
const LISTED: [&str; 2] = ["docs/decisions", "bench_results"];

/// The book's table of contents, with paths from the repository's root, and its pages in that order.
#[derive(Debug, Default)]
pub(crate) struct Book {
    pub(crate) summary: String,
    pub(crate) pages: Vec<String>,
}

/// Reads the book; `None` if there is no table of contents.
pub(crate) fn book(files: &[SourceFile]) -> Option<Book> {
    let summary = files.iter().find(|file| file.path == SUMMARY)?;
    let mut book = Book::default();
    for line in summary.text.lines() {
        match page_of(line) {
            Some(page) => book.add(line, page, files),
            None => book.summary += &format!("{line}\n"),
        }
    }
    Some(book)
}

impl Book {
    fn add(&mut self, line: &str, page: String, files: &[SourceFile]) {
        let indent = line.len() - line.trim_start().len();
        let begin = line.split("](").next().unwrap_or_default();
        self.summary += &format!("{begin}]({})\n", staged(&page));
        let folder = LISTED.iter().find(|folder| page == format!("{folder}/README.md"));
        self.pages.push(page);
        for child in folder.into_iter().flat_map(|folder| below(folder, files)) {
            let title = title(child).replace(['[', ']'], "");
            self.summary += &format!("{:indent$}  - [{title}]({})\n", "", staged(&child.path));
            self.pages.push(child.path.clone());
        }
    }
}

/// The pages below a folder, without its README.md.
fn below<'f>(folder: &str, files: &'f [SourceFile]) -> Vec<&'f SourceFile> {
    let inside = |path: &str| path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
    let page = |path: &str| path.ends_with(".md") && path != format!("{folder}/README.md");
    let mut pages: Vec<_> = files.iter().filter(|file| inside(&file.path) && page(&file.path)).collect();
    pages.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    pages
}

/// The first heading, without Markdown.
fn title(page: &SourceFile) -> String {
    let heading = page.text.lines().find_map(|line| line.strip_prefix("# "));
    heading.unwrap_or(&page.path).replace('`', "")
}

/// The page that a line of the table of contents links to.
fn page_of(line: &str) -> Option<String> {
    let target = targets(line).next()?;
    let folder = Path::new(SUMMARY).parent().unwrap_or(Path::new(""));
    Some(resolved(folder, target)?.to_str()?.to_owned())
}

/// The page's path in the book: a README.md is staged as `index.md`, because mdBook makes it `index.html`.
pub(crate) fn staged(page: &str) -> String {
    match page.strip_suffix("README.md") {
        Some(folder) if folder.is_empty() || folder.ends_with('/') => format!("{folder}index.md"),
        _ => page.to_owned(),
    }
}

/// The targets of a line's links: the text between `](` and `)`.
pub(crate) fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0))
}

/// Whether a link's target is in the repository, but on a different page.
pub(crate) fn is_local(target: &str) -> bool {
    !target.contains("://") && !target.starts_with(['#', '<'])
}

/// A link's target without its anchor, from the repository's root; `None` if it is outside the repository.
pub(crate) fn resolved(folder: &Path, target: &str) -> Option<PathBuf> {
    let mut path = folder.to_path_buf();
    for part in Path::new(target.split('#').next().unwrap_or_default()).components() {
        match part {
            Component::ParentDir if !path.pop() => return None,
            Component::Normal(name) => path.push(name),
            _ => {}
        }
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.to_owned(), text: text.to_owned() }
    }

    #[test]
    fn listed_folder_brings_all_its_pages_with_their_titles() {
        let files = [
            file(SUMMARY, "# Summary\n\n- [Start](../README.md)\n  - [Decisions](decisions/README.md)\n"),
            file("docs/decisions/README.md", "# Decisions\n"),
            file("docs/decisions/0002-b.md", "# 0002: `b`\n"),
            file("docs/decisions/0001-a.md", "# 0001: a\n"),
            file("docs/decisions/note.txt", ""),
        ];
        let book = book(&files).unwrap();
        assert_eq!(
            book.summary,
            "# Summary\n\n- [Start](index.md)\n  - [Decisions](docs/decisions/index.md)\n    \
             - [0001: a](docs/decisions/0001-a.md)\n    - [0002: b](docs/decisions/0002-b.md)\n"
        );
        assert_eq!(book.pages[..2], ["README.md", "docs/decisions/README.md"]);
        assert_eq!(book.pages.len(), 4);
    }

    #[test]
    fn only_a_file_with_that_name_is_renamed() {
        assert_eq!(staged("a/README.md"), "a/index.md");
        assert_eq!(staged("a/MY-README.md"), "a/MY-README.md");
    }
}
