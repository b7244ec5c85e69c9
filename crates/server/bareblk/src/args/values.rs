//! Parses and checks single values from the command line, a configuration file or `bareblk ctl add`.
//!
//! `text → value parser → checked value`. Limits come from the server or engine that enforces them.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail};
use blk_server::{
    Balance, DEFAULT_POLL, DiskConfig, InvalidDisk, MAX_QUEUE_SIZE, MAX_QUEUES, MIN_QUEUE_SIZE,
};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use disk_image::{CacheMode, SECTOR_BYTES};
use nix::unistd::{Uid, User};

use crate::helper::accounts;
use crate::helper::client::client;

/// Maximum timeout: a week. Anything longer is probably a typing mistake.
pub const MAX_TIMEOUT_S: u64 = 7 * 24 * 3600;
/// Maximum length of a disk's name, which appears in log lines and commands.
const MAX_NAME_CHARS: usize = 64;

/// Maximum number of digits after the point of a size: more digits never give a whole number of bytes, and would
/// overflow.
const MAX_DECIMALS: usize = 18;

/// A serial number that never makes the settings invalid.
const GOOD_SERIAL: &str = "-";
const GOOD_QUEUES: u16 = 1;

/// Parses a whole number in `range`. Each option declares its range beside its value parser.
pub fn whole<N>(range: RangeInclusive<N>) -> impl Fn(&str) -> Result<N> + Clone + Send + Sync
where
    N: FromStr + PartialOrd + Display + Clone + Send + Sync,
{
    number("a whole number", range)
}

/// Parses a number in `range`; otherwise the error asks for `what`.
pub fn number<N>(
    what: &'static str,
    range: RangeInclusive<N>,
) -> impl Fn(&str) -> Result<N> + Clone + Send + Sync
where
    N: FromStr + PartialOrd + Display + Clone + Send + Sync,
{
    move |text| match text.parse() {
        Ok(number) if range.contains(&number) => Ok(number),
        _ => bail!("give {what} from {} to {}", range.start(), range.end()),
    }
}

/// A timeout in seconds.
pub fn timeout_s(text: &str) -> Result<u64> {
    number("whole seconds, without a unit,", 0..=MAX_TIMEOUT_S)(text)
}

pub fn serial(text: &str) -> Result<String> {
    let checked = DiskConfig::check_settings(text, GOOD_QUEUES, MAX_QUEUE_SIZE);
    checked.map_err(|error| match error {
        // clap's line already shows the value, with line breaks escaped.
        InvalidDisk::Serial { max, .. } => anyhow!("give 1 to {max} printable ASCII characters"),
        other => other.into(),
    })?;
    Ok(text.to_owned())
}

pub fn queues(text: &str) -> Result<u16> {
    number("a whole number", 1..=MAX_QUEUES)(text)
}

/// The number of descriptors of a queue.
///
/// # Errors
/// The number is not a power of two within the limits.
pub fn queue_size(text: &str) -> Result<u16> {
    let size = text.parse().ok();
    let good = |size: &u16| DiskConfig::check_settings(GOOD_SERIAL, GOOD_QUEUES, *size).is_ok();
    size.filter(good)
        .with_context(|| format!("give a power of two from {MIN_QUEUE_SIZE} to {MAX_QUEUE_SIZE}"))
}

/// The user that the server runs as.
#[derive(Clone, Copy, Debug)]
pub struct ServerUser {
    pub id: u32,
    /// The user's primary group, if the lookup finds it.
    pub group: Option<u32>,
}

impl PartialEq for ServerUser {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for ServerUser {}

pub fn user(text: &str) -> Result<ServerUser> {
    let id = user_id(text)?;
    // A number need not belong to a known user. Inside the sandbox the process can neither look up users nor change its
    // own user.
    let known = match client() {
        None => User::from_uid(Uid::from_raw(id)).ok().flatten(),
        Some(_) => None,
    };
    Ok(ServerUser { id, group: known.map(|user| user.gid.as_raw()) })
}

/// Folders, separated by colons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folders(pub Vec<PathBuf>);

impl FromStr for Folders {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let folders: Vec<PathBuf> = text.split(':').map(PathBuf::from).collect();
        match folders.iter().find(|folder| !folder.is_absolute()) {
            Some(folder) => bail!("'{}' is not an absolute path: begin it with a slash", folder.display()),
            None => Ok(Self(folders)),
        }
    }
}

