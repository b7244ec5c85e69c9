//! Drawings over all workloads: a column's figures against a parameter of the workloads, one line per variant.
//!
//! `workloads with that parameter → points (median, interval) → lines in one panel, their names next to it`
//!
//! - The horizontal axis has powers of two. The vertical axis has powers of ten, or starts at zero. On logarithmic
//!   axes, points are placed by their logarithms.

use std::ops::Range;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::drawing::{Area, Chart, Drawn, GRID, INK, letters, positions, text};
use crate::error::LabError;
use crate::experiment::{Courses, Scale};
use crate::result::RunResult;
use crate::stats::Summary;

const WIDTH_PX: u32 = 980;
const HEIGHT_PX: u32 = 540;
/// Width of the lines' names.
const NAMES_PX: u32 = 230;
const NAME_PX: i32 = 26;
/// Colours that are distinguishable for the colour-blind (Okabe and Ito 2008). Further lines reuse these colours,
/// dashed and with hollow markers.
const COLORS: [RGBColor; 7] = [
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x8a, 0x6d, 0x00),
    RGBColor(0x70, 0x70, 0x70),
];

/// The line of one variant.
struct Line<'r> {
    label: &'r str,
    color: RGBColor,
    is_dashed: bool,
    /// The points by their horizontal positions in the drawing.
    points: Vec<(f64, Summary)>,
}

/// All drawings of a run, with their file names.
pub(super) fn all(result: &RunResult) -> Result<Vec<(String, String)>, LabError> {
    let courses = result.experiment.courses.iter();
    courses.map(|courses| Ok((format!("{}.svg", courses.id), svg(result, courses)?))).collect()
}

/// Draws one of the declaration's courses.
pub(super) fn svg(result: &RunResult, courses: &Courses) -> Result<String, LabError> {
    text(&format!("{}.svg", courses.id), |text| draw(text, result, courses))
}

fn draw(text: &mut String, result: &RunResult, courses: &Courses) -> Drawn {
    let lines = lines(result, courses);
    let area = SVGBackend::with_string(text, (WIDTH_PX, HEIGHT_PX)).into_drawing_area();
    area.fill(&WHITE)?;
    let (body, names) = area.split_horizontally(WIDTH_PX - NAMES_PX);
    let (across, up) = (across(&lines), up(&lines, courses.scale));
    let mut chart = axes(&body, result, courses, (&across, &up))?;
    ticks(&body, &mut chart, courses.scale, (&across, &up))?;
    for (place, line) in lines.iter().enumerate() {
        draw_line(&mut chart, line, &up, aside(place, lines.len()))?;
    }
    legend(&names, &lines)?;
    area.present()?;
    Ok(())
}

fn lines<'r>(result: &'r RunResult, courses: &Courses) -> Vec<Line<'r>> {
    let variants = result.experiment.variants.iter();
    let wanted = variants.filter(|variant| courses.variants.contains(&variant.id));
    let line = |(place, variant): (usize, &'r crate::experiment::Variant)| Line {
        label: &variant.label,
        color: COLORS[place % COLORS.len()],
        is_dashed: place >= COLORS.len(),
        points: points(result, courses, &variant.id),
    };
    wanted.enumerate().map(line).collect()
}

fn points(result: &RunResult, courses: &Courses, variant: &str) -> Vec<(f64, Summary)> {
    let mut points: Vec<_> = result
        .experiment
        .workloads
        .iter()
        .filter_map(|workload| {
            let across = workload.place.get(&courses.across.key).copied().filter(|&value| value > 0.0)?;
            let found = result.cell(&workload.id, variant)?.summary(&courses.column)?;
            placed(found, courses.scale).map(|found| (across.log2(), found))
        })
        .collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points
}

/// Returns `None` for values that a logarithmic scale cannot show.
fn placed(found: Summary, scale: Scale) -> Option<Summary> {
    let Summary { median, low, high, .. } = found;
    match scale {
        Scale::Linear => Some(found),
        Scale::Log if median <= 0.0 => None,
        Scale::Log => {
            // If the interval reaches zero, it is drawn to a power of ten below the median.
            let low = if low > 0.0 { low } else { median / 10.0 };
            Some(Summary { median: median.log10(), low: low.log10(), high: high.log10(), ..found })
        }
    }
}

