//! `bareblk top`: shows running servers, once per interval.
//!
//! ```text
//! control sockets → poller.rs (one thread each) → answer.rs → sample.rs (differences, latency.rs) ┐
//! keys, signals   → terminal.rs ──────────────────────────────────────────────────────────────────┤
//!         terminal: state.rs → tables.rs, grid.rs → screen.rs          else: lines.rs (text, JSON) ◀┘
//! ```
//!
//! - Names come from servers, so answer.rs escapes what a terminal would interpret.
//! - Between two intervals the program sleeps.

mod answer;
#[cfg(test)]
mod fixture;
mod grid;
mod latency;
mod lines;
mod poller;
mod sample;
mod screen;
mod state;
mod tables;
mod terminal;
mod units;

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, Sender};

use anyhow::{Context, Result, bail};
use bareblk::client::Connection;
use bareblk::command_line::TopArgs;

use crate::labels::{labels, shown};
use lines::Form;
use poller::{News, Pace};
use screen::palette::Palette;
use state::{Effect, State};
use terminal::{Input, Terminal};

/// Runs the command.
///
/// # Errors
/// No server answers at the start, or the terminal fails.
pub fn run(args: &TopArgs) -> Result<ExitCode> {
    let servers = connect(args.control())?;
    let has_terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb" || term.is_empty());
    if args.json {
        print_lines(Form::Json, servers, args)
    } else if has_terminal && !is_dumb {
        show(servers, args)
    } else {
        print_lines(Form::Tables, servers, args)
    }
}

/// A server that is to be polled.
#[derive(Debug)]
struct Server {
    path: PathBuf,
    connection: Option<Connection>,
}

/// Connects to the servers. It suffices that one of them answers: the others may start later.
fn connect(paths: Vec<PathBuf>) -> Result<Vec<Server>> {
    let (mut servers, mut error) = (Vec::new(), None);
    for path in paths {
        let connection = Connection::open(&path).map_err(|why| error = error.take().or(Some(why))).ok();
        servers.push(Server { path, connection });
    }
    match error {
        Some(why) if servers.iter().all(|server| server.connection.is_none()) => Err(why),
        _ => Ok(servers),
    }
}

/// A name for each server; `None` if there is only one server.
fn names(servers: &[Server]) -> Vec<Option<String>> {
    let paths: Vec<&Path> = servers.iter().map(|server| server.path.as_path()).collect();
    labels(&paths).into_iter().map(|label| (servers.len() > 1).then_some(label)).collect()
}

/// What the main thread waits for.
#[derive(Debug)]
enum Message {
    News(usize, News),
    Input(Input),
}

fn start_pollers(servers: Vec<Server>, pace: &Pace, sender: &Sender<Message>) {
    for (place, Server { path, connection }) in servers.into_iter().enumerate() {
        let tell = move |news| Message::News(place, news);
        poller::start(path, connection, pace.clone(), sender.clone(), tell);
    }
}

fn print_lines(form: Form, servers: Vec<Server>, args: &TopArgs) -> Result<ExitCode> {
    let labels = names(&servers);
    let paths: Vec<_> = servers.iter().map(|server| shown(&server.path)).collect();
    let mut left: Vec<_> = paths.iter().map(|_| args.count.unwrap_or(u64::MAX)).collect();
    let (sender, messages) = mpsc::channel();
    start_pollers(servers, &Pace::new(args.interval), &sender);
    while left.iter().any(|left| *left > 0) {
        let Message::News(server, news) = messages.recv()? else { continue };
        if matches!(news, News::Ended) {
            bail!("the thread that watches {} has ended", paths[server]);
        }
        if left[server] > 0 && !lines::print(form, &paths[server], labels[server].as_deref(), &news)? {
            break;
        }
        left[server] = left[server].saturating_sub(1);
    }
    Ok(ExitCode::SUCCESS)
}

fn show(servers: Vec<Server>, args: &TopArgs) -> Result<ExitCode> {
    let mut state = State::new(names(&servers), args.interval);
    let pace = Pace::new(args.interval);
    let (sender, messages) = mpsc::channel();
    let mut terminal = Terminal::begin().context("cannot use the terminal")?;
    terminal::listen(&sender, Message::Input).context("cannot catch signals")?;
    start_pollers(servers, &pace, &sender);
    let palette = Palette::of_environment();
    let mut left = args.count.unwrap_or(u64::MAX);
    loop {
        terminal.0.draw(|frame| screen::draw(frame, &mut state, palette)).context("cannot draw")?;
        if left == 0 {
            return Ok(ExitCode::SUCCESS);
        }
        for message in waiting(&messages) {
            match message {
                Message::News(_, News::Ended) => bail!("a thread that watches a server has ended"),
                Message::News(server, news) => {
                    left = left.saturating_sub(u64::from(server == 0));
                    state.note(server, news);
                }
                Message::Input(Input::Key(key)) => match state.key(key) {
                    Effect::None => {}
                    Effect::Pace => pace.set(state.interval, state.is_paused),
                    Effect::Quit => return Ok(ExitCode::SUCCESS),
                },
                Message::Input(Input::Resized) => {}
                Message::Input(Input::Ended) => bail!("the terminal was closed"),
                Message::Input(Input::Signal(signal)) => {
                    let signal = u8::try_from(signal).unwrap_or(0);
                    return Ok(ExitCode::from(128_u8.saturating_add(signal)));
                }
            }
        }
    }
}

/// Waits for a message; returns it with all that have arrived meanwhile, so that the screen is drawn once for all of
/// them.
fn waiting(messages: &Receiver<Message>) -> impl Iterator<Item = Message> {
    messages.recv().into_iter().chain(messages.try_iter())
}
