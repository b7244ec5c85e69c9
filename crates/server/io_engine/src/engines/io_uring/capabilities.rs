//! Reports which io_uring features this host offers, and why others are unavailable.
//!
//! Each result comes from an attempt on a tiny ring, not from the kernel's version: distributions backport features,
//! and sandboxes remove them.

use std::io;

use io_uring::{Builder, IoUring, Probe, cqueue, opcode, squeue};

use super::pinned::locked_memory_limit;
use crate::choose::capability::Capability;
use crate::core::bounce::Bounce;

/// The io_uring features of this host. The first entry is io_uring itself, and the only one if it is missing.
///
/// Takes about a millisecond: not for the request path.
#[must_use]
pub fn io_uring_capabilities() -> Vec<Capability> {
    let made = IoUring::new(1);
    let ring = match &made {
        Ok(ring) => ring,
        Err(error) => {
            return vec![Capability { name: "io_uring", available: false, detail: why_not(error) }];
        }
    };
    vec![
        Capability { name: "io_uring", available: true, detail: "this process may create rings".to_owned() },
        flag("batches past an error", "Linux 5.18", IoUring::builder().setup_submit_all()),
        flag(
            "cooperative task-run",
            "Linux 5.19",
            IoUring::builder().setup_coop_taskrun().setup_taskrun_flag(),
        ),
        flag(
            "deferred task-run",
            "Linux 6.1",
            IoUring::builder().setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag(),
        ),
        opcodes(ring),
        outcome("registered files", "Linux 5.19", ring.submitter().register_files_sparse(1)),
        feature("idle without iowait", "Linux 6.15", ring.params().is_feature_no_iowait()),
        restrictions(),
        flag("submissions polled (SQPOLL)", "Linux 5.11", IoUring::builder().setup_sqpoll(1)),
        flag(
            "completions polled (IOPOLL)",
            "Linux 5.1; each device needs poll queues too",
            IoUring::builder().setup_iopoll(),
        ),
        fixed_buffers(ring),
    ]
}

/// Whether a plain ring can be created.
pub(super) fn is_allowed() -> bool {
    IoUring::new(1).is_ok()
}

fn why_not(error: &io::Error) -> String {
    let disabled = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    explain(error, disabled.as_deref().unwrap_or("0").trim())
}

/// `disabled`: the value of `kernel.io_uring_disabled` (Documentation/admin-guide/sysctl/kernel.rst).
fn explain(error: &io::Error, disabled: &str) -> String {
    let why = match (error.raw_os_error(), disabled) {
        (Some(libc::ENOSYS), _) => "the kernel is built without it, or a seccomp profile hides it",
        (Some(libc::EPERM), "2") => "forbidden for all users (kernel.io_uring_disabled = 2): set it to 0",
        (Some(libc::EPERM), "1") => {
            "forbidden for users without CAP_SYS_ADMIN outside kernel.io_uring_group (kernel.io_uring_disabled = 1): \
             set it to 0"
        }
        (Some(libc::EPERM | libc::EACCES), _) => {
            "forbidden by a seccomp profile or a security module: let the container's profile allow it"
        }
        (Some(libc::ENOMEM), _) => "no memory for a ring: raise the limit on locked memory (ulimit -l)",
        (Some(libc::EMFILE | libc::ENFILE), _) => "too many open files (ulimit -n)",
        _ => return error.to_string(),
    };
    format!("{why} ({error})")
}

fn outcome(name: &'static str, needs: &str, result: io::Result<()>) -> Capability {
    let available = result.is_ok();
    let detail = match result {
        Ok(()) => format!("since {needs}"),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => format!("needs {needs} ({error})"),
        Err(error) => why_not(&error),
    };
    Capability { name, available, detail }
}

fn feature(name: &'static str, needs: &str, available: bool) -> Capability {
    let detail = if available { format!("since {needs}") } else { format!("needs {needs}") };
    Capability { name, available, detail }
}

