//! The times of a run: its steps, and the slowest test programs.

use std::time::Duration;

use super::lanes::{BUILD, Done};
use super::step::Finished;

/// Number of programs in the table; the other programs take little time.
const SHOWN: usize = 10;

/// A line per step, and the time of the whole run, which is less than the sum if steps ran at the same time.
pub(super) fn steps(finished: &[Finished], total: Duration) -> String {
    let line =
        |step: &Finished| format!("{:<8} {:>8.1} s  {}\n", step.name, step.took.as_secs_f64(), step.outcome);
    let lines: String = finished.iter().map(line).collect();
    format!("{:<8} {:>10}  outcome\n{lines}{:<8} {:>8.1} s\n", "step", "time", "all", total.as_secs_f64())
}

/// A line per slow program; empty if none ran.
pub(super) fn programs(done: &[Done], at_once: usize) -> String {
    let Some(build) = done.iter().find(|one| is_build(one)) else { return String::new() };
    let mut programs: Vec<&Done> = done.iter().filter(|one| !is_build(one)).collect();
    programs.sort_by_key(|one| std::cmp::Reverse(one.took));
    let line =
        |one: &&Done| format!("{:>8.1} s  {} ({})\n", one.took.as_secs_f64(), one.name, one.tests.passed);
    let lines: String = programs.iter().take(SHOWN).map(line).collect();
    format!(
        "tests: {:.1} s to build; the slowest of {} programs ({at_once} at once), with their tests:\n{lines}",
        build.took.as_secs_f64(),
        programs.len(),
    )
}

fn is_build(one: &Done) -> bool {
    one.name == BUILD
}

/// A line per test that failed, with its program.
pub(super) fn failed(done: &[Done]) -> String {
    let tests = |one: &Done| {
        let name = one.name.clone();
        let ended = (!one.passed && one.failed.is_empty())
            .then(|| "the program ended before its tests did".to_owned());
        one.failed.clone().into_iter().chain(ended).map(move |test| format!("FAILED: {name}: {test}\n"))
    };
    done.iter().flat_map(tests).collect()
}

#[cfg(test)]
mod tests {
    use super::super::step::Outcome;
    use super::*;

    fn done(name: &str, seconds: u64) -> Done {
        Done::step(name, Duration::from_secs(seconds))
    }

    #[test]
    fn summary_has_a_line_per_step_with_its_outcome() {
        let took = Duration::from_millis(1500);
        let finished = [
            Finished { name: "format", outcome: Outcome::Passed, took },
            Finished { name: "aarch64", outcome: Outcome::Skipped("no target".to_owned()), took },
        ];
        let text = steps(&finished, Duration::from_secs(2));
        assert!(text.contains("format        1.5 s  passed\n"), "{text}");
        assert!(text.contains("aarch64       1.5 s  skipped: no target\n"), "{text}");
        assert!(text.ends_with("all           2.0 s\n"), "{text}");
    }

    #[test]
    fn slow_programs_come_first_and_the_build_is_none() {
        let names: Vec<String> = (0..12).map(|index| format!("program {index}")).collect();
        let mut all: Vec<Done> = names.iter().zip(0..).map(|(name, seconds)| done(name, seconds)).collect();
        all.push(done(BUILD, 100));
        let text = programs(&all, 2);
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[0].starts_with("tests: 100.0 s to build; the slowest of 12 programs (2 at once)"),
            "{text}"
        );
        assert_eq!((lines[1], lines.len()), ("    11.0 s  program 11 (0)", 1 + SHOWN));
        assert_eq!(programs(&[], 2), "");
    }

    #[test]
    fn failed_tests_are_named_and_a_program_that_died_too() {
        let mut bad = done("lab it", 1);
        (bad.passed, bad.failed) = (false, vec!["a::b".to_owned()]);
        let mut dead = done("lab lib", 1);
        dead.passed = false;
        let text = failed(&[done("x it", 1), bad, dead]);
        assert_eq!(text, "FAILED: lab it: a::b\nFAILED: lab lib: the program ended before its tests did\n");
    }
}
