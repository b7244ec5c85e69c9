//! Options that choose and tune the I/O engine, shared by the subcommands that have one.
//!
//! Not here: which engine suits which file (`io_engine`'s `choose`).

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use io_engine::{EngineChoice, EngineConfig, EngineError, EngineKind};

/// Longest time that can be given for the submission thread: longer is a thread that never sleeps.
const MAX_SQPOLL_MS: u64 = 60_000;
/// Most descriptors per file, and most threads: far beyond what either gains.
const MAX_FD_POOL: u32 = 64;
const MAX_IO_THREADS: u32 = 1024;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "I/O engine")]
pub struct EngineArgs {
    /// How I/O reaches the kernel; `bareblk engines` says what works here
    #[arg(long, value_name = "ENGINE", default_value = "auto", value_parser = engine())]
    pub engine: EngineChoice,

    /// io_uring: a kernel thread submits; it sleeps after this many milliseconds without work
    #[arg(long, value_name = "MS", value_parser = sqpoll_ms)]
    pub sqpoll_ms: Option<u64>,

    /// io_uring: poll for completions; needs --cache none or directsync, costs a core under load
    #[arg(long)]
    pub iopoll: bool,

    /// io_uring: register guest memory; saves CPU. Breaks balloon, free-page reporting, virtio-mem:
    /// reads into pages that the guest gave back succeed and are lost. Locks all guest memory
    #[arg(long)]
    pub pin_guest_memory: bool,

    /// posix-aio: descriptors per image that requests are spread over; 1: its own only [default: 4]
    #[arg(long, value_name = "N", value_parser = fd_pool)]
    pub fd_pool: Option<u32>,

    /// Most threads for calls that wait: all calls of engine threads, few of the others, none of io_uring; with many
    /// disks half as many, and one for each disk, if that is more [default: 64]
    #[arg(long, value_name = "N", value_parser = io_threads)]
    pub io_threads: Option<u32>,
}

impl EngineArgs {
    /// The engine's configuration, everything else as usual. Options of io_uring are checked when it is chosen.
    pub fn configuration(&self) -> Result<EngineConfig, EngineError> {
        // The default would be ignored like any other number, and cannot be told apart later.
        let owner = EngineKind::PosixAio;
        if self.fd_pool.is_some() && self.engine != EngineChoice::Named(owner) {
            return Err(EngineError::Option { option: "--fd-pool", owner, kind: self.engine });
        }
        let usual = EngineConfig::default();
        Ok(EngineConfig {
            sqpoll_idle: self.sqpoll_ms.map(Duration::from_millis),
            iopoll: self.iopoll,
            pin_guest_memory: self.pin_guest_memory,
            fd_pool: self.fd_pool.unwrap_or(usual.fd_pool),
            threads: self.io_threads.unwrap_or(usual.threads),
            ..usual
        })
    }
}

fn engine() -> impl TypedValueParser<Value = EngineChoice> {
    let names = [
        PossibleValue::new("auto").help("The best that works for the image; says which and why"),
        PossibleValue::new("io_uring").help("One ring with the kernel for everything"),
        PossibleValue::new("linux-aio").help("io_submit; needs --cache none or directsync"),
        PossibleValue::new("posix-aio").help("The C library's aio_read and aio_write"),
        PossibleValue::new("threads").help("A pool of threads; works everywhere"),
        PossibleValue::new("sync").help("In the worker itself; the fastest safe way for images in memory"),
        PossibleValue::new("mmap").help("Copies from a mapping; images in memory (tmpfs) and DAX only"),
    ];
    PossibleValuesParser::new(names).try_map(|text| text.parse::<EngineChoice>())
}

fn sqpoll_ms(text: &str) -> Result<u64> {
    match text.parse() {
        Ok(ms) if (1..=MAX_SQPOLL_MS).contains(&ms) => Ok(ms),
        _ => bail!("give whole milliseconds, without a unit, from 1 to {MAX_SQPOLL_MS}"),
    }
}

fn fd_pool(text: &str) -> Result<u32> {
    count(text, MAX_FD_POOL)
}

fn io_threads(text: &str) -> Result<u32> {
    count(text, MAX_IO_THREADS)
}

fn count(text: &str, max: u32) -> Result<u32> {
    match text.parse() {
        Ok(number) if (1..=max).contains(&number) => Ok(number),
        _ => bail!("give a whole number from 1 to {max}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_limits_on_both_sides() {
        assert_eq!((fd_pool("1").unwrap(), io_threads("1024").unwrap()), (1, 1024));
        assert!(fd_pool("0").is_err() && fd_pool("65").is_err() && io_threads("many").is_err());
        assert!(sqpoll_ms("0").is_err() && sqpoll_ms("60001").is_err());
    }
}
