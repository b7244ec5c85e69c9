//! Drawings of a figure's parts: one per workload, with a bar per variant, a coloured part per column, and the sum.
//!
//! The parts' medians are stacked. Their sum need not equal the median of the sums.

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::drawing::{Area, Chart, Drawn, GRID, INK, letters, text};
use crate::error::LabError;
use crate::experiment::{Stack, Workload};
use crate::result::RunResult;

const WIDTH_PX: u32 = 860;
const ROW_PX: u32 = 30;
/// Height of title and legend.
const HEAD_PX: u32 = 66;
const AXIS_PX: u32 = 76;
const LABELS_PX: u32 = 275;
/// Half of a bar's thickness, in rows.
const HALF_BAR: f64 = 0.3;
/// Approximate width of a letter at font size 13.
const LETTER_PX: i32 = 7;
/// Colours that are distinguishable for the colour-blind (Okabe and Ito 2008).
const COLORS: [RGBColor; 6] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x80, 0x80, 0x80),
];

/// The bar of one variant.
struct Row<'r> {
    label: &'r str,
    /// Medians of the parts; empty if the variant was not measured.
    parts: Vec<f64>,
}

impl Row<'_> {
    fn sum(&self) -> f64 {
        self.parts.iter().sum()
    }
}

/// All drawings of a run, with their file names.
pub(super) fn all(result: &RunResult) -> Result<Vec<(String, String)>, LabError> {
    let workloads = result.experiment.workloads.iter();
    let pairs =
        workloads.flat_map(|workload| result.experiment.stacks.iter().map(move |stack| (workload, stack)));
    pairs.map(|(workload, stack)| Ok((name(workload, stack), svg(result, workload, stack)?))).collect()
}

fn name(workload: &Workload, stack: &Stack) -> String {
    format!("{}-{}.svg", workload.id, stack.id)
}

/// Draws a stack of one workload.
pub(super) fn svg(result: &RunResult, workload: &Workload, stack: &Stack) -> Result<String, LabError> {
    let rows = rows(result, workload, stack);
    text(&name(workload, stack), |text| draw(text, result, workload, stack, &rows))
}

fn rows<'r>(result: &'r RunResult, workload: &'r Workload, stack: &Stack) -> Vec<Row<'r>> {
    let cells = result.cells_of(&workload.id);
    cells
        .map(|cell| {
            let medians = stack.columns.iter().map(|id| cell.summary(id).map(|found| found.median));
            Row {
                label: result.label(&cell.variant),
                parts: medians.collect::<Option<_>>().unwrap_or_default(),
            }
        })
        .collect()
}

fn draw(
    text: &mut String,
    result: &RunResult,
    workload: &Workload,
    stack: &Stack,
    rows: &[Row<'_>],
) -> Drawn {
    let count = u32::try_from(rows.len()).unwrap_or(u32::MAX).max(1);
    let height_px = count.saturating_mul(ROW_PX).saturating_add(HEAD_PX + AXIS_PX);
    let area = SVGBackend::with_string(text, (WIDTH_PX, height_px)).into_drawing_area();
    area.fill(&WHITE)?;
    let (head, body) = area.split_vertically(HEAD_PX);
    self::head(&head, &format!("{}: {}", stack.title, workload.label), &names(result, stack))?;
    let most = rows.iter().map(Row::sum).fold(0.0, f64::max);
    let x = 0.0..if most > 0.0 { most * 1.15 } else { 1.0 };
    let mut chart = ChartBuilder::on(&body)
        .margin(14)
        .set_label_area_size(LabelAreaPosition::Left, LABELS_PX)
        .set_label_area_size(LabelAreaPosition::Bottom, 46)
        .build_cartesian_2d(x, 0.0..f64::from(count))?;
    axes(&mut chart, &stack.axis)?;
    for (place, row) in rows.iter().enumerate() {
        let from_top = u32::try_from(rows.len() - place).unwrap_or(u32::MAX);
        draw_row(&body, &mut chart, f64::from(from_top) - 0.5, row)?;
    }
    area.present()?;
    Ok(())
}

fn names<'r>(result: &'r RunResult, stack: &'r Stack) -> Vec<&'r str> {
    let title = |id: &'r String| {
        let column = result.experiment.columns.iter().find(|column| &column.id == id);
        column.map_or(id.as_str(), |column| &column.title)
    };
    stack.columns.iter().map(title).collect()
}

