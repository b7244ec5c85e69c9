//! Finds what can be weakened in the lock's files, and weakens one thing at a time.
//!
//! - An ordering: `Acquire` and `Release` to `Relaxed`, `AcqRel` to each of them.
//! - A wake: `wake_one(…)` and `wake_if_halted(…)` do nothing.
//! - A re-check: the `if` or `while` below a comment that begins with `re-check:` is never entered.
//!
//! Works on text and leaves the rest to rustc: a mutant that does not compile was noticed by the compiler.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::mutant::Mutant;
use crate::source_text::{SourceText, functions, words};

/// The files with the locks; the rest of the crate keeps statistics.
const FILES: &[&str] = &["src/queue.rs", "src/node.rs", "src/ticket.rs", "src/rwlock.rs"];
const FOLDERS: &[&str] = &["src/queue", "src/rwlock"];
const WAKES: &[&str] = &["wake_one", "wake_if_halted"];
const MARK: &str = "// re-check:";

pub(super) fn mechanical(folder: &Path) -> Result<Vec<Mutant>> {
    let mut mutants = Vec::new();
    for path in files(folder)? {
        let text = fs::read_to_string(folder.join(&path))?;
        let path = path.to_string_lossy().into_owned();
        mutants.extend(mutants_of(&path, &text)?);
    }
    Ok(mutants)
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found: Vec<PathBuf> =
        FILES.iter().map(PathBuf::from).filter(|path| folder.join(path).is_file()).collect();
    for inner in FOLDERS {
        let Ok(entries) = fs::read_dir(folder.join(inner)) else { continue };
        for entry in entries {
            let name = entry?.file_name();
            if name.to_string_lossy().ends_with(".rs") && name != "tests.rs" {
                found.push(Path::new(inner).join(name));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// A piece of text to replace.
struct Change {
    at: usize,
    end: usize,
    with: String,
    what: String,
}

fn mutants_of(path: &str, text: &str) -> Result<Vec<Mutant>> {
    let code = SourceText::new(&in_ascii(text)).code;
    let mut changes = weaker_orderings(&code);
    changes.extend(without_wakes(&code));
    changes.extend(without_rechecks(path, text, &code)?);
    changes.sort_by_key(|change| change.at);
    let mut mutants: Vec<Mutant> = Vec::new();
    for change in changes {
        let line = line_of(&code, change.at);
        let base = format!("{path}: {}: {}", function_around(&code, line), change.what);
        // Several mutants of the same kind in one function are numbered in order.
        let twins = mutants.iter().filter(|mutant| mutant.name.starts_with(&format!("{base} #"))).count();
        let changed = format!("{}{}{}", &text[..change.at], change.with, &text[change.end..]);
        mutants.push(Mutant {
            name: format!("{base} #{}", twins + 1),
            place: format!("{}:{line}", path.trim_start_matches("src/")),
            what: change.what,
            by_hand: false,
            in_smoke: false,
            files: vec![(path.to_owned(), changed)],
        });
    }
    Ok(mutants)
}

/// Replaces each other character by as many bytes, so that offsets stay valid where characters are blanked.
fn in_ascii(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii() { c.to_string() } else { "?".repeat(c.len_utf8()) }).collect()
}

fn line_of(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

fn function_around(code: &str, line: usize) -> String {
    let mut around =
        functions(code).into_iter().filter(|f| (f.line..f.line + f.length_lines).contains(&line));
    around.next_back().map_or_else(|| "outside functions".to_owned(), |function| function.name)
}

fn weaker_orderings(code: &str) -> Vec<Change> {
    let mut changes = Vec::new();
    for (at, word) in words(code) {
        let Some((method, argument)) = call_around(code, at) else { continue };
        let whole = at - qualifier_length(&code[..at]);
        for weaker in weaker_than(word, &method, argument) {
            changes.push(Change {
                at: whole,
                end: at + word.len(),
                with: format!("::core::sync::atomic::Ordering::{weaker}"),
                what: format!("{method} {}{word} -> {weaker}", role(&method, argument)),
            });
        }
    }
    changes
}

fn weaker_than(word: &str, method: &str, argument: usize) -> &'static [&'static str] {
    match word {
        "Acquire" | "Release" => &["Relaxed"],
        "AcqRel" => &["Acquire", "Release", "Relaxed"],
        "SeqCst" if method == "load" || role(method, argument) == "failure " => &["Acquire", "Relaxed"],
        "SeqCst" if method == "store" => &["Release", "Relaxed"],
        "SeqCst" => &["AcqRel", "Relaxed"],
        _ => &[],
    }
}

fn role(method: &str, argument: usize) -> &'static str {
    match (method, argument) {
        ("compare_exchange" | "compare_exchange_weak", 2) | ("fetch_update" | "try_update", 0) => "success ",
        ("compare_exchange" | "compare_exchange_weak", 3) | ("fetch_update" | "try_update", 1) => "failure ",
        _ => "",
    }
}

/// The length of `core::sync::atomic::Ordering::` before the ordering, if it is there.
fn qualifier_length(before: &str) -> usize {
    let rest = before.trim_end_matches(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
    before.len() - rest.len()
}

/// The method call whose parentheses contain `at`, and the argument's index; `None` outside method calls.
fn call_around(code: &str, at: usize) -> Option<(String, usize)> {
    let (mut depth, mut commas) = (0_usize, 0);
    for (offset, c) in code[..at].char_indices().rev() {
        match c {
            ')' | ']' | '}' => depth += 1,
            '(' if depth == 0 => return method_before(&code[..offset]).map(|name| (name, commas)),
            '{' | '[' | ';' if depth == 0 => return None,
            '(' | '[' | '{' => depth -= 1,
            ',' if depth == 0 => commas += 1,
            _ => {}
        }
    }
    None
}

fn method_before(code: &str) -> Option<String> {
    let name_at = code.rfind(|c: char| !(c.is_alphanumeric() || c == '_'))? + 1;
    let name = &code[name_at..];
    (code[..name_at].ends_with('.') && !name.is_empty()).then(|| name.to_owned())
}

fn without_wakes(code: &str) -> Vec<Change> {
    let mut changes = Vec::new();
    for (at, word) in words(code).filter(|(_, word)| WAKES.contains(word)) {
        if code[..at].trim_end().ends_with("fn") {
            continue;
        }
        let start = at - qualifier_length(&code[..at]);
        let Some(open) = code[at..].find('(').map(|open| at + open) else { continue };
        let Some(end) = closing(code, open) else { continue };
        let arguments = &code[open..=end];
        changes.push(Change {
            at: start,
            end: end + 1,
            with: format!("{{ let _ = {arguments}; }}"),
            what: format!("without {word}"),
        });
    }
    changes
}

/// The position that closes the parenthesis or brace at `open`.
fn closing(code: &str, open: usize) -> Option<usize> {
    let mut depth = 0_usize;
    for (offset, c) in code[open..].char_indices() {
        match c {
            '(' | '{' => depth += 1,
            ')' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(open + offset);
        }
    }
    None
}

fn without_rechecks(path: &str, text: &str, code: &str) -> Result<Vec<Change>> {
    let mut changes = Vec::new();
    for (mark, _) in text.match_indices(MARK) {
        let line = line_of(text, mark);
        // Comments are blank in `code`, so the next code follows.
        let at = mark + code[mark..].len() - code[mark..].trim_start().len();
        let change = unentered(code, at).or_else(|| statement_left_out(code, at));
        changes.push(
            change
                .with_context(|| format!("{path}:{line}: no `if`, `while` or call follows the re-check"))?,
        );
    }
    Ok(changes)
}

/// Changes `if a {` to `if false && (a) {`.
fn unentered(code: &str, at: usize) -> Option<Change> {
    let keyword = ["if ", "while "].into_iter().find(|keyword| code[at..].starts_with(keyword))?;
    let condition = at + keyword.len();
    Some(Change {
        at: condition,
        end: condition,
        with: "false && ".to_owned(),
        what: "without re-check".to_owned(),
    })
}

/// Removes a repeated read (`word = …;`) or a call.
fn statement_left_out(code: &str, at: usize) -> Option<Change> {
    if code[at..].starts_with("let ") {
        return None;
    }
    let end = at + code[at..].find(';')? + 1;
    Some(Change { at, end, with: String::new(), what: "without re-check".to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<String> {
        mutants_of("src/a.rs", text).unwrap().into_iter().map(|mutant| mutant.name).collect()
    }

    #[test]
    fn each_ordering_of_an_exchange_is_weakened_by_itself() {
        let text =
            "use x::{Acquire, AcqRel};\nfn f() {\n    a.compare_exchange(b(1, 2), c, AcqRel, Acquire);\n}\n";
        assert_eq!(
            names(text),
            [
                "src/a.rs: f: compare_exchange success AcqRel -> Acquire #1",
                "src/a.rs: f: compare_exchange success AcqRel -> Release #1",
                "src/a.rs: f: compare_exchange success AcqRel -> Relaxed #1",
                "src/a.rs: f: compare_exchange failure Acquire -> Relaxed #1",
            ]
        );
    }

    #[test]
    fn second_of_a_kind_in_a_function_has_another_name_and_another_place() {
        let mutants =
            mutants_of("src/a.rs", "fn f() {\n    a.load(Acquire);\n    b.load(Acquire);\n}\n").unwrap();
        assert_eq!(mutants[1].name, "src/a.rs: f: load Acquire -> Relaxed #2");
        assert_eq!(mutants[1].place, "a.rs:3");
        assert!(mutants[1].files[0].1.contains("b.load(::core::sync::atomic::Ordering::Relaxed)"));
    }

    #[test]
    fn orderings_in_comments_and_imports_are_no_accesses() {
        assert_eq!(names("use a::Acquire;\n// load(Acquire)\nfn f() {}\n"), <[String; 0]>::default());
    }

    #[test]
    fn wake_is_taken_out_with_its_path_and_its_definition_stays() {
        let mutants =
            mutants_of("src/a.rs", "fn wake_one(a: A) {}\nfn f() {\n    S::wake_one(&g(1));\n}\n").unwrap();
        assert_eq!(mutants.len(), 1);
        assert!(mutants[0].files[0].1.contains("{ let _ = (&g(1)); };"), "{}", mutants[0].files[0].1);
    }

    #[test]
    fn recheck_is_never_entered_or_left_out() {
        let text = "fn f() {\n    // re-check: why,\n    // and why.\n    while a() {\n    }\n    // re-check: b\n    w = b();\n}\n";
        let mutants = mutants_of("src/a.rs", text).unwrap();
        assert!(mutants[0].files[0].1.contains("while false && a() {"));
        assert!(!mutants[1].files[0].1.contains("w = b();"));
    }

    #[test]
    fn recheck_without_anything_to_take_out_is_refused() {
        assert!(mutants_of("src/a.rs", "fn f() {\n    // re-check: x\n    let a = 1;\n}\n").is_err());
    }
}
