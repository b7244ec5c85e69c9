//! Runs another program that generates a load, until it ends or the user wants to stop.
//!
//! - The program runs in its own process group, so a terminal's Ctrl-C reaches only this process, which then ends the
//!   program.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use crate::experiment::SampleError;
use crate::stop::Stop;

/// Time between two checks of whether the program has ended or the user wants to stop.
const LOOK: Duration = Duration::from_millis(20);

/// Runs the program `name`, and returns its output. `missing` says how to install it.
pub(crate) fn run(
    command: &mut Command,
    name: &str,
    missing: &str,
    stop: &Stop,
) -> Result<String, SampleError> {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => SampleError::Unavailable(missing.to_owned()),
            _ => SampleError::because(name, &error),
        })?;
    let ended = wait(child, stop).map_err(|error| SampleError::because(name, &error))?;
    let ended = ended.ok_or(SampleError::Interrupted)?;
    if ended.status.success() {
        return Ok(String::from_utf8_lossy(&ended.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    let line = said.lines().next().unwrap_or("no message").to_owned();
    Err(SampleError::because(&format!("{name} ended with {}", ended.status), &line))
}

/// Waits for the program's end. If the user wants to stop, kills the program and returns `None`.
fn wait(mut child: Child, stop: &Stop) -> io::Result<Option<Output>> {
    while child.try_wait()?.is_none() {
        if stop.is_asked() {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(LOOK);
    }
    child.wait_with_output().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, stop: &Stop) -> Result<String, SampleError> {
        run(Command::new("/bin/sh").args(["-c", script]), "sh", "no shell", stop)
    }

    #[test]
    fn program_that_ends_well_returns_what_it_printed() {
        assert_eq!(shell("echo done", &Stop::default()).unwrap(), "done\n");
    }

    #[test]
    fn program_that_fails_is_reported_with_its_first_words() {
        let error = shell("echo why >&2; echo more >&2; exit 3", &Stop::default()).unwrap_err();
        assert_eq!(error.to_string(), "sh ended with exit status: 3: why");
    }

    #[test]
    fn program_that_is_not_there_is_reported_with_what_to_install() {
        let error = run(&mut Command::new("/no/such"), "it", "install it", &Stop::default()).unwrap_err();
        assert_eq!(error.to_string(), "install it");
    }

    #[test]
    fn program_is_ended_when_the_user_wants_to_stop() {
        let stop = Stop::default();
        stop.ask();
        assert!(matches!(shell("sleep 1000", &stop), Err(SampleError::Interrupted)));
    }
}
