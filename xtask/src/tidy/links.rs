//! Links between pages lead to a file or folder of the repository.
//!
//! Not here: links to other sites, anchors within a page.

use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};

use super::{SourceFile, at};

/// A complaint for each link of a page that leads nowhere.
pub(super) fn broken(files: &[SourceFile]) -> Vec<String> {
    let known = known_paths(files);
    let pages = files.iter().filter(|file| file.path.ends_with(".md"));
    pages.flat_map(|page| broken_in(page, &known)).collect()
}

/// Every file, and every folder that has one.
fn known_paths(files: &[SourceFile]) -> HashSet<&Path> {
    files.iter().flat_map(|file| Path::new(&file.path).ancestors()).collect()
}

fn broken_in(page: &SourceFile, known: &HashSet<&Path>) -> Vec<String> {
    let folder = Path::new(&page.path).parent().unwrap_or(Path::new(""));
    let lines = page.text.lines().enumerate();
    let links = lines.flat_map(|(index, line)| targets(line).map(move |target| (index + 1, target)));
    let inside = links.filter(|(_, target)| !target.contains("://") && !target.starts_with(['#', '<']));
    let lost = inside.filter(|(_, target)| {
        let path = target.split('#').next().unwrap_or_default();
        resolved(folder, path).is_none_or(|path| !known.contains(path.as_path()))
    });
    lost.map(|(line, target)| at(page, line, &format!("the link to {target} leads nowhere"))).collect()
}

/// What stands between `](` and `)`.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0))
}

/// None above the repository's root.
fn resolved(folder: &Path, link: &str) -> Option<PathBuf> {
    let mut path = folder.to_path_buf();
    for part in Path::new(link).components() {
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

    fn complaints(text: &str) -> Vec<String> {
        let file = |path: &str, text: &str| SourceFile { path: path.to_owned(), text: text.to_owned() };
        broken(&[file("docs/a.md", text), file("README.md", ""), file("docs/decisions/0001-b.md", "")])
    }

    #[test]
    fn links_to_files_folders_and_other_sites_are_fine() {
        let text = "[a](../README.md#top) [b](decisions) [c](decisions/0001-b.md), [d](https://x.org/y.md) [e](#here)";
        assert_eq!(complaints(text), Vec::<String>::new());
    }

    #[test]
    fn link_that_leads_nowhere_is_named_with_its_line() {
        assert_eq!(complaints("x\n[a](b.md)"), ["docs/a.md:2: the link to b.md leads nowhere"]);
        assert_eq!(complaints("[a](../../README.md)").len(), 1);
    }
}
