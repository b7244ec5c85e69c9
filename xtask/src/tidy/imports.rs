//! Which file of a crate imports which, and the largest circle of files that import each other.
//!
//! It reads `use` items and paths that begin with `crate::`, `super::` or `self::`, as text. A name that `lib.rs`
//! re-exports stands for the file that defines it.
//!
//! Not here: crates (`layers.rs`).

use std::collections::{BTreeMap, BTreeSet};

use super::SourceFile;
use super::measures::is_test;
use crate::source_text::SourceText;

/// Module paths below the crate (`""` is its root) to the code of their files.
type Modules = BTreeMap<Vec<String>, String>;

/// Files of the largest circle, as paths; empty if there is none.
pub(super) fn largest_circle(files: &[SourceFile]) -> Vec<String> {
    let circles = crates(files).into_iter().filter_map(|(folder, modules)| {
        let circle = circle_of(&modules)?;
        Some(circle.iter().map(|module| format!("{folder}/{}", module.join("/"))).collect::<Vec<_>>())
    });
    circles.max_by_key(Vec::len).unwrap_or_default()
}

fn crates(files: &[SourceFile]) -> BTreeMap<String, Modules> {
    let mut crates: BTreeMap<String, Modules> = BTreeMap::new();
    for file in files.iter().filter(|file| file.path.ends_with(".rs") && !is_test(&file.path)) {
        let Some((folder, inner)) = file.path.split_once("/src/") else { continue };
        if file.path.contains("/tests/") || inner.starts_with("bin/") || inner == "main.rs" {
            continue;
        }
        let code = SourceText::new(product_part(&file.text)).code;
        crates.entry(folder.to_owned()).or_default().insert(module_of(inner), code);
    }
    crates
}

/// Without the tests at its end.
pub(super) fn product_part(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text)
}

fn module_of(path: &str) -> Vec<String> {
    let path = path.trim_end_matches(".rs");
    let path = path.trim_end_matches("/mod");
    let parts: Vec<String> = path.split('/').map(str::to_owned).collect();
    if parts == ["lib"] { Vec::new() } else { parts }
}

/// The largest set of modules of which each leads to each. The root and what it declares do not count.
fn circle_of(modules: &Modules) -> Option<Vec<Vec<String>>> {
    let exported = modules.get(&Vec::new()).map(|code| exports(code, modules)).unwrap_or_default();
    let arrows: BTreeMap<_, _> = modules
        .iter()
        .filter(|(module, _)| !module.is_empty())
        .map(|(module, code)| (module, imports(module, code, modules, &exported)))
        .collect();
    let reach: BTreeMap<_, _> = arrows.keys().map(|module| (*module, reachable(module, &arrows))).collect();
    let circle = |module: &Vec<String>| -> Vec<Vec<String>> {
        let there = reach[module].iter().filter(|other| reach[*other].contains(module));
        there.cloned().collect()
    };
    reach.keys().map(|module| circle(module)).max_by_key(Vec::len).filter(|circle| circle.len() > 1)
}

fn reachable(
    from: &[String],
    arrows: &BTreeMap<&Vec<String>, BTreeSet<Vec<String>>>,
) -> BTreeSet<Vec<String>> {
    let (mut seen, mut left) = (BTreeSet::new(), vec![from.to_vec()]);
    while let Some(module) = left.pop() {
        for next in arrows.get(&module).into_iter().flatten() {
            if seen.insert(next.clone()) {
                left.push(next.clone());
            }
        }
    }
    seen
}

/// Names that the root re-exports, with the module that each comes from.
fn exports(code: &str, modules: &Modules) -> BTreeMap<String, Vec<String>> {
    let paths = used_paths(code).into_iter();
    let named = paths.filter_map(|path| {
        let start = usize::from(path.first().is_some_and(|part| part == "crate" || part == "self"));
        Some((path.last()?.clone(), owner(&path[start..], modules)?))
    });
    named.collect()
}

fn imports(
    module: &[String],
    code: &str,
    modules: &Modules,
    exported: &BTreeMap<String, Vec<String>>,
) -> BTreeSet<Vec<String>> {
    let mut found = BTreeSet::new();
    for path in used_paths(code).into_iter().chain(inline_paths(code)) {
        let Some(path) = absolute(module, &path) else { continue };
        let target = owner(&path, modules).or_else(|| exported.get(path.first()?).cloned());
        found.extend(target.filter(|target| target != module && !target.is_empty()));
    }
    // A folder's file declares its modules; that they look at it is what makes a circle.
    found
}

