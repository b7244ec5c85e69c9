//! The terminal: raw mode and its end, keys and signals.
//!
//! The terminal is restored when [`Terminal`] is dropped, and when any thread panics.

use std::io;
use std::sync::mpsc::Sender;
use std::thread;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEvent};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;

/// Input from the user or the system.
#[derive(Debug)]
pub enum Input {
    Key(KeyEvent),
    /// The terminal's size has changed.
    Resized,
    /// A signal that ends the program.
    Signal(i32),
    /// The terminal was closed.
    Ended,
}

/// The terminal in raw mode, showing its second screen.
#[derive(Debug)]
pub struct Terminal(pub DefaultTerminal);

impl Terminal {
    /// Enters raw mode, and installs a panic hook that restores the terminal.
    ///
    /// # Errors
    /// There is no terminal.
    pub fn begin() -> io::Result<Self> {
        ratatui::try_init().map(Self)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Starts threads that send keys and signals to the main thread.
///
/// # Errors
/// Signals cannot be caught.
pub fn listen<M: Send + 'static>(sender: &Sender<M>, tell: fn(Input) -> M) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT])?;
    let of_signals = sender.clone();
    thread::spawn(move || {
        signals.forever().try_for_each(|signal| of_signals.send(tell(Input::Signal(signal))))
    });
    let sender = sender.clone();
    thread::spawn(move || {
        loop {
            let input = match event::read() {
                Ok(Event::Key(key)) => Input::Key(key),
                Ok(Event::Resize(..)) => Input::Resized,
                Ok(_) => continue,
                Err(_) => Input::Ended,
            };
            let is_last = matches!(input, Input::Ended);
            if sender.send(tell(input)).is_err() || is_last {
                return;
            }
        }
    });
    Ok(())
}
