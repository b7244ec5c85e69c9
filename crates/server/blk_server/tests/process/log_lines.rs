//! Captures the lines that this process logs.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fmt::{Debug, Write};
use std::sync::{Mutex, MutexGuard, Once};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::alone;

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps lines of any thread, at levels info, warning and error.
struct Keeper;

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{}={value:?} ", field.name()).unwrap();
    }
}

impl Subscriber for Keeper {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        LINES.lock().unwrap().push(line.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Clears the lines and keeps new ones. Until the guard is dropped, no other test runs.
pub fn keep_lines() -> MutexGuard<'static, ()> {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing::subscriber::set_global_default(Keeper).unwrap());
    let alone = alone();
    LINES.lock().unwrap().clear();
    alone
}

pub fn counted() -> usize {
    LINES.lock().unwrap().len()
}

/// Use words that only the test's own lines contain: an earlier test's server may log its last lines late.
pub fn lines_with(words: &str) -> usize {
    LINES.lock().unwrap().iter().filter(|line| line.contains(words)).count()
}
