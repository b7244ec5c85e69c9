//! `bareblk top` in a real terminal (tmux): screens, sizes, keys, ends.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;
use xtask::packages::find_program;
use xtask::skip::{Reason, skip};

use crate::load::Served;
use crate::rig::{Place, eventually, top};
use crate::top_hostile::{FakeServer, evil_answer, ok};

/// A terminal in a separate tmux server, in which a shell runs `bareblk top`.
struct Terminal {
    socket: PathBuf,
    _place: Place,
}

impl Terminal {
    /// `None` if tmux is not installed; the test then prints this.
    fn start(control: &Path, width: u16, height: u16, variables: &str) -> Option<Self> {
        if find_program("tmux").is_none() {
            skip(Reason::NoProgram("tmux".into()), "shows the screens in a real terminal");
            return None;
        }
        let place = Place::new();
        let terminal = Self { socket: place.socket("tmux"), _place: place };
        let command = top();
        let program = command.get_program().to_string_lossy();
        let shell = format!(
            "{variables} {program} top --interval 0.2 --control {}; echo ended $?; stty -a | grep -o -e '-*icanon' -e '-*echo '; exec cat",
            control.display()
        );
        let (width, height) = (width.to_string(), height.to_string());
        terminal.ask(&["-f", "/dev/null", "new-session", "-d", "-x", &width, "-y", &height, &shell]);
        Some(terminal)
    }

    fn ask(&self, words: &[&str]) -> String {
        let mut tmux = Command::new(find_program("tmux").unwrap());
        tmux.arg("-u").arg("-S").arg(&self.socket).args(words).env("LC_ALL", "C.UTF-8").env_remove("TMUX");
        let done = tmux.env_remove("NO_COLOR").output().unwrap();
        assert!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    }

    fn press(&self, keys: &[&str]) {
        self.ask(&[&["send-keys"], keys].concat());
    }

    fn resize(&self, width: u16, height: u16) {
        let (width, height) = (width.to_string(), height.to_string());
        self.ask(&["resize-window", "-x", &width, "-y", &height]);
    }

    fn shown(&self) -> String {
        self.ask(&["capture-pane", "-p"])
    }

    /// Waits until the terminal shows all of `parts`; returns the terminal's contents.
    fn wait(&self, parts: &[&str]) -> String {
        self.wait_until(&format!("{parts:?}"), |text| parts.iter().all(|part| text.contains(part)))
    }

    fn wait_until(&self, what: &str, is_shown: impl Fn(&str) -> bool) -> String {
        eventually(what, || Some(self.shown()).filter(|text| is_shown(text)))
    }

    /// Waits for the program's end, and checks that the terminal is restored.
    fn wait_ended(&self, code: u8) {
        let text = self.wait(&[&format!("ended {code}\n"), "icanon"]);
        assert!(!text.contains("-icanon") && !text.contains("-echo"), "{text}");
        assert_eq!(self.ask(&["display-message", "-p", "#{alternate_on} #{cursor_flag}"]), "0 1\n");
    }

    fn pid_of_top(&self) -> rustix::process::Pid {
        let shell = self.ask(&["display-message", "-p", "#{pane_pid}"]);
        let children = format!("/proc/{0}/task/{0}/children", shell.trim());
        let children = std::fs::read_to_string(children).unwrap();
        rustix::process::Pid::from_raw(children.trim().parse().unwrap()).unwrap()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let tmux = Command::new("tmux").arg("-S").arg(&self.socket).arg("kill-server").output();
        let _ = tmux;
    }
}

/// Whether the row of `root` has a rate.
fn is_busy(text: &str) -> bool {
    let row = text.lines().map(|line| line.trim_start_matches('▸')).find(|line| line.starts_with("root"));
    row.and_then(|row| row.split_whitespace().nth(1)).is_some_and(|iops| iops != "0")
}

/// Checks that no line is wider than the terminal, and that no line has shifted the others.
fn fits(text: &str, width: usize, height: usize) -> bool {
    text.lines().count() <= height && text.lines().all(|line| line.chars().count() <= width)
}

