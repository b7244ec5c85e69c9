//! The limits of a disk or a group, as an operator sets them, and the check that they make sense.
//!
//! `LimitSettings → Limits (checked)`; the names and meanings are those of QEMU's `throttling` options
//!
//! Parsing is the caller's task.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::bucket::MAX_RATE;

/// Longest burst, in seconds: a week.
const MAX_LENGTH_S: u64 = 7 * 24 * 3600;
/// Smallest and largest `iops-size`.
const IOPS_SIZES: RangeInclusive<u64> = 512..=1 << 30;
const IOPS_SIZE: &str = "iops-size";

/// A quantity that can be limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// Requests per second.
    Iops,
    /// Reads per second.
    IopsRead,
    /// Writes per second, including flushes, discards and write-zeroes.
    IopsWrite,
    /// Bytes per second.
    Bps,
    /// Bytes read per second.
    BpsRead,
    /// Bytes written per second.
    BpsWrite,
}

impl LimitKind {
    /// All kinds, in the order of their discriminants.
    pub const ALL: [Self; 6] =
        [Self::Iops, Self::IopsRead, Self::IopsWrite, Self::Bps, Self::BpsRead, Self::BpsWrite];

    /// The name of the setting for this quantity.
    #[must_use]
    pub fn key(self) -> &'static str {
        match self {
            Self::Iops => "iops",
            Self::IopsRead => "iops-read",
            Self::IopsWrite => "iops-write",
            Self::Bps => "bps",
            Self::BpsRead => "bps-read",
            Self::BpsWrite => "bps-write",
        }
    }

    /// The kind whose setting has this name.
    #[must_use]
    pub fn of_key(key: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.key() == key)
    }

    /// Whether the quantity is measured in bytes; otherwise in requests.
    #[must_use]
    pub fn is_bytes(self) -> bool {
        match self {
            Self::Iops | Self::IopsRead | Self::IopsWrite => false,
            Self::Bps | Self::BpsRead | Self::BpsWrite => true,
        }
    }

    /// The total that cannot be limited together with this read or write limit.
    fn total(self) -> Option<Self> {
        match self {
            Self::Iops | Self::Bps => None,
            Self::IopsRead | Self::IopsWrite => Some(Self::Iops),
            Self::BpsRead | Self::BpsWrite => Some(Self::Bps),
        }
    }
}

/// The unit of a setting's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettingUnit {
    /// Requests per second.
    RequestsPerSecond,
    /// Bytes per second.
    BytesPerSecond,
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
}

impl SettingUnit {
    /// The unit of the setting with this name; `None` if no setting has this name.
    #[must_use]
    pub fn of_key(key: &str) -> Option<Self> {
        if key == IOPS_SIZE {
            return Some(Self::Bytes);
        }
        LimitKind::ALL.into_iter().find_map(|kind| match key.strip_prefix(kind.key())? {
            "" | "-max" if kind.is_bytes() => Some(Self::BytesPerSecond),
            "" | "-max" => Some(Self::RequestsPerSecond),
            "-max-length" => Some(Self::Seconds),
            _ => None,
        })
    }

    /// The values that such a setting may have.
    #[must_use]
    pub fn range(self) -> RangeInclusive<u64> {
        match self {
            Self::RequestsPerSecond | Self::BytesPerSecond => 1..=MAX_RATE,
            Self::Seconds => 1..=MAX_LENGTH_S,
            Self::Bytes => IOPS_SIZES,
        }
    }
}

/// The settings of one quantity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RateSettings {
    /// Units per second.
    pub rate: Option<u64>,
    /// Units per second in a burst.
    pub max: Option<u64>,
    /// Length of a burst at `max`, in seconds.
    pub max_length: Option<u64>,
}

/// The settings of a disk or a group; the default limits nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitSettings {
    /// In the order of [`LimitKind::ALL`].
    pub rates: [RateSettings; LimitKind::ALL.len()],
    /// A longer request counts as several: one for each part of this many bytes.
    pub iops_size: Option<u64>,
}

