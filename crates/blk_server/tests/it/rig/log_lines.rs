//! How many lines this process has logged: for tests in programs of their own.
//!
//! Not here: what the lines say (`logs.rs`).
#![allow(dead_code, missing_docs)]

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

static LINES: AtomicUsize = AtomicUsize::new(0);

struct CountLines;

impl Write for CountLines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LINES.fetch_add(bytes.iter().filter(|byte| **byte == b'\n').count(), Ordering::Relaxed);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Counts from now on.
pub fn start_counting() {
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::INFO)
        .with_writer(|| CountLines)
        .init();
}

pub fn counted() -> usize {
    LINES.load(Ordering::Relaxed)
}
