//! Tests of the configuration file: inheritance, mistakes with their lines, the documented example.

use clap::{CommandFactory, Parser};
use disk_image::{CacheMode, HostOpener};

use super::*;
use crate::args::usage;
use crate::cli::Cli;

/// A folder with images `a` to `c`, which also holds the sockets.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            std::fs::write(folder.path().join(name), [0; 4096]).unwrap();
        }
        Self(folder)
    }

    /// Parses `text`, with `@` replaced by the folder.
    fn read(&self, text: &str) -> Result<Configuration, Vec<Problem>> {
        parse(&text.replace('@', &self.0.path().display().to_string()), &HostOpener, &[])
    }

    fn first_problem(&self, text: &str) -> (usize, String) {
        let mut problems = self.read(text).unwrap_err();
        problems.sort_by_key(|problem| problem.line);
        let first = problems.remove(0);
        (first.line, first.text.replace(&self.0.path().display().to_string(), "@"))
    }
}

const A: &str = "[[disk]]\nimage = '@/a'\nsocket = '@/a.sock'\n";
const B: &str = "[[disk]]\nimage = '@/b'\nsocket = '@/b.sock'\n";

#[test]
fn disk_has_what_the_defaults_say_unless_it_says_otherwise() {
    let place = Place::new();
    let text = format!(
        "[defaults]\nqueues = 4\ncache = 'writeback'\nreadonly = true\ndiscard = false\n{A}queues = 2\nreadonly = false\n{B}"
    );
    let disks = place.read(&text).unwrap().disks;
    assert_eq!((disks[0].options.queues, disks[0].read_only()), (2, false));
    assert_eq!((disks[1].options.queues, disks[1].read_only()), (4, true));
    assert!(disks.iter().all(|disk| disk.image.cache == CacheMode::Writeback && !disk.image.discard));
}

#[test]
fn disk_without_settings_is_what_the_command_line_makes_of_it() {
    let disk = Place::new().read(A).unwrap().disks.remove(0);
    assert_eq!((disk.options.queues, disk.options.queue_size, disk.socket.mode), (64, 1024, 0o600));
    assert_eq!(
        (disk.image.cache, disk.workers.clone(), disk.options.name.clone()),
        (CacheMode::None, None, None)
    );
}

#[test]
fn process_has_workers_alike_by_number_or_each_by_its_table() {
    let place = Place::new();
    let alike = place.read(&format!("workers = 3\npoll-us = 0\n{A}")).unwrap().server;
    assert_eq!((alike.workers.len(), alike.options.poll().as_micros()), (3, 0));
    let each = place.read(&format!("{A}[[worker]]\nnice = 5\n[[worker]]\n")).unwrap().server.workers;
    assert_eq!(each.iter().map(|worker| worker.nice).collect::<Vec<_>>(), [Some(5), None]);
}

#[test]
fn image_that_exists_is_not_made_again() {
    let place = Place::new();
    let text = format!("[defaults]\ncreate = '1M'\n{A}[[disk]]\nimage = '@/new'\nsocket = '@/n.sock'\n");
    let disks = place.read(&text).unwrap().disks;
    assert_eq!(disks.iter().map(|disk| disk.image.create_bytes).collect::<Vec<_>>(), [None, Some(1 << 20)]);
}

#[test]
fn two_readers_of_one_image_are_fine() {
    let text = format!("[defaults]\nreadonly = true\n{A}{}", B.replace("/b'", "/a'"));
    assert_eq!(Place::new().read(&text).unwrap().disks.len(), 2);
}

