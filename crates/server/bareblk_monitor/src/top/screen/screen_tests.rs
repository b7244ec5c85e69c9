//! The screens on terminals of several sizes.

use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent};
use ratatui::style::Color;
use serde_json::json;

use super::*;
use crate::top::answer::Reading;
use crate::top::fixture;
use crate::top::poller::News;
use crate::top::sample::Sample;

const COLOURS: Palette = Palette { has_colour: true };

fn state() -> State {
    let mut state = State::new(vec![None], Duration::from_secs(1));
    state.note(0, News::Sample(Box::new(fixture::sample()), "0.1.0".into()));
    state
}

fn terminal(state: &mut State, width: u16, height: u16, palette: Palette) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, state, palette)).unwrap();
    terminal
}

fn drawn(state: &mut State, width: u16, height: u16) -> Vec<String> {
    let terminal = terminal(state, width, height, COLOURS);
    let cells = terminal.backend().buffer().content().chunks(usize::from(width).max(1));
    let lines = cells.map(|cells| cells.iter().map(ratatui::buffer::Cell::symbol).collect::<String>());
    lines.map(|line| line.trim_end().to_owned()).collect()
}

fn press(state: &mut State, keys: &str) {
    keys.chars().for_each(|key| _ = state.key(KeyEvent::from(KeyCode::Char(key))));
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[test]
fn usual_terminal_shows_the_columns_of_disks_and_the_workers() {
    let lines = drawn(&mut state(), 80, 12);
    assert_eq!(lines[0], "bareblk 0.1.0  41.1k IOPS  1.3µs/IO  1s                      [d] u  w  g  h  ? q");
    assert_eq!(words(&lines[1]), ["DISK", "IOPS▼", "MB/s", "p50", "p99", "QD", "THR%", "CREDIT%", "STATE"]);
    assert_eq!(words(&lines[2]), ["root", "38.1k", "156", "82µs", "310µs", "62", "–", "–", "ok"]);
    assert_eq!(words(&lines[3]), ["db", "3.0k", "12", "82µs", "310µs", "31", "71", "12", "throttled"]);
    assert_eq!(words(&lines[4]), ["broken", "0", "0", "–", "–", "0", "–", "–", "failed"]);
    assert_eq!(lines[11], "W0 ██████░░ 74% wait 2%  W1 ███░░░░░ 38%");
}

#[test]
fn wide_terminal_shows_more_columns() {
    let lines = drawn(&mut state(), 200, 12);
    let more = ["READ/s", "WRITE/s", "FLUSH/s", "ERR/s", "HELD", "µs/IO"];
    assert!(more.iter().all(|heading| lines[1].contains(heading)), "{}", lines[1]);
    let keys = "[d disks] u queues  w workers  g groups  h heat  ? help  q quit";
    assert!(lines[0].ends_with(keys), "{}", lines[0]);
}

#[test]
fn below_80_columns_the_name_says_what_the_state_would() {
    let lines = drawn(&mut state(), 79, 12);
    assert_eq!(words(&lines[1]), ["DISK", "IOPS▼", "MB/s", "p99", "THR%"]);
    assert_eq!(words(&lines[3])[0], "*db");
    assert_eq!(words(&lines[4])[0], "!broken");
    assert!(drawn(&mut state(), 40, 12).iter().all(|line| line.chars().count() <= 40));
}

#[test]
fn below_40_columns_there_is_one_line_per_disk() {
    let lines = drawn(&mut state(), 39, 12);
    assert_eq!(lines[..6], ["root 38.1k 310µs", "*db 3.0k 310µs", "!broken 0", "*full 0", "idle 0", ""]);
}

#[test]
fn failed_disk_is_red_and_held_or_throttled_ones_yellow_unless_colours_are_unwanted() {
    let colour = |palette, y| {
        let terminal = terminal(&mut state(), 80, 12, palette);
        terminal.backend().buffer().cell((0, y)).unwrap().fg
    };
    assert_eq!(
        [2, 3, 4, 5].map(|y| colour(COLOURS, y)),
        [Color::Reset, Color::Yellow, Color::Red, Color::Yellow]
    );
    let none = Palette { has_colour: false };
    assert!((0..12).all(|y| colour(none, y) == Color::Reset));
}

#[test]
fn selected_row_has_a_mark_and_is_scrolled_to() {
    let mut state = state();
    state.key(KeyEvent::from(KeyCode::Down));
    assert!(drawn(&mut state, 80, 12)[2].starts_with("▸root"));
    state.key(KeyEvent::from(KeyCode::End));
    let lines = drawn(&mut state, 80, 5);
    assert!(lines.iter().any(|line| line.starts_with("▸idle")), "{lines:?}");
}

#[test]
fn every_screen_has_its_table() {
    for (key, heading, row) in [
        ("u", "KICK/s", "root 0 0 38.0k 156 31 256 0 9.5k 4.8k 1.3"),
        ("w", "WAIT%", "0 74 2 2 0 0 900 2-3"),
        ("g", "USED/s", "group acme bps 200M 12.0M 6 50"),
    ] {
        let mut state = state();
        press(&mut state, key);
        let lines = drawn(&mut state, 80, 12);
        assert!(lines[1].contains(heading), "{lines:?}");
        assert_eq!(words(&lines[2]).join(" "), row);
        assert!(lines[0].contains(&format!("[{key}]")), "{}", lines[0]);
    }
}

#[test]
fn heat_map_has_a_row_for_each_power_of_two() {
    let mut state = state();
    press(&mut state, "h");
    let lines = drawn(&mut state, 80, 12);
    assert!(lines[1].starts_with(" 262µs") && lines[1].ends_with('▓'), "{lines:?}");
    assert!(lines[3].starts_with("  66µs") && lines[3].ends_with('█'), "{lines:?}");
}

#[test]
fn one_disk_shows_what_it_is_and_its_limits() {
    let mut state = state();
    state.key(KeyEvent::from(KeyCode::Enter));
    let text = drawn(&mut state, 80, 24).join("\n");
    for part in ["root  ok", "/images/root.raw  20G  io_uring", "p99.9", "2 of 4 queues run", "62 in flight"]
    {
        assert!(text.contains(part), "no {part}: {text}");
    }
    state.view = View::Disk((0, "db".into()));
    let text = drawn(&mut state, 80, 24).join("\n");
    for part in
        ["iops: 3.0k of 3.0k per second, credit 12%", "bps of group acme: 12.0M of 200M", "throttled 71%"]
    {
        assert!(text.contains(part), "no {part}: {text}");
    }
    state.note(0, News::Sample(Box::default(), String::new()));
    assert!(drawn(&mut state, 80, 24).join("\n").contains("the server no longer has this disk"));
}

#[test]
fn server_that_is_gone_has_a_line_and_its_last_figures_stay() {
    let mut state = state();
    state.note(0, News::Gone("there is no server at /run/c.sock".into()));
    let lines = drawn(&mut state, 80, 12);
    assert_eq!(lines[11], "! there is no server at /run/c.sock");
    assert!(lines[2].contains("root"), "{lines:?}");
}

#[test]
fn many_servers_have_a_column_and_few_lines_about_those_that_are_gone() {
    let labels = (0..20).map(|number| Some(format!("s{number}"))).collect();
    let mut state = State::new(labels, Duration::from_secs(1));
    (0..19).for_each(|server| state.note(server, News::Gone(format!("no {server}"))));
    state.note(19, News::Sample(Box::new(fixture::sample()), "0.1.0".into()));
    let lines = drawn(&mut state, 80, 24);
    assert_eq!(words(&lines[1])[0], "SERVER");
    assert_eq!(words(&lines[2])[..2], ["s19", "root"]);
    assert!(lines.iter().any(|line| line == "! 14 servers do not answer"), "{lines:?}");
}

#[test]
fn page_of_help_fits_into_the_usual_terminal() {
    let mut state = State::new(vec![None], Duration::from_secs(1));
    press(&mut state, "?");
    let (usual, large) = (drawn(&mut state, 80, 24), drawn(&mut state, 119, 50));
    assert_eq!(usual[1..], large[1..24]);
    assert!(large[24..].iter().all(String::is_empty), "{large:?}");
}

/// The widths at which columns appear or disappear, and the smallest terminals.
#[test]
fn no_size_and_no_screen_is_too_small() {
    let mut old = State::new(vec![None], Duration::from_secs(1));
    let nothing =
        Sample::between(&Reading::new(json!({})).unwrap(), &Reading::new(json!({"disks": [{}]})).unwrap());
    let mut without = State::new(vec![Some("a".into()), None], Duration::from_secs(1));
    without.note(0, News::Sample(Box::new(nothing), String::new()));
    without.note(1, News::Gone("x".repeat(500)));
    for (width, height) in [(1, 1), (1, 24), (200, 1), (2, 2), (39, 3), (40, 3), (79, 2), (80, 24), (200, 60)]
    {
        for keys in ["", "u", "w", "g", "h", "?", "/abc"] {
            for state in [&mut old, &mut without, &mut state()] {
                press(state, keys);
                drawn(state, width, height);
                state.key(KeyEvent::from(KeyCode::Enter));
                drawn(state, width, height);
                state.key(KeyEvent::from(KeyCode::Esc));
            }
        }
    }
}

#[test]
fn names_and_numbers_that_no_honest_server_sends_stay_in_their_cells() {
    let wild = |n: u64| {
        let counters =
            json!({"queue": 65535, "reads": n, "read_bytes": n, "worker_ns": n, "in_flight": n, "kicks": n});
        let limit = json!({"limit": "\u{1b}[31m", "rate": n, "credit": n, "capacity": 0, "used": n});
        let disk = json!({"name": "\u{1b}[2J\n\u{9b}x\u{202e}", "size_bytes": n, "held": n, "sessions": n, "queues": [counters, counters],
            "latency": {"read": {"max_ns": n, "buckets": [[n, n], [0, n]]}}, "throttling": {"limits": [limit], "throttled_ns": n}});
        let long = json!({"name": "ä".repeat(5000)});
        Reading::new(
            json!({"at_ns": n, "process_cpu_ns": n, "disks": [disk, long], "workers": [{"worker": u32::MAX, "cpu_ns": n, "sleeps": n}]}),
        )
    };
    for (before, now) in [(0, u64::MAX), (u64::MAX, 0), (u64::MAX, u64::MAX)] {
        let sample = Sample::between(&wild(before).unwrap(), &wild(now).unwrap());
        let mut state = State::new(vec![None], Duration::from_secs(1));
        state.note(0, News::Sample(Box::new(sample), "\u{1b}".escape_default().to_string()));
        for keys in ["", "u", "w", "g", "h", "d"] {
            press(&mut state, keys);
            let text = drawn(&mut state, 80, 24).join("\n");
            assert!(!text.contains(['\u{1b}', '\u{9b}', '\u{202e}']), "{text:?}");
            assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
            state.key(KeyEvent::from(KeyCode::Enter));
            drawn(&mut state, 80, 24);
            state.key(KeyEvent::from(KeyCode::Esc));
        }
    }
}
