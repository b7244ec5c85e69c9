//! One table on the screen.

use ratatui::Frame;
use ratatui::layout::{Constraint, Rect};
use ratatui::style::Style;
use ratatui::text::Text;
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState};

use super::palette::Palette;
use crate::top::grid::{self, Grid};
use crate::top::state::State;
use crate::top::tables::Subject;

/// Maximum width of a column of words.
const LONGEST_WORDS: usize = 32;
/// The mark before the selected row.
const MARK: &str = "▸";

/// Draws the table, scrolled to the selected row.
pub fn draw(frame: &mut Frame<'_>, area: Rect, state: &State, subject: Subject, palette: Palette) {
    let grid = state.grid(subject);
    if grid.rows.is_empty() {
        let text = if state.filter.is_empty() { "nothing to show" } else { "no such name" };
        frame.render_widget(Paragraph::new(text), area);
        return;
    }
    let columns = grid.visible(area.width);
    let selected = state.selected.as_ref().and_then(|id| grid.rows.iter().position(|row| row.id == *id));
    // Only rows near the selected one are drawn, so a thousand disks cost no more than a screen.
    let room = usize::from(area.height.saturating_sub(1)).max(1);
    let first = selected.map_or(0, |row| row.saturating_sub(room - 1));
    let shown: Vec<_> = grid.rows.iter().skip(first).take(room).collect();
    let rows = shown.iter().map(|row| Row::new(cells(&grid, row, &columns)).style(palette.of(row.alarm)));
    let table = Table::new(rows, widths(&grid, &shown, &columns))
        .header(heading(&grid, state, subject, &columns))
        .highlight_symbol(MARK)
        .row_highlight_style(Style::new().bold());
    let mut place = TableState::new().with_selected(selected.map(|row| row - first));
    frame.render_stateful_widget(table, area, &mut place);
}

/// The headings. An arrow marks the column by which the table is sorted.
fn headings(grid: &Grid, state: &State, subject: Subject, columns: &[usize]) -> Vec<String> {
    let order = state.order(subject);
    let heading = |column: &usize| {
        let of = grid.columns[*column];
        let falls = of.is_figure != order.is_reversed;
        let arrow = if falls { "▼" } else { "▲" };
        if *column == order.column { format!("{}{arrow}", of.heading) } else { of.heading.to_owned() }
    };
    columns.iter().map(heading).collect()
}

fn heading(grid: &Grid, state: &State, subject: Subject, columns: &[usize]) -> Row<'static> {
    let texts = headings(grid, state, subject, columns);
    let cells = texts.into_iter().zip(columns).map(|(text, column)| aligned(grid, *column, text));
    Row::new(cells.collect::<Vec<_>>()).style(Style::new().bold().underlined())
}

fn cells(grid: &Grid, row: &grid::Row, columns: &[usize]) -> Vec<Cell<'static>> {
    let state_is_shown = columns.iter().any(|column| grid.columns[*column].heading == "STATE");
    let cell = |column: &usize| {
        let mut text = row.cells[*column].shown();
        if grid.columns[*column].heading == "DISK" && !state_is_shown {
            text.insert_str(0, row.alarm.mark());
        }
        aligned(grid, *column, text)
    };
    columns.iter().map(cell).collect()
}

fn aligned(grid: &Grid, column: usize, text: String) -> Cell<'static> {
    let text = Text::raw(text);
    Cell::new(if grid.columns[column].is_figure { text.right_aligned() } else { text })
}

fn widths(grid: &Grid, rows: &[&grid::Row], columns: &[usize]) -> Vec<Constraint> {
    let width = |column: &usize| {
        let of = grid.columns[*column];
        let cells = rows.iter().map(|row| row.cells[*column].shown().chars().count());
        // Space for the arrow of the heading, or for the mark of the row.
        let widest = cells.max().unwrap_or(0).max(of.heading.chars().count()) + 1;
        let widest = u16::try_from(widest.min(LONGEST_WORDS)).unwrap_or(u16::MAX);
        if of.is_figure { Constraint::Length(widest) } else { Constraint::Max(widest) }
    };
    columns.iter().map(width).collect()
}