/// Why limits are invalid. The messages name the settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidLimits {
    /// A value is zero or too large.
    #[error("{key} = {value} is out of range: choose from {min} to {max}, or omit {key} for no limit")]
    OutOfRange {
        /** The setting. */
        key: String,
        /** Its value. */
        value: u64,
        /** The least possible value. */
        min: u64,
        /** The greatest possible value. */
        max: u64,
    },
    /// A burst without a rate.
    #[error("{key} is set without {rate}: set {rate} too, the rate that applies after a burst")]
    WithoutRate {
        /** The setting. */
        key: String,
        /** The missing setting. */
        rate: &'static str,
    },
    /// A length without a burst.
    #[error("{rate}-max-length is set without {rate}-max: set {rate}-max too, the rate of a burst")]
    LengthWithoutMax {
        /** The setting of the rate. */
        rate: &'static str,
    },
    /// A burst that is slower than the rate.
    #[error("{rate}-max = {max} is below {rate} = {value}: a burst must not be slower than the rate")]
    MaxBelowRate {
        /** The setting of the rate. */
        rate: &'static str,
        /** Its value. */
        value: u64,
        /** The value of its burst. */
        max: u64,
    },
    /// A total is limited together with reads or writes.
    #[error(
        "{total} and {key} cannot be set together: set either {total}, or {total}-read and {total}-write"
    )]
    TotalAndPart {
        /** The setting of the total. */
        total: &'static str,
        /** The setting for reads or writes. */
        key: &'static str,
    },
}

impl LimitSettings {
    /// Changes the setting with this name. `None` removes it; removing a rate also removes its burst. Returns `false`
    /// if no setting has this name.
    pub fn set(&mut self, key: &str, value: Option<u64>) -> bool {
        if key == IOPS_SIZE {
            self.iops_size = value;
            return true;
        }
        for (kind, rate) in LimitKind::ALL.into_iter().zip(&mut self.rates) {
            match key.strip_prefix(kind.key()) {
                Some("") if value.is_none() => *rate = RateSettings::default(),
                Some("") => rate.rate = value,
                Some("-max") if value.is_none() => (rate.max, rate.max_length) = (None, None),
                Some("-max") => rate.max = value,
                Some("-max-length") => rate.max_length = value,
                _ => continue,
            }
            return true;
        }
        false
    }

    /// Each setting that has a value, by its name.
    pub fn values(&self) -> impl Iterator<Item = (String, u64)> {
        let rates = LimitKind::ALL.into_iter().zip(self.rates).flat_map(|(kind, settings)| {
            let RateSettings { rate, max, max_length } = settings;
            [("", rate), ("-max", max), ("-max-length", max_length)]
                .map(|(end, value)| (format!("{}{end}", kind.key()), value))
        });
        let all = rates.chain([(IOPS_SIZE.to_owned(), self.iops_size)]);
        all.filter_map(|(key, value)| Some((key, value?)))
    }

    /// The names of all settings.
    pub fn keys() -> impl Iterator<Item = String> {
        let rates = LimitKind::ALL.into_iter();
        let rates =
            rates.flat_map(|kind| ["", "-max", "-max-length"].map(|end| format!("{}{end}", kind.key())));
        rates.chain([IOPS_SIZE.to_owned()])
    }