#[test]
fn each_mistake_is_told_with_its_line_its_key_and_its_limit() {
    let second = |from: &str, to: &str| format!("{A}{}", B.replace(from, to));
    let cases = [
        (String::new(), 1, "there is no disk"),
        ("disk = 3".to_owned(), 1, "write [[disk]]"),
        ("defaults = 3\n".to_owned() + A, 1, "[defaults]"),
        ("[[disk]\n".to_owned() + A, 1, "]"),
        (format!("{A}qeues = 4"), 4, "there is no key `qeues`: did you mean `queues`?"),
        (format!("poll_us = 4\n{A}"), 1, "there is no key `poll_us`: did you mean `poll-us`?"),
        (format!("[[disks]]\n{A}"), 1, "there is no key `disks`: did you mean `disk`?"),
        (format!("{A}help = true"), 4, "there is no key `help`"),
        (format!("{A}queues = 300"), 4, "queues = 300 is invalid: give a whole number from 1 to 256"),
        (format!("{A}queues = -1"), 4, "queues = -1 is invalid: give a whole number from 1 to 256"),
        (format!("{A}queues = 4.5"), 4, "queues = 4.5 is invalid: give a whole number"),
        (format!("{A}queues = [4]"), 4, "queues = [4] is invalid: give one value, not a list"),
        (format!("{A}queue-size = 100"), 4, "power of two from 2 to 1024"),
        (
            format!("[defaults]\nqueues = 0\n{A}"),
            2,
            "queues = 0 is invalid: give a whole number from 1 to 256",
        ),
        (format!("{A}socket-mode = 0o600"), 4, "socket-mode = 0o600 is invalid: give three octal digits"),
        (format!("{A}cache = 'direct'"), 4, "cache = 'direct' is invalid: use none, writeback, writethrough"),
        (format!("{A}readonly = 1"), 4, "readonly = 1 is invalid: give true or false"),
        (format!("{A}serial = \"a\\nb\""), 4, "1 to 20 printable ASCII"),
        (format!("{A}name = ''"), 4, "name = '' is invalid: "),
        (format!("{A}create = '5X'"), 4, "create = '5X' is invalid: give a number of bytes"),
        (format!("{A}block-size = 1000"), 4, "1000"),
        (format!("{A}socket-owner = 'nobody-has-this-name'"), 4, "does not exist"),
        (format!("stop-timeout = '5m'\n{A}"), 1, "stop-timeout = '5m' is invalid: give whole seconds"),
        (format!("{A}cache = 'writeback'\niopoll = true\nengine = 'io_uring'"), 5, "iopoll needs cache none"),
        (format!("{A}fd-pool = 2"), 4, "fd-pool is an option of engine posix-aio"),
        (format!("[defaults]\nsqpoll-ms = 5\n{A}"), 2, "sqpoll-ms is an option of engine io_uring"),
        (format!("[defaults]\nname = 'x'\n{A}"), 2, "disks cannot share this value"),
        ("[[disk]]\nimage = '@/a'\n".to_owned(), 1, "has no `socket`"),
        (A.replace("/a'", "/none'"), 2, "does not exist"),
        (A.replace("@/a'", "@'"), 2, "is a directory"),
        (A.replace("@/a.sock", "@/no/a.sock"), 3, "the folder of socket"),
        (format!("{A}name = 'x'\n{B}name = 'x'"), 8, "name = 'x': the disk in line 4 has the same name"),
        (second("/b.sock", "/./a.sock"), 6, "the disk in line 3 has the same socket"),
        (second("/b'", "/./a'"), 5, "the disk in line 2 has the same image"),
        (format!("{}readonly = true\n{}", A, B.replace("/b'", "/a'")), 6, "they are not both readonly"),
        (format!("workers = 2\n{A}workers = 3"), 5, "workers = 3: 3 workers, but the server has 2"),
        (format!("workers = 2\n{A}workers = [0, 2]"), 5, "workers = [0, 2]: worker 2, but the server has 2"),
        (format!("workers = 0\n{A}"), 1, "workers = 0 is invalid: give a whole number from 1 to 1024"),
        (format!("workers = 2\n{A}[[worker]]\n"), 5, "`workers` (line 1) describes all workers"),
        (format!("{A}[[worker]]\nnice = 20\n"), 5, "nice = 20 is invalid: give a whole number from -20"),
        (format!("balance = 'on'\n{A}"), 1, "balance = 'on' is invalid: use auto, off"),
    ];
    let place = Place::new();
    for (text, line, expected) in cases {
        let (found, problem) = place.first_problem(&text);
        assert!(
            problem.contains(expected) && found == line,
            "{text}\n→ {found}: {problem}\n≠ {line}: {expected}"
        );
        assert!(!problem.contains('\n'), "more than a line: {problem}");
    }
}

