//! `cargo xtask bench --ratchet`: checks that the instructions per request do not increase, in the build of the tests.
//!
//! The same build gives the same count in each run. A different version of Rust gives a different count, so a small
//! difference is not a failure.

use std::fs;

use anyhow::{Context, Result, bail};
use xtask::workspace;

use super::program::{self, FORMATS};

/// The file of recorded counts: one line per ring format, with the count and the format.
const FILE: &str = "xtask/instructions.txt";
/// Allowed increase over the recorded count, in percent.
const SLACK: u64 = 2;

pub(super) fn check() -> Result<()> {
    let text =
        fs::read_to_string(workspace::root().join(FILE)).with_context(|| format!("cannot read {FILE}"))?;
    let program = program::build(&workspace::root(), program::AS_IN_TESTS, None)?;
    let mut complaints = Vec::new();
    for (ring, _, args) in FORMATS {
        let (allowed, counted) = (recorded(&text, ring)?, program::instructions(&program, args)?);
        println!("{ring}: {counted} instructions per request in the build of the tests, {allowed} recorded");
        complaints.extend(complaint(ring, counted, allowed));
    }
    if complaints.is_empty() { Ok(()) } else { bail!("{}", complaints.join("\n")) }
}

fn recorded(text: &str, ring: &str) -> Result<u64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    let count = lines.find_map(|(count, name)| if name == ring { count.parse().ok() } else { None });
    count.with_context(|| format!("{FILE} has no line `NUMBER {ring}`"))
}

fn complaint(ring: &str, counted: u64, allowed: u64) -> Option<String> {
    let limit = allowed + allowed * SLACK / 100;
    (counted > limit).then(|| {
        format!(
            "{ring}: {counted} instructions per request, at most {limit} are allowed; `cargo xtask bench --compare \
             REV` shows the change; if it is intended, record the count in {FILE}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_may_be_a_little_higher_and_no_more() {
        assert_eq!(complaint("split", 1020, 1000), None);
        let said = complaint("split", 1021, 1000).unwrap();
        assert!(said.starts_with("split: 1021 instructions per request, at most 1020"), "{said}");
    }

    #[test]
    fn recorded_count_of_every_format_is_found() {
        let text = fs::read_to_string(workspace::root().join(FILE)).unwrap();
        assert!(FORMATS.iter().all(|(ring, ..)| recorded(&text, ring).unwrap() > 0));
        assert!(recorded("10 split\nten packed\n", "packed").is_err());
    }
}
