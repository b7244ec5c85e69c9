//! `cargo xtask layers`: checks that the crates depend on each other as the table in ARCHITECTURE.md allows.
//!
//! The table's columns: level, crate, purpose, may depend on, unsafe. A dependency must be listed and be on a
//! lower level; dev-dependencies are not restricted, because tests may use anything.
//! Cells of `may depend on`: names in backticks; `levels 0–2`; `all` or `what they wrap` (any smaller level).

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, bail};
use xtask::workspace;

pub(crate) fn run() -> Result<()> {
    let violations = check_workspace()?;
    for violation in &violations {
        println!("{violation}");
    }
    if !violations.is_empty() {
        bail!("{} dependencies do not follow the table in ARCHITECTURE.md", violations.len());
    }
    println!("layers: the crates depend on each other as ARCHITECTURE.md says");
    Ok(())
}

fn check_workspace() -> Result<Vec<String>> {
    let path = workspace::root().join("ARCHITECTURE.md");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let table = parse_table(&text)?;
    Ok(violations(&table, &workspace_crates(&workspace::metadata()?)?))
}

/// A row of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    level: u32,
    allowed: Allowed,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Allowed {
    Named(Vec<String>),
    UpToLevel(u32),
}

/// Crate names to rows; a row may name several crates. Rows without a level (xtask) are skipped.
type Table = BTreeMap<String, Row>;

/// Crate names to the workspace crates in their `[dependencies]`.
type Crates = BTreeMap<String, Vec<String>>;

fn parse_table(text: &str) -> Result<Table> {
    let rows = text.lines().map(cells).skip_while(|cells| !is_header(cells)).skip(2);
    let mut table = Table::new();
    for cells in rows.take_while(|cells| cells.len() >= 4) {
        let Ok(level) = cells[0].parse() else { continue };
        let allowed = parse_allowed(&cells[3], level)?;
        for name in backticked(&cells[1]) {
            table.insert(name, Row { level, allowed: allowed.clone() });
        }
    }
    if table.is_empty() {
        bail!("ARCHITECTURE.md has no table with the columns L, crate, purpose, may depend on");
    }
    Ok(table)
}

fn cells(line: &str) -> Vec<String> {
    let Some(inner) = line.trim().strip_prefix('|') else { return Vec::new() };
    let inner = inner.strip_suffix('|').unwrap_or(inner);
    inner.split('|').map(|cell| cell.trim().to_owned()).collect()
}

fn is_header(cells: &[String]) -> bool {
    cells.len() >= 4 && cells[1] == "crate" && cells[3] == "may depend on"
}

fn parse_allowed(cell: &str, level: u32) -> Result<Allowed> {
    if let Some(levels) = cell.strip_prefix("levels ") {
        let last = levels.rsplit(['–', '-']).next().unwrap_or_default();
        let last = last.trim().parse().with_context(|| format!("no level at the end of {cell:?}"))?;
        return Ok(Allowed::UpToLevel(last));
    }
    let any_smaller = cell == "all" || cell.starts_with("what they wrap");
    if any_smaller {
        return Ok(Allowed::UpToLevel(level.saturating_sub(1)));
    }
    Ok(Allowed::Named(backticked(cell)))
}

/// All words between backticks: "`disk_image guest_mem`" has two.
fn backticked(cell: &str) -> Vec<String> {
    let quoted = cell.split('`').skip(1).step_by(2);
    quoted.flat_map(str::split_whitespace).map(str::to_owned).collect()
}

fn workspace_crates(metadata: &serde_json::Value) -> Result<Crates> {
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    let name = |value: &serde_json::Value| value["name"].as_str().unwrap_or_default().to_owned();
    let members: Vec<String> = packages.iter().map(name).collect();
    let mut crates = Crates::new();
    for package in packages.iter().filter(|package| name(package) != "xtask") {
        let dependencies = package["dependencies"].as_array().into_iter().flatten();
        let in_product = dependencies.filter(|dependency| dependency["kind"] != "dev").map(name);
        crates.insert(name(package), in_product.filter(|dependency| members.contains(dependency)).collect());
    }
    Ok(crates)
}

