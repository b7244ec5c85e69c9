//! Runs other programs: returns their output, or an error with what the program printed.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Runs the program to its end and returns its standard output.
///
/// # Errors
/// If the program cannot start or fails; the error contains its standard error.
pub fn output(command: &mut Command) -> Result<String> {
    let name = describe(command);
    let result = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start `{name}`"))?;
    if !result.status.success() {
        let said = String::from_utf8_lossy(&result.stderr);
        bail!("`{name}` failed ({}): {}", result.status, said.trim());
    }
    Ok(String::from_utf8_lossy(&result.stdout).into_owned())
}

/// Runs a program that shows its own progress on the terminal, and waits for its end.
///
/// # Errors
/// If the program cannot start or fails.
pub fn run(command: &mut Command) -> Result<()> {
    let name = describe(command);
    let status = command.stdin(Stdio::null()).status().with_context(|| format!("cannot start `{name}`"))?;
    if !status.success() {
        bail!("`{name}` failed ({status})");
    }
    Ok(())
}

/// The command as a user would type it in a shell.
#[must_use]
pub fn describe(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}
