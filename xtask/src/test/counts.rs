//! How many tests passed, failed and skipped themselves.

use std::fmt;

/// Tests counted over all test programs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub(super) struct Tests {
    pub(super) passed: u64,
    pub(super) failed: u64,
    /// Tests that skipped themselves. libtest counts them as passed, but this count does not.
    pub(super) skipped: u64,
}

impl Tests {
    pub(super) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// Moves this many tests from passed to skipped.
    pub(super) fn skip(&mut self, count: u64) {
        self.passed = self.passed.saturating_sub(count);
        self.skipped += count;
    }

    /// Adds a line like `test result: ok. 22 passed; 0 failed; 0 ignored; …`; other lines change nothing.
    pub(super) fn add_line(&mut self, line: &str) {
        let Some(counts) = line.strip_prefix("test result: ") else { return };
        for count in counts.split(['.', ';']) {
            match count.trim().split_once(' ').map(|(number, what)| (number.parse::<u64>(), what)) {
                Some((Ok(number), "passed")) => self.passed += number,
                Some((Ok(number), "failed")) => self.failed += number,
                _ => {}
            }
        }
    }
}

impl fmt::Display for Tests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_lines_add_up_and_others_do_not_count() {
        let mut tests = Tests::default();
        tests.add_line(
            "test result: ok. 22 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        );
        tests.add_line("test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out");
        tests.add_line("test some::name ... ok");
        tests.skip(3);
        assert_eq!(tests, Tests { passed: 22, failed: 2, skipped: 3 });
        assert_eq!(tests.to_string(), "22 passed, 2 failed, 3 skipped");
    }
}
