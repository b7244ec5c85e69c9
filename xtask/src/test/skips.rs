//! Collects and prints what did not run: tests that skipped themselves, and steps that were left out.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use anyhow::{Result, anyhow};
use serde::Serialize;
use xtask::skip::{self, Extent, Reason, Skip};

/// The file to which tests append, and the skips read from it.
#[derive(Debug)]
pub(super) struct Skips {
    file: tempfile::NamedTempFile,
    read_bytes: usize,
    found: BTreeSet<Skip>,
}

impl Skips {
    pub(super) fn new() -> Result<Self> {
        let file = tempfile::Builder::new().prefix("bareblk-skips-").tempfile()?;
        Ok(Self { file, read_bytes: 0, found: BTreeSet::new() })
    }

    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Reads the skips of the last step. Returns how many of its tests did not run.
    pub(super) fn read(&mut self) -> Result<u64> {
        let text = std::fs::read_to_string(self.path())?;
        let new = skip::read(&text[self.read_bytes..])
            .map_err(|error| anyhow!("the skips file has a line that is no skip: {error}"))?;
        self.read_bytes = text.len();
        let whole = new.iter().filter(|skip| skip.extent == Extent::Whole).map(|skip| &skip.test);
        let tests = whole.collect::<BTreeSet<_>>().len();
        self.found.extend(new);
        Ok(tests as u64)
    }

    /// All skips, each with the verdict of `explains` on its reason. Calls `explains` once for each reason.
    pub(super) fn judged(&self, explains: impl Fn(&Reason) -> bool) -> Vec<Judged> {
        let reasons: BTreeSet<&Reason> = self.found.iter().map(|skip| &skip.reason).collect();
        let verdicts: BTreeMap<&Reason, bool> =
            reasons.into_iter().map(|reason| (reason, explains(reason))).collect();
        let judge = |skip: &Skip| Judged { explained: verdicts[&skip.reason], skip: skip.clone() };
        self.found.iter().map(judge).collect()
    }
}

/// A skip, and whether the machine explains it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Judged {
    #[serde(flatten)]
    pub(super) skip: Skip,
    pub(super) explained: bool,
}

/// One line per test below its reason, followed by the `steps` that did not run.
pub(super) fn table(judged: &[Judged], steps: &[(&str, &str)]) -> String {
    let mut text = String::new();
    let mut last = None;
    for Judged { skip, explained } in judged {
        if last != Some(&skip.reason) {
            let verdict = if *explained { "" } else { " (NOT EXPLAINED: this machine has it)" };
            let _ = writeln!(text, "skipped: {}{verdict}", skip.reason);
            last = Some(&skip.reason);
        }
        let _ = writeln!(text, "  {}{}", skip.test, remark(skip));
    }
    for (step, why) in steps {
        let _ = writeln!(text, "skipped: step {step}: {why}");
    }
    text
}

fn remark(skip: &Skip) -> String {
    let why = skip.why.split_whitespace().collect::<Vec<_>>().join(" ");
    match (skip.extent, why.as_str()) {
        (Extent::Whole, "") => String::new(),
        (Extent::Whole, why) => format!(" - {why}"),
        (Extent::Part, why) => format!(" - in part: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn skip(reason: Reason, test: &str, extent: Extent) -> Skip {
        Skip { reason, test: test.to_owned(), extent, why: "so\nit is".into() }
    }

    fn said(skips: &mut Skips, said: &[Skip]) {
        for skip in said {
            writeln!(skips.file, "{}", serde_json::to_string(skip).unwrap()).unwrap();
        }
    }

    #[test]
    fn test_that_skips_itself_twice_counts_once_and_a_part_does_not_count() {
        let mut skips = Skips::new().unwrap();
        let root = |test| skip(Reason::NotRoot, test, Extent::Whole);
        let part = skip(Reason::NoEngine("linux-aio".into()), "a::three", Extent::Part);
        said(&mut skips, &[root("a::one"), root("a::two"), root("a::one"), part]);
        assert_eq!(skips.read().unwrap(), 2);
        assert_eq!(skips.read().unwrap(), 0);
        said(&mut skips, &[root("b::one")]);
        assert_eq!(skips.read().unwrap(), 1);
        assert_eq!(skips.judged(|_| true).len(), 4);
    }

    #[test]
    fn line_that_no_test_writes_is_an_error() {
        let mut skips = Skips::new().unwrap();
        writeln!(skips.file, "skipped: just so").unwrap();
        assert!(skips.read().unwrap_err().to_string().contains("just so"));
    }

    #[test]
    fn table_names_each_test_under_its_reason_and_what_the_machine_does_not_explain() {
        let mut skips = Skips::new().unwrap();
        let part = skip(Reason::NoFuse, "a::two", Extent::Part);
        said(&mut skips, &[skip(Reason::NotRoot, "a::one", Extent::Whole), part]);
        skips.read().unwrap();
        let judged = skips.judged(|reason| *reason == Reason::NotRoot);
        let expected = "skipped: only for root\n  a::one - so it is\n\
                        skipped: no FUSE (NOT EXPLAINED: this machine has it)\n  a::two - in part: so it is\n\
                        skipped: step miri: not installed\n";
        assert_eq!(table(&judged, &[("miri", "not installed")]), expected);
    }
}
