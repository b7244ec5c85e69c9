//! The heat map: a column for each interval, a row for each power of two of time. The shade is the share of the
//! interval's requests.

use std::collections::HashMap;

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use crate::top::grid::RowId;
use crate::top::state::State;
use crate::top::units::{float, time};

/// Each shade, with the minimum share of the requests for which it is used.
const SHADES: [(f64, char); 5] = [(0.5, '█'), (0.2, '▓'), (0.05, '▒'), (0.01, '░'), (0.0, '·')];
const LEGEND: &str = "share of the requests: · less than 1%  ░ 1%  ▒ 5%  ▓ 20%  █ 50%";
/// Width of the times on the left, in columns of the terminal.
const MARGIN: usize = 7;

/// Draws the heat map of one disk, or of all disks that match the filter.
pub fn draw(frame: &mut Frame<'_>, area: Rect, state: &State, of: Option<&RowId>) {
    frame.render_widget(Paragraph::new(lines(&state.heat(of), area)), area);
}

fn lines(columns: &[HashMap<u8, u64>], area: Rect) -> Vec<Line<'static>> {
    let room = usize::from(area.width).saturating_sub(MARGIN);
    let columns = &columns[columns.len().saturating_sub(room)..];
    let octaves = || columns.iter().flat_map(|column| column.keys().copied());
    let (Some(lowest), Some(highest)) = (octaves().min(), octaves().max()) else {
        return vec![Line::raw("no requests yet")];
    };
    let rows = usize::from(area.height).saturating_sub(1).max(1);
    let mut lines: Vec<_> = (lowest..=highest).rev().map(|octave| line(columns, octave)).collect();
    // The slowest requests are at the top, because they matter most if the terminal is too low for all rows.
    lines.truncate(rows);
    lines.push(Line::raw(LEGEND));
    lines
}

fn line(columns: &[HashMap<u8, u64>], octave: u8) -> Line<'static> {
    let cells: String = columns.iter().map(|column| shade(column, octave)).collect();
    Line::raw(format!("{:>6} {cells}", time(1_u64 << octave)))
}

fn shade(column: &HashMap<u8, u64>, octave: u8) -> char {
    let Some(count) = column.get(&octave) else { return ' ' };
    let all: f64 = column.values().map(|count| float(*count)).sum();
    let share = float(*count) / all.max(1.0);
    SHADES.iter().find(|(from, _)| share >= *from).map_or(' ', |(_, shade)| *shade)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shade_is_the_share_of_the_intervals_requests() {
        let columns = [HashMap::from([(10, 1), (12, 99)]), HashMap::from([(12, 7)]), HashMap::new()];
        let lines = lines(&columns, Rect::new(0, 0, 40, 10));
        let text: Vec<_> = lines.iter().map(ToString::to_string).collect();
        assert_eq!(text, [" 4.1µs ██ ", " 2.0µs    ", " 1.0µs ░  ", LEGEND]);
    }

    #[test]
    fn terminal_without_room_shows_the_slowest_and_the_latest() {
        let columns = [HashMap::from([(10, 1)]), HashMap::from([(20, 1)])];
        let lines = lines(&columns, Rect::new(0, 0, 8, 2));
        assert_eq!(lines[0].to_string(), " 1.0ms █");
        assert_eq!(lines.len(), 2);
        assert_eq!(super::lines(&columns, Rect::new(0, 0, 1, 1)).len(), 1);
    }
}
