//! The workers' load, below the disks: `W0 ██████░░ 74% wait 2%`.

use ratatui::layout::Rect;
use ratatui::text::Line;

use crate::top::sample::WorkerSample;
use crate::top::state::{Screen, State, View};
use crate::top::tables::Subject;
use crate::top::units::bar;

const BAR: u16 = 8;
/// Maximum number of lines for bars.
const MOST_LINES: usize = 4;
/// Terminals with fewer lines have no bars.
const LOWEST: u16 = 8;

/// The bars of the workers, as many as fit into [`MOST_LINES`].
pub fn lines(state: &State, area: Rect) -> Vec<Line<'static>> {
    let is_shown = state.screen == Screen::Table(Subject::Disks) && state.view == View::None;
    if !is_shown || area.height < LOWEST {
        return Vec::new();
    }
    let mut lines: Vec<String> = Vec::new();
    let servers = state.servers.iter().filter_map(|server| Some((server, server.sample.as_ref()?)));
    for (server, sample) in servers {
        for worker in &sample.workers {
            let text = text(server.label.as_deref(), worker);
            match lines.last_mut() {
                Some(line) if line.chars().count() + 2 + text.chars().count() <= usize::from(area.width) => {
                    *line = format!("{line}  {text}");
                }
                _ => lines.push(text),
            }
        }
    }
    if lines.len() > MOST_LINES {
        lines.truncate(MOST_LINES - 1);
        lines.push("… (w shows all workers)".to_owned());
    }
    lines.into_iter().map(Line::raw).collect()
}

fn text(label: Option<&str>, worker: &WorkerSample) -> String {
    let label = label.map(|label| format!("{label} ")).unwrap_or_default();
    let WorkerSample { worker, cpu_percent, wait_percent, .. } = worker;
    let wait = if *wait_percent >= 0.5 { format!(" wait {wait_percent:.0}%") } else { String::new() };
    format!("{label}W{worker} {} {cpu_percent:.0}%{wait}", bar(*cpu_percent, BAR))
}
