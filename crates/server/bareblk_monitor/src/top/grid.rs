//! The tables of all screens: columns, typed cells, filter and order. Text output and screen show the same tables.

use std::cmp::Ordering;

use super::units::{NONE, float, short, time};

/// A column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// The column's heading.
    pub heading: &'static str,
    /// Minimum width of a terminal that shows the column.
    pub from_width: u16,
    /// Whether the column holds figures. The key `s` sorts figures in descending order.
    pub is_figure: bool,
}

impl Column {
    /// A column of words.
    pub const fn words(heading: &'static str, from_width: u16) -> Self {
        Self { heading, from_width, is_figure: false }
    }

    /// A column of figures.
    pub const fn figures(heading: &'static str, from_width: u16) -> Self {
        Self { heading, from_width, is_figure: true }
    }
}

/// A cell.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Text without characters that a terminal would interpret.
    Words(String),
    /// A figure that is shown with a unit of thousands.
    Figure(f64),
    /// A number that is shown in full.
    Number(u64),
    /// A time in nanoseconds.
    Time(u64),
    /// A percentage, shown without its unit.
    Percent(f64),
    /// The value is not known.
    Missing,
}

impl Value {
    /// A figure, if it is known.
    pub fn of(figure: Option<f64>) -> Self {
        figure.map_or(Self::Missing, Self::Figure)
    }

    /// The cell's text in the table.
    pub fn shown(&self) -> String {
        match self {
            Self::Words(words) => words.clone(),
            Self::Figure(figure) => short(*figure),
            Self::Number(number) => number.to_string(),
            Self::Time(ns) => time(*ns),
            Self::Percent(percent) => format!("{percent:.0}"),
            Self::Missing => NONE.to_owned(),
        }
    }

    /// Compares two cells of a column. A missing value is less than any figure.
    fn compare(&self, other: &Self) -> Ordering {
        let figure = |value: &Self| match value {
            Self::Words(_) | Self::Missing => f64::NEG_INFINITY,
            Self::Figure(figure) | Self::Percent(figure) => *figure,
            Self::Number(number) | Self::Time(number) => float(*number),
        };
        match (self, other) {
            (Self::Words(one), Self::Words(other)) => natural(one, other),
            _ => figure(self).total_cmp(&figure(other)),
        }
    }
}

/// `vm2` comes before `vm10`.
fn natural(one: &str, other: &str) -> Ordering {
    let split = |text: &str| {
        let end = text.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let (word, digits) = text.split_at(end);
        (word.to_owned(), digits.parse::<u64>().unwrap_or(0))
    };
    split(one).cmp(&split(other)).then_with(|| one.cmp(other))
}

/// How urgent a row is. The row also shows this in words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Alarm {
    #[default]
    None,
    /// Requests are parked or throttled.
    Attention,
    /// Failed.
    Failure,
}

impl Alarm {
    /// The mark before the name, for tables without a column for the state.
    pub fn mark(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Attention => "*",
            Self::Failure => "!",
        }
    }
}

/// Identifies what a row shows: the number of the server, and a name.
pub type RowId = (usize, String);

/// A row.
#[derive(Clone, Debug)]
pub struct Row {
    pub id: RowId,
    /// The name to which the filter applies.
    pub name: String,
    pub alarm: Alarm,
    /// The cells, one for each column.
    pub cells: Vec<Value>,
}

/// A table.
#[derive(Clone, Debug)]
pub struct Grid {
    pub columns: &'static [Column],
    pub rows: Vec<Row>,
}

/// The column by which a table is sorted, and the direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    pub column: usize,
    pub is_reversed: bool,
}

impl Grid {
    /// Keeps the rows whose name contains the text, ignoring case.
    pub fn filter(&mut self, text: &str) {
        let text = text.to_lowercase();
        self.rows.retain(|row| row.name.to_lowercase().contains(&text));
    }

    /// Sorts the rows: figures in descending order, words in alphabetical order, or both the other way round.
    pub fn sort(&mut self, order: Order) {
        let Some(column) = self.columns.get(order.column) else { return };
        let value = |row: &Row| row.cells.get(order.column).cloned().unwrap_or(Value::Missing);
        self.rows.sort_by(|one, other| {
            let by_value = value(one).compare(&value(other));
            let by_value = if column.is_figure == order.is_reversed { by_value } else { by_value.reverse() };
            by_value.then_with(|| one.id.cmp(&other.id))
        });
    }

    /// The columns that a terminal of this width shows. Columns without any value are left out.
    pub fn visible(&self, width: u16) -> Vec<usize> {
        let has_value = |column: usize| {
            self.rows.is_empty() || self.rows.iter().any(|row| row.cells.get(column) != Some(&Value::Missing))
        };
        let fits = |column: &usize| self.columns[*column].from_width <= width && has_value(*column);
        (0..self.columns.len()).filter(fits).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[Column] =
        &[Column::words("NAME", 0), Column::figures("IOPS", 0), Column::figures("p99", 80)];

    fn grid() -> Grid {
        let row = |name: &str, iops: f64, p99: Value| Row {
            id: (0, name.into()),
            name: name.into(),
            alarm: Alarm::None,
            cells: vec![Value::Words(name.into()), Value::Figure(iops), p99],
        };
        let rows = vec![
            row("vm10", 5.0, Value::Missing),
            row("vm2", 7.0, Value::Time(9)),
            row("Root", 5.0, Value::Time(100)),
        ];
        Grid { columns: COLUMNS, rows }
    }

    fn sorted(column: usize, is_reversed: bool) -> Vec<String> {
        let mut grid = grid();
        grid.sort(Order { column, is_reversed });
        grid.rows.into_iter().map(|row| row.name).collect()
    }

    #[test]
    fn figures_begin_with_the_largest_and_words_with_the_first() {
        assert_eq!(sorted(1, false), ["vm2", "Root", "vm10"]);
        assert_eq!(sorted(1, true), ["Root", "vm10", "vm2"]);
        assert_eq!(sorted(0, false), ["Root", "vm2", "vm10"]);
        assert_eq!(sorted(2, false), ["Root", "vm2", "vm10"]);
        assert_eq!(sorted(9, false), ["vm10", "vm2", "Root"]);
    }

    #[test]
    fn filter_looks_for_a_part_of_the_name_in_any_case() {
        let mut grid = grid();
        grid.filter("VM");
        assert_eq!(grid.rows.len(), 2);
        grid.filter("oo");
        assert!(grid.rows.is_empty());
    }

    #[test]
    fn columns_go_that_have_no_room_or_no_value() {
        let mut grid = grid();
        assert_eq!((grid.visible(80), grid.visible(79)), (vec![0, 1, 2], vec![0, 1]));
        grid.filter("10");
        assert_eq!(grid.visible(200), [0, 1]);
    }
}