#[test]
fn worker_that_was_added_while_the_server_runs_may_be_named() {
    let place = Place::new();
    let here = place.0.path().display().to_string();
    let text = format!("workers = 2\n{A}workers = [0, 5]").replace('@', &here);
    assert!(parse(&text, &HostOpener, &[1, 5]).is_ok());
    let problems = parse(&text, &HostOpener, &[1, 4]).unwrap_err();
    assert!(
        problems[0].text.ends_with("worker 5, but the server has 3 workers, numbered 0-1,4"),
        "{problems:?}"
    );
}

#[test]
fn all_mistakes_are_found_and_each_has_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.toml");
    let second = "[[disk]]\nimage = '/none/b'\nsocket = '/none/b.sock'\nqueues = 0\nserial = ''\n";
    std::fs::write(&path, format!("poll-us = -1\n[[disk]]\nimage = 'none'\nqueues = 0\n{second}")).unwrap();
    let error = read(&path, &[], &HostOpener).unwrap_err();
    let lines = error.lines();
    let expected = [
        (1, "poll-us = -1 is invalid: give whole microseconds"),
        (2, "[[disk]] has no `socket`"),
        (4, "queues = 0 is invalid: give a whole number"),
        (6, "image /none/b does not exist"),
        (7, "the folder of socket /none/b.sock"),
        (8, "queues = 0 is invalid: give a whole number"),
        (9, "serial = '' is invalid: give 1 to 20"),
    ];
    for (line, (number, part)) in lines.iter().zip(expected) {
        assert!(line.starts_with(&format!("{}:{number}: {part}", path.display())), "{line}");
    }
    assert_eq!((lines.len(), error.to_string()), (expected.len(), lines.join("; ")));
}

#[test]
fn wrong_key_is_no_reason_for_further_mistakes() {
    let text = A.replace("/a'", "/new'") + "create = '5X'\n";
    assert_eq!(Place::new().read(&text).unwrap_err().len(), 1);
}

#[test]
fn mistakes_of_disks_are_found_beside_those_of_their_keys() {
    let problems = Place::new().read(&format!("{A}queues = 0\n{}", B.replace("/b'", "/a'"))).unwrap_err();
    let texts: Vec<_> = problems.iter().map(|problem| (problem.line, problem.text.as_str())).collect();
    assert!(texts.len() == 2 && texts[1].1.contains("the disk in line 2 has the same image"), "{texts:?}");
}

#[test]
fn mistakes_without_end_are_counted() {
    let lines = Place::new().read(&"[[disk]]\n".repeat(40)).unwrap_err();
    let error = InvalidFile::Problems { path: "f".into(), problems: lines };
    assert_eq!(error.lines().len(), SHOWN_PROBLEMS + 1);
    assert_eq!(error.lines().last().unwrap(), "f: 30 more mistakes");
}

#[test]
fn hard_link_to_another_disks_image_is_the_same_image() {
    let place = Place::new();
    std::fs::hard_link(place.0.path().join("a"), place.0.path().join("alias")).unwrap();
    let (line, problem) = place.first_problem(&format!("{A}{}", B.replace("/b'", "/alias'")));
    assert!(line == 5 && problem.contains("has the same image"), "{line}: {problem}");
}

