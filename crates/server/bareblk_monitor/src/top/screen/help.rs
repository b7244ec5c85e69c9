//! The page that `?` shows.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use crate::top::state::State;

const KEYS: &[(&str, &str)] = &[
    ("d u w", "disks, queues, workers"),
    ("g h", "limits of groups and disks; heat map of latencies"),
    ("Tab", "the next screen"),
    ("↑ ↓ PgUp PgDn", "select a row; also k j Home End"),
    ("Enter", "show one disk"),
    ("s r", "sort by the next column; reverse the order"),
    ("/", "show only names that contain a text"),
    ("p", "pause, or continue"),
    ("+ -", "a longer or shorter interval"),
    ("Esc", "go back; on a screen, show all names again"),
    ("q", "go back; on a screen, quit"),
];
const WORDS: &[(&str, &str)] = &[
    ("QD", "requests in flight now"),
    ("p50 p99", "half and 99% of the requests took at most this long"),
    ("THR%", "share of the time during which queues waited for limits"),
    ("CREDIT%", "remaining credit of the scarcest limit"),
    ("µs/IO", "processor time per request, of workers (first line: all threads)"),
    ("WAIT%", "share of the time during which a worker waited for a CPU"),
    ("* !", "before a name: * means holding or throttled, ! means failed"),
];

/// Draws the page.
pub fn draw(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let line = |(key, what): &(&str, &str)| Line::raw(format!("{key:<14} {what}"));
    let mut lines: Vec<_> = KEYS.iter().map(line).collect();
    lines.push(Line::raw(""));
    lines.extend(WORDS.iter().map(line));
    if !state.has_latencies() {
        lines.push(Line::raw(""));
        lines.push(Line::raw("No server has sent histograms yet: no p50, no p99, no heat map."));
    }
    frame.render_widget(Paragraph::new(lines), area);
}
