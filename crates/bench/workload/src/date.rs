//! Formats dates and times.

use std::time::{SystemTime, UNIX_EPOCH};

/// The current time, UTC, in ISO 8601.
#[must_use]
pub fn now() -> String {
    of(SystemTime::now())
}

/// Formats `moment` as UTC in ISO 8601.
#[must_use]
pub fn of(moment: SystemTime) -> String {
    iso_8601(moment.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs())
}

/// Converts days to a date. The calendar repeats every 400 years (146,097 days); counting years from March puts the
/// leap day last.
fn iso_8601(unix_s: u64) -> String {
    let (days, s) = (unix_s / 86_400 + 719_468, unix_s % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", s / 3600, s / 60 % 60, s % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_since_1970_become_a_date() {
        assert_eq!(iso_8601(0), "1970-01-01T00:00:00Z");
        assert_eq!(iso_8601(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(iso_8601(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(iso_8601(1_795_219_546), "2026-11-21T00:05:46Z");
    }
}
