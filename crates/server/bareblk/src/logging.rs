//! Starts the log: standard error, as text or JSON, with time stamps.

use std::ffi::OsString;
use std::io::{self, IsTerminal};

use anyhow::{Context, Result, anyhow};
use tracing_subscriber::EnvFilter;

use clap::{Args, ValueEnum};

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Log")]
pub struct LogArgs {
    /// Log more (-vv: everything)
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,

    /// Format of the log lines on standard error
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// Starts logging for the whole process; `RUST_LOG` overrides `-v`.
pub fn start(args: &LogArgs) -> Result<()> {
    let colours = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter(args.verbose, std::env::var_os("RUST_LOG"))?)
        .with_writer(io::stderr)
        .with_ansi(colours)
        // Otherwise the logger would panic when standard error cannot be written, and a guest would lose its disk
        // because the log has no reader.
        .log_internal_errors(false);
    let started = match args.log_format {
        LogFormat::Text => lines.try_init(),
        LogFormat::Json => lines.json().try_init(),
    };
    started.map_err(|error| anyhow!(error)).context("cannot start logging")
}

fn filter(verbose: u8, rust_log: Option<OsString>) -> Result<EnvFilter> {
    let level = match verbose {
        0 => "info",
        1 => "debug",
        _ => "trace",
    };
    let wanted = rust_log.filter(|text| !text.is_empty()).unwrap_or_else(|| level.into());
    let wanted = wanted.to_string_lossy();
    // The error is not passed on as a source, because its text already contains its own source.
    EnvFilter::builder().parse(&*wanted).map_err(|error| anyhow!("cannot parse RUST_LOG={wanted}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_v_is_a_level() {
        let levels = [0, 1, 2, 9].map(|verbose| filter(verbose, None).unwrap().to_string());
        assert_eq!(levels, ["info", "debug", "trace", "trace"]);
    }

    #[test]
    fn rust_log_goes_before_verbosity_unless_it_is_empty() {
        assert_eq!(filter(1, Some("warn".into())).unwrap().to_string(), "warn");
        assert_eq!(filter(1, Some("".into())).unwrap().to_string(), "debug");
    }

    #[test]
    fn senseless_rust_log_is_named() {
        let error = filter(0, Some("a=b=c".into())).unwrap_err();
        assert!(format!("{error:#}").starts_with("cannot parse RUST_LOG=a=b=c: "));
        assert_eq!(format!("{error:#}").matches("error parsing level filter").count(), 1, "{error:#}");
    }
}
