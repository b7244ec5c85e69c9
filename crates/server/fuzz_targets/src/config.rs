//! `config`: the text of a configuration file.
//!
//! - Any text is either a valid configuration or refused in one line that names the file and a line in it.
//! - The error is not much longer than the text.

use bareblk::inputs::configuration;

/// Maximum length of an error relative to the text: the error repeats the invalid value with escapes.
const MOST_TIMES: usize = 16;
const MOST_MORE: usize = 4096;

/// Runs the target once.
pub(crate) fn run(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Err(line) = configuration(text) else { return };
    assert!(!line.contains(char::is_control), "not exactly one line: {line:?}");
    assert!(line.len() <= text.len() * MOST_TIMES + MOST_MORE, "{} bytes for {}", line.len(), text.len());
    let rest = line.strip_prefix("bareblk.toml:").expect("the file's name first");
    let (number, _) = rest.split_once(": ").expect("a line number, then what is wrong");
    let number: usize = number.parse().expect("a line number");
    assert!((1..=text.lines().count() + 1).contains(&number), "{line}");
}

/// Files that contain every kind of setting, and mistakes.
pub(crate) fn seeds() -> Vec<(String, Vec<u8>)> {
    let disk = "[[disk]]\nimage = \"/dev/null\"\nsocket = \"/nowhere/a.sock\"\n";
    let texts = [
        ("one", disk.to_owned()),
        (
            "process",
            format!(
                "control = \"/nowhere/c\"\nworkers = 2\ncpus = \"0-1\"\nbalance = \"off\"\npoll-us = 0\n{disk}"
            ),
        ),
        ("workers", format!("[[worker]]\nnice = 5\n[[worker]]\nclass = \"batch\"\n{disk}workers = [0, 1]\n")),
        (
            "defaults",
            format!(
                "[defaults]\nqueues = 4\nengine = \"mmap\"\ncache = \"writeback\"\nreadonly = true\n{disk}queues = 300\n"
            ),
        ),
        (
            "placed",
            format!("{disk}placement = \"completion\"\nhand-over = \"count:4\"\ncompletion-worker = 1\n"),
        ),
        (
            "options",
            format!(
                "{disk}size = \"20G\"\nblock-size = 4096\ndiscard = false\nserial = \"x\"\ncoalesce = \"8,50us\"\nname = \"n\"\n"
            ),
        ),
        ("twice", format!("{disk}{disk}")),
        ("unknown", "colour = \"red\"\n[[disk]]\n".to_owned()),
        ("types", "workers = [1, \"a\", {x = 1}]\n[disk]\nimage = 3\n".to_owned()),
        ("broken", "[[disk\nimage = \"a\nb = '''\n".to_owned()),
        ("dates", format!("{disk}queues = 1979-05-27T07:32:00Z\nname = inf\n")),
        ("example", include_str!("../../../../docs/examples/bareblk.toml").to_owned()),
        ("empty", String::new()),
    ];
    texts.into_iter().map(|(name, text)| (name.to_owned(), text.into_bytes())).collect()
}