fn violations(table: &Table, crates: &Crates) -> Vec<String> {
    let mut found = Vec::new();
    for (name, dependencies) in crates {
        let Some(row) = table.get(name) else {
            found.push(format!("{name} is not in the table"));
            continue;
        };
        found.extend(dependencies.iter().filter_map(|dependency| objection(name, row, dependency, table)));
    }
    found
}

fn objection(name: &str, row: &Row, dependency: &str, table: &Table) -> Option<String> {
    let Some(below) = table.get(dependency).map(|row| row.level) else {
        return Some(format!("{name} depends on {dependency}, which has no level"));
    };
    let level = row.level;
    if below >= level {
        return Some(format!("{name} (level {level}) depends on {dependency} (level {below}, not smaller)"));
    }
    let listed = match &row.allowed {
        Allowed::Named(names) => names.iter().any(|name| name == dependency),
        Allowed::UpToLevel(highest) => below <= *highest,
    };
    (!listed).then(|| format!("{name} depends on {dependency}, which the table does not allow"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
Some words.

| L | crate | purpose | may depend on | unsafe |
|---|---|---|---|---|
| 0 | `guest_mem` | memory | – (on `vm-memory`) | home |
| 0 | `disk_image` | images | – | forbid |
| 1 | `virtqueue` | rings | `guest_mem` | forbid |
| 1 | `io_engine` | I/O | `disk_image guest_mem` | home |
| 3 | `blk_server` | server | levels 0–2 | forbid |
| 4 | `one_capi`, `two_capi` | C | what they wrap | homes |
| 5 | `bareblk` | program | all | forbid |
| – | `xtask` | chores | – | forbid |

After it.
";

    fn found(name: &str, dependencies: &[&str]) -> Vec<String> {
        let dependencies = dependencies.iter().map(|name| (*name).to_owned()).collect();
        violations(&parse_table(TEXT).unwrap(), &Crates::from([(name.to_owned(), dependencies)]))
    }

    #[test]
    fn dependency_that_is_listed_and_below_is_fine() {
        assert_eq!(found("io_engine", &["disk_image", "guest_mem"]), Vec::<String>::new());
    }

    #[test]
    fn dependency_that_is_not_listed_is_named() {
        assert_eq!(found("virtqueue", &["disk_image"]).len(), 1);
    }

    #[test]
    fn dependency_on_the_same_level_is_refused() {
        assert_eq!(
            found("virtqueue", &["io_engine"]),
            ["virtqueue (level 1) depends on io_engine (level 1, not smaller)"]
        );
    }

    #[test]
    fn range_of_levels_allows_what_is_in_it_and_no_more() {
        assert_eq!(found("blk_server", &["virtqueue", "guest_mem"]), Vec::<String>::new());
        assert_eq!(found("blk_server", &["bareblk"]).len(), 1);
    }

    #[test]
    fn word_all_allows_every_smaller_level() {
        assert_eq!(found("bareblk", &["blk_server", "two_capi"]), Vec::<String>::new());
    }

    #[test]
    fn crate_outside_the_table_is_named() {
        assert_eq!(found("stranger", &[]), ["stranger is not in the table"]);
    }

    #[test]
    fn dependency_without_level_is_refused() {
        assert_eq!(found("bareblk", &["xtask"]), ["bareblk depends on xtask, which has no level"]);
    }

    #[test]
    fn row_with_two_crates_counts_for_both() {
        let table = parse_table(TEXT).unwrap();
        assert_eq!(table["one_capi"], table["two_capi"]);
    }

    #[test]
    fn text_without_the_table_is_an_error() {
        assert!(parse_table("| a | b |\n|---|---|\n| 1 | 2 |\n").is_err());
    }

    #[test]
    fn metadata_gives_workspace_dependencies_without_those_of_tests() {
        let metadata = serde_json::json!({"packages": [
            {"name": "a", "dependencies": [
                {"name": "b", "kind": null}, {"name": "c", "kind": "dev"}, {"name": "libc", "kind": null}]},
            {"name": "b", "dependencies": []},
            {"name": "c", "dependencies": []},
            {"name": "xtask", "dependencies": []},
        ]});
        let crates = workspace_crates(&metadata).unwrap();
        assert_eq!(crates["a"], ["b"]);
        assert!(!crates.contains_key("xtask"));
    }
}
