//! SIGSYS: a thread made a call that is not on its list. The process prints one line and ends. It does the same if it
//! cannot install the list of a thread that it cannot do without.
//!
//! - The call was not executed. The thread must not continue either: it would take the call's number for the result,
//!   and a write that never happened would seem to have succeeded.
//! - If the thread has all signals blocked (while it starts another thread), the kernel ends the process with signal
//!   SIGSYS, without this line.
//! - The line is for the operator. The refusal of the call does not depend on it, nor on any code in this
//!   process.

use std::io::{self, Write};

use crate::SandboxError;
use crate::filter::CALL_BITS;
use crate::names;
use crate::role::Role;

/// The process's exit code after such a call. Shells report the same code for a program that SIGSYS ended.
pub const EXIT_CODE: i32 = 128 + libc::SIGSYS;

/// Buffer size, longer than any expected line.
const LINE_BYTES: usize = 400;

/// Ends the process, because a thread that it needs cannot be confined.
pub(crate) fn end(role: Role, error: &SandboxError) -> ! {
    let mut line = [0; LINE_BYTES];
    let left = describe_unconfined(&mut line, role, error);
    write_and_exit(&line, left)
}

/// Installs the handler, once.
pub(crate) fn install() -> io::Result<()> {
    // SAFETY: 1. the action runs in a signal handler and does only what is allowed there: it formats numbers
    // and constants into a buffer on its stack, and calls write(2) and _exit(2); it takes no lock, allocates
    // nothing and does not return.
    unsafe { signal_hook_registry::register_sigaction(libc::SIGSYS, |info| tell_and_end(info.si_errno)) }?;
    Ok(())
}

/// `verdict`: the value that `filter.rs` puts into the refusal.
fn tell_and_end(verdict: i32) {
    let mut line = [0; LINE_BYTES];
    let left = describe(&mut line, verdict);
    write_and_exit(&line, left)
}

fn write_and_exit(line: &[u8; LINE_BYTES], left: usize) -> ! {
    let length = LINE_BYTES - left;
    let _ = rustix::io::write(io::stderr(), line.get(..length).unwrap_or_default());
    signal_hook::low_level::exit(EXIT_CODE)
}

/// Returns how many bytes of the buffer are left.
fn describe(mut line: &mut [u8], verdict: i32) -> usize {
    let verdict = verdict.unsigned_abs();
    let call = verdict & ((1 << CALL_BITS) - 1);
    let role = Role::of_number(verdict >> CALL_BITS).map_or("", Role::name);
    let name = names::of(i64::from(call)).unwrap_or("not known by name");
    // Fails only for lack of space; the buffer then holds the start of the line.
    let _ = writeln!(
        line,
        "bareblk: sandbox: {role} thread made system call {call} ({name}), which is not on its list: the call was refused, \
         and the server ends; if the list is incomplete, use --sandbox off (docs/reference/sandbox.md)"
    );
    line.len()
}

fn describe_unconfined(mut line: &mut [u8], role: Role, error: &SandboxError) -> usize {
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
    // Also fails only for lack of space.
    let _ = writeln!(
        line,
        "bareblk: sandbox: {role} thread cannot install its list of system calls: {error}{cause}: the server ends; \
         --sandbox off serves without (docs/reference/sandbox.md)"
    );
    line.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_names_role_and_call() {
        let verdict = Role::Worker.number() << CALL_BITS | u32::try_from(libc::SYS_execve).unwrap();
        let mut line = [0; LINE_BYTES];
        let left = describe(&mut line, verdict.try_into().unwrap());
        let text = std::str::from_utf8(&line[..LINE_BYTES - left]).unwrap();
        assert!(text.starts_with("bareblk: sandbox: worker thread made system call "), "{text}");
        assert!(text.contains("(execve)") && text.ends_with(")\n"), "{text}");
    }
}
