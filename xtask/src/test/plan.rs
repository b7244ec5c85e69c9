//! Chooses the steps, the crates for them, and the packages that they need.

use anyhow::{Context, Result, bail};
use xtask::packages::{self, Package};
use xtask::workspace;

use super::step::Step;

/// The steps for named crates without `--only`: the daily loop.
const OF_CRATES: &[&str] = &["format", "clippy", "tests"];

/// The steps in order, and the crates to which they are limited; no crate means the workspace.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) steps: Vec<&'static Step>,
    pub(super) crates: Vec<String>,
}

impl Plan {
    pub(super) fn new(steps: &'static [Step], only: &[String], crates: &[String]) -> Result<Self> {
        let known = if crates.is_empty() { Vec::new() } else { packages_of_workspace()? };
        choose(steps, only, crates, &known)
    }

    /// The packages that the chosen steps use on this machine.
    pub(super) fn packages(&self, is_long: bool) -> Vec<Package> {
        if !self.steps.iter().any(|step| step.uses_packages) {
            return Vec::new();
        }
        let mut wanted = packages::used_by_tests(&self.crates);
        if is_long {
            wanted.extend(packages::NEEDED_FOR_LONG);
        }
        wanted
    }
}

fn choose(steps: &'static [Step], only: &[String], crates: &[String], known: &[String]) -> Result<Plan> {
    let names = |steps: &[&Step]| steps.iter().map(|step| step.name).collect::<Vec<_>>().join(", ");
    let all: Vec<&Step> = steps.iter().collect();
    if let Some(name) = only.iter().find(|name| !steps.iter().any(|step| step.name == **name)) {
        bail!("step `{name}` does not exist; the steps are {}", names(&all));
    }
    if let Some(name) = crates.iter().find(|name| !known.contains(name)) {
        bail!("the workspace has no crate `{name}`; its crates are {}", known.join(", "));
    }
    let is_chosen = |step: &&Step| match (only, crates) {
        ([], []) => true,
        ([], _) => OF_CRATES.contains(&step.name),
        (only, _) => only.iter().any(|name| name == step.name),
    };
    let chosen: Vec<&Step> = steps.iter().filter(is_chosen).collect();
    if let Some(step) = chosen.iter().find(|step| !crates.is_empty() && !step.takes_crates) {
        let able: Vec<&Step> = steps.iter().filter(|step| step.takes_crates).collect();
        bail!(
            "step `{}` is for the whole workspace; the steps for single crates are {}",
            step.name,
            names(&able)
        );
    }
    Ok(Plan { steps: chosen, crates: crates.to_vec() })
}

fn packages_of_workspace() -> Result<Vec<String>> {
    let metadata = workspace::metadata()?;
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    let mut names: Vec<String> =
        packages.iter().filter_map(|package| package["name"].as_str().map(str::to_owned)).collect();
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::super::STEPS;
    use super::*;

    fn chosen(only: &[&str], crates: &[&str]) -> Result<Vec<&'static str>> {
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let plan = choose(STEPS, &owned(only), &owned(crates), &owned(&["lab", "virtqueue"]))?;
        Ok(plan.steps.iter().map(|step| step.name).collect())
    }

    #[test]
    fn all_steps_run_unless_some_are_named_and_then_in_the_tables_order() {
        assert_eq!(chosen(&[], &[]).unwrap().len(), STEPS.len());
        assert_eq!(chosen(&["tests", "format"], &[]).unwrap(), ["format", "tests"]);
    }

    #[test]
    fn crates_get_the_daily_loop_or_the_named_steps() {
        assert_eq!(chosen(&[], &["virtqueue"]).unwrap(), OF_CRATES);
        assert_eq!(chosen(&["doc"], &["virtqueue", "lab"]).unwrap(), ["doc"]);
    }

    #[test]
    fn wrong_name_is_refused_with_the_right_ones() {
        let says = |result: Result<Vec<&str>>| result.unwrap_err().to_string();
        let step = says(chosen(&["test"], &[]));
        assert!(step.contains("step `test` does not exist; the steps are format, layers, tidy"), "{step}");
        let name = says(chosen(&[], &["virtque"]));
        assert_eq!(name, "the workspace has no crate `virtque`; its crates are lab, virtqueue");
        let whole = says(chosen(&["layers"], &["lab"]));
        assert!(whole.contains("`layers` is for the whole workspace"), "{whole}");
        assert!(whole.ends_with("single crates are format, clippy, doc, tests"), "{whole}");
    }

    #[test]
    fn only_tests_need_packages_and_those_of_single_crates_need_fewer() {
        let names = |only: &str, crates: &[&str]| {
            let crates = crates.iter().map(|name| (*name).to_owned()).collect();
            let steps = STEPS.iter().filter(|step| step.name == only).collect();
            let plan = Plan { steps, crates };
            plan.packages(false).iter().map(|package| package.name).collect::<Vec<_>>()
        };
        assert!(names("clippy", &[]).is_empty());
        assert!(names("tests", &[]).contains(&"fio"));
        assert!(names("tests", &["virtqueue"]).is_empty());
        assert!(!names("tests", &["qspinlock_preload"]).contains(&"fio"));
    }
}
