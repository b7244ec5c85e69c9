//! Checks before a release: the versions of the crates, the changelog and the C libraries agree, and the published
//! crates have the fields that the package registry requires.
//!
//! A crate is published if its manifest does not say `publish = false`.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use xtask::{command, workspace};

use super::changelog::{self, Top};

/// Crates with a shared library for other programs, and the library's name.
const C_LIBRARIES: [(&str, &str); 2] = [("blk_driver_capi", "bareblk_driver"), ("qspinlock_capi", "qspin")];

/// Checks versions and sonames, and publishes as a dry run.
pub(super) fn all() -> Result<()> {
    let metadata = versions()?;
    sonames()?;
    let names = published(&metadata)?;
    publish_dry_run(&names)?;
    println!(
        "release: version {} agrees everywhere; ready to publish, in this order or at once: {}",
        env!("CARGO_PKG_VERSION"),
        names.join(", ")
    );
    Ok(())
}

/// Checks that every crate and the changelog have the workspace's version. Returns cargo's metadata.
pub(super) fn versions() -> Result<Value> {
    let (metadata, version) = (workspace::metadata()?, env!("CARGO_PKG_VERSION"));
    for package in packages(&metadata)? {
        let (name, its) = (text(package, "name"), text(package, "version"));
        if its != version {
            bail!("{name} has version {its}, but the workspace has {version}");
        }
    }
    let changelog = workspace::root().join("CHANGELOG.md");
    let text =
        fs::read_to_string(&changelog).with_context(|| format!("cannot read {}", changelog.display()))?;
    if changelog::check(&text, version)? == Top::Unreleased {
        println!(
            "note: before you tag, change the heading `Unreleased` in CHANGELOG.md to `## {version} (DATE)`"
        );
    }
    Ok(metadata)
}

fn packages(metadata: &Value) -> Result<&Vec<Value>> {
    metadata["packages"].as_array().context("cargo metadata names no packages")
}

fn text<'v>(package: &'v Value, field: &str) -> &'v str {
    package[field].as_str().unwrap_or_default()
}

/// Builds the C libraries and reads their sonames.
fn sonames() -> Result<()> {
    let mut cargo = Command::new(workspace::cargo());
    cargo.args(["build", "--quiet", "--locked"]).current_dir(workspace::root());
    C_LIBRARIES.iter().for_each(|(package, _)| _ = cargo.args(["--package", package]));
    command::run(&mut cargo)?;
    let folder = workspace::build_dir()?.join("debug");
    C_LIBRARIES.iter().try_for_each(|(_, library)| soname(&folder, library))
}

fn soname(folder: &Path, library: &str) -> Result<()> {
    let path = folder.join(format!("lib{library}.so"));
    let listed = command::output(Command::new("readelf").args(["--dynamic", "--wide"]).arg(&path))?;
    let wanted = format!("lib{library}.so.{}", env!("CARGO_PKG_VERSION_MAJOR"));
    let has_it =
        listed.lines().any(|line| line.contains("(SONAME)") && line.ends_with(&format!("[{wanted}]")));
    if !has_it {
        bail!("the library {} does not have the soname {wanted}", path.display());
    }
    Ok(())
}

/// The published crates, each after those on which it depends.
fn published(metadata: &Value) -> Result<Vec<String>> {
    // cargo's metadata shows `publish = false` as an empty list of registries.
    let is_for_others =
        |package: &&Value| package["publish"].as_array().is_none_or(|names| !names.is_empty());
    let mut waiting: Vec<&Value> = packages(metadata)?.iter().filter(is_for_others).collect();
    waiting.iter().try_for_each(|package| described(package))?;
    let mut ordered: Vec<String> = Vec::new();
    while !waiting.is_empty() {
        let names: Vec<_> = waiting.iter().map(|package| text(package, "name").to_owned()).collect();
        let (ready, rest): (Vec<_>, Vec<_>) = waiting
            .into_iter()
            .partition(|package| !crates_needed(package).any(|name| names.contains(&name)));
        if ready.is_empty() {
            bail!("these crates depend on each other in a circle: {}", names.join(", "));
        }
        ordered.extend(ready.into_iter().map(|package| text(package, "name").to_owned()));
        waiting = rest;
    }
    Ok(ordered)
}

/// Names of dependencies that a published crate keeps. These include test dependencies that have a version.
fn crates_needed(package: &Value) -> impl Iterator<Item = String> {
    let dependencies = package["dependencies"].as_array().into_iter().flatten();
    let kept =
        dependencies.filter(|dependency| dependency["kind"] != "dev" || text(dependency, "req") != "*");
    kept.map(|dependency| text(dependency, "name").to_owned())
}

/// Checks the fields that a reader of the registry sees.
fn described(package: &Value) -> Result<()> {
    let name = text(package, "name");
    let is_empty = |field: &str| match &package[field] {
        Value::String(text) => text.is_empty(),
        Value::Array(words) => words.is_empty(),
        _ => true,
    };
    let missing: Vec<_> = ["description", "license", "readme", "keywords", "categories"]
        .into_iter()
        .filter(|field| is_empty(field))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    bail!(
        "{name} cannot be published without {} (a README.md beside its Cargo.toml counts as readme)",
        missing.join(", ")
    );
}

/// cargo packages each crate and builds it from the package. The crates need not be in the registry yet.
fn publish_dry_run(names: &[String]) -> Result<()> {
    let mut cargo = Command::new(workspace::cargo());
    // A release itself requires a clean tree; a check may precede a commit.
    cargo.args(["publish", "--dry-run", "--allow-dirty", "--quiet"]).current_dir(workspace::root());
    names.iter().for_each(|name| _ = cargo.args(["--package", name]));
    command::run(&mut cargo)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn package(name: &str, dependencies: &Value) -> Value {
        json!({
            "name": name, "publish": null, "dependencies": dependencies, "description": "d", "license": "l",
            "readme": "README.md", "keywords": ["k"], "categories": ["c"],
        })
    }

    #[test]
    fn versions_of_this_repository_agree() {
        versions().unwrap();
    }

    #[test]
    fn crates_come_behind_those_that_they_need() {
        let needs = |name: &str| json!([{"name": name, "kind": null, "req": "^1"}]);
        let private = json!({"name": "private", "publish": [], "dependencies": []});
        let metadata = json!({"packages": [package("b", &needs("a")), package("c", &needs("b")), private, package("a", &json!([]))]});
        assert_eq!(published(&metadata).unwrap(), ["a", "b", "c"]);
        let circle = json!({"packages": [package("a", &needs("b")), package("b", &needs("a"))]});
        assert!(published(&circle).unwrap_err().to_string().contains("circle: a, b"));
    }

    #[test]
    fn dependency_of_tests_that_is_not_published_does_not_count() {
        let tests = |req: &str| json!([{"name": "b", "kind": "dev", "req": req}]);
        let metadata = |req: &str| json!({"packages": [package("a", &tests(req)), package("b", &json!([]))]});
        assert_eq!(published(&metadata("*")).unwrap(), ["a", "b"]);
        assert_eq!(published(&metadata("^1")).unwrap(), ["b", "a"]);
    }

    #[test]
    fn crate_without_a_readme_or_keywords_is_named() {
        let mut one = package("a", &json!([]));
        one["readme"] = Value::Null;
        one["keywords"] = json!([]);
        let error = published(&json!({"packages": [one]})).unwrap_err().to_string();
        assert!(error.starts_with("a cannot be published without readme, keywords "), "{error}");
    }
}
