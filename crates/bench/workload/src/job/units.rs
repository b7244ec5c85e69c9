//! Quantities in fio's notation: bytes with `k`, `m`, `g`, and times with `ms`, `s`, `m`.
//!
//! - As with fio's default `kb_base=1024`: `k` and `kb` are 1024, and `ki` and `kib` are 1000, the reverse of the usual
//!   meaning. A job file must mean the same in this program as in fio.
//! - A time without a unit is in seconds.
//!
//! Facts: fio 3.33, HOWTO, "Parameter types", and runs of fio.

use std::time::Duration;

/// Splits "4k" into 4 and "k". `None` if there are no digits, or the number exceeds 64 bits.
fn split(text: &str) -> Option<(u64, String)> {
    let text = text.trim();
    let (text, radix) = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) => (hex, 16),
        None => (text, 10),
    };
    let end = text.find(|letter: char| !letter.is_digit(radix)).unwrap_or(text.len());
    let number = u64::from_str_radix(text.get(..end)?, radix).ok()?;
    Some((number, text.get(end..)?.to_ascii_lowercase()))
}

/// "4k" → 4096. `None` if `text` is not a quantity, or exceeds 64 bits.
#[must_use]
pub fn bytes(text: &str) -> Option<u64> {
    const LETTERS: &str = "kmgtp";
    let (number, unit) = split(text)?;
    let Some(letter) = unit.chars().next().filter(|_| unit != "b") else { return Some(number) };
    let power = u32::try_from(LETTERS.find(letter)?).ok()? + 1;
    let base: u64 = match unit.get(1..)? {
        "" | "b" => 1024,
        "i" | "ib" => 1000,
        _ => return None,
    };
    number.checked_mul(base.checked_pow(power)?)
}

/// "90" and "90s" → 90 s. `None` if `text` is not a time.
#[must_use]
pub fn time(text: &str) -> Option<Duration> {
    let (number, unit) = split(text)?;
    let seconds = |per_unit: u64| number.checked_mul(per_unit).map(Duration::from_secs);
    match unit.as_str() {
        "us" | "usec" => Some(Duration::from_micros(number)),
        "ms" | "msec" => Some(Duration::from_millis(number)),
        "" | "s" | "sec" | "seconds" => seconds(1),
        "m" | "min" | "minutes" => seconds(60),
        "h" | "hours" => seconds(3600),
        "d" | "days" => seconds(24 * 3600),
        _ => None,
    }
}

/// "0-3,7" → 0, 1, 2, 3, 7. `None` if `text` is not a list of CPUs.
#[must_use]
pub fn cpus(text: &str) -> Option<Vec<usize>> {
    const MOST: usize = 4096;
    let mut list = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<usize>().ok()?, last.trim().parse::<usize>().ok()?);
        if first > last || last >= MOST {
            return None;
        }
        list.extend(first..=last);
    }
    Some(list)
}

/// 0, 1, 2, 3, 7 → "0-3,7". The list must be ascending.
#[must_use]
pub(crate) fn list(cpus: &[usize]) -> String {
    let runs = cpus.chunk_by(|before, next| before + 1 == *next);
    let words = runs.filter_map(|run| match (run.first()?, run.last()?) {
        (first, last) if first == last => Some(first.to_string()),
        (first, last) => Some(format!("{first}-{last}")),
    });
    words.collect::<Vec<_>>().join(",")
}

/// For error messages: "4k", "25g" if the number is a multiple of the unit.
#[must_use]
pub fn short(size_bytes: u64) -> String {
    let units = [("t", 40), ("g", 30), ("m", 20), ("k", 10)];
    let unit = units.iter().find(|(_, shift)| size_bytes > 0 && size_bytes.is_multiple_of(1 << shift));
    unit.map_or_else(|| size_bytes.to_string(), |(name, shift)| format!("{}{name}", size_bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_mean_what_they_mean_to_fio() {
        let sizes = ["512", "4k", "4K", "4kb", "4kib", "4MB", "25g", "1t", "0x200", "7b"].map(bytes);
        let expected = [512, 4096, 4096, 4096, 4000, 4 << 20, 25 << 30, 1 << 40, 512, 7];
        assert_eq!(sizes, expected.map(Some));
    }

    #[test]
    fn sizes_that_are_none_are_refused() {
        let sizes =
            ["", "k", "4x", "4kk", "-1", "1.5k", "50%", "20000000000000000000", "99999999p"].map(bytes);
        assert_eq!(sizes, [None; 9]);
    }

    #[test]
    fn time_without_a_unit_is_in_seconds() {
        let times = ["120", "2m", "300ms", "5us", "1h", "1d"].map(|text| time(text).unwrap().as_micros());
        assert_eq!(times, [120_000_000, 120_000_000, 300_000, 5, 3_600_000_000, 86_400_000_000]);
        assert_eq!([time("1x"), time(""), time("s")], [None; 3]);
    }

    #[test]
    fn list_of_cpus_has_numbers_and_ranges() {
        assert_eq!(cpus("0-2,7"), Some(vec![0, 1, 2, 7]));
        assert_eq!([cpus(""), cpus("3-1"), cpus("a"), cpus("0-99999")], [const { None }; 4]);
    }

    #[test]
    fn cpus_are_shown_as_they_are_read() {
        assert_eq!([list(&[0, 1, 2, 7]), list(&[3]), list(&[])], ["0-2,7", "3", ""]);
    }

    #[test]
    fn sizes_are_shown_in_the_largest_whole_unit() {
        assert_eq!([512, 4096, 25 << 30, 4097, 0].map(short), ["512", "4k", "25g", "4097", "0"]);
    }
}
