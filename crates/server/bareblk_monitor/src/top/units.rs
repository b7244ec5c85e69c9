//! Figures as tables show them: short, with units.

/// Shown in place of a missing figure.
pub const NONE: &str = "–";

const THOUSANDS: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];

/// Three digits with a unit of thousands: `0`, `0.4`, `31`, `3.0k`, `38.1k`, `149k`.
pub fn short(figure: f64) -> String {
    let mut figure = figure.max(0.0);
    let mut units = THOUSANDS.iter();
    let mut unit = units.next().unwrap_or(&"");
    while figure >= 999.5 {
        let Some(next) = units.next() else { break };
        (figure, unit) = (figure / 1000.0, next);
    }
    let has_fraction = if unit.is_empty() { figure.fract() > 0.0 && figure < 9.95 } else { figure < 99.95 };
    if has_fraction { format!("{figure:.1}{unit}") } else { format!("{figure:.0}{unit}") }
}

/// A time with two or three digits: `820ns`, `82µs`, `1.1ms`, `12s`.
pub fn time(ns: u64) -> String {
    let mut figure = float(ns);
    let mut unit = "ns";
    for next in ["µs", "ms", "s"] {
        if figure < 999.5 {
            break;
        }
        (figure, unit) = (figure / 1000.0, next);
    }
    if figure < 9.95 && unit != "ns" { format!("{figure:.1}{unit}") } else { format!("{figure:.0}{unit}") }
}

/// The conversion is exact up to 2^53.
#[allow(clippy::cast_precision_loss)]
pub fn float(count: u64) -> f64 {
    count as f64
}

/// A bar that shows a percentage.
pub fn bar(percent: f64, cells: u16) -> String {
    let full = (percent.clamp(0.0, 100.0) / 100.0 * f64::from(cells)).round();
    (0..cells).map(|cell| if f64::from(cell) < full { '█' } else { '░' }).collect()
}

/// A size as users write it: `20G`.
pub fn size(bytes: u64) -> String {
    let unit = [(40, "T"), (30, "G"), (20, "M"), (10, "K")];
    let found = unit.into_iter().find(|(shift, _)| bytes >> shift > 0);
    found.map_or_else(
        || bytes.to_string(),
        |(shift, name)| {
            let figure = float(bytes) / float(1 << shift);
            if figure.fract() == 0.0 { format!("{figure:.0}{name}") } else { format!("{figure:.1}{name}") }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_at_most_three_digits() {
        let shown = [0.0, 0.04, 0.42, 3.0, 9.96, 31.4, 999.4, 999.6, 3000.0, 38_140.0, 149_000.0, 1.2e6];
        let wanted = ["0", "0.0", "0.4", "3", "10", "31", "999", "1.0k", "3.0k", "38.1k", "149k", "1.2M"];
        assert_eq!(shown.map(short), wanted);
        assert_eq!(
            (short(-1.0), short(f64::NAN), short(1e30)),
            ("0".into(), "0".into(), "1000000000000E".into())
        );
    }

    #[test]
    fn times_have_the_unit_that_suits_them() {
        let shown = [0, 820, 999, 1000, 1100, 82_000, 310_400, 1_100_000, 12_000_000, 1_500_000_000];
        let wanted = ["0ns", "820ns", "999ns", "1.0µs", "1.1µs", "82µs", "310µs", "1.1ms", "12ms", "1.5s"];
        assert_eq!(shown.map(time), wanted);
        assert_eq!(time(u64::MAX), "18446744074s");
    }
    #[test]
    fn sizes_are_shown_as_users_give_them() {
        let sizes = [0, 512, 1536, 4096, 20 << 30, (20 << 30) + (1 << 29), 3 << 40].map(size);
        assert_eq!(sizes, ["0", "512", "1.5K", "4K", "20G", "20.5G", "3T"]);
    }

    #[test]
    fn bar_is_full_from_100_percent_on() {
        assert_eq!((bar(74.0, 8), bar(0.0, 2), bar(900.0, 2)), ("██████░░".into(), "░░".into(), "██".into()));
    }
}
