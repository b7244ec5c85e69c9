//! The colours of alarms.

use ratatui::style::{Color, Style};

use crate::top::grid::Alarm;

/// Whether to use colours.
#[derive(Clone, Copy, Debug)]
pub struct Palette {
    pub has_colour: bool,
}

impl Palette {
    /// Uses colours unless the environment forbids them: <https://no-color.org>.
    pub fn of_environment() -> Self {
        Self { has_colour: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) }
    }

    /// The style of text with this alarm.
    pub fn of(self, alarm: Alarm) -> Style {
        match alarm {
            Alarm::Failure if self.has_colour => Style::new().fg(Color::Red).bold(),
            Alarm::Attention if self.has_colour => Style::new().fg(Color::Yellow),
            Alarm::Failure => Style::new().bold(),
            Alarm::Attention | Alarm::None => Style::new(),
        }
    }
}
