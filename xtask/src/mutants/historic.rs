//! Inserts bugs that other locks had into this one: `historic.toml`.
//!
//! Each bug names the text that it replaces. That text must occur exactly once, so that no bug is lost when the lock
//! changes.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::mutant::Mutant;

const LIST: &str = include_str!("historic.toml");

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    /// Mechanical mutants that each run of the tests includes.
    smoke: Vec<String>,
    #[serde(default)]
    bug: Vec<Bug>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Bug {
    name: String,
    /// Which lock had the bug, and what it is in this lock.
    what: String,
    #[serde(default)]
    smoke: bool,
    edit: Vec<Edit>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Edit {
    file: String,
    find: String,
    replace: String,
}

pub(super) fn injected(folder: &Path) -> Result<Vec<Mutant>> {
    let list: List = toml::from_str(LIST).context("historic.toml")?;
    list.bug.iter().map(|bug| inject(bug, |file| Ok(fs::read_to_string(folder.join(file))?))).collect()
}

fn inject(bug: &Bug, read: impl Fn(&str) -> Result<String>) -> Result<Mutant> {
    let mut files: Vec<(String, String)> = Vec::new();
    for edit in &bug.edit {
        let known = files.iter().position(|(path, _)| *path == edit.file);
        let text = match known {
            Some(at) => files.swap_remove(at).1,
            None => read(&edit.file).with_context(|| format!("bug {}: {}", bug.name, edit.file))?,
        };
        let times = text.matches(&edit.find).count();
        if times != 1 {
            bail!(
                "bug {}: its text occurs {times} times in {} instead of once: {}",
                bug.name,
                edit.file,
                edit.find
            );
        }
        files.push((edit.file.clone(), text.replacen(&edit.find, &edit.replace, 1)));
    }
    let place = bug.edit.first().map_or("", |edit| edit.file.trim_start_matches("src/"));
    Ok(Mutant {
        name: format!("historic: {}", bug.name),
        place: place.to_owned(),
        what: bug.what.clone(),
        by_hand: true,
        in_smoke: bug.smoke,
        files,
    })
}

/// Marks the mechanical mutants that `smoke` names.
pub(super) fn mark_smoke(mutants: &mut [Mutant]) -> Result<()> {
    let list: List = toml::from_str(LIST).context("historic.toml")?;
    for name in &list.smoke {
        match mutants.iter_mut().find(|mutant| mutant.name == *name) {
            Some(mutant) => mutant.in_smoke = true,
            None => {
                bail!("historic.toml: no mutant is called {name:?}; `cargo xtask mutants --list` names them")
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bug(find: &str) -> Bug {
        let edit = Edit { file: "a.rs".to_owned(), find: find.to_owned(), replace: "b".to_owned() };
        Bug { name: "x".to_owned(), what: String::new(), smoke: false, edit: vec![edit] }
    }

    #[test]
    fn bug_replaces_its_text() {
        let mutant = inject(&bug("a"), |_| Ok("-a-".to_owned())).unwrap();
        assert_eq!(mutant.files, [("a.rs".to_owned(), "-b-".to_owned())]);
    }

    #[test]
    fn bug_whose_text_is_gone_or_not_the_only_one_is_refused() {
        assert!(inject(&bug("a"), |_| Ok("-".to_owned())).is_err());
        assert!(inject(&bug("a"), |_| Ok("aa".to_owned())).is_err());
    }

    #[test]
    fn list_fits_the_lock_as_it_is() {
        let folder = xtask::workspace::root().join(crate::mutants::mutant::CRATE);
        assert!(
            crate::mutants::all(&folder).is_ok_and(|mutants| mutants.iter().any(|mutant| mutant.in_smoke))
        );
    }
}