#[test]
fn disk_in_json_is_read_as_a_table_is() {
    let place = Place::new();
    let path = |name: &str| Value::from(place.0.path().join(name).display().to_string());
    let mut keys =
        serde_json::Map::from_iter([("image".into(), path("a")), ("socket".into(), path("s \"1\""))]);
    keys.insert("queues".into(), Value::from(3));
    keys.insert("readonly".into(), Value::from(true));
    let read = disk(&keys, &HostOpener).unwrap();
    assert_eq!(
        (read.options.queues, read.read_only(), read.socket.path),
        (3, true, place.0.path().join("s \"1\""))
    );
    keys.insert("queues".into(), Value::from(300));
    assert!(disk(&keys, &HostOpener).unwrap_err().to_string().contains("1 to 256"));
    keys.insert("queues".into(), Value::Null);
    assert!(disk(&keys, &HostOpener).is_err());
}

/// The error lines of the same wrong value on the command line, in a file and in `ctl add`.
fn refusals(key: &str, value: &str) -> [String; 3] {
    let option = format!("--{key}={value}");
    let words = ["serve", "image", "--socket=s", &option];
    let error = Cli::try_parse_from(["bareblk"].iter().chain(&words)).unwrap_err();
    let command_line = usage::line(Cli::command(), &error, words.map(Into::into));
    let (_, file) = Place::new().first_problem(&format!("{A}{key} = '{value}'"));
    let keys = [("image", "i"), ("socket", "s"), (key, value)];
    let keys = keys.map(|(key, value)| (key.to_owned(), Value::from(value))).into_iter().collect();
    let control = disk(&keys, &HostOpener).unwrap_err().to_string();
    [command_line, file, control]
}

#[test]
fn wrong_value_is_refused_alike_on_the_command_line_in_a_file_and_by_ctl() {
    for (key, value, limit) in [
        ("queues", "300", "give a whole number from 1 to 256"),
        ("queue-size", "100", "give a power of two from 2 to 1024"),
        ("retry-after", "5m", "give whole seconds, without a unit, from 0 to 604800"),
        ("fd-pool", "65", "give a whole number from 1 to 64"),
        ("io-threads", "0", "give a whole number from 1 to 1024"),
        ("sqpoll-ms", "0", "give whole milliseconds, without a unit, from 1 to 60000"),
        ("socket-mode", "rw", "give three octal digits"),
        ("create", "1000", "give a multiple of 512"),
    ] {
        for line in refusals(key, value) {
            assert!(line.contains(key) && line.contains(value) && line.contains(limit), "{line}");
        }
    }
}

#[test]
fn example_is_valid_where_its_folders_exist() {
    let text = include_str!("../../../../../docs/examples/bareblk.toml");
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().display().to_string();
    std::fs::write(folder.path().join("golden.raw"), [0; 4096]).unwrap();
    let text = text.replace("/var/lib/bareblk", &here).replace("/run/bareblk", &here);
    let configuration = parse(&text, &HostOpener, &[]).unwrap();
    let disks: Vec<_> =
        configuration.disks.iter().map(|disk| disk.options.name.as_deref().unwrap()).collect();
    assert_eq!(disks, ["vm1-root", "vm1-scratch", "golden"]);
}

#[test]
fn control_characters_of_a_path_are_escaped_in_the_error() {
    let text = "[[disk]]\nimage = \"@/a\\tb\\u001b[2J\"\nsocket = \"@/a.sock\"\n";
    let (_, text) = Place::new().first_problem(text);
    assert!(text.contains("/a\\tb\\u{1b}[2J"), "{text}");
    assert!(!text.contains(char::is_control), "{text:?}");
}

#[test]
fn every_key_is_documented_and_in_the_manual_page_and_no_other() {
    let document = include_str!("../../../../../docs/reference/config.md");
    let mut page = xtask::config_page::keys(&xtask::config_page::page(document));
    let schemas = [Schema::of::<FileServer>(&[]), Schema::of::<WorkerArgs>(&[]), Schema::of::<FileDisk>(&[])];
    let mut known: Vec<_> = schemas.iter().flat_map(Schema::keys).map(str::to_owned).collect();
    // A key that several tables have, such as `workers`, has an entry in each.
    page.sort_unstable();
    known.sort_unstable();
    assert_eq!(page, known);
}