/// From the crate's root on; none for a path into another crate.
fn absolute(module: &[String], path: &[String]) -> Option<Vec<String>> {
    let (first, rest) = path.split_first()?;
    match first.as_str() {
        "crate" => Some(rest.to_vec()),
        "self" => Some([module, rest].concat()),
        "super" => {
            let ups = path.iter().take_while(|part| *part == "super").count();
            let kept = module.len().checked_sub(ups)?;
            Some([&module[..kept], &path[ups..]].concat())
        }
        // A module of this one, without `self`.
        _ => Some([module, path].concat()),
    }
}

/// The module that the longest beginning of `path` names.
fn owner(path: &[String], modules: &Modules) -> Option<Vec<String>> {
    (1..=path.len()).rev().map(|length| path[..length].to_vec()).find(|start| modules.contains_key(start))
}

/// Every path of every `use` item, written out.
fn used_paths(code: &str) -> Vec<Vec<String>> {
    let items = code.split("use ").skip(1).filter_map(|rest| Some(rest.split_once(';')?.0));
    items.flat_map(written_out).map(|path| parts(&path)).collect()
}

fn parts(path: &str) -> Vec<String> {
    let path = path.split(" as ").next().unwrap_or_default();
    path.split("::").map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

/// `a::{b, c::{d, e}}` → `a::b`, `a::c::d`, `a::c::e`.
fn written_out(tree: &str) -> Vec<String> {
    let Some((before, rest)) = tree.split_once('{') else { return vec![tree.trim().to_owned()] };
    let inner = rest.rsplit_once('}').map_or(rest, |(inner, _)| inner);
    let branches = split_at_commas(inner).into_iter();
    branches.flat_map(written_out).map(|branch| format!("{}{branch}", before.trim())).collect()
}

fn split_at_commas(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, letter) in text.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    found.push(&text[start..]);
    found.retain(|branch| !branch.trim().is_empty());
    found
}

/// Paths in the code itself: `crate::flush::flush(…)`.
fn inline_paths(code: &str) -> Vec<Vec<String>> {
    let starts = ["crate::", "super::"].iter().flat_map(|start| code.match_indices(start));
    let ends =
        |text: &str| text.find(|letter: char| !(letter.is_alphanumeric() || letter == '_' || letter == ':'));
    let path = |at: usize| &code[at..at + ends(&code[at..]).unwrap_or(code.len() - at)];
    starts.map(|(at, _)| parts(path(at))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circle(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<_> = files
            .iter()
            .map(|(path, text)| SourceFile {
                path: format!("crates/a/b/src/{path}"),
                text: (*text).to_owned(),
            })
            .collect();
        largest_circle(&files)
    }

    #[test]
    fn files_that_import_each_other_are_a_circle() {
        let found = circle(&[
            ("lib.rs", "mod one; mod two; mod three; pub use two::Two;"),
            ("one.rs", "use crate::{Two, three};"),
            ("two.rs", "fn f() { crate::three::g(); }"),
            ("three/mod.rs", "use super::one::{self, One as Other};"),
        ]);
        assert_eq!(found, ["crates/a/b/one", "crates/a/b/three", "crates/a/b/two"]);
    }

    #[test]
    fn arrows_one_way_comments_and_tests_are_none() {
        let found = circle(&[
            ("lib.rs", "mod one; mod two;"),
            ("one.rs", "use crate::two::Two;"),
            ("two.rs", "// use crate::one::One;\n#[cfg(test)]\nmod tests {\nuse crate::one::One;\n}\n"),
            ("two_tests.rs", "use crate::one::One;"),
        ]);
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn trees_of_names_are_written_out() {
        let paths = used_paths("use crate::{a::B, c::{self, D}, e::f::*};");
        let text: Vec<_> = paths.iter().map(|path| path.join("::")).collect();
        assert_eq!(text, ["crate::a::B", "crate::c::self", "crate::c::D", "crate::e::f::*"]);
    }
}
