//! Drawings over all workloads: the ratio to the baseline against one parameter, with a panel per variant and a line
//! per value of a second parameter.
//!
//! `workloads with both parameters → points (median, interval) → panels side by side, one scale for all`

use std::ops::Range;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::drawing::{Area, Chart, Drawn, GRID, INK, in_percent, letters, positions, text};
use crate::error::LabError;
use crate::experiment::{Curves, RatioForm};
use crate::result::RunResult;
use crate::stats::Summary;

const PANEL_PX: u32 = 400;
const HEIGHT_PX: u32 = 400;
/// Height of the title and the legend.
const HEAD_PX: u32 = 66;
/// Width of the vertical axis; in the first panel, with the axis's name.
const SCALE_PX: u32 = 58;
/// Upper limit of the scale. A disturbed lock may be a hundred times slower, which would flatten all other curves.
const MOST: f64 = 400.0;
/// The scale shows intervals at least up to this distance from the medians, in %.
const LEAST_REACH: f64 = 5.0;
/// Colours that are distinguishable for the colour-blind (Okabe and Ito 2008).
const COLORS: [RGBColor; 6] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x80, 0x80, 0x80),
    RGBColor(0x8a, 0x6d, 0x00),
];

/// One line: a value of the second parameter.
struct Line {
    value: f64,
    color: RGBColor,
    /// The points by their horizontal values.
    points: Vec<(f64, Summary)>,
}

/// All drawings of a run, with their file names.
pub(super) fn all(result: &RunResult) -> Result<Vec<(String, String)>, LabError> {
    let curves = result.experiment.curves.iter();
    curves.map(|curves| Ok((format!("{}.svg", curves.id), svg(result, curves)?))).collect()
}

/// Draws one of the declaration's curves.
pub(super) fn svg(result: &RunResult, curves: &Curves) -> Result<String, LabError> {
    text(&format!("{}.svg", curves.id), |text| draw(text, result, curves))
}

fn draw(text: &mut String, result: &RunResult, curves: &Curves) -> Drawn {
    let panels: Vec<_> =
        curves.panels.iter().map(|variant| (variant, lines(result, curves, variant))).collect();
    let count = u32::try_from(panels.len()).unwrap_or(u32::MAX).clamp(1, 6);
    let area = SVGBackend::with_string(text, (count * PANEL_PX, HEAD_PX + HEIGHT_PX)).into_drawing_area();
    area.fill(&WHITE)?;
    let (head, body) = area.split_vertically(HEAD_PX);
    self::head(&head, curves, panels.first().map_or(&[], |(_, lines)| lines))?;
    let all = || panels.iter().flat_map(|(_, lines)| lines);
    let (x, y) = (across(all()), up(all()));
    let name = axis_name(result);
    for (place, (area, (variant, lines))) in
        body.split_evenly((1, count as usize)).iter().zip(&panels).enumerate()
    {
        let name = if place == 0 { name.as_str() } else { "" };
        panel(area, result.label(variant), (&curves.across.title, name), (&x, &y), lines)?;
    }
    area.present()?;
    Ok(())
}

fn axis_name(result: &RunResult) -> String {
    match result.experiment.ratio_form {
        RatioForm::Gain => format!("{}, %", result.experiment.ratio_title),
        RatioForm::Share => format!("% {}", result.experiment.ratio_title),
    }
}

fn lines(result: &RunResult, curves: &Curves, variant: &str) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for workload in &result.experiment.workloads {
        let (Some(&x), Some(&value)) =
            (workload.place.get(&curves.across.key), workload.place.get(&curves.lines.key))
        else {
            continue;
        };
        let ratio = result.cell(&workload.id, variant).and_then(|cell| cell.ratio.as_ref());
        let point = ratio.map(|ratio| (x, in_percent(ratio.summary, result.experiment.ratio_form)));
        match lines.iter_mut().find(|line| line.value.total_cmp(&value).is_eq()) {
            Some(line) => line.points.extend(point),
            None => lines.push(Line { value, color: INK, points: point.into_iter().collect() }),
        }
    }
    lines.sort_by(|a, b| a.value.total_cmp(&b.value));
    for (line, color) in lines.iter_mut().zip(COLORS.into_iter().cycle()) {
        line.color = color;
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    lines
}

