//! Options that choose and tune the I/O engine: each is declared here once, with its help and its limits.
//!
//! `EngineArgs → configuration() → EngineConfig`: the only conversion to the engines' own settings
//!
//! Not here: which engine suits which file (`io_engine`'s `choose`).

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use io_engine::{EngineChoice, EngineConfig, EngineError, EngineKind, MAX_FD_POOL};

/// Longest time that can be given for the submission thread: longer is a thread that never sleeps.
const MAX_SQPOLL_MS: u64 = 60_000;
/// Most threads: far beyond what any number gains.
const MAX_IO_THREADS: u32 = 1024;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "I/O engine")]
pub struct EngineArgs {
    /// How I/O reaches the kernel; `bareblk engines` shows what works on this host
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = engine())]
    pub engine: EngineChoice,

    /// io_uring: a kernel thread submits; it sleeps after this many milliseconds without work [default: off]
    #[arg(long, value_name = "MS", value_parser = number("whole milliseconds, without a unit,", 1..=60_000_u64))]
    pub sqpoll_ms: Option<u64>,

    /// io_uring: poll for completions; needs --cache none or directsync; uses a whole CPU under load
    #[arg(long)]
    pub iopoll: bool,

    /// io_uring: register guest memory; saves CPU and locks all guest memory. Breaks balloon, free-page reporting and
    /// virtio-mem: reads into pages that the guest gave back succeed, and their data is lost
    #[arg(long)]
    pub pin_guest_memory: bool,

    /// posix-aio: descriptors per image, over which requests are spread [default: 4]
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_FD_POOL))]
    pub fd_pool: Option<u32>,

    /// Most threads for blocking calls (not with io_uring); with many disks, half of this number plus one per disk if
    /// that is more [default: 64]
    #[arg(long, value_name = "N", value_parser = whole(1..=1024_u32))]
    pub io_threads: Option<u32>,
}

impl EngineArgs {
    /// The engine that was asked for, with its options; `None`: the best that works, with its usual options.
    pub fn options(&self) -> Result<Option<EngineOptions>, EngineError> {
        self.refuse_foreign()?;
        let EngineChoice::Named(kind) = self.engine else { return Ok(None) };
        Ok(Some(match EngineOptions::from(kind) {
            EngineOptions::IoUring(_) => EngineOptions::IoUring(IoUringOptions {
                sqpoll_idle: self.sqpoll_ms.map(Duration::from_millis),
                iopoll: self.iopoll,
                pin_guest_memory: self.pin_guest_memory,
            }),
            EngineOptions::PosixAio(PosixAioOptions { fd_pool }) => {
                EngineOptions::PosixAio(PosixAioOptions { fd_pool: self.fd_pool.unwrap_or(fd_pool) })
            }
            without => without,
        }))
    }

    /// An option that would be ignored is a mistake. `auto` takes none, because it may choose any engine.
    fn refuse_foreign(&self) -> Result<(), EngineError> {
        let given = [
            ("--fd-pool", EngineKind::PosixAio, self.fd_pool.is_some()),
            ("--sqpoll-ms", EngineKind::IoUring, self.sqpoll_ms.is_some()),
            ("--iopoll", EngineKind::IoUring, self.iopoll),
            ("--pin-guest-memory", EngineKind::IoUring, self.pin_guest_memory),
        ];
        let is_foreign = |owner| self.engine != EngineChoice::Named(owner);
        match given.into_iter().find(|&(_, owner, given)| given && is_foreign(owner)) {
            Some((option, owner, _)) => Err(EngineError::Option { option, owner, kind: self.engine }),
            None => Ok(()),
        }
    }

    /// What all engines share, everything else as usual.
    pub fn configuration(&self) -> EngineConfig {
        let usual = EngineConfig::default();
        EngineConfig { threads: self.io_threads.unwrap_or(usual.threads), ..usual }
    }
}

/// The engines' own names, with a line of help for each.
fn engine() -> impl TypedValueParser<Value = EngineChoice> {
    let choices = std::iter::once(EngineChoice::Auto).chain(EngineKind::ALL.map(EngineChoice::Named));
    let values = choices.map(|choice| PossibleValue::new(name(choice)).help(help(choice)));
    PossibleValuesParser::new(values).try_map(|text| text.parse::<EngineChoice>())
}

fn name(choice: EngineChoice) -> &'static str {
    match choice {
        EngineChoice::Auto => "auto",
        EngineChoice::Named(kind) => kind.name(),
    }
}