/// The logarithms of all horizontal values, and their range with a margin.
fn across(lines: &[Line<'_>]) -> (Range<f64>, Vec<f64>) {
    let values = positions(lines.iter().flat_map(|line| &line.points));
    let (low, high) = (values.first().copied().unwrap_or(0.0), values.last().copied().unwrap_or(1.0));
    (low - 0.3..high + 0.3, values)
}

/// The vertical range: it covers all medians, and the nearby parts of the intervals.
fn up(lines: &[Line<'_>], scale: Scale) -> Range<f64> {
    let medians = || lines.iter().flat_map(|line| line.points.iter().map(|(_, found)| found.median));
    let (low, high) = (medians().fold(f64::INFINITY, f64::min), medians().fold(f64::NEG_INFINITY, f64::max));
    if low > high {
        return 0.0..1.0;
    }
    let room = ((high - low) * 0.08).max(if scale == Scale::Log { 0.1 } else { 0.02 });
    low - room..high + room
}

fn axes<'a, 's>(
    area: &'a Area<'s>,
    result: &RunResult,
    courses: &Courses,
    ((across, _), up): (&(Range<f64>, Vec<f64>), &Range<f64>),
) -> Drawn<Chart<'a, 's>> {
    let small = ("sans-serif", 13).into_font().color(&INK);
    let mut chart = ChartBuilder::on(area)
        .caption(&courses.title, ("sans-serif", 18).into_font().color(&INK))
        .margin(12)
        .set_label_area_size(LabelAreaPosition::Left, 66)
        .set_label_area_size(LabelAreaPosition::Bottom, 46)
        .build_cartesian_2d(across.clone(), up.clone())?;
    let column = result.experiment.columns.iter().find(|column| column.id == courses.column);
    let name = column.map_or_else(String::new, |column| match column.unit.as_str() {
        "" => column.title.clone(),
        unit => format!("{}, {unit}", column.title),
    });
    chart
        .configure_mesh()
        .disable_mesh()
        .x_labels(0)
        .y_labels(0)
        .x_desc(&courses.across.title)
        .y_desc(name)
        .axis_desc_style(small)
        .draw()?;
    Ok(chart)
}

/// Draws the ticks: at the measured values on the horizontal axis, at round numbers on the vertical axis.
fn ticks(
    area: &Area<'_>,
    chart: &mut Chart<'_, '_>,
    scale: Scale,
    ((across, values), up): (&(Range<f64>, Vec<f64>), &Range<f64>),
) -> Drawn {
    let text = |text: String, at: (i32, i32), h: HPos, v: VPos| {
        let style = ("sans-serif", 13).into_font().color(&INK).pos(Pos::new(h, v));
        let base = area.get_base_pixel();
        area.draw(&Text::new(text, (at.0 - base.0, at.1 - base.1), style))
    };
    for (label, y) in round_numbers(up, scale) {
        chart.draw_series([PathElement::new(vec![(across.start, y), (across.end, y)], GRID)])?;
        let (x_px, y_px) = chart.backend_coord(&(across.start, y));
        text(label, (x_px - 7, y_px), HPos::Right, VPos::Center)?;
    }
    for &x in values {
        let (x_px, y_px) = chart.backend_coord(&(x, up.start));
        text(number(x.exp2()), (x_px, y_px + 6), HPos::Center, VPos::Top)?;
    }
    Ok(())
}

/// Labels of the vertical axis, with their positions.
fn round_numbers(up: &Range<f64>, scale: Scale) -> Vec<(String, f64)> {
    let inside = |(_, y): &(String, f64)| up.contains(y);
    match scale {
        Scale::Log => {
            let wide = up.end - up.start > 2.5;
            let steps: &[f64] = if wide { &[1.0] } else { &[1.0, 2.0, 5.0] };
            #[allow(clippy::cast_possible_truncation)] // powers of ten of what was measured
            let powers = up.start.floor() as i32..=up.end.ceil() as i32;
            let all = powers.flat_map(|power| steps.iter().map(move |step| step * 10_f64.powi(power)));
            all.map(|value| (number(value), value.log10())).filter(inside).collect()
        }
        Scale::Linear => {
            let step = step(up.end - up.start);
            #[allow(clippy::cast_possible_truncation)] // about ten labels
            let places = (up.start / step).ceil() as i64..=(up.end / step).floor() as i64;
            #[allow(clippy::cast_precision_loss)]
            let all = places.map(|place| place as f64 * step);
            all.map(|value| (number(value), value)).collect()
        }
    }
}

/// A round step that fits into `width` five to ten times.
fn step(width: f64) -> f64 {
    let power = 10_f64.powf((width / 5.0).log10().floor());
    let most = width / 5.0 / power;
    power
        * if most >= 5.0 {
            5.0
        } else if most >= 2.0 {
            2.0
        } else {
            1.0
        }
}

/// Formats a number with as few digits as possible.
fn number(value: f64) -> String {
    let text = format!("{value:.5}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The horizontal shift of a line. Without a shift, intervals at the same position would cover each other.
fn aside(place: usize, of: usize) -> f64 {
    let (place, of) = (u32::try_from(place).unwrap_or(0), u32::try_from(of).unwrap_or(1));
    (f64::from(place) - f64::from(of.saturating_sub(1)) / 2.0) * 0.022
}

fn draw_line(chart: &mut Chart<'_, '_>, line: &Line<'_>, up: &Range<f64>, aside: f64) -> Drawn {
    let shown = |y: f64| y.clamp(up.start, up.end);
    let points = || line.points.iter().map(|(x, found)| (x + aside, *found));
    chart.draw_series(points().map(|(x, found)| {
        let ends = vec![(x, shown(found.low)), (x, shown(found.high))];
        PathElement::new(ends, line.color.mix(0.6).stroke_width(1))
    }))?;
    let medians = points().map(|(x, found)| (x, found.median));
    if line.is_dashed {
        chart.draw_series(DashedLineSeries::new(medians, 6, 4, line.color.stroke_width(2)))?;
    } else {
        chart.draw_series([PathElement::new::<Vec<_>, _>(medians.collect(), line.color.stroke_width(2))])?;
    }
    chart.draw_series(points().map(|(x, found)| Circle::new((x, found.median), 4, dot(line))))?;
    Ok(())
}

fn dot(line: &Line<'_>) -> ShapeStyle {
    if line.is_dashed { line.color.stroke_width(2) } else { line.color.filled() }
}

/// The names of all lines, one below another, in the order of the tables.
fn legend(area: &Area<'_>, lines: &[Line<'_>]) -> Drawn {
    let measured = lines.iter().filter(|line| !line.points.is_empty());
    for (place, line) in measured.enumerate() {
        let y_px = 60 + NAME_PX * i32::try_from(place).unwrap_or(0);
        let pieces: &[(i32, i32)] = if line.is_dashed { &[(8, 15), (23, 30)] } else { &[(8, 30)] };
        for &(from, to) in pieces {
            area.draw(&PathElement::new(vec![(from, y_px), (to, y_px)], line.color.stroke_width(2)))?;
        }
        area.draw(&Circle::new((19, y_px), 4, dot(line)))?;
        area.draw(&Text::new(line.label.to_owned(), (38, y_px), letters(13, INK, HPos::Left)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::{Axis, Workload};
    use crate::report::example;

    fn result() -> RunResult {
        let mut result = example::result();
        result.experiment.workloads[0] = Workload::new("disk-randwrite", "w").at("threads", 8.0);
        result.experiment.courses = vec![Courses {
            id: "by-threads".into(),
            title: "Bandwidth <over> threads".into(),
            across: Axis { key: "threads".into(), title: "threads on 2 cores".into() },
            column: "bandwidth".into(),
            scale: Scale::Log,
            variants: vec!["bare".into(), "none-posix-aio-1".into(), "none-posix-aio-4".into()],
        }];
        result
    }

    #[test]
    fn drawing_names_axes_and_the_variants_that_were_measured() {
        let (name, svg) = all(&result()).unwrap().remove(0);
        assert_eq!(name, "by-threads.svg");
        for part in ["bare metal", "Bandwidth &lt;over&gt;", "threads on 2 cores", "bandwidth, MB/s"] {
            assert!(svg.contains(part), "no {part} in {svg}");
        }
        assert!(!svg.contains("pool of 4"), "was not measured");
    }

    #[test]
    fn points_stand_at_their_logarithms() {
        let result = result();
        let found = points(&result, &result.experiment.courses[0], "bare");
        assert_eq!((found[0].0, found[0].1.median), (3.0, 2.0));
        assert_eq!(placed(Summary { median: 0.0, low: 0.0, high: 0.0, coverage: 1.0 }, Scale::Log), None);
    }

    #[test]
    fn workload_without_the_number_is_not_drawn() {
        let mut result = result();
        result.experiment.workloads[0].place.clear();
        assert!(points(&result, &result.experiment.courses[0], "bare").is_empty());
        assert!(svg(&result, &result.experiment.courses[0]).is_ok());
    }

    #[test]
    fn round_numbers_are_powers_of_ten_or_even_steps() {
        let labels = |range, scale| -> Vec<String> {
            round_numbers(&range, scale).into_iter().map(|(label, _)| label).collect()
        };
        assert_eq!(labels(-3.1..0.5, Scale::Log), ["0.001", "0.01", "0.1", "1"]);
        assert_eq!(labels(0.2..1.1, Scale::Log), ["2", "5", "10"]);
        assert_eq!(labels(0.47..1.02, Scale::Linear), ["0.5", "0.6", "0.7", "0.8", "0.9", "1"]);
    }
}
