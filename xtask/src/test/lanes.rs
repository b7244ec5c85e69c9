//! Runs test programs, some at the same time, each with its output in its own file.
//!
//! Prints one line per program, and the output of each failed one below its line.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::counts::Tests;

/// If no program ends for this long, the running programs are named.
const SILENCE: Duration = Duration::from_secs(60);

/// Name of the entry for the build in a run's list of programs.
pub(super) const BUILD: &str = "(build)";

/// A program to run.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) name: String,
    pub(super) command: Command,
    /// The file that receives the program's output.
    pub(super) output: PathBuf,
    /// Whether the output has result lines of several programs. If not, only the last result line is the program's own.
    pub(super) has_many: bool,
}

/// A program that has run.
#[derive(Debug, Clone)]
pub(super) struct Done {
    pub(super) name: String,
    pub(super) took: Duration,
    pub(super) tests: Tests,
    pub(super) passed: bool,
    /// Names of the tests that failed.
    pub(super) failed: Vec<String>,
    /// A failed program's output, without the tests that passed.
    said: String,
}

impl Done {
    /// A step that is no test program, with its time.
    pub(super) fn step(name: &str, took: Duration) -> Self {
        let (tests, failed) = (Tests::default(), Vec::new());
        Self { name: name.to_owned(), took, tests, passed: true, failed, said: String::new() }
    }
}

#[derive(Debug)]
enum News {
    Started(String),
    Ended(Result<Done>),
}

/// Runs all jobs in order, each as soon as a lane is free.
///
/// # Errors
/// A program cannot be started, or its output cannot be kept. The other programs run to their ends.
pub(super) fn run(jobs: Vec<Job>, at_once: usize) -> Result<Vec<Done>> {
    let total = jobs.len();
    let jobs = Mutex::new(VecDeque::from(jobs));
    let (sender, news) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..at_once.max(1) {
            let sender = sender.clone();
            scope.spawn(|| work(&jobs, sender));
        }
        drop(sender);
        gather(&news, total)
    })
}

fn work(jobs: &Mutex<VecDeque<Job>>, news: Sender<News>) {
    let next = || jobs.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    while let Some(job) = next() {
        let _ = news.send(News::Started(job.name.clone()));
        let _ = news.send(News::Ended(run_one(job)));
    }
}

