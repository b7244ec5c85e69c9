//! Tests each rule of `tidy` on a small text that breaks it and on one that does not.

use super::*;

fn complaints(path: &str, text: &str) -> Vec<String> {
    check(&[SourceFile { path: path.to_owned(), text: text.to_owned() }]).complaints
}

fn only_complaint(path: &str, text: &str) -> String {
    let mut found = complaints(path, text);
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

#[test]
fn this_repository_is_tidy() {
    let files = read_tree().unwrap();
    let report = check(&files);
    let mut complaints = report.complaints;
    let measures = measures::held(&files, &report.long_functions);
    complaints.extend(measures::check(&measures, false).unwrap());
    assert!(report.files > 0);
    assert_eq!(complaints, Vec::<String>::new());
}

#[test]
fn file_that_follows_the_rules_has_no_complaint() {
    let text = "//! A file. virtio 1.3 §2.7\n#![forbid(unsafe_code)]\nfn f() {}\n";
    assert_eq!(complaints("crates/server/a/src/lib.rs", text), Vec::<String>::new());
}

#[test]
fn file_without_header_is_named() {
    assert!(
        only_complaint("crates/server/a/src/b.rs", "fn f() {}\n")
            .starts_with("crates/server/a/src/b.rs:1: does not begin")
    );
}

#[test]
fn crate_root_that_does_not_forbid_unsafe_is_named() {
    assert!(only_complaint("crates/server/a/src/lib.rs", "//! A.\n").contains("forbid"));
    assert_eq!(complaints("crates/common/guest_mem/src/lib.rs", "//! A.\n"), Vec::<String>::new());
}

#[test]
fn forbid_in_a_comment_does_not_count() {
    assert!(
        only_complaint("crates/server/a/src/main.rs", "//! A.\n// #![forbid(unsafe_code)]\n")
            .contains("forbid")
    );
}

#[test]
fn unsafe_code_is_complained_about_only_outside_its_homes() {
    let text = "//! A.\n// unsafe in words is fine\nfn f() { unsafe { g() } }\n";
    assert!(
        only_complaint("crates/server/a/src/b.rs", text).starts_with("crates/server/a/src/b.rs:3: `unsafe`")
    );
    assert_eq!(complaints("crates/server/io_engine/src/b.rs", text), Vec::<String>::new());
}

#[test]
fn left_over_macros_and_marks_are_named() {
    assert!(only_complaint("a/b.rs", "//! A.\nfn f() { todo!() }\n").contains("todo"));
    assert!(only_complaint("a/b.rs", "//! A.\nfn f() { dbg!(1); }\n").contains("dbg"));
    assert!(only_complaint("a/b.rs", "//! A.\n// FIXME later\n").contains("FIXME"));
}

#[test]
fn words_in_strings_are_not_left_over() {
    assert_eq!(complaints("a/b.rs", "//! A.\nconst A: &str = \"FIXME todo!\";\n"), Vec::<String>::new());
}

#[test]
fn citation_without_version_is_named() {
    assert!(only_complaint("a/b.rs", "//! A.\n// virtio §2.7.8\n").contains(":2:"));
    assert!(only_complaint("a/b.rs", "//! A.\n// Spec: §2.7.8\n").contains(":2:"));
}

#[test]
fn citation_with_version_or_of_vhost_user_is_fine() {
    let text = "//! A.\n// (virtio 1.3 §2.7.8, §2.7.9), vhost-user §3\n";
    assert_eq!(complaints("a/b.rs", text), Vec::<String>::new());
}

#[test]
fn skip_that_is_only_printed_is_named() {
    assert!(only_complaint("a/b.rs", "//! A.\nfn f() { println!(\"skipped: no x\") }\n").contains(":2:"));
    assert!(only_complaint("a/b.rs", "//! A.\nfn f() { eprintln!(\n \"not run: {x}\") }\n").contains(":2:"));
    let other = "//! A.\nfn f() { println!(\"{skipped}\"); assert!(said.contains(\"skipped:\")); }\n";
    assert_eq!(complaints("a/b.rs", other), Vec::<String>::new());
}

#[test]
fn machine_path_is_named_in_any_file() {
    let text = format!("see {}shared\n", MACHINE_PATHS[0]);
    assert!(only_complaint("README.md", &text).starts_with("README.md:1:"));
}

#[test]
fn long_file_is_only_a_warning() {
    let text = format!("//! A.\n{}", "// line\n".repeat(LONGEST_FILE_LINES));
    let report = check(&[SourceFile { path: "a/b.rs".to_owned(), text }]);
    assert_eq!((report.complaints.len(), report.warnings.len()), (0, 1));
}

#[test]
fn long_function_is_counted_for_the_ratchet() {
    let text = format!("//! A.\nfn f() {{\n{}}}\n", "    g();\n".repeat(LONGEST_FUNCTION_LINES));
    let report = check(&[SourceFile { path: "a/b.rs".to_owned(), text }]);
    assert_eq!(report.long_functions.len(), 1);
}

#[test]
fn kept_results_stay_small() {
    let path = "bench_results/2026-11-23-x/summary.json";
    assert_eq!(complaints(path, &"1".repeat(1_000_000)), Vec::<String>::new());
    assert!(only_complaint(path, &"1".repeat(1_000_001)).contains("at most 1000000"));
}
