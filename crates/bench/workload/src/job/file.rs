//! Parses fio's job files: `[global]`, sections, `key=value`, keys alone, `;` and `#` comments.
//!
//! `text → lines → [global] applies to the sections below it → one Job per section`
//!
//! - Every error names the line and the section. The existing INI crates (`rust-ini`, `configparser`) do not report
//!   line numbers, and one of them merges keys without a value. The syntax has only four kinds of line.
//! - fio runs sections at the same time unless `stonewall` separates them. This program runs them one after another, so
//!   an unseparated section is an error.
//!
//! Facts: fio 3.33, HOWTO, "Job file format".

use super::options::OptionError;
use super::{Job, JobError};

/// The error and its location.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobFileError {
    /// An invalid option.
    #[error("line {line}, section [{section}]: {source}")]
    Option {
        /** Number of the line, from 1. */
        line: usize,
        /** The section's name. */
        section: String,
        /** The option, and the reason. */
        source: OptionError,
    },
    /// A line that is neither section, option nor comment.
    #[error("line {line}: '{text}' is outside any section: begin the file with [global] or [NAME]")]
    NoSection {
        /** Number of the line, from 1. */
        line: usize,
        /** The line. */
        text: String,
    },
    /// A section name without its `]`.
    #[error("line {line}: section '{text}' has no closing ']'")]
    Bracket {
        /** Number of the line, from 1. */
        line: usize,
        /** The line. */
        text: String,
    },
    /// The file has no section other than `[global]`.
    #[error("the file has no job: add a section [NAME]")]
    NoJob,
    /// Sections that fio would run at the same time.
    #[error(
        "section [{section}] would run together with the previous one in fio, but this program runs one section after \
         another: to accept that, add stonewall to [{section}] or to [global]"
    )]
    Together {
        /** The later section. */
        section: String,
    },
    /// Options that exclude each other.
    #[error("section [{section}]: {source}")]
    Job {
        /** The section's name. */
        section: String,
        /** The options that exclude each other. */
        source: JobError,
    },
}

/// Reads a job file. `given`: options of the command line, which take precedence over those of the file.
///
/// # Errors
/// [`JobFileError`].
pub fn parse(text: &str, given: &[(String, Option<String>)]) -> Result<Vec<Job>, JobFileError> {
    let mut global = Job::default();
    let mut jobs: Vec<Job> = Vec::new();
    let mut section: Option<String> = None;
    for (line, text) in text.lines().enumerate().map(|(index, text)| (index + 1, text.trim())) {
        if text.is_empty() || text.starts_with([';', '#']) {
            continue;
        }
        if let Some(rest) = text.strip_prefix('[') {
            let bracket = || JobFileError::Bracket { line, text: quoted(text) };
            let name = rest.split_once(']').ok_or_else(bracket)?.0;
            if name != "global" {
                jobs.push(begin(&global, name));
            }
            section = Some(name.to_owned());
            continue;
        }
        let no_section = || JobFileError::NoSection { line, text: quoted(text) };
        let name = section.as_deref().ok_or_else(no_section)?;
        let job = if name == "global" { &mut global } else { jobs.last_mut().ok_or_else(no_section)? };
        let (option, value) = option(text);
        job.set(option, value).map_err(|source| JobFileError::Option {
            line,
            section: name.to_owned(),
            source,
        })?;
    }
    finish(jobs, given)
}

/// Shortens arbitrary text for a message and removes special characters.
fn quoted(text: &str) -> String {
    const MOST: usize = 40;
    let shown: String = text.chars().take(MOST).flat_map(char::escape_debug).collect();
    if text.chars().count() > MOST { shown + "…" } else { shown }
}

/// A section starts with the options that `[global]` has set so far.
fn begin(global: &Job, name: &str) -> Job {
    let (options, global_options) = (Vec::new(), global.options.clone());
    Job { name: name.to_owned(), options, global_options, ..global.clone() }
}

/// "bs = 4k ; note" → bs, 4k. Within a line, a comment starts after white space.
fn option(text: &str) -> (&str, Option<&str>) {
    let end = [" ;", "\t;", " #", "\t#"].iter().filter_map(|mark| text.find(mark)).min();
    let text = text.get(..end.unwrap_or(text.len())).unwrap_or(text).trim();
    match text.split_once('=') {
        Some((option, value)) => (option.trim(), Some(value.trim())),
        None => (text, None),
    }
}