fn colors() -> impl Iterator<Item = RGBColor> {
    COLORS.into_iter().cycle()
}

/// Draws the title, and below it each part's colour and name.
fn head(area: &Area<'_>, title: &str, names: &[&str]) -> Drawn {
    let style = |size| letters(size, INK, HPos::Left);
    area.draw(&Text::new(title.to_owned(), (14, 22), style(17)))?;
    let mut x_px = 16;
    for (name, color) in names.iter().zip(colors()) {
        area.draw(&Rectangle::new([(x_px, 44), (x_px + 14, 56)], color.filled()))?;
        area.draw(&Text::new((*name).to_owned(), (x_px + 20, 50), style(13)))?;
        x_px += 40 + LETTER_PX * i32::try_from(name.chars().count()).unwrap_or(0);
    }
    Ok(())
}

fn axes(chart: &mut Chart<'_, '_>, title: &str) -> Drawn {
    let small = ("sans-serif", 13).into_font().color(&INK);
    chart
        .configure_mesh()
        .disable_y_mesh()
        .y_labels(0)
        .x_labels(8)
        .x_desc(title)
        .label_style(small.clone())
        .axis_desc_style(small)
        .bold_line_style(GRID)
        .light_line_style(WHITE.mix(0.0))
        .draw()?;
    Ok(())
}

/// Draws the stacked parts, with the name on the left and the sum on the right.
fn draw_row(area: &Area<'_>, chart: &mut Chart<'_, '_>, y: f64, row: &Row<'_>) -> Drawn {
    let mut end = 0.0;
    for (part, color) in row.parts.iter().zip(colors()) {
        let corners = [(end, y - HALF_BAR), (end + part, y + HALF_BAR)];
        chart.draw_series([Rectangle::new(corners, color.filled())])?;
        end += part;
    }
    let (base_x, base_y) = area.get_base_pixel();
    let (left_px, _) = chart.plotting_area().get_pixel_range();
    let (end_px, y_px) = chart.backend_coord(&(end, y));
    let text = |side| letters(13, INK, side);
    let name_at = (left_px.start - base_x - 10, y_px - base_y);
    area.draw(&Text::new(row.label.to_owned(), name_at, text(HPos::Right)))?;
    let sum = if row.parts.is_empty() { "not available".to_owned() } else { format!("{:.2}", row.sum()) };
    area.draw(&Text::new(sum, (end_px - base_x + 8, y_px - base_y), text(HPos::Left)))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example;

    fn result() -> RunResult {
        let mut result = example::result();
        result.experiment.stacks = vec![Stack {
            id: "parts".into(),
            title: "Made <of>".into(),
            axis: "MB/s".into(),
            columns: vec!["bandwidth".into(), "client-submit".into()],
        }];
        result
    }

    #[test]
    fn drawing_names_variants_and_parts_and_has_each_sum() {
        let mut result = result();
        let known: Vec<_> = result.experiment.columns.iter().map(|column| column.id.clone()).collect();
        result.experiment.stacks[0].columns = known[..2].to_vec();
        let (name, svg) = all(&result).unwrap().remove(0);
        assert_eq!(name, "disk-randwrite-parts.svg");
        for part in ["Made &lt;of&gt;", "MB/s", "posix-aio, no pool", "not available", "bandwidth"] {
            assert!(svg.contains(part), "no {part} in {svg}");
        }
        // Medians of 100 and 100 / 0.7.
        assert!(svg.contains("242.86"), "{svg}");
    }

    #[test]
    fn variant_that_lacks_a_part_has_no_bar() {
        let mut result = result();
        result.experiment.stacks[0].columns = vec!["bandwidth".into(), "nonsense".into()];
        let rows = rows(&result, &result.experiment.workloads[0], &result.experiment.stacks[0]);
        assert!(rows.iter().all(|row| row.parts.is_empty()));
    }
}
