//! The bill of materials: the crates in the programs, in CycloneDX 1.6 as JSON.
//!
//! - Written with our own code, because the file has only a dozen fields: `cyclonedx-bom` would add some twenty crates,
//!   and `cargo cyclonedx` writes a file for each crate into the source tree.
//! - The file has no random serial number and no time of day, so the same commit gives the same file.
//! - It lists what cargo resolves for the whole workspace, so it may contain an optional dependency that only another
//!   member enables. It omits crates that only build or test.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use xtask::{command, workspace};

/// The bill of materials of these workspace crates.
pub(super) fn of(programs: &[&str]) -> Result<Value> {
    let mut cargo = Command::new(workspace::cargo());
    let host = host()?;
    cargo.args(["metadata", "--format-version", "1", "--locked", "--filter-platform", &host]);
    let text = command::output(cargo.current_dir(workspace::root()))?;
    let metadata = serde_json::from_str(&text).context("cargo metadata's answer is not JSON")?;
    let lock = workspace::root().join("Cargo.lock");
    let lock = fs::read_to_string(&lock).with_context(|| format!("cannot read {}", lock.display()))?;
    bill(&metadata, &checksums(&lock)?, programs)
}

fn host() -> Result<String> {
    let told = command::output(Command::new("rustc").arg("-vV"))?;
    let host = told.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV names no host")?.to_owned())
}

/// Maps name and version to the hash in Cargo.lock.
type Checksums = BTreeMap<(String, String), String>;

fn checksums(lock: &str) -> Result<Checksums> {
    let lock: toml::Table = toml::from_str(lock).context("Cargo.lock is not TOML")?;
    let packages =
        lock.get("package").and_then(toml::Value::as_array).context("Cargo.lock has no packages")?;
    let field = |package: &toml::Value, name: &str| Some(package.get(name)?.as_str()?.to_owned());
    let entry =
        |package| Some(((field(package, "name")?, field(package, "version")?), field(package, "checksum")?));
    Ok(packages.iter().filter_map(entry).collect())
}

fn bill(metadata: &Value, checksums: &Checksums, programs: &[&str]) -> Result<Value> {
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    let packages: BTreeMap<&str, &Value> =
        packages.iter().map(|package| (text(package, "id"), package)).collect();
    let graph = graph(metadata)?;
    let roots =
        packages.iter().filter(|(id, package)| is_program(package, programs) && graph.contains_key(*id));
    let roots: Vec<&str> = roots.map(|(id, _)| *id).collect();
    let mut reached = BTreeSet::new();
    let mut next = roots.clone();
    while let Some(id) = next.pop() {
        if reached.insert(id) {
            next.extend(graph.get(id).into_iter().flatten());
        }
    }
    let component =
        |id: &&str| packages.get(*id).map(|package| component(package, checksums, roots.contains(id)));
    let reference = |id: &&str| packages.get(*id).map(|package| purl(package));
    let dependencies = reached.iter().map(|id| {
        let on: BTreeSet<String> = graph.get(id).into_iter().flatten().filter_map(reference).collect();
        json!({"ref": reference(id), "dependsOn": on})
    });
    let version = env!("CARGO_PKG_VERSION");
    let whole = format!("bareblk-{version}");
    let of_whole: Vec<_> = roots.iter().filter_map(reference).collect();
    let mut dependencies: Vec<Value> = dependencies.collect();
    dependencies.push(json!({"ref": whole, "dependsOn": of_whole}));
    Ok(json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "cargo xtask release", "version": version}]},
            "component": {"type": "application", "bom-ref": whole, "name": "bareblk", "version": version},
        },
        "components": reached.iter().filter_map(component).collect::<Vec<_>>(),
        "dependencies": dependencies,
    }))
}

fn text<'v>(value: &'v Value, field: &str) -> &'v str {
    value[field].as_str().unwrap_or_default()
}

/// Whether the package is one of these crates of the workspace.
fn is_program(package: &Value, programs: &[&str]) -> bool {
    package["source"].is_null() && programs.contains(&text(package, "name"))
}

/// Maps package ids to the ids of linked dependencies, without those that only build or test.
fn graph<'m>(metadata: &'m Value) -> Result<BTreeMap<&'m str, Vec<&'m str>>> {
    let nodes = metadata["resolve"]["nodes"].as_array().context("cargo metadata resolves nothing")?;
    let is_linked = |dependency: &&Value| {
        dependency["dep_kinds"]
            .as_array()
            .is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()))
    };
    let linked = |node: &'m Value| {
        let dependencies = node["deps"].as_array().into_iter().flatten().filter(is_linked);
        dependencies.map(|dependency| text(dependency, "pkg")).collect()
    };
    Ok(nodes.iter().map(|node| (text(node, "id"), linked(node))).collect())
}