#[test]
fn screens_follow_keys_and_size() {
    let served = Served::start();
    let _load = served.load();
    let Some(terminal) = Terminal::start(&served.control(), 200, 30, "") else { return };
    let text = terminal.wait_until("a busy disk", is_busy);
    assert!(text.contains("READ/s") && text.contains("no guest") && text.contains("W0 "), "{text}");
    terminal.press(&["u"]);
    terminal.wait(&["[u queues]", "KICK/s"]);
    terminal.press(&["w"]);
    terminal.wait(&["[w workers]", "WAIT%", "SLEEP/s"]);
    terminal.press(&["?"]);
    terminal.wait(&["shorter interval", "CREDIT%"]);
    terminal.press(&["Escape"]);
    terminal.wait(&["WAIT%"]);
    terminal.press(&["d"]);
    terminal.wait(&["[d disks]"]);
    terminal.press(&["Enter"]);
    terminal.wait(&["root.raw", "p99.9", "QUEUE"]);
    terminal.resize(80, 24);
    terminal.wait_until("80 columns of one disk", |text| text.contains("p99.9") && fits(text, 80, 24));
    terminal.press(&["q"]);
    terminal.wait_until("80 columns", |text| {
        text.contains("STATE") && !text.contains("READ/s") && is_busy(text) && fits(text, 80, 24)
    });
    terminal.resize(40, 10);
    terminal.wait_until("40 columns", |text| {
        !text.contains("STATE") && text.contains("MB/s") && is_busy(text) && fits(text, 40, 10)
    });
    terminal.resize(39, 10);
    terminal.wait_until("39 columns", |text| !text.contains("MB/s") && text.starts_with("root "));
    terminal.resize(1, 1);
    terminal.wait_until("1 column", |text| text.trim_end().chars().count() <= 1);
    terminal.resize(80, 24);
    terminal.wait(&["STATE"]);
    terminal.press(&["q"]);
    terminal.wait_ended(0);
}

#[test]
fn keys_filter_pause_and_slow_down() {
    let served = Served::start();
    let Some(terminal) = Terminal::start(&served.control(), 80, 24, "") else { return };
    terminal.wait(&["root", "spare", "0.2s"]);
    terminal.press(&["/", "S", "P"]);
    terminal.wait_until("only one disk", |text| text.contains("/SP_") && !text.contains("root"));
    terminal.press(&["Enter"]);
    terminal.wait(&["only names with \"SP\""]);
    terminal.press(&["Escape"]);
    terminal.wait(&["root", "spare"]);
    terminal.press(&["+"]);
    terminal.wait(&["0.5s"]);
    terminal.press(&["p"]);
    terminal.wait(&["PAUSED"]);
    terminal.press(&["p"]);
    terminal.wait_until("going on", |text| !text.contains("PAUSED"));
    terminal.press(&["s"]);
    terminal.wait(&["MB/s▼"]);
    terminal.press(&["r"]);
    terminal.wait(&["MB/s▲"]);
    terminal.press(&["C-c"]);
    terminal.wait_ended(0);
}

#[test]
fn signal_ends_it_and_restores_the_terminal() {
    use rustix::process::{Signal, kill_process};
    let served = Served::start();
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let Some(terminal) = Terminal::start(&served.control(), 80, 24, "") else { return };
        terminal.wait(&["STATE"]);
        kill_process(terminal.pid_of_top(), signal).unwrap();
        terminal.wait_ended(code);
    }
}

#[test]
fn server_that_dies_is_a_line_until_it_is_back() {
    let mut served = Served::start();
    let Some(terminal) = Terminal::start(&served.control(), 80, 24, "") else { return };
    terminal.wait(&["STATE"]);
    served.server.take().unwrap().kill();
    terminal.wait(&["! ", "control.sock", "root"]);
    served.start_server();
    terminal.wait_until("it is back", |text| !text.contains("! ") && text.contains("root"));
    terminal.press(&["q"]);
    terminal.wait_ended(0);
}

#[test]
fn terminal_obeys_no_name_of_a_hostile_server() {
    let server = FakeServer::start(|request| ok(request, &evil_answer()));
    let Some(terminal) = Terminal::start(&server.control(), 80, 24, "") else { return };
    let text = terminal.wait(&["bareblk 9.9\\u{1b}[31m", "\\u{1b}[2J\\u{1b}]0;gotcha"]);
    assert!(fits(&text, 80, 24), "{text}");
    assert!(!terminal.ask(&["display-message", "-p", "#{pane_title}"]).contains("gotcha"));
    terminal.press(&["q"]);
    terminal.wait_ended(0);
}

#[test]
fn server_that_never_answers_leaves_the_keys_alone() {
    let server = FakeServer::start(|_| None);
    let Some(terminal) = Terminal::start(&server.control(), 80, 24, "") else { return };
    terminal.wait(&["reading…"]);
    terminal.press(&["?"]);
    terminal.wait(&["shorter interval"]);
    terminal.press(&["q", "q"]);
    terminal.wait_ended(0);
}

#[test]
fn failed_disk_is_red_unless_colours_are_unwanted() {
    let answer = json!({"disks": [{"name": "broken", "failed": true}]});
    let server = FakeServer::start(move |request| ok(request, &answer));
    for (variables, is_red) in [("", true), ("NO_COLOR=1", false)] {
        let Some(terminal) = Terminal::start(&server.control(), 80, 24, variables) else { return };
        terminal.wait(&["broken", "failed"]);
        let text = terminal.ask(&["capture-pane", "-p", "-e"]);
        let line = text.lines().find(|line| line.contains("broken")).unwrap();
        assert_eq!(line.contains("\u{1b}[38;5;1m"), is_red, "{line:?}");
        terminal.press(&["q"]);
        terminal.wait_ended(0);
    }
}
