//! Checks that links between pages lead to a file, folder or heading, and that the book has every page that it needs.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use crate::docs::pages::{self, is_local, resolved, targets};
use crate::source_tree::{SourceFile, at};

/// A complaint for each link of a page that leads nowhere.
pub(crate) fn broken(files: &[SourceFile]) -> Vec<String> {
    let known = known_paths(files);
    let pages: Vec<_> = files.iter().filter(|file| file.path.ends_with(".md")).collect();
    let headings = pages.iter().map(|page| (Path::new(&page.path), anchors(&page.text))).collect();
    pages.iter().flat_map(|page| broken_in(page, &known, &headings)).collect()
}

/// A complaint for each page below docs/ that the book does not list, and for each page that the book lists or links to
/// but does not contain.
pub(crate) fn missing_in_the_book(files: &[SourceFile]) -> Vec<String> {
    let Some(book) = pages::book(files) else { return Vec::new() };
    let has = |path: &str| book.pages.iter().any(|page| page == path);
    let by_path: HashMap<&str, &SourceFile> = files.iter().map(|file| (file.path.as_str(), file)).collect();
    let of_docs = files.iter().filter(|file| file.path.starts_with("docs/") && file.path.ends_with(".md"));
    let unlisted = of_docs.filter(|file| file.path != pages::SUMMARY && !has(&file.path));
    let mut complaints: Vec<_> =
        unlisted.map(|file| format!("{} does not list {}", pages::SUMMARY, file.path)).collect();
    let is_lost = |path: &str| {
        path.ends_with(".md") && path != pages::SUMMARY && by_path.contains_key(path) && !has(path)
    };
    for page in book.pages.iter().filter_map(|page| by_path.get(page.as_str())) {
        for (line, target) in links(page) {
            let path = resolved(folder_of(page), target).and_then(|path| Some(path.to_str()?.to_owned()));
            if let Some(path) = path.filter(|path| is_lost(path)) {
                complaints.push(at(
                    page,
                    line,
                    &format!("the book lacks {path}: add it to {}", pages::SUMMARY),
                ));
            }
        }
    }
    complaints
}

/// Every file, and every folder that contains one.
fn known_paths(files: &[SourceFile]) -> HashSet<&Path> {
    files.iter().flat_map(|file| Path::new(&file.path).ancestors()).collect()
}

fn folder_of(page: &SourceFile) -> &Path {
    Path::new(&page.path).parent().unwrap_or(Path::new(""))
}

/// The links of a page to places in the repository, with their lines. Ignores blocks of code.
fn links(page: &SourceFile) -> impl Iterator<Item = (usize, &str)> {
    let links = prose(&page.text).flat_map(|(line, text)| targets(text).map(move |target| (line, target)));
    links.filter(|(_, target)| is_local(target) || target.starts_with('#'))
}

/// The numbered lines outside of blocks of code.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let fence = line.trim_start().starts_with("```");
        in_code ^= fence;
        (!in_code && !fence).then_some((index + 1, line))
    })
}

fn broken_in(
    page: &SourceFile,
    known: &HashSet<&Path>,
    headings: &HashMap<&Path, HashSet<String>>,
) -> Vec<String> {
    let lost = links(page).filter(|(_, target)| {
        let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
        let path = if file.is_empty() {
            Some(Path::new(&page.path).to_path_buf())
        } else {
            resolved(folder_of(page), file)
        };
        let Some(path) = path.filter(|path| known.contains(path.as_path())) else { return true };
        let of_page = headings.get(path.as_path());
        !anchor.is_empty() && of_page.is_some_and(|headings| !headings.contains(anchor))
    });
    lost.map(|(line, target)| at(page, line, &format!("the link to {target} leads nowhere"))).collect()
}

/// The anchors of a page's headings, as GitHub and mdBook form them.
fn anchors(text: &str) -> HashSet<String> {
    let headings = prose(text).filter_map(|(_, line)| {
        let heading = line.trim_start_matches('#');
        (heading.len() < line.len() && heading.starts_with(' ')).then(|| anchor(heading.trim()))
    });
    headings.collect()
}

fn anchor(heading: &str) -> String {
    let heading = heading.to_lowercase();
    let kept = heading.chars().filter_map(|character| match character {
        ' ' => Some('-'),
        _ if character.is_alphanumeric() || matches!(character, '-' | '_') => Some(character),
        _ => None,
    });
    kept.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.to_owned(), text: text.to_owned() }
    }

    fn complaints(text: &str) -> Vec<String> {
        broken(&[file("docs/a.md", text), file("README.md", "# Top\n"), file("docs/decisions/0001-b.md", "")])
    }

    #[test]
    fn links_to_files_folders_and_other_sites_are_fine() {
        let text = "## Here\n[a](../README.md#top) [b](decisions) [c](decisions/0001-b.md), [d](https://x.org/y.md) [e](#here)";
        assert_eq!(complaints(text), Vec::<String>::new());
    }

    #[test]
    fn link_that_leads_nowhere_is_named_with_its_line() {
        assert_eq!(complaints("x\n[a](b.md)"), ["docs/a.md:2: the link to b.md leads nowhere"]);
        assert_eq!(complaints("[a](../../README.md)").len(), 1);
    }

    #[test]
    fn heading_that_is_not_there_is_named() {
        let text = "[a](../README.md#bottom) [b](#c)\n```\n# C\n```\n";
        let nowhere = |target| format!("docs/a.md:1: the link to {target} leads nowhere");
        assert_eq!(complaints(text), [nowhere("../README.md#bottom"), nowhere("#c")]);
    }

    #[test]
    fn anchors_are_words_with_hyphens() {
        assert_eq!(anchor("Why `disable-legacy=on`, and 2?"), "why-disable-legacyon-and-2");
    }

    #[test]
    fn page_that_the_book_lacks_is_named() {
        let summary = file("docs/SUMMARY.md", "- [A](a.md)\n");
        let files = [summary, file("docs/a.md", "\n[x](../X.md)"), file("docs/b.md", ""), file("X.md", "")];
        assert_eq!(
            missing_in_the_book(&files),
            [
                "docs/SUMMARY.md does not list docs/b.md",
                "docs/a.md:2: the book lacks X.md: add it to docs/SUMMARY.md"
            ]
        );
    }
}