/// Looks up a user's number. Inside the sandbox the helper process does this, because the lookup may need the network.
pub fn user_id(text: &str) -> Result<u32> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    if let Some(helper) = client() {
        return Ok(helper.user_id(text)?);
    }
    accounts::user_id(text)
}

/// Like [`user_id`], for a group.
pub fn group_id(text: &str) -> Result<u32> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    if let Some(helper) = client() {
        return Ok(helper.group_id(text)?);
    }
    accounts::group_id(text)
}

pub fn balance() -> impl TypedValueParser<Value = Balance> {
    PossibleValuesParser::new(["auto", "off"]).try_map(|text| text.parse::<Balance>())
}

pub fn cache_mode() -> impl TypedValueParser<Value = CacheMode> {
    PossibleValuesParser::new(CacheMode::ALL.map(CacheMode::name)).try_map(|text| text.parse::<CacheMode>())
}

pub fn socket_mode(text: &str) -> Result<u32> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => bail!("give three octal digits, such as 660"),
    }
}

/// "64M" → 67108864, "1.5G" → 1610612736, "20GiB" → 21474836480.
pub fn size_bytes(text: &str) -> Result<u64> {
    let usage = "give a number of bytes, or one with K, M, G or T (powers of 1024), such as 20G or 1.5T";
    let (digits, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
    let unit_bytes = 1_u128
        << match unit.strip_suffix("iB").unwrap_or(unit) {
            "" if unit.is_empty() => 0,
            "K" | "k" => 10,
            "M" | "m" => 20,
            "G" | "g" => 30,
            "T" | "t" => 40,
            _ => bail!(usage),
        };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) {
        bail!(usage);
    }
    let too_large = || anyhow!("{text} is more than the maximum, 16777215T");
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    if fraction.len() > MAX_DECIMALS {
        bail!("give at most {MAX_DECIMALS} digits after the point");
    }
    let scale = 10_u128.pow(u32::try_from(fraction.len()).unwrap_or(0));
    let fraction_bytes = u128::from(fraction.parse::<u64>()?) * unit_bytes;
    if !fraction_bytes.is_multiple_of(scale) {
        bail!("{text} is not a whole number of bytes");
    }
    let bytes = u128::from(whole) * unit_bytes + fraction_bytes / scale;
    u64::try_from(bytes).map_err(|_| too_large())
}

/// Parses a size such as "20G" that is a multiple of a sector.
pub fn image_bytes(text: &str) -> Result<u64> {
    match size_bytes(text)? {
        bytes if bytes > 0 && bytes.is_multiple_of(SECTOR_BYTES) => Ok(bytes),
        _ => bail!("give a multiple of {SECTOR_BYTES} bytes, above 0"),
    }
}

/// The size that `bareblk ctl resize` gives a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewSize {
    pub bytes: u64,
    /// Whether to add `bytes` to the current size: "+1G".
    pub is_growth: bool,
}

/// Parses "20G" or "+1G".
pub fn new_size(text: &str) -> Result<NewSize> {
    let more = text.strip_prefix('+');
    Ok(NewSize { bytes: image_bytes(more.unwrap_or(text))?, is_growth: more.is_some() })
}

pub fn default_poll_us() -> u64 {
    u64::try_from(DEFAULT_POLL.as_micros()).unwrap_or(u64::MAX)
}

