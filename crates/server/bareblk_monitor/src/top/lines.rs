//! The output without a terminal: tables, or a line of JSON, for each interval and server.

use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use bareblk::client;
use serde_json::{Value, json};

use super::grid::Grid;
use super::poller::News;
use super::sample::Sample;
use super::tables::Subject;
use super::units::{NONE, short};

/// The terminal width for which the tables choose their columns.
const WIDTH: u16 = 120;

/// The form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Tables,
    Json,
}

/// Prints the news of a server. Returns false if the reader has closed standard output, which is not an error.
///
/// # Errors
/// Standard output cannot be written.
pub fn print(form: Form, server: &str, label: Option<&str>, news: &News) -> Result<bool> {
    let (text, is_error) = match (form, news) {
        (Form::Json, _) => (json(server, news), false),
        (Form::Tables, News::Sample(sample, _)) => (tables(label, sample), false),
        (Form::Tables, News::Gone(why)) => (format!("bareblk: {why}\n"), true),
        (_, News::Ended) => return Ok(true),
    };
    if is_error {
        let _ = io::stderr().write_all(text.as_bytes());
        return Ok(true);
    }
    let mut out = io::stdout();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        done => Ok(done.map(|()| true)?),
    }
}

/// `41.2k IOPS, 1.3 µs of processor time per request (the whole process), over 1.0 s`, then workers and disks.
fn tables(label: Option<&str>, sample: &Sample) -> String {
    let cpu = sample.cpu_us_per_request.map_or_else(|| NONE.to_owned(), |us| format!("{us:.2}"));
    let label = label.map(|label| format!("{label}: ")).unwrap_or_default();
    let (iops, seconds) = (short(sample.iops()), sample.seconds);
    let mut text = format!(
        "{label}{iops} IOPS, {cpu} µs of processor time per request (the whole process), over {seconds:.1} s\n\n"
    );
    for subject in [Subject::Workers, Subject::Groups, Subject::Disks] {
        let mut grid = subject.grid(std::iter::once((0, None, sample)));
        if !grid.rows.is_empty() {
            grid.sort(subject.usual_order());
            text += &table(&grid);
            text.push('\n');
        }
    }
    text
}

fn table(grid: &Grid) -> String {
    let columns = grid.visible(WIDTH);
    let headings: Vec<_> = columns.iter().map(|column| grid.columns[*column].heading).collect();
    let first_figure = columns.iter().position(|column| grid.columns[*column].is_figure).unwrap_or(0);
    let rows = grid.rows.iter().map(|row| columns.iter().map(|column| row.cells[*column].shown()).collect());
    client::table(&headings, first_figure, rows)
}

fn json(server: &str, news: &News) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let mut line = json!({"server": server, "at_ms": u64::try_from(now).unwrap_or(u64::MAX)});
    let more = match news {
        News::Sample(sample, version) => {
            line["version"] = Value::from(version.as_str());
            serde_json::to_value(sample).unwrap_or_default()
        }
        News::Gone(why) => json!({"error": why}),
        News::Ended => Value::Null,
    };
    if let (Value::Object(line), Value::Object(more)) = (&mut line, more) {
        line.extend(more);
    }
    format!("{line}\n")
}
