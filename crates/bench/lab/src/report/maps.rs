//! Drawings over all workloads: the ratio to the baseline by two parameters, one grid per variant and layer.
//!
//! `Grid per layer and variant → cells (colour and figure) → grids side by side, layers one below another`
//!
//! - White is a ratio of 1. The colours are on a logarithmic scale: half and double are equally strong.

use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::drawing::{Area, Drawn, GRID, INK, letters, text};
use crate::error::LabError;
use crate::experiment::{Layer, Map};
use crate::grid::{self, Grid};
use crate::result::RunResult;

const CELL_WIDTH_PX: i32 = 56;
const CELL_HEIGHT_PX: i32 = 26;
/// Height of the title, the explanation and the scale.
const HEAD_PX: i32 = 128;
const MARGIN_PX: i32 = 14;
/// Width of the row values, left of each grid.
const VALUES_PX: i32 = 46;
/// Height of a layer's name and the variants' names, above the grids.
const NAMES_PX: i32 = 46;
/// Height of the column values and the gap below them.
const BELOW_PX: i32 = 40;
/// Colours for ratios below and above 1. Distinguishable for the colour-blind (Okabe and Ito 2008).
const LESS: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
const MORE: RGBColor = RGBColor(0x00, 0x72, 0xb2);
/// Colour of a cell without a ratio.
const ABSENT: RGBColor = RGBColor(0xf0, 0xf0, 0xf0);
/// This ratio and its reciprocal have the strongest colours.
const STRONGEST: f64 = 2.0;
/// Share of the pure colour in the strongest shade. The rest is white, so that dark figures remain readable.
const MOST_MIXED: f64 = 0.75;
/// The legend's ratios, which explain the colours.
const SCALE: [(f64, &str); 7] =
    [(0.5, "≤ 0.5"), (0.7, "0.7"), (0.85, "0.85"), (1.0, "1"), (1.2, "1.2"), (1.4, "1.4"), (2.0, "≥ 2")];

/// All drawings of a run, with their file names.
pub(super) fn all(result: &RunResult) -> Result<Vec<(String, String)>, LabError> {
    let maps = result.experiment.maps.iter();
    maps.map(|map| Ok((format!("{}.svg", map.id), svg(result, map)?))).collect()
}

/// Draws one of the declaration's maps.
pub(super) fn svg(result: &RunResult, map: &Map) -> Result<String, LabError> {
    text(&format!("{}.svg", map.id), |text| draw(text, result, map))
}

fn draw(text: &mut String, result: &RunResult, map: &Map) -> Drawn {
    let of_layer = |layer: &Layer| -> Vec<Grid> {
        map.variants.iter().map(|variant| Grid::of(result, map, layer, variant)).collect()
    };
    let layers: Vec<_> = map.layers.iter().map(|layer| (layer, of_layer(layer))).collect();
    let columns = layers.iter().flat_map(|(_, grids)| grids).map(|grid| grid.across.len()).max().unwrap_or(0);
    let grid_width_px = VALUES_PX + CELL_WIDTH_PX * number(columns) + MARGIN_PX;
    let height_px = |grids: &[Grid]| {
        let rows = grids.iter().map(|grid| grid.down.len()).max().unwrap_or(0);
        NAMES_PX + CELL_HEIGHT_PX * number(rows) + BELOW_PX
    };
    // The head needs this width even if the grids are narrower.
    let width_px = (MARGIN_PX + grid_width_px * number(map.variants.len())).max(720);
    let all_px = HEAD_PX + layers.iter().map(|(_, grids)| height_px(grids)).sum::<i32>();
    let area =
        SVGBackend::with_string(text, (width_px.unsigned_abs(), all_px.unsigned_abs())).into_drawing_area();
    area.fill(&WHITE)?;
    head(&area, result, map)?;
    let mut y_px = HEAD_PX;
    for (layer, grids) in &layers {
        area.draw(&Text::new(layer.label.clone(), (MARGIN_PX, y_px + 8), letters(15, INK, HPos::Left)))?;
        let mut x_px = MARGIN_PX + VALUES_PX;
        for (variant, grid) in map.variants.iter().zip(grids) {
            let name = result.label(variant).to_owned();
            area.draw(&Text::new(name, (x_px, y_px + 33), letters(13, INK, HPos::Left)))?;
            draw_grid(&area, grid, (x_px, y_px + NAMES_PX))?;
            x_px += grid_width_px;
        }
        y_px += height_px(grids);
    }
    area.present()?;
    Ok(())
}