fn gather(news: &Receiver<News>, total: usize) -> Result<Vec<Done>> {
    let (mut done, mut error, mut running) = (Vec::new(), None, BTreeMap::new());
    loop {
        match news.recv_timeout(SILENCE) {
            Ok(News::Started(name)) => drop(running.insert(name, Instant::now())),
            Ok(News::Ended(Ok(one))) => {
                running.remove(&one.name);
                done.push(one);
                print!("[{:>2}/{total}] {}", done.len(), line(&done[done.len() - 1]));
            }
            Ok(News::Ended(Err(failure))) => error = Some(failure),
            Err(RecvTimeoutError::Timeout) => println!("{}", still(&running)),
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    error.map_or(Ok(done), Err)
}

/// Runs one program to its end.
///
/// # Errors
/// It cannot be started, or its output cannot be kept.
pub(super) fn run_one(mut job: Job) -> Result<Done> {
    let kept = || format!("cannot write {}", job.output.display());
    let file = File::create(&job.output).with_context(kept)?;
    let copy = file.try_clone().with_context(kept)?;
    let started = Instant::now();
    let status = job.command.stdin(Stdio::null()).stdout(file).stderr(copy).status();
    let status = status.with_context(|| format!("cannot start {}", job.name))?;
    let took = started.elapsed();
    let output = String::from_utf8_lossy(&std::fs::read(&job.output).with_context(kept)?).into_owned();
    let passed = status.success();
    let mut tests = count(&output, job.has_many);
    if !passed && tests.failed == 0 {
        tests.failed = 1; // A test has ended the whole process.
    }
    let said = if passed { String::new() } else { format!("{}({status})\n", without_passed(&output)) };
    let failed = if passed { Vec::new() } else { failed_tests(&output) };
    Ok(Done { name: job.name, took, tests, passed, failed, said })
}

/// A program may print result lines of others, for example of itself in a guest. Its own is the last.
fn count(output: &str, has_many: bool) -> Tests {
    let mut results = output.lines().filter(|line| line.starts_with("test result: "));
    let mut tests = Tests::default();
    if has_many {
        results.for_each(|line| tests.add_line(line));
    } else {
        results.next_back().into_iter().for_each(|line| tests.add_line(line));
    }
    tests
}

fn is_verdict(line: &str, verdict: &str) -> bool {
    line.starts_with("test ") && line.ends_with(verdict)
}

fn without_passed(output: &str) -> String {
    let lines = output.lines().filter(|line| !is_verdict(line, " ... ok"));
    lines.map(|line| format!("{line}\n")).collect()
}

fn failed_tests(output: &str) -> Vec<String> {
    let failed = output.lines().filter(|line| is_verdict(line, " ... FAILED"));
    failed.map(|line| line["test ".len()..line.len() - " ... FAILED".len()].to_owned()).collect()
}

/// A line with the result, followed by the output of a failed program.
pub(super) fn line(done: &Done) -> String {
    let Done { name, took, tests, passed, said, .. } = done;
    let took = took.as_secs_f64();
    if *passed {
        return format!("{name}: {} passed in {took:.1} s\n", tests.passed);
    }
    format!("{name}: FAILED after {took:.1} s, {} passed, {} failed\n{said}", tests.passed, tests.failed)
}

fn still(running: &BTreeMap<String, Instant>) -> String {
    let each = running.iter().map(|(name, since)| format!("{name} ({} s)", since.elapsed().as_secs()));
    format!("still running: {}", each.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(folder: &std::path::Path, name: &str, script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]).current_dir(folder);
        Job { name: name.to_owned(), command, output: folder.join(name), has_many: false }
    }

    fn passed(at_once: usize, scripts: [&str; 2]) -> usize {
        let folder = tempfile::tempdir().unwrap();
        let [one, two] = scripts.map(str::to_owned);
        let jobs = vec![job(folder.path(), "first", &one), job(folder.path(), "second", &two)];
        run(jobs, at_once).unwrap().iter().filter(|one| one.passed).count()
    }

    #[test]
    fn programs_of_two_lanes_run_at_the_same_time() {
        let meet = |own: &str, other: &str| {
            format!("touch {own}; for i in $(seq 600); do [ -e {other} ] && exit 0; sleep 0.05; done; exit 1")
        };
        assert_eq!(passed(2, [&meet("one", "two"), &meet("two", "one")]), 2);
    }

    #[test]
    fn programs_of_one_lane_run_one_after_another() {
        let alone = "mkdir busy && sleep 0.2 && rmdir busy";
        assert_eq!(passed(1, [alone, alone]), 2);
    }

    #[test]
    fn failed_program_is_told_with_its_output_and_without_the_tests_that_passed() {
        let folder = tempfile::tempdir().unwrap();
        let script = "echo 'test a::good ... ok'; echo 'test a::bad ... FAILED'; echo why >&2; \
                      echo 'test result: FAILED. 1 passed; 1 failed; 0 ignored'; exit 101";
        let done = run(vec![job(folder.path(), "bad", script)], 2).unwrap().remove(0);
        assert_eq!((done.tests.passed, done.tests.failed, done.passed), (1, 1, false));
        assert_eq!(done.failed, ["a::bad"]);
        let text = line(&done);
        assert!(text.contains("why\n") && text.contains("a::bad") && !text.contains("a::good"), "{text}");
    }

    #[test]
    fn only_the_last_result_is_the_programs_own_unless_it_runs_many() {
        let result = |passed: u32| format!("test result: ok. {passed} passed; 0 failed; 0 ignored\n");
        let output = result(3) + &result(5);
        assert_eq!(count(&output, false).passed, 5);
        assert_eq!(count(&output, true).passed, 8);
    }

    #[test]
    fn program_that_dies_without_a_result_counts_as_a_failure() {
        let folder = tempfile::tempdir().unwrap();
        let done = run(vec![job(folder.path(), "dead", "kill -9 $$")], 1).unwrap().remove(0);
        assert_eq!((done.tests.failed, done.passed), (1, false));
        assert!(line(&done).contains("signal: 9"), "{}", line(&done));
    }

    #[test]
    fn program_that_cannot_start_is_an_error_and_the_others_run() {
        let folder = tempfile::tempdir().unwrap();
        let mut gone = job(folder.path(), "gone", "");
        gone.command = Command::new("/no/such/program");
        let error = run(vec![gone, job(folder.path(), "good", "touch ran")], 1).unwrap_err();
        assert!(error.to_string().contains("gone"), "{error:#}");
        assert!(folder.path().join("ran").exists());
    }
}
