//! Finds the imports between the files of a crate, and the circles of files that import each other.
//!
//! It reads `use` items and paths that begin with `crate::`, `super::` or `self::`, as text. A name that `lib.rs`
//! re-exports stands for the file that defines it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::source_text::{SourceText, words};
use crate::source_tree::{SourceFile, is_test, product_part};

/// The path of a module in its crate; empty for the root.
type Module = Vec<String>;
/// The code of each module's file.
type Modules = BTreeMap<Module, String>;
/// Names that each module imports, by the module that defines them.
type Arrows = BTreeMap<Module, BTreeMap<Module, BTreeSet<String>>>;

/// Files that all import each other, directly or indirectly, and the imports among them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Circle {
    /// The crate's folder.
    folder: String,
    arrows: Arrows,
}

impl Circle {
    /// Paths of the circle's files, without `.rs`.
    pub(super) fn files(&self) -> Vec<String> {
        self.arrows.keys().map(|module| format!("{}/{}", self.folder, module.join("/"))).collect()
    }
}

/// A line for the circle, and one for each import in it.
impl fmt::Display for Circle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} files", self.folder, self.arrows.len())?;
        for (from, targets) in &self.arrows {
            for (to, names) in targets {
                let names = names.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
                writeln!(f, "  {} -> {}: {names}", from.join("/"), to.join("/"))?;
            }
        }
        Ok(())
    }
}

/// Every circle, crate by crate.
pub(super) fn circles(files: &[SourceFile]) -> Vec<Circle> {
    let circles = |(folder, modules): (String, Modules)| {
        let arrows = circles_of(&modules).into_iter();
        arrows.map(move |arrows| Circle { folder: folder.clone(), arrows })
    };
    crates(files).into_iter().flat_map(circles).collect()
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

fn module_of(path: &str) -> Module {
    let path = path.trim_end_matches(".rs");
    let path = path.trim_end_matches("/mod");
    let parts: Module = path.split('/').map(str::to_owned).collect();
    if parts == ["lib"] { Vec::new() } else { parts }
}

/// Every set of modules that all import each other, directly or indirectly. Omits the root and its declarations.
fn circles_of(modules: &Modules) -> Vec<Arrows> {
    let known = Names::new(modules);
    let below_root = modules.iter().filter(|(module, _)| !module.is_empty());
    let arrows: Arrows =
        below_root.map(|(module, code)| (module.clone(), imports(module, code, &known))).collect();
    let reach: BTreeMap<_, _> = arrows.keys().map(|module| (module, reachable(module, &arrows))).collect();
    let circle = |module: &Module| -> BTreeSet<Module> {
        reach[module].iter().filter(|other| reach[*other].contains(module)).cloned().collect()
    };
    let circles: BTreeSet<_> = arrows.keys().map(circle).filter(|circle| circle.len() > 1).collect();
    circles.iter().map(|circle| arrows_among(circle, &arrows)).collect()
}

fn arrows_among(circle: &BTreeSet<Module>, arrows: &Arrows) -> Arrows {
    let mut among = arrows.clone();
    among.retain(|from, _| circle.contains(from));
    among.values_mut().for_each(|targets| targets.retain(|to, _| circle.contains(to)));
    among
}

fn reachable(from: &Module, arrows: &Arrows) -> BTreeSet<Module> {
    let (mut seen, mut left) = (BTreeSet::new(), vec![from]);
    while let Some(module) = left.pop() {
        for next in arrows.get(module).into_iter().flat_map(BTreeMap::keys) {
            if seen.insert(next.clone()) {
                left.push(next);
            }
        }
    }
    seen
}

/// Where a crate's names are defined.
struct Names<'a> {
    modules: &'a Modules,
    /// The names in each module's `use` items, with their paths from the root.
    used: BTreeMap<&'a Module, BTreeMap<String, Module>>,
}

impl<'a> Names<'a> {
    fn new(modules: &'a Modules) -> Self {
        let used = |(module, code): (&'a Module, &'a String)| {
            let paths = used_paths(code).into_iter();
            let named = paths.filter_map(|path| Some((path.name, absolute(module, &path.parts, modules)?)));
            (module, named.collect())
        };
        Self { modules, used: modules.iter().map(used).collect() }
    }

    /// The module that defines the item at `path`. Follows `use` items on the way.
    fn owner(&self, path: &[String]) -> Option<Module> {
        self.owner_in(path, self.modules.len())
    }

    /// Follows at most `steps` imports, because imports in a module may name each other.
    fn owner_in(&self, path: &[String], steps: usize) -> Option<Module> {
        let module = (0..=path.len()).rev().map(|length| &path[..length]);
        let module = module.map(<[String]>::to_vec).find(|start| self.modules.contains_key(start))?;
        let rest = &path[module.len()..];
        let imported = rest.first().and_then(|name| self.used.get(&module)?.get(name));
        match imported {
            Some(imported) if steps > 0 => self.owner_in(&[imported, &rest[1..]].concat(), steps - 1),
            _ => Some(module),
        }
    }
}

fn imports(module: &Module, code: &str, known: &Names<'_>) -> BTreeMap<Module, BTreeSet<String>> {
    let mut found: BTreeMap<Module, BTreeSet<String>> = BTreeMap::new();
    let used = used_paths(code).into_iter().map(|path| path.parts);
    for path in used.chain(inline_paths(code)) {
        let Some(path) = absolute(module, &path, known.modules) else { continue };
        let Some(target) = known.owner(&path) else { continue };
        if target != *module && !target.is_empty() {
            found.entry(target).or_default().extend(path.last().cloned());
        }
    }
    found
}

