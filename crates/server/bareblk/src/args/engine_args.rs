//! Options that choose and tune the I/O engine: each is declared here once, with its help and its limits.
//!
//! `EngineArgs → options(), configuration() → EngineOptions, EngineConfig`: the only conversions to the engines' settings

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use disk_image::CacheMode;
use io_engine::{
    EngineChoice, EngineConfig, EngineKind, EngineOptions, IoUringOptions, MAX_FD_POOL, PosixAioOptions,
};

use crate::args::usage::Wrong;
use crate::args::values::{number, whole};

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "I/O engine")]
pub struct EngineArgs {
    /// How I/O reaches the kernel; `bareblk engines` shows which engines work on this host
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = engine())]
    pub engine: EngineChoice,

    /// io_uring: a kernel thread submits requests, and sleeps after this many milliseconds without work [default: off]
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

    /// Maximum number of threads for blocking calls (not with io_uring); with many disks, half of this value plus one
    /// thread per disk if that is more [default: 64]
    #[arg(long, value_name = "N", value_parser = whole(1..=1024_u32))]
    pub io_threads: Option<u32>,
}

impl EngineArgs {
    /// The chosen engine with its options; `None`: the best engine that works, with its default options. `cache` is the
    /// disk's cache mode.
    ///
    /// Refuses options that the chosen engine would ignore. `auto` takes none: it may choose any engine.
    pub fn options(&self, cache: CacheMode) -> Result<Option<EngineOptions>> {
        self.check(cache)?;
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

    fn check(&self, cache: CacheMode) -> Result<()> {
        let Self { engine, sqpoll_ms, iopoll, pin_guest_memory, fd_pool, io_threads } = self;
        let owners = [
            ("--sqpoll-ms", EngineKind::IoUring, sqpoll_ms.is_some()),
            ("--iopoll", EngineKind::IoUring, *iopoll),
            ("--pin-guest-memory", EngineKind::IoUring, *pin_guest_memory),
            ("--fd-pool", EngineKind::PosixAio, fd_pool.is_some()),
        ];
        if *iopoll && !cache.is_direct() {
            bail!(Wrong(format!(
                "--iopoll needs --cache none or directsync, but the cache mode is {cache}: the page cache \
                 has nothing to poll"
            )));
        }
        for (option, owner, given) in owners {
            if given && *engine != EngineChoice::Named(owner) {
                bail!(Wrong(format!(
                    "{option} is an option of engine {owner}, but the engine is {engine}: add --engine {owner}"
                )));
            }
        }
        if io_threads.is_some() && *engine == EngineChoice::Named(EngineKind::IoUring) {
            bail!(Wrong(
                "--io-threads has no effect with --engine io_uring: the kernel has its own threads".into()
            ));
        }
        Ok(())
    }

    /// The settings that all engines share; the others keep their defaults.
    pub fn configuration(&self) -> EngineConfig {
        let usual = EngineConfig::default();
        EngineConfig { threads: self.io_threads.unwrap_or(usual.threads), ..usual }
    }
}

/// Accepts the names of the engines for files, with a line of help for each. A disk on another machine has only one.
fn engine() -> impl TypedValueParser<Value = EngineChoice> {
    let choices = std::iter::once(EngineChoice::Auto).chain(EngineKind::FOR_FILES.map(EngineChoice::Named));
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
        EngineChoice::Named(EngineKind::IoUring) => "One ring, shared with the kernel, for all I/O",
        EngineChoice::Named(EngineKind::LinuxAio) => "io_submit; needs --cache none or directsync",
        EngineChoice::Named(EngineKind::PosixAio) => "The C library's aio_read and aio_write",
        EngineChoice::Named(EngineKind::Threads) => "A pool of threads; works everywhere",
        EngineChoice::Named(EngineKind::Sync) => {
            "I/O calls in the worker itself, which waits for the device if the image is not in memory"
        }
        EngineChoice::Named(EngineKind::Mmap) => {
            "Copies to and from a mapping: the fastest engine for images in memory (tmpfs); only for those and DAX"
        }
        EngineChoice::Named(EngineKind::Nbd) => "Exports of NBD servers; no other disks",
        EngineChoice::Named(EngineKind::Rbd) => "Images in a Ceph cluster; no other disks",
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

    fn read(line: &str) -> Result<Option<EngineOptions>> {
        Line::try_parse_from(line.split_whitespace())?.engine.options(CacheMode::Writeback)
    }

    #[test]
    fn options_reach_the_engine_that_has_them() {
        let ring = read("--engine io_uring --sqpoll-ms 20 --pin-guest-memory").unwrap();
        let sqpoll_idle = Some(Duration::from_millis(20));
        let expected = IoUringOptions { sqpoll_idle, iopoll: false, pin_guest_memory: true };
        assert_eq!(ring, Some(EngineOptions::IoUring(expected)));
        let pool = read("--engine posix-aio --fd-pool 2").unwrap();
        assert_eq!(pool, Some(EngineOptions::PosixAio(PosixAioOptions { fd_pool: 2 })));
        assert_eq!(read("").unwrap(), None);
    }

    #[test]
    fn counts_have_limits_on_both_sides() {
        assert!(read("--engine posix-aio --fd-pool 1").is_ok());
        let most = Line::try_parse_from(["--engine", "threads", "--io-threads", "1024"]).unwrap();
        assert_eq!(most.engine.configuration().threads, 1024);
        for line in ["--fd-pool 0", "--fd-pool 65", "--io-threads many", "--sqpoll-ms 0", "--sqpoll-ms 60001"]
        {
            let text = read(line).unwrap_err().to_string();
            assert!(text.contains(" from 1 to "), "{text}");
        }
    }

    #[test]
    fn every_engine_can_be_chosen_by_its_name() {
        for kind in EngineKind::FOR_FILES {
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
}
