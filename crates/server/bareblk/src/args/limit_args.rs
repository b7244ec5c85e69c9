//! Options that limit the IOPS and the bandwidth of a disk or a group.
//!
//! `LimitArgs → LimitSettings (checked)`; `KEY=VALUE of ctl limit → JSON → LimitSettings`

use anyhow::{Context, Result, bail};
use blk_server::{InvalidLimits, LimitSettings, MAX_WEIGHT, SettingUnit};
use clap::Args;
use serde_json::Value;

use crate::args::usage::Wrong;
use crate::args::values::{number, size_bytes};

/// The word that removes a limit in `ctl limit`.
const OFF: &str = "off";
pub const GROUP: &str = "group";
pub const WEIGHT: &str = "weight";

/// The limits of a disk or a group. Names and meanings are QEMU's.
#[derive(Clone, Copy, Debug, Default, Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Limit of requests per second [default: no limit]
    #[arg(long, value_name = "N", value_parser = rate)]
    iops: Option<u64>,

    /// Limit of requests per second in a burst, at least --iops [default: no burst]
    #[arg(long, value_name = "N", value_parser = rate)]
    iops_max: Option<u64>,

    /// Length in seconds of a full burst at --iops-max [default: 1]
    #[arg(long, value_name = "S", value_parser = seconds)]
    iops_max_length: Option<u64>,

    /// Limit of reads per second; not together with --iops [default: no limit]
    #[arg(long, value_name = "N", value_parser = rate)]
    iops_read: Option<u64>,

    /// Limit of reads per second in a burst, at least --iops-read [default: no burst]
    #[arg(long, value_name = "N", value_parser = rate)]
    iops_read_max: Option<u64>,

    /// Length in seconds of a full burst of reads at --iops-read-max [default: 1]
    #[arg(long, value_name = "S", value_parser = seconds)]
    iops_read_max_length: Option<u64>,

    /// Limit of writes, flushes and discards per second; not together with --iops [default: no limit]
    #[arg(long, value_name = "N", value_parser = rate)]
    iops_write: Option<u64>,

    /// Limit of writes, flushes and discards per second in a burst, at least --iops-write [default: no burst]
    #[arg(long, value_name = "N", value_parser = rate)]
    iops_write_max: Option<u64>,

    /// Length in seconds of a full burst of writes at --iops-write-max [default: 1]
    #[arg(long, value_name = "S", value_parser = seconds)]
    iops_write_max_length: Option<u64>,

    /// Limit of bytes per second (K, M, G, T: powers of 1024) [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    bps: Option<u64>,

    /// Limit of bytes per second in a burst, at least --bps [default: no burst]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    bps_max: Option<u64>,

    /// Length in seconds of a full burst at --bps-max [default: 1]
    #[arg(long, value_name = "S", value_parser = seconds)]
    bps_max_length: Option<u64>,

    /// Limit of bytes read per second; not together with --bps [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    bps_read: Option<u64>,

    /// Limit of bytes read per second in a burst, at least --bps-read [default: no burst]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    bps_read_max: Option<u64>,

    /// Length in seconds of a full burst of reads at --bps-read-max [default: 1]
    #[arg(long, value_name = "S", value_parser = seconds)]
    bps_read_max_length: Option<u64>,

    /// Limit of bytes written per second; not together with --bps [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    bps_write: Option<u64>,

    /// Limit of bytes written per second in a burst, at least --bps-write [default: no burst]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    bps_write_max: Option<u64>,

    /// Length in seconds of a full burst of writes at --bps-write-max [default: 1]
    #[arg(long, value_name = "S", value_parser = seconds)]
    bps_write_max_length: Option<u64>,

    /// Count a longer request as several, one for each part of this size [default: every request counts as one]
    #[arg(long, value_name = "SIZE", value_parser = part)]
    iops_size: Option<u64>,
}