    /// Checks each value, and whether the settings fit together.
    ///
    /// # Errors
    /// [`InvalidLimits`]: the first mistake.
    pub fn check(&self) -> Result<(), InvalidLimits> {
        for (key, value) in self.values() {
            let (min, max) =
                SettingUnit::of_key(&key).map_or((0, u64::MAX), |unit| unit.range().into_inner());
            if !(min..=max).contains(&value) {
                return Err(InvalidLimits::OutOfRange { key, value, min, max });
            }
        }
        let given = |kind: LimitKind| self.rates[kind as usize].rate.is_some();
        for (kind, settings) in LimitKind::ALL.into_iter().zip(self.rates) {
            let rate = kind.key();
            if let Some(total) = kind.total().filter(|total| given(kind) && given(*total)) {
                return Err(InvalidLimits::TotalAndPart { total: total.key(), key: rate });
            }
            match settings {
                RateSettings { max: None, max_length: Some(_), .. } => {
                    return Err(InvalidLimits::LengthWithoutMax { rate });
                }
                RateSettings { rate: None, max: Some(_), .. } => {
                    return Err(InvalidLimits::WithoutRate { key: format!("{rate}-max"), rate });
                }
                RateSettings { rate: Some(value), max: Some(max), .. } if max < value => {
                    return Err(InvalidLimits::MaxBelowRate { rate, value, max });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether nothing is limited.
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        self.rates.iter().all(|settings| settings.rate.is_none())
    }
}

/// The limits of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskLimits {
    /// The disk's own limits.
    pub own: LimitSettings,
    /// The group whose limits the disk shares.
    pub group: Option<String>,
    /// The disk's share of its group, relative to the other disks', 1 to [`MAX_WEIGHT`].
    pub weight: u32,
}

/// The greatest weight of a disk.
pub const MAX_WEIGHT: u32 = 10_000;
/// The weight of a disk without a setting.
pub const DEFAULT_WEIGHT: u32 = 100;

impl Default for DiskLimits {
    fn default() -> Self {
        Self { own: LimitSettings::default(), group: None, weight: DEFAULT_WEIGHT }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(values: &[(&str, u64)]) -> LimitSettings {
        let mut settings = LimitSettings::default();
        values.iter().for_each(|&(key, value)| assert!(settings.set(key, Some(value)), "{key}"));
        settings
    }

    fn error(values: &[(&str, u64)]) -> String {
        settings(values).check().unwrap_err().to_string()
    }

    #[test]
    fn every_setting_is_set_and_read_by_its_name() {
        let keys: Vec<String> = LimitSettings::keys().collect();
        assert_eq!(keys.len(), 19);
        for key in keys {
            let mut settings = LimitSettings::default();
            assert!(settings.set(&key, Some(7)));
            assert_eq!(settings.values().collect::<Vec<_>>(), [(key.clone(), 7)]);
            assert!(settings.set(&key, None) && settings == LimitSettings::default());
        }
        assert!(!LimitSettings::default().set("iops-maximum", Some(1)));
    }

    #[test]
    fn every_setting_has_a_unit_and_others_have_none() {
        assert!(LimitSettings::keys().all(|key| SettingUnit::of_key(&key).is_some()));
        let units =
            ["iops-read-max", "bps-write", "bps-max", "bps-max-length", "iops-size", "bps-size", "weight"]
                .map(SettingUnit::of_key);
        let [requests, bytes] = [SettingUnit::RequestsPerSecond, SettingUnit::BytesPerSecond].map(Some);
        let [seconds, size] = [SettingUnit::Seconds, SettingUnit::Bytes].map(Some);
        assert_eq!(units, [requests, bytes, bytes, seconds, size, None, None]);
    }

    #[test]
    fn limits_that_make_sense_are_accepted() {
        for values in [
            &[][..],
            &[("iops", 1), ("bps", MAX_RATE)],
            &[("iops-read", 5), ("iops-write", 6), ("bps", 7)],
            &[("iops", 300), ("iops-max", 3000), ("iops-max-length", 1800)],
            &[("iops", 300), ("iops-max", 300), ("iops-size", 4096)],
        ] {
            assert_eq!(settings(values).check(), Ok(()), "{values:?}");
        }
    }

    #[test]
    fn values_out_of_range_are_refused_with_the_range() {
        assert!(
            error(&[("iops", 0)]).starts_with("iops = 0 is out of range: choose from 1 to 1099511627776")
        );
        assert!(error(&[("bps-read", MAX_RATE + 1)]).starts_with("bps-read = 1099511627777 is out of range"));
        assert!(error(&[("iops", 1), ("iops-max", 0)]).starts_with("iops-max = 0 is out of range"));
        let length = [("iops", 1), ("iops-max", 1), ("iops-max-length", MAX_LENGTH_S + 1)];
        assert!(error(&length).contains("from 1 to 604800"));
        assert!(error(&[("iops-size", 511)]).contains("from 512 to 1073741824"));
    }

    #[test]
    fn contradictions_are_refused_and_say_what_is_missing() {
        assert!(
            error(&[("iops", 1), ("iops-read", 1)])
                .starts_with("iops and iops-read cannot be set together: set either iops")
        );
        assert!(
            error(&[("bps", 1), ("bps-write", 1)]).starts_with("bps and bps-write cannot be set together")
        );
        assert!(error(&[("bps", 9), ("bps-max", 8)]).starts_with("bps-max = 8 is below bps = 9"));
        assert!(
            error(&[("iops", 9), ("iops-max-length", 8)])
                .starts_with("iops-max-length is set without iops-max")
        );
        assert!(error(&[("iops-max", 8)]).starts_with("iops-max is set without iops"));
    }

    #[test]
    fn rate_that_is_removed_takes_its_burst_along() {
        let mut limits = settings(&[("iops", 1), ("iops-max", 2), ("iops-max-length", 3), ("bps", 4)]);
        limits.set("iops", None);
        assert_eq!(limits, settings(&[("bps", 4)]));
    }
}
