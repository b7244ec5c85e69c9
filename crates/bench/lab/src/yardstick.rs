//! Finds the figure that a target is judged by, for one variant under one workload.

use crate::experiment::{Beside, Declaration, Target, Yardstick};
use crate::result::{CellResult, Ratio};
use crate::stats::Summary;

/// The judged figure, and a text that names what it was compared with (empty for the baseline).
pub(crate) struct Found {
    pub summary: Summary,
    pub against: String,
}

/// Returns `None` if one of the figures was not measured.
pub(crate) fn found(
    declaration: &Declaration,
    target: &Target,
    cells: &[CellResult],
    cell: &CellResult,
) -> Option<Found> {
    let plain = |summary| Found { summary, against: String::new() };
    match &target.yardstick {
        Yardstick::Baseline => cell.ratio.as_ref().map(|ratio| plain(ratio.summary)),
        Yardstick::Figure { column, .. } => cell.summary(column).map(plain),
        Yardstick::BestOf(variants) => {
            let same = cells.iter().filter(|other| other.workload == cell.workload);
            let best = best(declaration, same.filter(|other| variants.contains(&other.variant)))?;
            against(declaration, cell, best, &label(declaration, &best.variant))
        }
        Yardstick::BestWithin { column, at_most } => {
            let is_within =
                |other: &&CellResult| other.summary(column).is_some_and(|summary| summary.median <= *at_most);
            let same = cells.iter().filter(|other| other.workload == cell.workload);
            let best = best(declaration, same.filter(is_within))?;
            against(declaration, cell, best, &label(declaration, &best.variant))
        }
        Yardstick::Workload(id) => {
            let mut own = cells.iter().filter(|other| other.variant == cell.variant);
            let other = own.find(|other| &other.workload == id)?;
            against(declaration, cell, other, &label(declaration, id))
        }
        Yardstick::Beside { column, variant, by, .. } => {
            let mut same = cells.iter().filter(|other| other.workload == cell.workload);
            let other = same.find(|other| &other.variant == variant)?;
            let name = label(declaration, variant);
            beside(cell.samples(column)?, other.samples(column)?, *by)
                .map(|summary| Found { summary, against: format!(" beside {name}") })
        }
    }
}

fn beside(ours: &[Option<f64>], theirs: &[Option<f64>], by: Beside) -> Option<Summary> {
    match by {
        Beside::Ratio => Ratio::between(ours, theirs).map(|ratio| ratio.summary),
        Beside::Difference => {
            let pairs = ours.iter().zip(theirs).filter_map(|(ours, theirs)| Some((*ours)? - (*theirs)?));
            Summary::of(&pairs.collect::<Vec<_>>())
        }
    }
}

/// The variant with the highest median of the compared column.
fn best<'c>(
    declaration: &Declaration,
    cells: impl Iterator<Item = &'c CellResult>,
) -> Option<&'c CellResult> {
    let median = |cell: &CellResult| cell.summary(&declaration.compared).map(|summary| summary.median);
    let measured = cells.filter_map(|cell| Some((median(cell)?, cell)));
    measured.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, cell)| cell)
}

fn against(declaration: &Declaration, cell: &CellResult, other: &CellResult, name: &str) -> Option<Found> {
    let place = declaration.compared_column();
    let ratio = Ratio::between(&cell.measures.get(place)?.samples, &other.measures.get(place)?.samples)?;
    Some(Found { summary: ratio.summary, against: format!(" of {name}") })
}

