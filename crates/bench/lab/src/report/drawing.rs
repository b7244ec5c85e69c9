//! Code that all drawings share: types, colours, lettering, and the conversion to a file's text.

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::error::LabError;
use crate::experiment::RatioForm;
use crate::stats::Summary;

pub(super) const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
pub(super) const GRID: RGBColor = RGBColor(0xe4, 0xe4, 0xe4);

pub(super) type Area<'s> = DrawingArea<SVGBackend<'s>, Shift>;
pub(super) type Chart<'a, 's, X = RangedCoordf64> =
    ChartContext<'a, SVGBackend<'s>, Cartesian2d<X, RangedCoordf64>>;
pub(super) type Drawn<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Draws, and returns the file's text. `name` is the file's name, for the error.
pub(super) fn text(name: &str, draw: impl FnOnce(&mut String) -> Drawn) -> Result<String, LabError> {
    let mut text = String::new();
    let failed = |error: Box<dyn std::error::Error>| LabError::Plot {
        name: name.to_owned(),
        reason: error.to_string(),
    };
    draw(&mut text).map_err(failed)?;
    Ok(text)
}

/// Style of text beside its anchor, vertically centred on it.
pub(super) fn letters(size: u32, color: RGBColor, side: HPos) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&color).pos(Pos::new(side, VPos::Center))
}

pub(super) fn in_percent(summary: Summary, form: RatioForm) -> Summary {
    let [median, low, high] = [summary.median, summary.low, summary.high].map(|ratio| form.percent(ratio));
    Summary { median, low, high, ..summary }
}

/// All horizontal positions, each once, from left to right.
pub(super) fn positions<'p>(points: impl Iterator<Item = &'p (f64, Summary)>) -> Vec<f64> {
    let mut values: Vec<f64> = points.map(|(x, _)| *x).collect();
    values.sort_by(f64::total_cmp);
    values.dedup();
    values
}