/// The path from the crate's root; `None` for a path into another crate.
fn absolute(module: &[String], path: &[String], modules: &Modules) -> Option<Module> {
    let (first, rest) = path.split_first()?;
    match first.as_str() {
        "crate" => Some(rest.to_vec()),
        "self" => Some([module, rest].concat()),
        "super" => {
            let ups = path.iter().take_while(|part| *part == "super").count();
            let kept = module.len().checked_sub(ups)?;
            Some([&module[..kept], &path[ups..]].concat())
        }
        // A child of this module, named without `self`.
        _ => {
            let path = [module, path].concat();
            modules.contains_key(&path[..=module.len()]).then_some(path)
        }
    }
}

/// A path in a `use` item, and the name under which the module imports the item.
struct UsedPath {
    parts: Vec<String>,
    name: String,
}

/// Every path of every `use` item, expanded.
fn used_paths(code: &str) -> Vec<UsedPath> {
    let starts = words(code).filter(|(_, word)| *word == "use");
    let items = starts.filter_map(|(at, word)| Some(code[at + word.len()..].split_once(';')?.0));
    items.flat_map(written_out).filter_map(|path| used_path(&path)).collect()
}

fn used_path(path: &str) -> Option<UsedPath> {
    let (path, alias) = path.split_once(" as ").map_or((path, None), |(path, alias)| (path, Some(alias)));
    let mut parts = parts(path);
    if parts.len() > 1 && parts.last().is_some_and(|part| part == "self") {
        parts.pop();
    }
    let name = alias.map(|alias| alias.trim().to_owned()).or_else(|| parts.last().cloned())?;
    Some(UsedPath { parts, name })
}

fn parts(path: &str) -> Vec<String> {
    path.split("::").map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

/// Expands `a::{b, c::{d, e}}` to `a::b`, `a::c::d`, `a::c::e`.
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

/// Paths in the code itself: `crate::flush::flush(…)`, `child::run()`.
fn inline_paths(code: &str) -> Vec<Vec<String>> {
    let all: Vec<_> = words(code).collect();
    let declared: BTreeSet<&str> =
        all.windows(2).filter(|two| two[0].1 == "mod").map(|two| two[1].1).collect();
    let starts = all.iter().filter(|(at, word)| {
        let first = !code[..*at].ends_with("::") && code[at + word.len()..].starts_with("::");
        let visibility = code[..*at].ends_with("pub(in ");
        let inside = ["crate", "super", "self"].contains(word) || declared.contains(word);
        first && inside && !visibility
    });
    let ends =
        |text: &str| text.find(|letter: char| !(letter.is_alphanumeric() || letter == '_' || letter == ':'));
    let path = |at: usize| &code[at..at + ends(&code[at..]).unwrap_or(code.len() - at)];
    // A path that ends in `::` opens a tree of a `use` item.
    starts.map(|(at, _)| path(*at)).filter(|path| !path.ends_with("::")).map(parts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(files: &[(&str, &str)]) -> Vec<SourceFile> {
        let source = |(path, text): &(&str, &str)| SourceFile {
            path: format!("crates/a/b/src/{path}"),
            text: (*text).to_owned(),
        };
        files.iter().map(source).collect()
    }

    fn circle(files: &[(&str, &str)]) -> Vec<String> {
        circles(&sources(files)).iter().flat_map(Circle::files).collect()
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
    fn each_circle_is_listed_with_its_imports() {
        let found = circles(&sources(&[
            ("lib.rs", "mod one; mod two; mod three; mod four;"),
            ("one.rs", "use crate::two::{A, B}; use crate::four::D;"),
            ("two.rs", "use super::one::C;"),
            ("three.rs", "use crate::four;"),
            ("four.rs", "use crate::three::E as F;"),
        ]));
        let text: Vec<_> = found.iter().map(Circle::to_string).collect();
        let first = "crates/a/b: 2 files\n  four -> three: E\n  three -> four: four\n";
        assert_eq!(text, [first, "crates/a/b: 2 files\n  one -> two: A, B\n  two -> one: C\n"]);
    }

    #[test]
    fn file_that_calls_into_its_child_imports_it() {
        let child = ("one/two.rs", "use super::A;");
        assert_eq!(circle(&[("one/mod.rs", "mod two; fn f() { two::g() }"), child]).len(), 2);
        assert_eq!(circle(&[("one/mod.rs", "mod two; fn f() { other::two::g() }"), child]).len(), 0);
    }

    #[test]
    fn name_that_a_folder_imports_stands_for_the_file_that_defines_it() {
        let front = ("one/mod.rs", "mod two; mod three; pub(crate) use two::A as B; use three::C;");
        let found = circle(&[front, ("one/two.rs", ""), ("one/three.rs", "use super::B;")]);
        assert_eq!(found, Vec::<String>::new());
        let found = circle(&[front, ("one/two.rs", "use crate::one::C;"), ("one/three.rs", "use super::B;")]);
        assert_eq!(found, ["crates/a/b/one/three", "crates/a/b/one/two"]);
    }

    #[test]
    fn visibility_imports_nothing() {
        let one = ("one.rs", "use crate::two::A;");
        let two = ("two.rs", "pub(in crate::one) fn f() {}");
        assert_eq!(circle(&[one, two]), Vec::<String>::new());
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
        let text: Vec<_> = paths.iter().map(|path| path.parts.join("::")).collect();
        assert_eq!(text, ["crate::a::B", "crate::c", "crate::c::D", "crate::e::f::*"]);
    }
}
