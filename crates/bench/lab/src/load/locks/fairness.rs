//! The fairness of a lock (Dice and Kogan 2019): the share of acquisitions made by the more successful half of the
//! threads.

/// 0.5 if all threads are equal, 1 if one half made all acquisitions. `None` for a single thread, or without
/// acquisitions.
#[allow(clippy::cast_precision_loss)] // counts of one sample
pub(crate) fn upper_half(counts: &[u64]) -> Option<f64> {
    let total: u64 = counts.iter().sum();
    if counts.len() < 2 || total == 0 {
        return None;
    }
    let mut sorted = counts.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let half = sorted.len() / 2;
    let upper: u64 = sorted[..half].iter().sum();
    // The middle thread's count is split between both halves.
    let middle = if sorted.len() % 2 == 1 { sorted[half] as f64 / 2.0 } else { 0.0 };
    Some((upper as f64 + middle) / total as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_counts_are_a_half_and_one_winner_is_all() {
        assert_eq!(upper_half(&[5, 5, 5, 5]), Some(0.5));
        assert_eq!(upper_half(&[5, 5, 5]), Some(0.5));
        assert_eq!(upper_half(&[0, 9, 0, 0]), Some(1.0));
        assert_eq!(upper_half(&[1, 3, 1, 3]), Some(0.75));
    }

    #[test]
    fn nothing_to_share_has_no_fairness() {
        assert_eq!((upper_half(&[7]), upper_half(&[0, 0])), (None, None));
    }
}