/// All horizontal values, and their range with a margin.
fn across<'l>(lines: impl Iterator<Item = &'l Line>) -> (Range<f64>, Vec<f64>) {
    let values = positions(lines.flat_map(|line| &line.points));
    let (low, high) = (values.first().copied().unwrap_or(0.0), values.last().copied().unwrap_or(1.0));
    let room = if high > low { (high - low) * 0.06 } else { 0.5 };
    (low - room..high + room, values)
}

/// The vertical range. It covers "no difference", all medians up to [`MOST`], and the intervals unless they reach much
/// further: one disturbed round must not flatten all other curves.
fn up<'l>(lines: impl Iterator<Item = &'l Line>) -> Range<f64> {
    let around = |(low, high): (f64, f64), value: f64| (low.min(value), high.max(value));
    let found: Vec<_> = lines.flat_map(|line| line.points.iter().map(|(_, found)| *found)).collect();
    let (low, high) = found.iter().map(|found| found.median.min(MOST)).fold((0.0, 0.0), around);
    let reach = (high - low).max(LEAST_REACH);
    let shown = |end: f64| end.clamp(low - reach, high + reach);
    let ends = found.iter().flat_map(|found| [shown(found.low), shown(found.high)]);
    let (low, high) = ends.fold((low, high), around);
    let room = ((high - low) * 0.06).max(1.0);
    low - room..high + room
}

/// The title, and below it each line's colour and value.
fn head(area: &Area<'_>, curves: &Curves, lines: &[Line]) -> Drawn {
    let style = |size| letters(size, INK, HPos::Left);
    area.draw(&Text::new(curves.title.clone(), (14, 22), style(19)))?;
    let title = curves.lines.title.clone();
    area.draw(&Text::new(format!("{title}:"), (14, 50), style(13)))?;
    // About 7 px per letter at font size 13.
    let mut x_px = 30 + 7 * i32::try_from(title.chars().count()).unwrap_or(0);
    for line in lines {
        area.draw(&PathElement::new(vec![(x_px, 50), (x_px + 22, 50)], line.color.stroke_width(2)))?;
        area.draw(&Circle::new((x_px + 11, 50), 4, line.color.filled()))?;
        area.draw(&Text::new(short(line.value), (x_px + 28, 50), style(13)))?;
        x_px += 72;
    }
    Ok(())
}

fn panel(
    area: &Area<'_>,
    title: &str,
    (across, up): (&str, &str),
    (x, y): (&(Range<f64>, Vec<f64>), &Range<f64>),
    lines: &[Line],
) -> Drawn {
    let small = ("sans-serif", 13).into_font().color(&INK);
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 15).into_font().color(&INK))
        .margin(10)
        .set_label_area_size(LabelAreaPosition::Left, SCALE_PX)
        .set_label_area_size(LabelAreaPosition::Bottom, 44)
        .build_cartesian_2d(x.0.clone(), y.clone())?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .y_labels(8)
        .x_labels(0)
        .y_label_formatter(&|value| short(*value))
        .x_desc(across)
        .y_desc(up)
        .label_style(small.clone())
        .axis_desc_style(small)
        .bold_line_style(GRID)
        .light_line_style(WHITE.mix(0.0))
        .draw()?;
    chart.draw_series([PathElement::new(vec![(x.0.start, 0.0), (x.0.end, 0.0)], INK.stroke_width(1))])?;
    // Ticks at the measured values instead of round ones.
    let below = Pos::new(HPos::Center, VPos::Top);
    for value in &x.1 {
        let (x_px, y_px) = chart.backend_coord(&(*value, y.start));
        let style = ("sans-serif", 13).into_font().color(&INK).pos(below);
        area.draw(&Text::new(
            short(*value),
            (x_px - area.get_base_pixel().0, y_px + 6 - area.get_base_pixel().1),
            style,
        ))?;
    }
    lines
        .iter()
        .enumerate()
        .try_for_each(|(place, line)| draw_line(&mut chart, (&x.0, y), line, place, lines.len()))
}