impl LimitArgs {
    /// # Errors
    /// The options contradict each other.
    pub fn settings(&self) -> Result<LimitSettings> {
        let values = [
            ("iops", self.iops),
            ("iops-max", self.iops_max),
            ("iops-max-length", self.iops_max_length),
            ("iops-read", self.iops_read),
            ("iops-read-max", self.iops_read_max),
            ("iops-read-max-length", self.iops_read_max_length),
            ("iops-write", self.iops_write),
            ("iops-write-max", self.iops_write_max),
            ("iops-write-max-length", self.iops_write_max_length),
            ("bps", self.bps),
            ("bps-max", self.bps_max),
            ("bps-max-length", self.bps_max_length),
            ("bps-read", self.bps_read),
            ("bps-read-max", self.bps_read_max),
            ("bps-read-max-length", self.bps_read_max_length),
            ("bps-write", self.bps_write),
            ("bps-write-max", self.bps_write_max),
            ("bps-write-max-length", self.bps_write_max_length),
            ("iops-size", self.iops_size),
        ];
        let mut settings = LimitSettings::default();
        for (key, value) in values {
            if value.is_some() {
                settings.set(key, value);
            }
        }
        settings.check().map_err(|error| Wrong(as_options(&error)))?;
        Ok(settings)
    }
}

/// The error's text, with settings written as options: `iops-max is set without iops` becomes `--iops-max is set without --iops`.
fn as_options(error: &InvalidLimits) -> String {
    let is_key = |word: &str| is_setting(word.trim_end_matches([',', ':', ';']));
    let text = error.to_string();
    let words: Vec<_> = text
        .split(' ')
        .map(|word| if is_key(word) { format!("--{word}") } else { word.to_owned() })
        .collect();
    words.join(" ")
}

/// Whether `key` is the name of a limit.
pub fn is_setting(key: &str) -> bool {
    LimitSettings::default().set(key, None)
}

/// Whether a reload applies a change of this disk's key by changing the disk's limits.
pub fn is_limit_key(key: &str) -> bool {
    is_setting(key) || key == GROUP || key == WEIGHT
}

fn rate(text: &str) -> Result<u64> {
    value_in(SettingUnit::RequestsPerSecond, text)
}

fn bytes(text: &str) -> Result<u64> {
    value_in(SettingUnit::BytesPerSecond, text)
}

fn seconds(text: &str) -> Result<u64> {
    value_in(SettingUnit::Seconds, text)
}

fn part(text: &str) -> Result<u64> {
    value_in(SettingUnit::Bytes, text)
}

pub fn weight(text: &str) -> Result<u32> {
    number("a whole number", 1..=MAX_WEIGHT)(text)
}

/// Parses the value of one setting.
fn value(key: &str, text: &str) -> Result<u64> {
    value_in(SettingUnit::of_key(key).context("no limit has this name")?, text)
}

fn value_in(unit: SettingUnit, text: &str) -> Result<u64> {
    let (what, parsed) = match unit {
        SettingUnit::Seconds => ("whole seconds, from 1 to 604800", text.parse().ok()),
        SettingUnit::Bytes => ("a size from 512 to 1G, such as 16K", size_bytes(text).ok()),
        SettingUnit::BytesPerSecond => ("bytes per second from 1 to 1T, such as 200M", size_bytes(text).ok()),
        SettingUnit::RequestsPerSecond => ("a whole number from 1 to 1099511627776", text.parse().ok()),
    };
    parsed
        .filter(|value| unit.range().contains(value))
        .with_context(|| format!("give {what}; for no limit, leave it out"))
}