fn finish(mut jobs: Vec<Job>, given: &[(String, Option<String>)]) -> Result<Vec<Job>, JobFileError> {
    for job in &mut jobs {
        let section = job.name.clone();
        for (option, value) in given {
            let refused = |source| JobFileError::Option { line: 0, section: section.clone(), source };
            job.set(option, value.as_deref()).map_err(refused)?;
        }
        job.check().map_err(|source| JobFileError::Job { section, source })?;
    }
    if let Some(job) = jobs.iter().skip(1).find(|job| !job.stonewall) {
        return Err(JobFileError::Together { section: job.name.clone() });
    }
    if jobs.is_empty() { Err(JobFileError::NoJob) } else { Ok(jobs) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published set of jobs with which the unlocked kick was measured.
    const KICK: &str = "\
; caches dropped first
[global]
group_reporting
norandommap
ioscheduler=noop
thread
bs=512
size=4MB
direct=1
numjobs=256
ioengine=aio
iodepth=64
loops=3
stonewall

[read]
rw=read
[write]
rw=write
# two more
[randread]
rw=randread
[randwrite]
rw = randwrite   ; the last one
";

    fn refusal(text: &str) -> String {
        parse(text, &[]).unwrap_err().to_string()
    }

    #[test]
    fn published_job_is_read_as_it_stands() {
        let jobs = parse(KICK, &[]).unwrap();
        let words: Vec<_> = jobs.iter().map(|job| (job.name.as_str(), job.pattern.word())).collect();
        let same = ["read", "write", "randread", "randwrite"].map(|word| (word, word));
        assert_eq!(words, same);
        let job = &jobs[3];
        assert_eq!((job.block_bytes, job.size_bytes, job.jobs, job.depth), (512, Some(4 << 20), 256, 64));
        assert!(job.loops == 3 && job.group_reporting && job.direct, "{job:?}");
        assert_eq!(job.options, [("rw".to_owned(), "randwrite".to_owned())]);
        assert_eq!(job.global_options.len(), 12);
    }

    #[test]
    fn unknown_option_is_named_with_section_and_line() {
        let line = refusal("[global]\nbs=4k\n\n[a]\nzonemode=zbd\n");
        assert!(
            line.starts_with("line 5, section [a]: option 'zonemode' is unknown; known options: "),
            "{line}"
        );
    }

    #[test]
    fn value_that_is_not_understood_is_named_with_section_and_line() {
        let line = refusal("[global]\niodepth=many\n[a]\n");
        assert_eq!(
            line,
            "line 2, section [global]: iodepth=many is invalid: give a whole number from 1 to 4096"
        );
    }

    #[test]
    fn sections_without_stonewall_are_refused_by_name() {
        let line = refusal("[a]\nrw=read\n[b]\nrw=write\n");
        assert!(line.starts_with("section [b] would run together") && line.contains("stonewall"), "{line}");
    }

    #[test]
    fn later_global_section_applies_to_what_follows_it() {
        let jobs = parse("[global]\nbs=4k\n[a]\n[global]\nbs=8k\n[b]\nstonewall\n", &[]).unwrap();
        assert_eq!([jobs[0].block_bytes, jobs[1].block_bytes], [4096, 8192]);
    }

    #[test]
    fn command_line_stands_above_the_file() {
        let jobs = parse("[a]\nruntime=120\n", &[("runtime".to_owned(), Some("1".to_owned()))]).unwrap();
        assert_eq!(jobs[0].runtime.map(|time| time.as_secs()), Some(1));
    }

    #[test]
    fn text_that_is_no_job_file_is_refused() {
        assert!(refusal("bs=4k\n").starts_with("line 1: 'bs=4k' is outside any section"));
        let zeroes = refusal(&"\0".repeat(5000));
        assert!(zeroes.starts_with(r"line 1: '\0\0") && zeroes.len() < 200, "{zeroes}");
        assert!(refusal("[a\n").starts_with("line 1: section '[a' has no closing"));
        assert!(refusal("; nothing\n").starts_with("the file has no job"));
        assert!(refusal("[a]\nbs=1000\n").starts_with("section [a]: bs=1000"));
    }
}
