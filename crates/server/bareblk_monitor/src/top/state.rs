//! The state that the screen shows, and how keys change it.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::grid::{Grid, Order, RowId};
use super::poller::News;
use super::sample::{DiskSample, Sample};
use super::tables::Subject;

/// The intervals that `+` and `-` choose from.
const INTERVALS: [Duration; 10] = [
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
    Duration::from_secs(30),
    Duration::from_secs(60),
    Duration::from_secs(300),
];
/// Number of intervals that the heat map keeps: about as many as the widest terminals have columns.
pub const HISTORY: usize = 240;
const LONGEST_FILTER: usize = 64;

/// One screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Screen {
    Table(Subject),
    Heat,
}

impl Screen {
    /// The screen's name, beside its key.
    pub fn word(self) -> &'static str {
        match self {
            Self::Table(Subject::Disks) => "disks",
            Self::Table(Subject::Queues) => "queues",
            Self::Table(Subject::Workers) => "workers",
            Self::Table(Subject::Groups) => "groups",
            Self::Heat => "heat",
        }
    }
}

/// A page that covers the current screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum View {
    None,
    Help,
    Disk(RowId),
}

/// The program's reaction to a key, beyond the changed state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    None,
    /// The interval or the pause changed.
    Pace,
    Quit,
}

/// The requests of one interval in each power of two of nanoseconds.
pub type Octaves = Box<[(u8, u64)]>;

/// A server.
#[derive(Debug, Default)]
pub struct Server {
    /// The server's name, if there are several servers.
    pub label: Option<String>,
    pub version: String,
    /// The last interval.
    pub sample: Option<Sample>,
    /// The reason why there is no newer sample.
    pub gone: Option<String>,
    /// The intervals of each disk, the latest last.
    history: HashMap<String, VecDeque<Octaves>>,
}

/// The state from which the screen is drawn.
#[derive(Debug)]
pub struct State {
    pub servers: Vec<Server>,
    pub screen: Screen,
    pub view: View,
    /// Only names that contain this text are shown. If it is empty, all names are shown.
    pub filter: String,
    /// The previous filter, while the user types a new filter.
    pub typing: Option<String>,
    orders: HashMap<Subject, Order>,
    pub selected: Option<RowId>,
    pub is_paused: bool,
    pub interval: Duration,
    /// The terminal's size at the last drawing.
    pub size: (u16, u16),
}

impl State {
    pub fn new(labels: Vec<Option<String>>, interval: Duration) -> Self {
        let servers = labels.into_iter().map(|label| Server { label, ..Server::default() }).collect();
        Self {
            servers,
            screen: Screen::Table(Subject::Disks),
            view: View::None,
            filter: String::new(),
            typing: None,
            orders: HashMap::new(),
            selected: None,
            is_paused: false,
            interval,
            size: (80, 24),
        }
    }

    /// Records what a poller reported.
    pub fn note(&mut self, server: usize, news: News) {
        let Some(server) = self.servers.get_mut(server) else { return };
        match news {
            News::Sample(sample, version) => {
                server.remember(&sample);
                (server.sample, server.version, server.gone) = (Some(*sample), version, None);
            }
            News::Gone(why) => server.gone = Some(why),
            News::Ended => {}
        }
    }

    /// The servers' last intervals.
    pub fn samples(&self) -> impl Iterator<Item = &Sample> {
        self.servers.iter().filter_map(|server| server.sample.as_ref())
    }

    pub fn has_limits(&self) -> bool {
        self.samples().any(|sample| !sample.limits.is_empty())
    }

    pub fn has_latencies(&self) -> bool {
        self.servers.iter().any(|server| !server.history.is_empty())
    }

    /// The screens that have something to show, with their keys.
    pub fn screens(&self) -> Vec<(char, Screen)> {
        let mut screens = vec![
            ('d', Screen::Table(Subject::Disks)),
            ('u', Screen::Table(Subject::Queues)),
            ('w', Screen::Table(Subject::Workers)),
        ];
        screens.extend(self.has_limits().then_some(('g', Screen::Table(Subject::Groups))));
        screens.extend(self.has_latencies().then_some(('h', Screen::Heat)));
        screens
    }

    /// The table of the subject, filtered and sorted.
    pub fn grid(&self, subject: Subject) -> Grid {
        let servers = self.servers.iter().enumerate();
        let mut grid =
            subject.grid(servers.filter_map(|(place, server)| {
                Some((place, server.label.as_deref(), server.sample.as_ref()?))
            }));
        if subject != Subject::Workers {
            grid.filter(&self.filter);
        }
        grid.sort(self.order(subject));
        grid
    }

    pub fn order(&self, subject: Subject) -> Order {
        self.orders.get(&subject).copied().unwrap_or(subject.usual_order())
    }

    /// The disk of this row.
    pub fn disk(&self, (server, name): &RowId) -> Option<&DiskSample> {
        self.servers.get(*server)?.sample.as_ref()?.disks.iter().find(|disk| disk.name == *name)
    }

    /// The requests of the last intervals, the latest last: of one disk, or of all that the filter keeps.
    pub fn heat(&self, of: Option<&RowId>) -> Vec<HashMap<u8, u64>> {
        let filter = self.filter.to_lowercase();
        let is_wanted = |server: usize, name: &str| match of {
            Some((its, disk)) => *its == server && disk == name,
            None => name.to_lowercase().contains(&filter),
        };
        let mut columns: Vec<HashMap<u8, u64>> = vec![HashMap::new(); HISTORY];
        let servers = self.servers.iter().enumerate();
        let disks = servers.flat_map(|(place, server)| server.history.iter().map(move |disk| (place, disk)));
        for (_, (_, intervals)) in disks.filter(|(place, (name, _))| is_wanted(*place, name)) {
            for (column, octaves) in columns.iter_mut().rev().zip(intervals.iter().rev()) {
                octaves.iter().for_each(|(octave, count)| {
                    let sum = column.entry(*octave).or_default();
                    *sum = sum.saturating_add(*count);
                });
            }
        }
        columns
    }
}

