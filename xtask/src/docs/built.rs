//! Checks the links of the built book: each leads to an existing file and heading of the book.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::pages::{is_local, resolved};

/// Files that mdBook generates from all pages together. Their links are relative to a different folder.
const MADE_OF_ALL: [&str; 3] = ["print.html", "404.html", "toc.html"];

/// A complaint for each link that leads nowhere.
pub(super) fn broken_links(book: &Path) -> Result<Vec<String>> {
    let files = files_below(book)?;
    let mut pages = HashMap::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|end| end == "html")) {
        let path = book.join(file);
        let html = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        pages.insert(file.clone(), html);
    }
    let known: HashSet<&Path> = files.iter().map(PathBuf::as_path).collect();
    let mut complaints = Vec::new();
    for (page, html) in pages.iter().filter(|(page, _)| !MADE_OF_ALL.iter().any(|name| page.ends_with(name)))
    {
        let broken = attributes(html, "href").filter(|target| leads_nowhere(page, target, &known, &pages));
        complaints
            .extend(broken.map(|target| format!("{}: the link to {target} leads nowhere", page.display())));
    }
    complaints.sort_unstable();
    Ok(complaints)
}

fn leads_nowhere(
    page: &Path,
    target: &str,
    known: &HashSet<&Path>,
    pages: &HashMap<PathBuf, String>,
) -> bool {
    if !is_local(target) && !target.starts_with('#') {
        return false;
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let folder = page.parent().unwrap_or(Path::new(""));
    let path = if file.is_empty() { Some(page.to_path_buf()) } else { resolved(folder, file) };
    let Some(path) = path.filter(|path| known.contains(path.as_path())) else { return true };
    let has_anchor = |html: &String| attributes(html, "id").any(|id| id == anchor);
    !anchor.is_empty() && pages.get(&path).is_some_and(|html| !has_anchor(html))
}

/// The values of an attribute, as mdBook writes them.
fn attributes<'h>(html: &'h str, name: &str) -> impl Iterator<Item = &'h str> {
    let begin = format!(" {name}=\"");
    let places: Vec<usize> = html.match_indices(&begin).map(|(at, found)| at + found.len()).collect();
    places.into_iter().filter_map(|at| html[at..].split('"').next())
}

/// All files below `folder`, with paths relative to it.
fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut files, mut open) = (Vec::new(), vec![folder.to_path_buf()]);
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(&next).with_context(|| format!("cannot read {}", next.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
            } else {
                files.push(path.strip_prefix(folder)?.to_path_buf());
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_page_and_missing_heading_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let page = r##"<h1 id="top">x</h1><a href="b/c.html#in">1</a> <a href="d.html">2</a> <a href="#top">3</a>
            <a href="b/c.html#out">4</a> <a href="https://x.org/">5</a>"##;
        fs::create_dir(folder.path().join("b")).unwrap();
        fs::write(folder.path().join("a.html"), page).unwrap();
        fs::write(folder.path().join("b/c.html"), r#"<p id="in"><a href="../a.html">back</a>"#).unwrap();
        let expected =
            ["b/c.html#out", "d.html"].map(|target| format!("a.html: the link to {target} leads nowhere"));
        assert_eq!(broken_links(folder.path()).unwrap(), expected);
    }
}
