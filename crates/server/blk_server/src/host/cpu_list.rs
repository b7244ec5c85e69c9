//! Lists of CPUs as text, such as `2-5,8`: the format of the kernel, `taskset -c` and QEMU.

use rustix::thread::CpuSet;

/// The highest CPU number to which a thread can be bound.
#[allow(clippy::cast_possible_truncation)] // 1023
pub const MAX_CPU: u32 = CpuSet::MAX_CPU as u32 - 1;

/// The highest CPU number accepted in the kernel's lists, far above that of any kernel.
const MAX_KERNEL_CPU: u32 = 0xffff;

/// Why a text is not a valid list of CPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidCpuList {
    /// The list is empty.
    #[error("the list contains no CPU: use numbers and ranges, such as 2-5,8")]
    Empty,
    /// Neither a number nor a range.
    #[error("`{part}` is not a CPU: use numbers and ranges, such as 2-5,8")]
    Malformed {
        /** The invalid part, shortened. */
        part: String,
    },
    /// The range ends before it begins.
    #[error("CPUs {first}-{last}: the smaller number must come first")]
    Backwards {
        /** The number before the dash. */
        first: u32,
        /** The number after the dash. */
        last: u32,
    },
    /// Above the highest possible number.
    #[error("CPU {cpu} is too high: the highest possible is {max}")]
    TooHigh {
        /** The CPU's number. */
        cpu: u32,
        /** See [`MAX_CPU`]. */
        max: u32,
    },
    /// The CPU is listed twice.
    #[error("CPU {cpu} appears twice")]
    Twice {
        /** The CPU's number. */
        cpu: u32,
    },
}

/// Reads `2-5,8`, in any order; the result is ascending.
///
/// # Errors
/// [`InvalidCpuList`].
pub fn parse_cpus(text: &str) -> Result<Vec<u32>, InvalidCpuList> {
    if text.trim().is_empty() {
        return Err(InvalidCpuList::Empty);
    }
    let mut cpus = ranges(text, MAX_CPU)?;
    cpus.sort_unstable();
    match cpus.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(InvalidCpuList::Twice { cpu: pair[0] }),
        None => Ok(cpus),
    }
}

/// Parses a list from one of the kernel's files. The list may be empty. Returns `None` if the text is not a list.
pub(crate) fn parse_kernel_list(text: &str) -> Option<Vec<u32>> {
    if text.trim().is_empty() { Some(Vec::new()) } else { ranges(text, MAX_KERNEL_CPU).ok() }
}

/// Writes ascending CPUs as `2-5,8`.
#[must_use]
pub fn format_cpus(cpus: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &cpu in cpus {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(cpu) => *last = cpu,
            _ => runs.push((cpu, cpu)),
        }
    }
    let text = |(first, last): (u32, u32)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    runs.into_iter().map(text).collect::<Vec<_>>().join(",")
}

/// Checks each part against `max` before expanding it, so that a short text cannot make a long list.
fn ranges(text: &str, max: u32) -> Result<Vec<u32>, InvalidCpuList> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first, part)?, number(last, part)?);
        if first > last {
            return Err(InvalidCpuList::Backwards { first, last });
        }
        if last > max {
            return Err(InvalidCpuList::TooHigh { cpu: last, max });
        }
        cpus.extend(first..=last);
        if cpus.len() > 2 * (max as usize + 1) {
            // Stops early if a long text repeats the same CPUs.
            return Err(InvalidCpuList::Twice { cpu: last });
        }
    }
    Ok(cpus)
}

fn number(text: &str, part: &str) -> Result<u32, InvalidCpuList> {
    let digits = text.trim();
    let malformed = || InvalidCpuList::Malformed { part: part.trim().chars().take(40).collect() };
    // `parse` would accept a plus sign.
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(malformed());
    }
    digits.parse().map_err(|_| malformed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_ranges_in_any_order_become_ascending() {
        assert_eq!(parse_cpus("8,2-5").unwrap(), [2, 3, 4, 5, 8]);
        assert_eq!(parse_cpus(" 1, 3 - 4 \n").unwrap(), [1, 3, 4]);
        assert_eq!(parse_cpus("1023").unwrap(), [MAX_CPU]);
    }

    #[test]
    fn what_is_written_is_read_back() {
        for text in ["0", "2-5,8", "0-1,3,5-7", "0-1023"] {
            assert_eq!(format_cpus(&parse_cpus(text).unwrap()), text);
        }
        assert_eq!(format_cpus(&[]), "");
    }

    #[test]
    fn text_that_is_no_list_is_refused_with_the_part_that_is_wrong() {
        for text in ["x", "1,,2", "-1", "1-", "2-x", "+1", "1-2-3", "0x3", "1;2", ",", "99999999999"] {
            assert!(matches!(parse_cpus(text), Err(InvalidCpuList::Malformed { .. })), "{text}");
        }
        assert_eq!(parse_cpus(" "), Err(InvalidCpuList::Empty));
        assert_eq!(parse_cpus("5-2"), Err(InvalidCpuList::Backwards { first: 5, last: 2 }));
        assert_eq!(parse_cpus("1-3,2"), Err(InvalidCpuList::Twice { cpu: 2 }));
    }

    #[test]
    fn short_text_for_a_long_list_is_refused() {
        let error = parse_cpus("0-4294967295").unwrap_err();
        assert_eq!(error, InvalidCpuList::TooHigh { cpu: u32::MAX, max: MAX_CPU });
        assert!(parse_cpus(&"0-1023,".repeat(100_000)).is_err());
        assert!(parse_kernel_list("0-4294967295").is_none());
    }

    #[test]
    fn list_of_the_kernels_may_be_empty() {
        assert_eq!(parse_kernel_list("\n"), Some(vec![]));
        assert_eq!(parse_kernel_list("0-1,4\n"), Some(vec![0, 1, 4]));
        assert_eq!(parse_kernel_list("(null)"), None);
    }
}