fn flag(name: &'static str, needs: &str, builder: &mut Builder<squeue::Entry, cqueue::Entry>) -> Capability {
    outcome(name, needs, builder.build(1).map(drop))
}

fn opcodes(ring: &IoUring) -> Capability {
    let needed = [
        ("readv", opcode::Readv::CODE),
        ("writev", opcode::Writev::CODE),
        ("read", opcode::Read::CODE),
        ("write", opcode::Write::CODE),
        ("fsync", opcode::Fsync::CODE),
        ("fallocate", opcode::Fallocate::CODE),
        ("poll", opcode::PollAdd::CODE),
        ("cancel", opcode::AsyncCancel::CODE),
    ];
    let mut probe = Probe::new();
    let name = "operations";
    if let Err(error) = ring.submitter().register_probe(&mut probe) {
        return Capability { name, available: false, detail: format!("cannot be listed ({error})") };
    }
    let missing = needed.iter().filter(|(_, code)| !probe.is_supported(*code)).map(|(name, _)| *name);
    let missing: Vec<&str> = missing.collect();
    let available = missing.is_empty();
    let detail =
        if available { "all that are needed".to_owned() } else { format!("lacks {}", missing.join(", ")) };
    Capability { name, available, detail }
}

fn restrictions() -> Capability {
    let made: io::Result<IoUring> = IoUring::builder().setup_r_disabled().build(1);
    let restricted = made.and_then(|ring| {
        let rule = io_uring::register::Restriction::sqe_op(opcode::Read::CODE);
        ring.submitter().register_restrictions(&mut [rule])
    });
    outcome("restrictions", "Linux 5.10", restricted)
}

/// Registers one page of this process.
fn fixed_buffers(ring: &IoUring) -> Capability {
    let mut bounce = Bounce::default();
    let iov_base = bounce.zeroes().cast();
    let page = libc::iovec { iov_base, iov_len: rustix::param::page_size() };
    // SAFETY: 1. the page lives until it is unregistered below, or the ring keeps only the physical page.
    let registered = unsafe { ring.submitter().register_buffers(&[page]) };
    let registered = registered.and_then(|()| ring.submitter().unregister_buffers());
    let mut capability = outcome("fixed buffers (pinned guest memory)", "Linux 5.1", registered);
    let limit = locked_memory_limit();
    capability.detail +=
        &format!("; the limit on locked memory (RLIMIT_MEMLOCK) is {limit}, which does not apply to root");
    capability
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_errno(errno: i32, disabled: &str) -> String {
        explain(&io::Error::from_raw_os_error(errno), disabled)
    }

    #[test]
    fn each_way_to_be_without_io_uring_has_its_own_explanation() {
        assert!(of_errno(libc::ENOSYS, "0").contains("built without"));
        assert!(of_errno(libc::EPERM, "2").contains("io_uring_disabled = 2"));
        assert!(of_errno(libc::EPERM, "1").contains("io_uring_group"));
        assert!(of_errno(libc::EPERM, "0").contains("seccomp"));
        assert!(of_errno(libc::ENOMEM, "0").contains("ulimit -l"));
    }

    #[test]
    fn each_capability_has_a_name_of_its_own_and_a_detail() {
        let found = io_uring_capabilities();
        found.iter().for_each(|capability| println!("{capability:?}"));
        let names: std::collections::HashSet<_> = found.iter().map(|capability| capability.name).collect();
        assert_eq!(names.len(), found.len());
        assert!(found.iter().all(|capability| !capability.detail.is_empty()));
        assert!(found[0].available, "the tests of this engine need it");
    }

    #[test]
    fn refused_flag_names_the_kernel_that_has_it() {
        let refused = outcome("x", "Linux 9.9", Err(io::Error::from_raw_os_error(libc::EINVAL)));
        assert!(!refused.available && refused.detail.starts_with("needs Linux 9.9"), "{refused:?}");
    }
}
