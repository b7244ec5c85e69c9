//! `cargo xtask mutants`: weakens the lock in every way, one change at a time, and tests whether a check notices.
//!
//! Weakens every ordering of every atomic access, removes every wake and every marked re-check, and inserts
//! bugs that other locks had (`mutants/historic.toml`), one at a time, in a copy of the crate under
//! `target/mutants`. A check must notice each of them. A mutant that no check notices is a survivor, and
//! `mutants/survivors.toml` must say why: nothing can go wrong (equivalent), or the checks have a blind spot.
//!
//! Fails if a survivor is not explained, or if an explained one no longer survives.

mod check;
mod find;
mod historic;
mod mutant;
mod report;
mod survivors;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use xtask::workspace;

use check::{Bench, Judged, Verdict};
use mutant::{CRATE, Mutant};

/// Folder for copies and results, in the repository.
const PLACE: &str = "target/mutants";

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Run only a small fixed selection of mutants, each of which a check must notice
    #[arg(long)]
    smoke: bool,
    /// Run only mutants whose name contains this text
    #[arg(long)]
    only: Option<String>,
    /// List the mutants, and do nothing else
    #[arg(long)]
    list: bool,
    /// Keep the verdicts of an earlier run on the same source
    #[arg(long)]
    resume: bool,
    /// Number of mutants checked at the same time [default: one per processor]
    #[arg(long)]
    jobs: Option<usize>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let root = workspace::root();
    let mutants = chosen(args, all(&root.join(CRATE))?);
    if args.list {
        mutants.iter().for_each(|mutant| println!("{:<28} {}", mutant.place, mutant.name));
        println!("{} mutants", mutants.len());
        return Ok(());
    }
    if mutants.is_empty() {
        bail!("no mutant matches: `cargo xtask mutants --list` names them");
    }
    let place = root.join(PLACE);
    let digest = report::digest(&root.join(CRATE))?;
    let run = Run {
        earlier: if args.resume { report::earlier(&place, &digest)? } else { Vec::new() },
        is_smoke: args.smoke,
        progress: progress_bar(mutants.len()),
        next: AtomicUsize::new(0),
        judged: Mutex::new(Vec::new()),
        root,
        place,
        digest,
        mutants,
    };
    let jobs = args.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    run.judge_all(jobs.clamp(1, run.mutants.len()))?;
    let is_all = !args.smoke && args.only.is_none();
    conclude(&run.root, &run.judged()?, is_all)
}

fn all(folder: &Path) -> Result<Vec<Mutant>> {
    let mut mutants = find::mechanical(folder)?;
    mutants.extend(historic::injected(folder)?);
    historic::mark_smoke(&mut mutants)?;
    Ok(mutants)
}

fn chosen(args: &Args, mutants: Vec<Mutant>) -> Vec<Mutant> {
    let wanted = |mutant: &Mutant| {
        (!args.smoke || mutant.in_smoke)
            && args.only.as_ref().is_none_or(|part| mutant.name.contains(part.as_str()))
    };
    mutants.into_iter().filter(wanted).collect()
}

/// A run of mutants through the checks.
struct Run {
    root: PathBuf,
    place: PathBuf,
    digest: String,
    mutants: Vec<Mutant>,
    /// Verdicts of an earlier run on the same source.
    earlier: Vec<(String, Verdict)>,
    is_smoke: bool,
    progress: ProgressBar,
    next: AtomicUsize,
    judged: Mutex<Vec<Judged>>,
}

impl Run {
    fn judge_all(&self, jobs: usize) -> Result<()> {
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..jobs).map(|job| scope.spawn(move || self.work(job))).collect();
            workers
                .into_iter()
                .try_for_each(|worker| worker.join().unwrap_or_else(|_| bail!("a worker panicked")))
        })?;
        self.progress.finish_and_clear();
        Ok(())
    }

    /// First runs every check on the unchanged source: a check that fails anyway proves nothing. In a smoke run it is
    /// enough that the copy compiles, because the tests have run all checks before.
    fn work(&self, job: usize) -> Result<()> {
        let bench = Bench::set_up(&self.root, &self.place.join(format!("job-{job}")))?;
        bench.must_pass_unchanged(self.is_smoke)?;
        while let Some(mutant) = self.mutants.get(self.next.fetch_add(1, Relaxed)) {
            let known = self.earlier.iter().find(|(name, _)| *name == mutant.name);
            let verdict = match known {
                Some((_, verdict)) => verdict.clone(),
                None => bench.judge(mutant, self.is_smoke)?,
            };
            self.add(Judged { mutant: mutant.clone(), verdict })?;
        }
        Ok(())
    }

    /// Saves the verdict at once, so that an interrupted run can be resumed.
    fn add(&self, one: Judged) -> Result<()> {
        let line = format!("{:<10} {}", one.verdict.short(), one.mutant.name);
        self.progress.suspend(|| println!("{line}"));
        self.progress.inc(1);
        let mut judged = self.judged.lock().ok().context("a worker panicked")?;
        judged.push(one);
        judged.sort_by_key(|one| self.mutants.iter().position(|mutant| mutant.name == one.mutant.name));
        report::keep(&self.place, &self.digest, &judged)
    }

    fn judged(&self) -> Result<Vec<Judged>> {
        Ok(self.judged.lock().ok().context("a worker panicked")?.clone())
    }
}

fn progress_bar(count: usize) -> ProgressBar {
    let bar = ProgressBar::new(count as u64);
    if let Ok(style) =
        ProgressStyle::with_template("{bar:30} {pos}/{len} mutants, {elapsed}, about {eta} to go")
    {
        bar.set_style(style);
    }
    bar
}

fn conclude(root: &Path, judged: &[Judged], is_all: bool) -> Result<()> {
    let explained = survivors::read(&fs::read_to_string(root.join(survivors::FILE))?)?;
    println!("{}", report::summary(judged));
    if is_all {
        let path = root.join("docs/internals/qspinlock-mutations.md");
        fs::write(&path, report::markdown(judged, &explained))?;
        println!("written: {}", path.display());
    }
    let complaints = survivors::complaints(judged, &explained);
    complaints.iter().for_each(|complaint| println!("{complaint}"));
    if !complaints.is_empty() {
        bail!("the outcomes of {} mutants differ from the list of survivors", complaints.len());
    }
    Ok(())
}