/// Draws the title, an explanation of the cells, and the scale of colours.
fn head(area: &Area<'_>, result: &RunResult, map: &Map) -> Drawn {
    let line = |text: String, y_px, size| {
        area.draw(&Text::new(text, (MARGIN_PX, y_px), letters(size, INK, HPos::Left)))
    };
    line(map.title.clone(), 22, 19)?;
    line(format!("{}.", grid::explanation(result)), 48, 13)?;
    line(format!("Rows: {}. Columns: {}.", map.down.title, map.across.title), 66, 13)?;
    let mut x_px = MARGIN_PX;
    for (ratio, label) in SCALE {
        cell(area, (x_px, 78), label, color(ratio))?;
        x_px += CELL_WIDTH_PX;
    }
    Ok(())
}

/// Draws a grid. `x_px` and `y_px` are the upper left corner of its cells; the row and column values are to the left of
/// and below the cells.
fn draw_grid(area: &Area<'_>, grid: &Grid, (x_px, y_px): (i32, i32)) -> Drawn {
    let mut down_px = y_px;
    for (value, row) in grid.down.iter().zip(&grid.ratios) {
        let at = (x_px - 8, down_px + CELL_HEIGHT_PX / 2);
        area.draw(&Text::new(value.to_string(), at, letters(13, INK, HPos::Right)))?;
        let mut across_px = x_px;
        for ratio in row {
            let color = ratio.map_or(ABSENT, |ratio| color(ratio.median));
            cell(area, (across_px, down_px), &grid::figure(*ratio), color)?;
            across_px += CELL_WIDTH_PX;
        }
        down_px += CELL_HEIGHT_PX;
    }
    let mut across_px = x_px + CELL_WIDTH_PX / 2;
    for value in &grid.across {
        area.draw(&Text::new(value.to_string(), (across_px, down_px + 12), letters(13, INK, HPos::Center)))?;
        across_px += CELL_WIDTH_PX;
    }
    Ok(())
}

fn cell(area: &Area<'_>, (x_px, y_px): (i32, i32), figure: &str, color: RGBColor) -> Drawn {
    let corners = [(x_px, y_px), (x_px + CELL_WIDTH_PX, y_px + CELL_HEIGHT_PX)];
    area.draw(&Rectangle::new(corners, color.filled()))?;
    area.draw(&Rectangle::new(corners, GRID.stroke_width(1)))?;
    let middle = (x_px + CELL_WIDTH_PX / 2, y_px + CELL_HEIGHT_PX / 2);
    area.draw(&Text::new(figure.to_owned(), middle, letters(13, INK, HPos::Center)))?;
    Ok(())
}

fn color(ratio: f64) -> RGBColor {
    // A ratio of zero gives minus infinity.
    let strength = (ratio.ln() / STRONGEST.ln()).clamp(-1.0, 1.0);
    let RGBColor(red, green, blue) = if strength < 0.0 { LESS } else { MORE };
    let mixed = |part: u8| {
        let share = strength.abs() * MOST_MIXED;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // between 0 and 255
        let part = (255.0 + (f64::from(part) - 255.0) * share).round() as u8;
        part
    };
    RGBColor(mixed(red), mixed(green), mixed(blue))
}

fn number(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example;

    #[test]
    fn drawing_names_variants_layers_and_axes_and_has_each_figure() {
        let (result, _) = example::with_map();
        let (name, svg) = all(&result).unwrap().remove(0);
        assert_eq!(name, "plane.svg");
        let named = ["Throughput &lt;over&gt;", "held &lt;briefly&gt;", "posix-aio, no pool", "pool of 4"];
        let others = ["Rows: threads per core. Columns: pauses outside.", "~1.01", "2.50", "≥ 2"];
        for part in named.into_iter().chain(others) {
            assert!(svg.contains(part), "no {part} in {svg}");
        }
    }

    #[test]
    fn colour_is_white_at_one_and_strongest_at_half_and_twice() {
        assert_eq!(color(1.0), WHITE);
        assert_eq!((color(2.0), color(0.5)), (color(40.0), color(0.0)));
        let RGBColor(red, _, blue) = color(1.5);
        assert!(red < blue, "more is blue");
        let RGBColor(red, _, blue) = color(0.6);
        assert!(red > blue, "less is orange");
        assert_ne!(color(0.9), color(0.8));
    }

    #[test]
    fn map_of_nothing_is_a_drawing() {
        let (result, mut map) = example::with_map();
        map.layers.clear();
        assert!(svg(&result, &map).is_ok());
    }
}