/// Names appear in commands and log lines, where a space would end them.
pub fn disk_name(text: &str) -> Result<String> {
    let chars = text.chars().count();
    let printable = text.chars().all(|c| !c.is_whitespace() && !c.is_control());
    if (1..=MAX_NAME_CHARS).contains(&chars) && printable {
        return Ok(text.to_owned());
    }
    bail!("give 1 to {MAX_NAME_CHARS} characters without spaces")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn name_is_short_and_one_word() {
        assert_eq!(disk_name("vm1/root").unwrap(), "vm1/root");
        assert!(disk_name("").is_err() && disk_name("a b").is_err() && disk_name("a\n").is_err());
        assert!(disk_name(&"x".repeat(65)).unwrap_err().to_string().contains("1 to 64"));
    }

    #[test]
    fn size_suffixes_are_powers_of_1024() {
        let sizes = ["512", "4K", "64M", "20G", "2T"].map(|text| size_bytes(text).unwrap());
        assert_eq!(sizes, [512, 4 << 10, 64 << 20, 20 << 30, 2 << 40]);
    }

    #[test]
    fn size_that_overflows_is_refused() {
        assert!(size_bytes("16777215T").is_ok());
        assert!(size_bytes("16777216T").is_err());
    }

    #[test]
    fn sizes_may_have_a_fraction_and_the_unit_in_full() {
        let sizes = ["1.5G", "0.5K", "20GiB", "4KiB", "1.50T"].map(|text| size_bytes(text).unwrap());
        assert_eq!(sizes, [3 << 29, 512, 20 << 30, 4 << 10, 3 << 39]);
        assert_eq!(image_bytes("0.7G").unwrap_err().to_string(), "0.7G is not a whole number of bytes");
        assert!(
            size_bytes("0.0000000000000000000001T").unwrap_err().to_string().contains("at most 18 digits")
        );
        assert_eq!(size_bytes("0.000000000000000000T").unwrap(), 0);
    }

    #[test]
    fn plus_before_a_size_means_more_only_where_there_is_a_disk() {
        assert_eq!(new_size("+1.5G").unwrap(), NewSize { bytes: 3 << 29, is_growth: true });
        assert_eq!(new_size("1G").unwrap(), NewSize { bytes: 1 << 30, is_growth: false });
        assert!(image_bytes("+1G").is_err());
        for text in ["+", "++1G", "-1G", "+0", "+100", "+-1G"] {
            assert!(new_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn size_without_digits_or_with_an_unknown_suffix_is_refused() {
        for text in
            ["", "G", "5X", "-5G", "+5G", "1.G", ".5G", "1.5.5G", "5 G", "5iB", "5GB", "5Gib", "1e9", "٣G"]
        {
            assert!(
                size_bytes(text).unwrap_err().to_string().starts_with("give a number of bytes"),
                "{text}"
            );
        }
    }

    #[test]
    fn new_image_has_whole_sectors_and_at_least_one() {
        assert_eq!(image_bytes("1K").unwrap(), 1024);
        assert!(image_bytes("0").is_err());
        assert_eq!(image_bytes("1000").unwrap_err().to_string(), "give a multiple of 512 bytes, above 0");
    }

    #[test]
    fn durations_have_no_units_and_a_limit() {
        assert_eq!((timeout_s("604800").unwrap(), timeout_s("0").unwrap()), (604_800, 0));
        assert!(timeout_s("5m").unwrap_err().to_string().starts_with("give whole seconds"));
        assert!(timeout_s("604801").unwrap_err().to_string().ends_with("from 0 to 604800"));
    }

    #[test]
    fn whole_number_outside_its_range_is_refused_with_the_range() {
        let percent = whole(-5..=100_i32);
        assert_eq!((percent("-5").unwrap(), percent("100").unwrap()), (-5, 100));
        for text in ["-6", "101", "1.5", "", "4000000000000"] {
            assert_eq!(percent(text).unwrap_err().to_string(), "give a whole number from -5 to 100");
        }
    }

    #[test]
    fn queues_and_their_size_have_the_servers_limits() {
        assert_eq!((queues("256").unwrap(), queue_size("1024").unwrap()), (256, 1024));
        assert!(queues("257").unwrap_err().to_string().contains("1 to 256"));
        assert!(queues("70000").unwrap_err().to_string().contains("1 to 256"));
        for text in ["70000", "100", "2048", "1", "-2"] {
            assert!(queue_size(text).unwrap_err().to_string().ends_with("a power of two from 2 to 1024"));
        }
    }

    #[test]
    fn socket_mode_is_octal_and_has_only_permission_bits() {
        assert_eq!(socket_mode("660").unwrap(), 0o660);
        assert!(socket_mode("1777").is_err());
        assert!(socket_mode("rw").is_err());
    }

    #[test]
    fn root_is_found_by_name_and_by_number() {
        assert_eq!((user_id("root").unwrap(), user_id("0").unwrap()), (0, 0));
        assert_eq!((group_id("root").unwrap(), group_id("0").unwrap()), (0, 0));
    }

    #[test]
    fn poll_default_of_the_server_survives_the_conversion() {
        assert_eq!(Duration::from_micros(default_poll_us()), DEFAULT_POLL);
    }
}
