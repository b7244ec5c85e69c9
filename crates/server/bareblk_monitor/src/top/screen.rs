//! Draws the display, from top to bottom: a summary line, the current view, the workers' load, and notes about the
//! user's filter or lost servers.
//!
//! - Colours only repeat what words or marks say. `NO_COLOR` leaves them out.
//! - Below 40 columns there is one line per disk and nothing else.

mod bars;
mod heat;
mod help;
mod one_disk;
pub mod palette;
mod table;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Stylize;
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use super::grid::Alarm;
use super::sample::Sample;
use super::state::{Screen, State, View};
use super::tables::Subject;
use super::units::{NONE, short, time};
use palette::Palette;

/// Terminals narrower than this show one line per disk.
const NARROW: u16 = 40;
/// Terminals of at least this width show words beside the keys.
const WORDS: u16 = 120;

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, state: &mut State, palette: Palette) {
    let area = frame.area();
    state.size = (area.width, area.height);
    if area.width < NARROW {
        return draw_narrow(frame, area, state, palette);
    }
    let notes = notes(state, palette);
    let bars = bars::lines(state, area);
    let height = |lines: &[Line<'_>]| Constraint::Length(u16::try_from(lines.len()).unwrap_or(0));
    let parts = [Constraint::Length(1), Constraint::Min(0), height(&bars), height(&notes)];
    let [head, body, load, foot] = Layout::vertical(parts).areas(area);
    frame.render_widget(heading(state, area.width), head);
    frame.render_widget(Paragraph::new(bars), load);
    frame.render_widget(Paragraph::new(notes), foot);
    draw_body(frame, body, state, palette);
}

fn draw_body(frame: &mut Frame<'_>, area: Rect, state: &State, palette: Palette) {
    match (&state.view, state.screen) {
        (View::Help, _) => help::draw(frame, area, state),
        (View::Disk(id), _) => one_disk::draw(frame, area, state, id, palette),
        (View::None, _) if state.samples().next().is_none() => {
            frame.render_widget(Paragraph::new("reading…"), area);
        }
        (View::None, Screen::Table(subject)) => table::draw(frame, area, state, subject, palette),
        (View::None, Screen::Heat) => heat::draw(frame, area, state, None),
    }
}

/// `bareblk 0.1.0  41.2k IOPS  1.3µs/IO  1s                [d] u w g h  ? q`
fn heading(state: &State, width: u16) -> Line<'static> {
    let iops = state.samples().map(Sample::iops).sum::<f64>();
    let mut versions: Vec<_> = state.servers.iter().map(|server| server.version.as_str()).collect();
    versions.dedup();
    let mut left = vec![format!("{} IOPS", short(iops))];
    if width >= 60 {
        left.insert(0, format!("bareblk {}", versions.join(", ")).trim_end().to_owned());
        left.push(cpu_time(state));
    }
    left.push(format!("{}s", state.interval.as_secs_f64()));
    if state.is_paused {
        left.push("PAUSED".to_owned());
    }
    let (left, right) = (left.join("  "), keys(state, width));
    let used = left.chars().count() + right.chars().count();
    let gap = usize::from(width).saturating_sub(used).max(2);
    Line::from(vec![Span::raw(left), Span::raw(" ".repeat(gap)), Span::raw(right)]).bold()
}

/// Processor time per request, over all servers.
fn cpu_time(state: &State) -> String {
    let requests = |sample: &Sample| sample.iops() * sample.seconds;
    let known = || state.samples().filter_map(|sample| Some((sample.cpu_us_per_request?, requests(sample))));
    let all: f64 = known().map(|(_, requests)| requests).sum();
    let spent: f64 = known().map(|(each, requests)| each * requests).sum();
    if all > 0.0 { format!("{:.1}µs/IO", spent / all) } else { format!("{NONE} µs/IO") }
}

/// The keys of the screens; that of the current screen is in brackets. Wide terminals have words beside them.
fn keys(state: &State, width: u16) -> String {
    let words = |key: char, word: &str| if width < WORDS { key.to_string() } else { format!("{key} {word}") };
    let key = |(key, screen): (char, Screen)| {
        let text = words(key, screen.word());
        if screen == state.screen { format!("[{text}]") } else { format!(" {text} ") }
    };
    let screens: String = state.screens().into_iter().map(key).collect();
    format!("{screens} {} {}", words('?', "help "), words('q', "quit"))
}

/// The filter that the user types, and the servers that do not answer.
fn notes(state: &State, palette: Palette) -> Vec<Line<'static>> {
    let mut notes: Vec<_> = state
        .servers
        .iter()
        .filter_map(|server| server.gone.as_ref())
        .map(|why| Line::styled(format!("! {why}"), palette.of(Alarm::Failure)))
        .collect();
    let room = usize::from(state.size.1 / 4).max(1);
    if notes.len() > room {
        let more = notes.len() - room + 1;
        notes.truncate(room - 1);
        notes.push(Line::styled(format!("! {more} servers do not answer"), palette.of(Alarm::Failure)));
    }
    match (&state.typing, state.filter.as_str()) {
        (Some(_), filter) => {
            notes.push(Line::raw(format!("/{filter}_  (Enter keeps the filter, Esc discards it)")))
        }
        (None, "") => {}
        (None, filter) => notes.push(Line::raw(format!("only names with \"{filter}\"  (Esc shows all)"))),
    }
    notes
}

fn draw_narrow(frame: &mut Frame<'_>, area: Rect, state: &State, palette: Palette) {
    let room = usize::from(area.height);
    let mut lines: Vec<_> = state
        .servers
        .iter()
        .filter_map(|server| server.gone.as_ref())
        .map(|why| Line::raw(format!("! {why}")))
        .collect();
    for row in state.grid(Subject::Disks).rows {
        let Some(disk) = state.disk(&row.id) else { continue };
        let p99 = disk.latency.map_or_else(String::new, |latency| format!(" {}", time(latency.p99_ns)));
        let text = format!("{}{} {}{p99}", row.alarm.mark(), disk.name, short(disk.iops));
        lines.push(Line::styled(text, palette.of(row.alarm)));
    }
    lines.truncate(room);
    frame.render_widget(Paragraph::new(lines), area);
}

#[cfg(test)]
#[path = "screen/screen_tests.rs"]
mod tests;