impl Server {
    fn remember(&mut self, sample: &Sample) {
        let latencies = sample.disks.iter().any(|disk| !disk.octaves.is_empty());
        if self.history.is_empty() && !latencies {
            return;
        }
        self.history.retain(|name, _| sample.disks.iter().any(|disk| disk.name == *name));
        for disk in &sample.disks {
            let intervals = self.history.entry(disk.name.clone()).or_default();
            if intervals.len() == HISTORY {
                intervals.pop_front();
            }
            intervals.push_back(disk.octaves.clone().into_boxed_slice());
        }
    }
}

// ---- keys

impl State {
    /// Carries out the key's command.
    pub fn key(&mut self, key: KeyEvent) -> Effect {
        if key.kind == KeyEventKind::Release {
            return Effect::None;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return if key.code == KeyCode::Char('c') { Effect::Quit } else { Effect::None };
        }
        if self.typing.is_some() {
            self.type_filter(key.code);
            return Effect::None;
        }
        match key.code {
            KeyCode::Char('q') if self.view == View::None => return Effect::Quit,
            KeyCode::Esc if self.view == View::None => self.filter.clear(),
            KeyCode::Char('q') | KeyCode::Esc => self.view = View::None,
            KeyCode::Char('?') => self.view = if self.view == View::Help { View::None } else { View::Help },
            KeyCode::Char('p' | ' ') => {
                self.is_paused = !self.is_paused;
                return Effect::Pace;
            }
            KeyCode::Char('+' | '=') => return self.step_interval(true),
            KeyCode::Char('-') => return self.step_interval(false),
            KeyCode::Char('/') => self.typing = Some(self.filter.clone()),
            KeyCode::Tab => self.step_screen(1),
            KeyCode::BackTab => self.step_screen(self.screens().len() - 1),
            KeyCode::Char(letter) if self.screens().iter().any(|(key, _)| *key == letter) => {
                self.open(letter)
            }
            code => self.table_key(code),
        }
        Effect::None
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.typing = None,
            KeyCode::Esc => self.filter = self.typing.take().unwrap_or_default(),
            KeyCode::Backspace => _ = self.filter.pop(),
            KeyCode::Char(c) if self.filter.chars().count() < LONGEST_FILTER && !c.is_control() => {
                self.filter.push(c);
            }
            _ => {}
        }
    }

    fn step_interval(&mut self, longer: bool) -> Effect {
        let next = if longer {
            INTERVALS.into_iter().find(|interval| *interval > self.interval)
        } else {
            INTERVALS.into_iter().rev().find(|interval| *interval < self.interval)
        };
        self.interval = next.unwrap_or(self.interval);
        Effect::Pace
    }

    fn step_screen(&mut self, by: usize) {
        let screens = self.screens();
        let now = screens.iter().position(|(_, screen)| *screen == self.screen).unwrap_or(0);
        if let Some((letter, _)) = screens.get((now + by) % screens.len()) {
            self.open(*letter);
        }
    }

    fn open(&mut self, letter: char) {
        if let Some((_, screen)) = self.screens().into_iter().find(|(key, _)| *key == letter) {
            (self.screen, self.view) = (screen, View::None);
        }
    }

    /// Handles the keys that only tables have.
    fn table_key(&mut self, code: KeyCode) {
        let (Screen::Table(subject), View::None) = (self.screen, &self.view) else { return };
        let page = isize::try_from(self.size.1.saturating_sub(4).max(1)).unwrap_or(1);
        match code {
            KeyCode::Char('s') => self.next_order(subject),
            KeyCode::Char('r') => {
                let order = self.order(subject);
                self.orders.insert(subject, Order { is_reversed: !order.is_reversed, ..order });
            }
            KeyCode::Enter if subject == Subject::Disks => {
                let first = || self.grid(subject).rows.into_iter().next().map(|row| row.id);
                self.view = self.selected.clone().or_else(first).map_or(View::None, View::Disk);
            }
            KeyCode::Up | KeyCode::Char('k') => self.step_row(subject, -1),
            KeyCode::Down | KeyCode::Char('j') => self.step_row(subject, 1),
            KeyCode::PageUp => self.step_row(subject, -page),
            KeyCode::PageDown => self.step_row(subject, page),
            KeyCode::Home => self.step_row(subject, isize::MIN),
            KeyCode::End => self.step_row(subject, isize::MAX),
            _ => {}
        }
    }

    fn next_order(&mut self, subject: Subject) {
        let visible = self.grid(subject).visible(self.size.0);
        let now = self.order(subject).column;
        let next = visible.iter().find(|column| **column > now).or(visible.first());
        if let Some(column) = next {
            self.orders.insert(subject, Order { column: *column, is_reversed: false });
        }
    }

    fn step_row(&mut self, subject: Subject, by: isize) {
        let rows = self.grid(subject).rows;
        let now = self.selected.as_ref().and_then(|id| rows.iter().position(|row| row.id == *id));
        let next = now.unwrap_or(0).saturating_add_signed(by).min(rows.len().saturating_sub(1));
        // The first such key only marks the first row.
        let next = if now.is_none() && by.unsigned_abs() == 1 { 0 } else { next };
        self.selected = rows.get(next).map(|row| row.id.clone());
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
