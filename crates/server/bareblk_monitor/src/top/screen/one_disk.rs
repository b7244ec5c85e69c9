//! The page of one disk: its image and socket, its requests by kind, its limits, its queues and its heat map.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Stylize;
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use super::heat;
use super::palette::Palette;
use crate::top::grid::{Alarm, RowId};
use crate::top::latency::Percentiles;
use crate::top::sample::{DiskSample, LimitSample, State as DiskState};
use crate::top::state::State;
use crate::top::units::{NONE, float, short, size, time};

/// Maximum number of queues listed; the screen of queues shows all.
const MOST_QUEUES: usize = 8;

/// Draws the disk.
pub fn draw(frame: &mut Frame<'_>, area: Rect, state: &State, id: &RowId, palette: Palette) {
    let Some(disk) = state.disk(id) else {
        frame.render_widget(Paragraph::new("the server no longer has this disk  (Esc goes back)"), area);
        return;
    };
    let alarm = match disk.state {
        DiskState::Failed => Alarm::Failure,
        DiskState::Holding | DiskState::Throttled => Alarm::Attention,
        _ => Alarm::None,
    };
    let mut lines =
        vec![Line::styled(format!("{}  {}", disk.name, disk.state.word()), palette.of(alarm)).bold()];
    lines.extend(about(disk).into_iter().map(Line::raw));
    lines.push(Line::raw(""));
    lines.extend(kinds(disk).into_iter().map(Line::raw));
    let limits =
        state.servers.get(id.0).and_then(|server| server.sample.as_ref()).map(|sample| &sample.limits);
    lines.extend(limits.into_iter().flat_map(|limits| self::limits(disk, limits)).map(Line::raw));
    lines.push(Line::raw(""));
    lines.extend(queues(disk).into_iter().map(Line::raw));
    let height = u16::try_from(lines.len()).unwrap_or(u16::MAX);
    let [text, map] = Layout::vertical([Constraint::Max(height), Constraint::Min(0)]).areas(area);
    frame.render_widget(Paragraph::new(lines), text);
    if map.height > 3 && state.has_latencies() {
        let below = Rect { y: map.y + 1, height: map.height - 1, ..map };
        heat::draw(frame, below, state, Some(id));
    }
}

fn about(disk: &DiskSample) -> Vec<String> {
    let DiskSample { image, socket, engine, size_bytes, sessions, queues, queues_offered, .. } = disk;
    let size = size(*size_bytes);
    let held = if disk.held > 0 { format!(", {} held", disk.held) } else { String::new() };
    vec![
        format!("image   {image}  {size}  {engine}"),
        format!("socket  {socket}  {sessions} connected  {} of {queues_offered} queues run", queues.len()),
        format!("now     {} in flight{held}, {} errors/s", disk.in_flight, short(disk.errors_per_s)),
    ]
}

/// A row for each kind of request.
fn kinds(disk: &DiskSample) -> Vec<String> {
    let rates = [
        ("read", disk.reads_per_s, Some(disk.read_mb_per_s)),
        ("write", disk.writes_per_s, Some(disk.written_mb_per_s)),
        ("flush", disk.flushes_per_s, None),
    ];
    let mut lines = vec![row("", ["IOPS", "MB/s", "p50", "p90", "p99", "p99.9", "max"].map(str::to_owned))];
    for (kind, iops, mb) in rates {
        let latency = disk.latencies.iter().find(|(name, _)| name == kind).map(|(_, latency)| latency);
        let times = |of: fn(&Percentiles) -> u64| {
            latency.map_or_else(|| NONE.to_owned(), |latency| time(of(latency)))
        };
        let cells = [
            short(iops),
            mb.map_or_else(|| NONE.to_owned(), short),
            times(|latency| latency.p50_ns),
            times(|latency| latency.p90_ns),
            times(|latency| latency.p99_ns),
            times(|latency| latency.p999_ns),
            times(|latency| latency.max_ns),
        ];
        lines.push(row(kind, cells));
    }
    lines
}

fn row<const N: usize>(name: &str, cells: [String; N]) -> String {
    let cells: String = cells.iter().map(|cell| format!("{cell:>8}")).collect();
    format!("{name:<6}{cells}")
}

/// The limits of the disk and of its group.
fn limits(disk: &DiskSample, limits: &[LimitSample]) -> Vec<String> {
    let is_its = |limit: &&LimitSample| match limit.scope {
        "disk" => limit.name == disk.name,
        _ => disk.group.as_ref() == Some(&limit.name),
    };
    let line = |limit: &LimitSample| {
        let LimitSample { scope, name, limit, rate, used_per_s, credit_percent } = limit;
        let whose = if *scope == "group" { format!(" of group {name}") } else { String::new() };
        let (used, rate) = (short(*used_per_s), short(float(*rate)));
        format!("{limit}{whose}: {used} of {rate} per second, credit {credit_percent:.0}%")
    };
    let lines: Vec<_> = limits.iter().filter(is_its).map(line).collect();
    let throttled = disk.throttled_percent.map(|percent| format!("throttled {percent:.0}% of the time"));
    if lines.is_empty() && throttled.is_none() {
        return Vec::new();
    }
    std::iter::once(String::new()).chain(lines).chain(throttled).collect()
}

fn queues(disk: &DiskSample) -> Vec<String> {
    let headings = ["WORKER", "IOPS", "MB/s", "QD", "KICK/s", "CALL/s"].map(str::to_owned);
    let mut lines = vec![row("QUEUE", headings)];
    for queue in disk.queues.iter().take(MOST_QUEUES) {
        let cells = [
            queue.worker.to_string(),
            short(queue.iops),
            short(queue.mb_per_s),
            queue.in_flight.to_string(),
            short(queue.kicks_per_s),
            short(queue.calls_per_s),
        ];
        lines.push(row(&queue.queue.to_string(), cells));
    }
    match disk.queues.len() {
        0 => lines[0] = "no queue runs".to_owned(),
        MOST_QUEUES.. if disk.queues.len() > MOST_QUEUES => {
            lines.push(format!("… {} more (u shows all queues)", disk.queues.len() - MOST_QUEUES));
        }
        _ => {}
    }
    lines
}