/// Draws a line, shifted slightly: otherwise whiskers at the same position would cover each other.
fn draw_line(
    chart: &mut Chart<'_, '_>,
    (x, y): (&Range<f64>, &Range<f64>),
    line: &Line,
    place: usize,
    of: usize,
) -> Drawn {
    let (place, of) = (u32::try_from(place).unwrap_or(0), u32::try_from(of).unwrap_or(1));
    let aside = (f64::from(place) - f64::from(of - 1) / 2.0) * (x.end - x.start) * 0.008;
    let points = || line.points.iter().map(move |(x, found)| (x + aside, *found));
    chart.draw_series(points().map(|(x, Summary { low, high, .. })| {
        PathElement::new(vec![(x, low.max(y.start)), (x, high.min(y.end))], line.color.stroke_width(1))
    }))?;
    let medians = points().map(|(x, found)| (x, found.median.min(y.end))).collect();
    chart.draw_series([PathElement::new::<Vec<_>, _>(medians, line.color.stroke_width(2))])?;
    // Hollow markers are for values beyond the scale.
    chart.draw_series(points().map(|(x, found)| {
        let style = if found.median > y.end { line.color.stroke_width(2) } else { line.color.filled() };
        Circle::new((x, found.median.min(y.end)), 4, style)
    }))?;
    Ok(())
}

fn short(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::{Axis, Workload};
    use crate::report::example;

    fn result() -> RunResult {
        let mut result = example::result();
        result.experiment.workloads[0] =
            Workload::new("disk-randwrite", "w").at("notify", 2.0).at("threads", 4.0);
        result.experiment.curves = vec![Curves {
            id: "by-notify".into(),
            title: "Share <over> all".into(),
            across: Axis { key: "notify".into(), title: "per notification, µs".into() },
            lines: Axis { key: "threads".into(), title: "threads".into() },
            panels: vec!["none-posix-aio-1".into(), "none-posix-aio-4".into()],
        }];
        result
    }

    #[test]
    fn drawing_has_a_panel_per_variant_and_its_axes_have_units() {
        let (name, svg) = all(&result()).unwrap().remove(0);
        assert_eq!(name, "by-notify.svg");
        for part in
            ["posix-aio, no pool", "pool of 4", "per notification, µs", "Share &lt;over&gt; all", "threads:"]
        {
            assert!(svg.contains(part), "no {part} in {svg}");
        }
    }

    #[test]
    fn workload_without_the_numbers_is_on_no_line() {
        let mut result = result();
        let found = lines(&result, &result.experiment.curves[0], "none-posix-aio-1");
        assert_eq!((found.len(), found[0].value, found[0].points[0].0), (1, 4.0, 2.0));
        result.experiment.workloads[0].place.clear();
        assert!(lines(&result, &result.experiment.curves[0], "none-posix-aio-1").is_empty());
    }

    #[test]
    fn variant_that_was_not_measured_has_an_empty_panel() {
        let result = result();
        let found = lines(&result, &result.experiment.curves[0], "none-posix-aio-4");
        assert!(found[0].points.is_empty());
        assert!(svg(&result, &result.experiment.curves[0]).is_ok());
    }

    #[test]
    fn median_far_beyond_all_others_is_cut_off() {
        let found = |median| Summary { median, low: median, high: median, coverage: 1.0 };
        let line = Line { value: 1.0, color: INK, points: vec![(1.0, found(90.0)), (2.0, found(16_000.0))] };
        let y = up([&line].into_iter());
        assert!(y.end > 90.0 && y.end < 1000.0, "{y:?}");
    }

    #[test]
    fn interval_that_dwarfs_all_medians_is_cut_off() {
        let found = Summary { median: 50.0, low: 40.0, high: 60.0, coverage: 1.0 };
        let wild = Summary { high: 1e6, ..found };
        let line = Line { value: 1.0, color: INK, points: vec![(1.0, found), (2.0, wild)] };
        let y = up([&line].into_iter());
        assert!(y.start < 0.0 && y.end > 60.0 && y.end < 120.0, "{y:?}");
    }

    #[test]
    fn scales_enclose_all_intervals_and_no_difference() {
        let found = Summary { median: 50.0, low: 40.0, high: 60.0, coverage: 1.0 };
        let line = Line { value: 1.0, color: INK, points: vec![(2.0, found), (10.0, found)] };
        let y = up([&line].into_iter());
        assert!(y.start < 0.0 && y.end > 60.0, "{y:?}");
        let (x, at) = across([&line].into_iter());
        assert!(x.start < 2.0 && x.end > 10.0 && at == [2.0, 10.0], "{x:?} {at:?}");
    }
}