/// The variant's name in tables.
pub(crate) fn label(declaration: &Declaration, id: &str) -> String {
    let variant = declaration.variants.iter().find(|variant| variant.id == id).map(|found| &found.label);
    let workload = declaration.workloads.iter().find(|workload| workload.id == id).map(|found| &found.label);
    variant.or(workload).cloned().unwrap_or_else(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example;

    fn target(yardstick: Yardstick) -> Target {
        Target {
            text: "t".into(),
            variants: vec!["none-posix-aio-1".into()],
            workloads: vec!["disk-randwrite".into()],
            at_least: 1.0,
            half_width_max: 0.1,
            yardstick,
        }
    }

    fn of(yardstick: Yardstick) -> Option<Found> {
        let result = example::result();
        let cell = result.cell("disk-randwrite", "none-posix-aio-1").unwrap();
        found(&result.experiment, &target(yardstick), &result.cells, cell)
    }

    #[test]
    fn best_of_several_is_the_one_with_the_highest_median_and_pairs_stay_pairs() {
        // Both medians are 100, and the later of two equal variants is taken. Compared with itself, every ratio is 1.
        let itself = of(Yardstick::BestOf(vec!["none-posix-aio-1".into()])).unwrap();
        assert_eq!((itself.summary.low, itself.summary.high), (1.0, 1.0));
        let bare = of(Yardstick::BestOf(vec!["bare".into(), "none-posix-aio-4".into()])).unwrap();
        assert_eq!((bare.summary.low, bare.against.as_str()), (0.9, " of bare metal, O_DIRECT"));
    }

    #[test]
    fn best_of_what_was_not_measured_is_nothing() {
        assert!(of(Yardstick::BestOf(vec!["none-posix-aio-4".into()])).is_none());
    }

    #[test]
    fn best_within_a_limit_is_the_best_of_those_that_keep_it() {
        // Both have a median of 100. The interval of "bare" is 98 to 102, that of the other 90 to 110.
        let within = |at_most| of(Yardstick::BestWithin { column: "bandwidth".into(), at_most });
        assert_eq!(within(100.0).unwrap().against, " of cache=none, posix-aio, no pool");
        assert!(within(99.0).is_none());
        let mut result = example::result();
        let judged = result.cell("disk-randwrite", "none-posix-aio-1").unwrap().clone();
        let own = result.cells.iter_mut().find(|cell| cell.variant == judged.variant).unwrap();
        own.measures[0].summary.as_mut().unwrap().median = 101.0;
        let yardstick = Yardstick::BestWithin { column: "bandwidth".into(), at_most: 100.0 };
        let best = found(&result.experiment, &target(yardstick), &result.cells, &judged).unwrap();
        assert_eq!(best.against, " of bare metal, O_DIRECT", "although the other is higher");
    }

    #[test]
    fn other_workload_is_the_same_variants() {
        let same = of(Yardstick::Workload("disk-randwrite".into())).unwrap();
        assert_eq!((same.summary.median, same.against.as_str()), (1.0, " of random <writes> & more"));
        assert!(of(Yardstick::Workload("nowhere".into())).is_none());
    }

    #[test]
    fn figures_beside_each_other_are_put_together_round_by_round() {
        let with = |by| {
            let (column, variant) = ("bandwidth".to_owned(), "bare".to_owned());
            of(Yardstick::Beside { column, variant, by, at_most: 1.0 }).unwrap()
        };
        let ratio = with(Beside::Ratio);
        assert_eq!((ratio.summary.low, ratio.against.as_str()), (0.9, " beside bare metal, O_DIRECT"));
        let cell = |id| example::result().cell("disk-randwrite", id).unwrap().clone();
        let (ours, theirs) = (cell("none-posix-aio-1"), cell("bare"));
        let pairs = ours.samples("bandwidth").unwrap().iter().zip(theirs.samples("bandwidth").unwrap());
        let smallest = pairs.filter_map(|(a, b)| Some((*a)? - (*b)?)).fold(f64::INFINITY, f64::min);
        assert_eq!(with(Beside::Difference).summary.low, smallest);
    }

    #[test]
    fn figure_is_the_columns_own() {
        let found = of(Yardstick::Figure { column: "bandwidth".into(), at_most: 1.0 }).unwrap();
        assert_eq!(found.summary.median, 100.0);
    }
}