/// Parses `iops=5000`, `bps=200M`, `iops-max=off`, `weight=200`, `group=off` for `ctl limit`.
pub fn change(text: &str) -> Result<(String, Value)> {
    let Some((key, given)) = text.split_once('=') else {
        bail!("give KEY=VALUE, such as iops=5000 or iops=off")
    };
    let parsed = match key {
        _ if !is_limit_key(key) => {
            let keys: Vec<String> = LimitSettings::keys().collect();
            bail!(
                "there is no limit `{}`: give one of {}, {WEIGHT}, {GROUP}",
                key.escape_debug(),
                keys.join(", ")
            )
        }
        WEIGHT => weight(given)?.into(),
        _ if given == OFF => Value::Null,
        GROUP => given.into(),
        _ => value(key, given)
            .map_err(|error| {
                anyhow::anyhow!("{key}: {}", error.to_string().replace("leave it out", "give off"))
            })?
            .into(),
    };
    Ok((key.to_owned(), parsed))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        limits: LimitArgs,
    }

    fn parsed(words: &[&str]) -> Result<LimitSettings> {
        Line::try_parse_from([&["line"], words].concat())?.limits.settings()
    }

    #[test]
    fn every_setting_has_an_option_that_reaches_it() {
        for key in LimitSettings::keys() {
            let given = SettingUnit::of_key(&key).unwrap().range().start().to_string();
            let line = Line::try_parse_from(["line", &format!("--{key}"), &given]).unwrap();
            let set = match line.limits.settings() {
                Ok(settings) => settings.values().map(|(key, _)| key).collect(),
                // A burst without its rate is refused, and the error names the option.
                Err(error) => vec![error.to_string().split(' ').next().unwrap()[2..].to_owned()],
            };
            assert_eq!(set, [key]);
        }
    }

    #[test]
    fn rates_are_numbers_and_bandwidths_sizes() {
        let settings = parsed(&["--iops", "5000", "--bps", "1.5M", "--iops-size", "16K"]).unwrap();
        let values: Vec<_> = settings.values().collect();
        let expected = [("iops", 5000), ("bps", 3 << 19), ("iops-size", 16 << 10)];
        assert_eq!(values, expected.map(|(key, value)| (key.to_owned(), value)));
    }

    #[test]
    fn value_that_is_no_limit_is_refused_with_what_to_give() {
        for (option, value) in [
            ("--iops=", "0"),
            ("--iops=", "-5"),
            ("--iops=", "5k"),
            ("--iops-max=", "1099511627777"),
            ("--bps=", "0"),
            ("--bps=", "-1M"),
            ("--bps-write-max=", "1025G"),
            ("--bps-max-length=", "0"),
            ("--iops-size=", "511"),
        ] {
            let error = parsed(&[&format!("{option}{value}")]).unwrap_err().to_string();
            assert!(error.contains("give ") && error.contains("leave it out"), "{error}");
        }
    }

    #[test]
    fn contradiction_names_the_options() {
        let error = parsed(&["--iops=5", "--iops-read=5"]).unwrap_err().to_string();
        assert!(
            error.starts_with(
                "--iops and --iops-read cannot be set together: set either --iops, or --iops-read and"
            ),
            "{error}"
        );
        let error = parsed(&["--bps=5", "--bps-max-length=5"]).unwrap_err().to_string();
        assert!(
            error.starts_with("--bps-max-length is set without --bps-max: set --bps-max too,"),
            "{error}"
        );
    }

    #[test]
    fn changes_have_the_types_of_the_protocol() {
        let value = |text: &str| change(text).unwrap().1;
        assert_eq!([value("iops=5000"), value("bps=200M")], [Value::from(5000), Value::from(200 << 20)]);
        assert_eq!([value("iops-max=off"), value("group=off")], [Value::Null, Value::Null]);
        assert_eq!([value("weight=200"), value("group=acme")], [Value::from(200), Value::from("acme")]);
        for wrong in ["iops", "iop=5", "iops=0", "weight=0", "weight=off", "bps=fast", "=5"] {
            assert!(change(wrong).is_err(), "{wrong}");
        }
        assert!(change("iops=0").unwrap_err().to_string().ends_with("for no limit, give off"));
    }
}
