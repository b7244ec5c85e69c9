//! The demo's progress line, and its clean end after Ctrl-C.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Turns signals that would end this process into an error, so that everything is cleaned up.
pub(super) struct Interrupt {
    caught: Arc<AtomicBool>,
}

impl Interrupt {
    /// Interval at which loops check for an interrupt.
    pub(super) const POLL: Duration = Duration::from_millis(100);

    pub(super) fn catch() -> Result<Self> {
        let caught = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // The second signal ends the process at once.
            signal_hook::flag::register_conditional_shutdown(signal, 1, Arc::clone(&caught))?;
            signal_hook::flag::register(signal, Arc::clone(&caught))?;
        }
        Ok(Self { caught })
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.caught.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        Ok(())
    }
}

/// One line that shows the current step; without a terminal, a plain line per step.
pub(super) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    pub(super) fn new() -> Self {
        let bar = ProgressBar::new_spinner();
        bar.enable_steady_tick(Interrupt::POLL);
        Self { bar }
    }

    pub(super) fn step(&self, text: &str) {
        if self.bar.is_hidden() {
            eprintln!("{text}");
        }
        self.bar.set_message(text.to_owned());
    }

    /// A bar for a step whose length is known.
    pub(super) fn bytes(&self, text: &str, total_bytes: u64) -> ProgressBar {
        self.step(text);
        let style = ProgressStyle::with_template("  {msg} {wide_bar} {bytes}/{total_bytes}");
        let bar = ProgressBar::new(total_bytes).with_message(text.to_owned());
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