fn help(choice: EngineChoice) -> &'static str {
    match choice {
        EngineChoice::Auto => "The best engine that works for the image; the log says which one and why",
        EngineChoice::Named(EngineKind::IoUring) => "One ring shared with the kernel, for everything",
        EngineChoice::Named(EngineKind::LinuxAio) => "io_submit; needs --cache none or directsync",
        EngineChoice::Named(EngineKind::PosixAio) => "The C library's aio_read and aio_write",
        EngineChoice::Named(EngineKind::Threads) => "A pool of threads; works everywhere",
        EngineChoice::Named(EngineKind::Sync) => {
            "Calls in the worker itself; the fastest safe engine for images in memory"
        }
        EngineChoice::Named(EngineKind::Mmap) => {
            "Copies from and to a mapping; only for images in memory (tmpfs) and DAX"
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    #[command(no_binary_name = true)]
    struct Line {
        #[command(flatten)]
        engine: EngineArgs,
    }

    fn read(line: &str) -> Result<EngineConfig> {
        Line::try_parse_from(line.split_whitespace())?.engine.configuration(CacheMode::Writeback)
    }

    #[test]
    fn counts_have_limits_on_both_sides() {
        assert_eq!(read("--engine posix-aio --fd-pool 1").unwrap().fd_pool, 1);
        assert_eq!(read("--engine threads --io-threads 1024").unwrap().threads, 1024);
        for line in ["--fd-pool 0", "--fd-pool 65", "--io-threads many", "--sqpoll-ms 0", "--sqpoll-ms 60001"]
        {
            let text = read(line).unwrap_err().to_string();
            assert!(text.contains(" from 1 to "), "{text}");
        }
    }

    #[test]
    fn every_engine_can_be_chosen_by_its_name() {
        for kind in EngineKind::ALL {
            let line = Line::try_parse_from(["--engine", kind.name()]).unwrap();
            assert_eq!(line.engine.engine, EngineChoice::Named(kind));
        }
        assert_eq!(Line::try_parse_from([""; 0]).unwrap().engine.engine, EngineChoice::Auto);
    }

    #[test]
    fn option_of_another_engine_is_refused_by_name_even_with_its_default() {
        for (line, option, owner) in [
            ("--engine threads --fd-pool 4", "--fd-pool", "posix-aio"),
            ("--sqpoll-ms 5", "--sqpoll-ms", "io_uring"),
            ("--engine sync --pin-guest-memory", "--pin-guest-memory", "io_uring"),
        ] {
            let text = read(line).unwrap_err().to_string();
            let end = format!(": add --engine {owner}");
            assert!(text.starts_with(option) && text.ends_with(&end), "{text}");
        }
        assert!(read("--engine io_uring --io-threads 2").unwrap_err().to_string().contains("no effect"));
        let polled = read("--engine io_uring --iopoll").unwrap_err().to_string();
        assert!(polled.contains("the cache mode is writeback"), "{polled}");
    }

    fn args(engine: &str) -> EngineArgs {
        EngineArgs {
            engine: engine.parse().unwrap(),
            sqpoll_ms: None,
            iopoll: false,
            pin_guest_memory: false,
            fd_pool: None,
            io_threads: None,
        }
    }

    #[test]
    fn option_of_another_engine_is_refused_by_name() {
        for engine in ["auto", "threads"] {
            let error = EngineArgs { iopoll: true, ..args(engine) }.options().unwrap_err().to_string();
            let expected = format!("the engine is {engine}: add --engine io_uring");
            assert!(error.starts_with("--iopoll is") && error.ends_with(&expected), "{error}");
        }
        // Also the default, which would be ignored like any other number.
        let error = EngineArgs { fd_pool: Some(4), ..args("io_uring") }.options().unwrap_err().to_string();
        assert!(error.starts_with("--fd-pool is an option of engine posix-aio"), "{error}");
    }

    #[test]
    fn options_reach_the_engine_that_has_them() {
        let ring = EngineArgs { sqpoll_ms: Some(20), pin_guest_memory: true, ..args("io_uring") };
        let sqpoll_idle = Some(Duration::from_millis(20));
        let expected = IoUringOptions { sqpoll_idle, iopoll: false, pin_guest_memory: true };
        assert_eq!(ring.options().unwrap(), Some(EngineOptions::IoUring(expected)));
        let pool = EngineArgs { fd_pool: Some(2), ..args("posix-aio") };
        let expected = PosixAioOptions { fd_pool: 2 };
        assert_eq!(pool.options().unwrap(), Some(EngineOptions::PosixAio(expected)));
        assert_eq!(args("auto").options().unwrap(), None);
    }
}
