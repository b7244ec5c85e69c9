//! Other processes that keep every core busy, next to the threads under test.
//!
//! - Each core has a shell that counts in a loop. The shell checks periodically whether this process still exists, and
//!   ends if it does not. Dropping [`Neighbours`] ends the shells.

use std::process::{Child, Command, Stdio};

use super::cores;
use crate::experiment::SampleError;

/// Checks about ten times per second.
const BUSY: &str =
    "while kill -0 \"$0\" 2>/dev/null; do n=0; while [ $n -lt 100000 ]; do n=$((n+1)); done; done";

/// The processes. They run while this value exists.
#[derive(Debug)]
pub(crate) struct Neighbours(Vec<Child>);

impl Neighbours {
    /// Starts `per_core` processes on each core.
    pub fn start(per_core: usize) -> Result<Self, SampleError> {
        let mut all = Self(Vec::new());
        for place in 0..cores::all().len() * per_core {
            let mut command = Command::new("sh");
            command.args(["-c", BUSY, &std::process::id().to_string()]);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let child = command.spawn().map_err(|why| SampleError::because("a busy neighbour", &why))?;
            cores::pin_process(child.id(), place);
            all.0.push(child);
        }
        Ok(all)
    }
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_run_until_they_are_dropped() {
        let mut neighbours = Neighbours::start(1).unwrap();
        assert_eq!(neighbours.0.len(), cores::all().len());
        assert!(neighbours.0.iter_mut().all(|child| child.try_wait().unwrap().is_none()));
        let first = neighbours.0[0].id();
        drop(neighbours);
        assert!(!cores::pin_process(first, 0), "process {first} is still there");
    }
}
