//! Turns lists of calls into seccomp filters, and installs them.
//!
//! `calls → seccompiler → BPF program, whose refusals carry the call and the role → installed on one thread`
//!
//! - Filters accumulate: a thread has its own and those of its ancestors. The strictest verdict applies.
//! - A refusal is SECCOMP_RET_TRAP: the call is not executed, and the thread gets SIGSYS (`report.rs`).
//!
//! Source: seccomp(2), Linux `Documentation/userspace-api/seccomp_filter.rst`.

use std::collections::BTreeMap;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter, sock_filter};

use crate::SandboxError;
use crate::calls;
use crate::role::{EngineCalls, Role};

/// `SECCOMP_RET_TRAP` (linux/seccomp.h). Its lower half is free for our use; it arrives as the signal's
/// `si_errno`.
const TRAP: u32 = 0x0003_0000;
/// Number of bits in `TRAP`'s lower half that hold the call; the other four hold the role.
pub(crate) const CALL_BITS: u32 = 12;

/// Instructions of classic BPF (linux/bpf_common.h).
const LOAD_WORD: u16 = 0x20;
const AND_CONSTANT: u16 = 0x54;
const OR_CONSTANT: u16 = 0x44;
const JUMP: u16 = 0x05;
const RETURN_CONSTANT: u16 = 0x06;
const RETURN_ACCUMULATOR: u16 = 0x16;
/// Offset of the call's number in `struct seccomp_data`.
const CALL_OFFSET: u32 = 0;

/// The filter of a role.
pub(crate) fn program(role: Role, engines: EngineCalls) -> Result<BpfProgram, SandboxError> {
    let mut rules: BTreeMap<i64, _> = calls::conditional(role).map_err(refused)?.into_iter().collect();
    rules.extend(calls::plain(role, engines).into_iter().map(|call| (call, vec![])));
    let filter = SeccompFilter::new(rules, SeccompAction::Trap, SeccompAction::Allow, processor()?);
    let mut program = filter.and_then(BpfProgram::try_from).map_err(refused)?;
    name_the_call(&mut program, role);
    Ok(program)
}

/// Makes `clone3` fail as if the kernel lacked it, so that libraries use `clone`: a filter cannot read the flags of
/// `clone3`, because they are in memory.
pub(crate) fn no_processes() -> Result<BpfProgram, SandboxError> {
    failing(libc::SYS_clone3, libc::ENOSYS)
}

/// Makes `openat` fail, for threads that open no files. Only the C library calls it there, for optional information.
pub(crate) fn no_files() -> Result<BpfProgram, SandboxError> {
    failing(libc::SYS_openat, libc::EACCES)
}

/// Makes opening a file for writing fail, for threads whose library gives threads their names through /proc and works
/// without.
pub(crate) fn no_writing() -> Result<BpfProgram, SandboxError> {
    let action = SeccompAction::Errno(libc::EACCES.unsigned_abs());
    let rules = calls::opening_for_writing().map_err(refused)?;
    let rules = BTreeMap::from([(libc::SYS_openat, rules)]);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, processor()?);
    filter.and_then(BpfProgram::try_from).map_err(refused)
}

/// Makes one call fail with `errno`. Another filter may still have a stricter verdict on the same call.
fn failing(call: i64, errno: i32) -> Result<BpfProgram, SandboxError> {
    let action = SeccompAction::Errno(errno.unsigned_abs());
    let filter =
        SeccompFilter::new(BTreeMap::from([(call, vec![])]), SeccompAction::Allow, action, processor()?);
    filter.and_then(BpfProgram::try_from).map_err(refused)
}

/// Installs the filter on the calling thread, permanently.
pub(crate) fn install(program: &BpfProgram) -> Result<(), SandboxError> {
    apply_filter(program).map_err(|error| SandboxError::Filter { reason: error.to_string() })
}

fn processor() -> Result<TargetArch, SandboxError> {
    let arch = std::env::consts::ARCH;
    TargetArch::try_from(arch).map_err(|_| SandboxError::Processor { arch })
}

fn refused(error: seccompiler::BackendError) -> SandboxError {
    SandboxError::Filter { reason: error.to_string() }
}

/// Adds the call and the role to the verdict: redirects all refusals in the program to one at its end that includes
/// both.
fn name_the_call(program: &mut BpfProgram, role: Role) {
    let end = program.len();
    let statement = |code, k| sock_filter { code, jt: 0, jf: 0, k };
    for (at, instruction) in program.iter_mut().enumerate() {
        if (instruction.code, instruction.k) == (RETURN_CONSTANT, TRAP) {
            // Jumps count from the next instruction. Programs have at most 4096 instructions.
            *instruction = statement(JUMP, u32::try_from(end - at - 1).unwrap_or(u32::MAX));
        }
    }
    program.extend([
        statement(LOAD_WORD, CALL_OFFSET),
        statement(AND_CONSTANT, (1 << CALL_BITS) - 1),
        statement(OR_CONSTANT, TRAP | role.number() << CALL_BITS),
        statement(RETURN_ACCUMULATOR, 0),
    ]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_roles_program_fits_the_kernels_limit() {
        for role in Role::ALL {
            let program = program(role, EngineCalls::ALL).unwrap();
            assert!(program.len() < 4096, "{role}: {}", program.len());
        }
    }

    #[test]
    fn whatever_a_role_may_the_process_may_too() {
        let all = calls::plain(Role::Control, EngineCalls::ALL);
        let conditional: Vec<i64> =
            calls::conditional(Role::Control).unwrap().into_iter().map(|(call, _)| call).collect();
        // Network threads start before the process's list is installed.
        for role in Role::ALL.into_iter().filter(|role| *role != Role::Network) {
            for call in calls::plain(role, EngineCalls::ALL) {
                assert!(all.contains(&call), "{role}: {call}");
            }
            for (call, _) in calls::conditional(role).unwrap() {
                assert!(all.contains(&call) || conditional.contains(&call), "{role}: {call}");
            }
        }
    }
}
