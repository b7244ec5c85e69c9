//! SIGINT and SIGTERM during a measurement: the first signal ends it cleanly, the second ends the process at once.

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use signal_hook::consts::{SIGINT, SIGTERM};

/// Catches SIGINT and SIGTERM: the first signal requests a clean end, the second ends the process.
#[derive(Debug)]
pub struct Ending {
    flag: Arc<AtomicBool>,
    number: Arc<AtomicUsize>,
}

impl Ending {
    /// Catches the signals; until then they end the process.
    pub fn catch() -> io::Result<Self> {
        let ending = Self { flag: Arc::default(), number: Arc::default() };
        for signal in [SIGINT, SIGTERM] {
            let number = usize::try_from(signal).unwrap_or(0);
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&ending.flag))?;
            signal_hook::flag::register_usize(signal, Arc::clone(&ending.number), number)?;
            signal_hook::flag::register(signal, Arc::clone(&ending.flag))?;
        }
        Ok(ending)
    }

    /// The flag that the first signal sets.
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.flag)
    }

    /// Success, or the exit code with which shells report that a signal ended a program.
    pub fn exit_code(&self) -> ExitCode {
        // Relaxed: it orders no other data, and either signal will do.
        match self.number.load(Relaxed) {
            0 => ExitCode::SUCCESS,
            signal => ExitCode::from(128_u8.saturating_add(u8::try_from(signal).unwrap_or(0))),
        }
    }
}