fn purl(package: &Value) -> String {
    format!("pkg:cargo/{}@{}", text(package, "name"), text(package, "version"))
}

fn component(package: &Value, checksums: &Checksums, is_program: bool) -> Value {
    let (name, version) = (text(package, "name"), text(package, "version"));
    let mut component = json!({
        "type": if is_program { "application" } else { "library" },
        "bom-ref": purl(package),
        "name": name,
        "version": version,
        "purl": purl(package),
    });
    if let Some(license) = package["license"].as_str() {
        // `MIT/Apache-2.0` is an old form of OR in manifests.
        component["licenses"] = json!([{"expression": license.replace('/', " OR ")}]);
    }
    if let Some(checksum) = checksums.get(&(name.to_owned(), version.to_owned())) {
        component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    component
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Value {
        let dependency = |id: &str, kind: Value| json!({"pkg": id, "dep_kinds": [{"kind": kind}]});
        let package = |name: &str, source: Value| json!({"id": name, "name": name, "version": "1.0.0", "source": source, "license": "MIT/Apache-2.0"});
        json!({
            "packages": [
                package("program", Value::Null), package("library", json!("registry")), package("deeper", json!("registry")),
                package("builds", json!("registry")), package("tests", json!("registry")), package("other", Value::Null),
            ],
            "resolve": {"nodes": [
                {"id": "program", "deps": [
                    dependency("library", Value::Null), dependency("builds", json!("build")), dependency("tests", json!("dev"))]},
                {"id": "library", "deps": [dependency("deeper", Value::Null)]},
                {"id": "deeper", "deps": []}, {"id": "builds", "deps": []}, {"id": "tests", "deps": []},
                {"id": "other", "deps": [dependency("deeper", Value::Null)]},
            ]},
        })
    }

    const LOCK: &str = "version = 4\n[[package]]\nname = 'library'\nversion = '1.0.0'\nchecksum = 'abc'\n\
                        [[package]]\nname = 'program'\nversion = '1.0.0'\n";

    #[test]
    fn bill_has_what_is_linked_and_nothing_else() {
        let bill = bill(&example(), &checksums(LOCK).unwrap(), &["program"]).unwrap();
        let names: Vec<_> =
            bill["components"].as_array().unwrap().iter().map(|one| text(one, "name")).collect();
        assert_eq!(names, ["deeper", "library", "program"]);
        let library = &bill["components"][1];
        assert_eq!(library["hashes"], json!([{"alg": "SHA-256", "content": "abc"}]));
        assert_eq!(library["licenses"], json!([{"expression": "MIT OR Apache-2.0"}]));
        assert_eq!((text(library, "purl"), text(library, "type")), ("pkg:cargo/library@1.0.0", "library"));
        assert_eq!(text(&bill["components"][2], "type"), "application");
        let of_library = json!({"ref": "pkg:cargo/library@1.0.0", "dependsOn": ["pkg:cargo/deeper@1.0.0"]});
        assert_eq!(bill["dependencies"][1], of_library);
    }

    #[test]
    fn bill_of_this_repository_has_all_programs_and_a_hash_for_each_foreign_crate() {
        let bill = of(&crate::deb::program::CRATES).unwrap();
        let components = bill["components"].as_array().unwrap();
        let own: Vec<_> =
            components.iter().filter(|one| one["hashes"].is_null()).map(|one| text(one, "name")).collect();
        let wanted = ["bareblk", "bareblk_monitor", "bareblk_bench", "guest_mem"];
        assert!(wanted.iter().all(|name| own.contains(name)), "{own:?}");
        assert!(components.iter().any(|one| text(one, "name") == "io-uring"));
        let without: Vec<_> = components.iter().filter(|one| one["licenses"].is_null()).collect();
        assert!(without.is_empty(), "{without:?}");
        let tests =
            components.iter().find(|one| ["proptest", "xtask", "criterion"].contains(&text(one, "name")));
        assert_eq!(tests, None);
        assert!(
            own.iter().all(|name| workspace::root().join("crates").read_dir().unwrap().any(|room| room
                .unwrap()
                .path()
                .join(name)
                .is_dir())),
            "{own:?}"
        );
    }
}
