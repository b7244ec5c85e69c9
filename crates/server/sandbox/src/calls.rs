//! Lists the system calls that each role may make, with conditions on their arguments where necessary.
//!
//! - Older and newer variants of a call are both listed: which one the C library uses depends on its version.
//! - Calls of the request path have no conditions, so that the kernel decides from a bitmap without running the filter.
//!
//! How to find missing calls: docs/reference/sandbox.md.

use libc::{
    SYS_accept, SYS_accept4, SYS_bind, SYS_brk, SYS_clock_getres, SYS_clock_gettime, SYS_clock_nanosleep,
    SYS_clone, SYS_clone3, SYS_close, SYS_close_range, SYS_connect, SYS_dup, SYS_dup3, SYS_epoll_create1,
    SYS_epoll_ctl, SYS_epoll_pwait, SYS_epoll_pwait2, SYS_eventfd2, SYS_exit, SYS_exit_group, SYS_faccessat,
    SYS_faccessat2, SYS_fallocate, SYS_fcntl, SYS_fdatasync, SYS_fgetxattr, SYS_fremovexattr, SYS_fsetxattr,
    SYS_fstat, SYS_fstatfs, SYS_fsync, SYS_ftruncate, SYS_futex, SYS_futex_waitv, SYS_get_robust_list,
    SYS_getcpu, SYS_getcwd, SYS_getdents64, SYS_getegid, SYS_geteuid, SYS_getgid, SYS_getpeername,
    SYS_getpid, SYS_getpriority, SYS_getrandom, SYS_getrusage, SYS_getsockname, SYS_getsockopt, SYS_gettid,
    SYS_gettimeofday, SYS_getuid, SYS_io_cancel, SYS_io_destroy, SYS_io_getevents, SYS_io_setup,
    SYS_io_submit, SYS_io_uring_enter, SYS_io_uring_register, SYS_io_uring_setup, SYS_ioctl, SYS_listen,
    SYS_lseek, SYS_madvise, SYS_membarrier, SYS_memfd_create, SYS_mincore, SYS_mmap, SYS_mprotect,
    SYS_mremap, SYS_msync, SYS_munmap, SYS_nanosleep, SYS_newfstatat, SYS_openat, SYS_openat2, SYS_pipe2,
    SYS_ppoll, SYS_prctl, SYS_pread64, SYS_preadv, SYS_preadv2, SYS_prlimit64, SYS_pselect6, SYS_pwrite64,
    SYS_pwritev, SYS_pwritev2, SYS_read, SYS_readlinkat, SYS_readv, SYS_recvfrom, SYS_recvmsg,
    SYS_restart_syscall, SYS_rseq, SYS_rt_sigaction, SYS_rt_sigpending, SYS_rt_sigprocmask, SYS_rt_sigreturn,
    SYS_rt_sigtimedwait, SYS_sched_get_priority_max, SYS_sched_get_priority_min, SYS_sched_getaffinity,
    SYS_sched_getattr, SYS_sched_getparam, SYS_sched_getscheduler, SYS_sched_setaffinity, SYS_sched_setattr,
    SYS_sched_setparam, SYS_sched_setscheduler, SYS_sched_yield, SYS_seccomp, SYS_sendmsg, SYS_sendto,
    SYS_set_robust_list, SYS_setpriority, SYS_setsockopt, SYS_shutdown, SYS_sigaltstack, SYS_socket,
    SYS_socketpair, SYS_statfs, SYS_statx, SYS_sync_file_range, SYS_sysinfo, SYS_tgkill, SYS_timerfd_create,
    SYS_timerfd_settime, SYS_uname, SYS_write, SYS_writev,
};
use seccompiler::{BackendError, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule};

use crate::role::{EngineCalls, Role};

/// Harmless calls that the Rust and C libraries make on any thread: the process's own memory, time, waiting,
/// its open descriptors.
const EVERYBODY: &[i64] = &[
    SYS_brk,
    SYS_clock_getres,
    SYS_clock_gettime,
    SYS_clock_nanosleep,
    SYS_close,
    SYS_exit,
    SYS_exit_group,
    SYS_fstat,
    SYS_fstatfs,
    SYS_futex,
    SYS_futex_waitv,
    SYS_get_robust_list,
    SYS_getcpu,
    // Rust calls this for the backtrace of a panic.
    SYS_getcwd,
    SYS_getegid,
    SYS_geteuid,
    SYS_getgid,
    SYS_getpid,
    SYS_getrandom,
    SYS_getrusage,
    SYS_gettid,
    SYS_gettimeofday,
    SYS_getuid,
    SYS_lseek,
    SYS_madvise,
    SYS_membarrier,
    SYS_mremap,
    SYS_munmap,
    SYS_nanosleep,
    SYS_newfstatat,
    SYS_ppoll,
    SYS_pselect6,
    SYS_read,
    // Reads a descriptor's link in /proc, to find out what kind of descriptor a front-end has passed.
    SYS_readlinkat,
    SYS_readv,
    SYS_restart_syscall,
    SYS_rseq,
    SYS_rt_sigpending,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_rt_sigtimedwait,
    SYS_sched_getaffinity,
    SYS_sched_getattr,
    SYS_sched_getparam,
    SYS_sched_getscheduler,
    SYS_sched_yield,
    // Harmless: another filter can only take calls away.
    SYS_seccomp,
    SYS_set_robust_list,
    SYS_sigaltstack,
    SYS_statx,
    SYS_sysinfo,
    SYS_uname,
    SYS_write,
    SYS_writev,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_time,
];

/// Waiting for several things at once.
const EVENTS: &[i64] = &[
    SYS_epoll_create1,
    SYS_epoll_ctl,
    SYS_epoll_pwait,
    SYS_epoll_pwait2,
    SYS_eventfd2,
    SYS_timerfd_create,
    SYS_timerfd_settime,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
];

/// Reading, writing and syncing files that are open.
const TRANSFERS: &[i64] = &[
    SYS_fallocate,
    SYS_fdatasync,
    SYS_fsync,
    SYS_pread64,
    SYS_preadv,
    SYS_preadv2,
    SYS_pwrite64,
    SYS_pwritev,
    SYS_pwritev2,
    SYS_sync_file_range,
];

/// Communication over existing sockets.
const TALKING: &[i64] = &[
    SYS_getpeername,
    SYS_getsockname,
    SYS_getsockopt,
    SYS_recvfrom,
    SYS_recvmsg,
    SYS_sendmsg,
    SYS_sendto,
    SYS_setsockopt,
    SYS_shutdown,
];

/// Requests to the helper, over a socket pair created for them ([`pair_of`]): each worker reopens an image.
const ASKING: &[i64] = &[SYS_recvfrom, SYS_recvmsg, SYS_sendmsg];

/// Passing on the bytes of a TLS connection. Each role whose threads may start one has these calls, too.
const RELAYING: &[i64] = &[SYS_recvfrom, SYS_sendmsg];

const IO_URING: &[i64] = &[SYS_io_uring_enter, SYS_io_uring_register, SYS_io_uring_setup];

const LINUX_AIO: &[i64] = &[SYS_io_cancel, SYS_io_destroy, SYS_io_getevents, SYS_io_setup, SYS_io_submit];

/// Calls that signal front-ends without ever waiting (`io_engine`, `signal_shared`), with any engine.
const SIGNALS: &[i64] = &[SYS_io_getevents, SYS_io_setup, SYS_io_submit];

/// Memory into which tables of image formats are read.
const SCRATCH: &[i64] = &[SYS_ftruncate, SYS_memfd_create];

/// Calls on mapped images.
const MAPPED: &[i64] = &[SYS_mincore, SYS_msync];

const SESSION: &[i64] = &[
    // For the in-flight log and the dirty log (migration).
    SYS_ftruncate,
    SYS_memfd_create,
    SYS_fallocate,
    SYS_pread64,
    SYS_pwrite64,
];

/// Looking at the host, moving threads, accepting clients.
const CONTROL: &[i64] = &[
    SYS_accept,
    SYS_accept4,
    SYS_close_range,
    SYS_dup,
    SYS_dup3,
    SYS_faccessat,
    SYS_faccessat2,
    // The marks on images that have an overlay, or were committed.
    SYS_fgetxattr,
    SYS_fremovexattr,
    SYS_fsetxattr,
    SYS_ftruncate,
    SYS_getdents64,
    SYS_getpriority,
    SYS_listen,
    SYS_memfd_create,
    SYS_openat,
    SYS_openat2,
    SYS_pipe2,
    SYS_sched_get_priority_max,
    SYS_sched_get_priority_min,
    SYS_sched_setaffinity,
    SYS_sched_setattr,
    SYS_sched_setparam,
    SYS_sched_setscheduler,
    SYS_setpriority,
    SYS_statfs,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
];

/// Connecting to other machines, and what a client library looks up for that.
const NETWORK: &[i64] = &[
    SYS_close_range,
    SYS_connect,
    SYS_dup,
    SYS_faccessat,
    SYS_faccessat2,
    SYS_getdents64,
    SYS_gettimeofday,
    SYS_openat2,
    SYS_pipe2,
    SYS_statfs,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_create,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
];

/// `linux/fs.h`, `asm-generic/ioctls.h`: sizes of block devices, `FIONBIO`, and whether a stream is a
/// terminal.
const IOCTLS: &[u64] = &[0x1260, 0x1268, 0x127a, 0x127b, 0x127c, 0x8008_1272, 0x5421, 0x5401];
/// `linux/fs.h`: `FICLONE`, for snapshots.
const FICLONE: u64 = 0x4004_9409;
/// `linux/prctl.h`: thread names, names of memory, and the first step of installing a filter.
const PRCTLS: &[u64] = &[15, 16, 38, 0x5356_4d41];
/// `linux/fcntl.h`: flags of the descriptor and of the file, locks of open files (`F_OFD_*`), duplicates,
/// seals. Not `F_SETOWN` and `F_SETSIG`: with these a file can send signals to any process.
const FCNTLS: &[u64] = &[1, 2, 3, 4, 36, 37, 38, 1030, 1033, 1034];
/// SIGBUS (guest memory that disappears), SIGABRT and SIGSEGV (which end the process), and signals 32 and 33, which the
/// C library uses itself.
const HANDLED_SIGNALS: &[u64] = &[7, 6, 11, 32, 33];
const SIGNAL_ARGUMENT: u8 = 0;
/// `AF_UNIX`; `SOCK_STREAM`, `SOCK_SEQPACKET`, and the mask of the bits of a socket's type that are not flags.
const UNIX_SOCKET: u64 = 1;
const STREAM: u64 = 1;
const PACKETS: u64 = 5;
const SOCKET_TYPE: u64 = 0xf;
/// `AF_UNIX`, `AF_INET`, `AF_INET6`, and `AF_NETLINK`, through which the C library lists network interfaces.
const SOCKET_FAMILIES: &[u64] = &[UNIX_SOCKET, 2, 10, 16];
/// `linux/sched.h`: `CLONE_VM | CLONE_THREAD`.
const CLONE_OF_A_THREAD: u64 = 0x0001_0100;
const PROT_EXEC: u64 = 4;
/// `O_ACCMODE`, `O_CREAT`, `O_TRUNC`.
const OPEN_FOR_WRITING: u64 = 0o1103;

/// Calls without a condition.
pub(crate) fn plain(role: Role, engines: EngineCalls) -> Vec<i64> {
    let engine = |on: bool, calls: &'static [i64]| if on { calls } else { &[] };
    let (uring, aio) = (engine(engines.io_uring, IO_URING), engine(engines.linux_aio, LINUX_AIO));
    let lists: &[&[i64]] = match role {
        Role::Control => {
            &[EVERYBODY, EVENTS, TRANSFERS, TALKING, IO_URING, LINUX_AIO, MAPPED, SESSION, CONTROL, ASKING]
        }
        Role::Session => &[EVERYBODY, EVENTS, TALKING, SESSION, SIGNALS],
        Role::Worker => &[EVERYBODY, EVENTS, TRANSFERS, MAPPED, SCRATCH, SIGNALS, uring, aio, ASKING],
        // A context of Linux AIO is destroyed on a thread of its own, whatever engine the workers use: even a context
        // that was only created as a trial.
        Role::EngineThread => &[EVERYBODY, TRANSFERS, MAPPED, &[SYS_io_destroy]],
        Role::Metadata => &[EVERYBODY, TRANSFERS, &[SYS_ftruncate]],
        Role::Network => &[EVERYBODY, EVENTS, TALKING, NETWORK],
        Role::TlsRelay => &[EVERYBODY, RELAYING],
    };
    lists.concat()
}

fn ioctls(role: Role) -> Vec<u64> {
    let clone = if role == Role::Control { &[FICLONE][..] } else { &[] };
    [IOCTLS, clone].concat()
}

/// Calls with conditions on their arguments.
pub(crate) fn conditional(role: Role) -> Result<Vec<(i64, Vec<SeccompRule>)>, BackendError> {
    let own_pid = u64::from(std::process::id());
    let mut rules = vec![
        // Refuses to make memory executable.
        (SYS_mmap, vec![lacks(2, PROT_EXEC)?]),
        (SYS_mprotect, vec![lacks(2, PROT_EXEC)?]),
        (SYS_prctl, any_of(0, PRCTLS)?),
        (SYS_rt_sigaction, any_of(SIGNAL_ARGUMENT, HANDLED_SIGNALS)?),
        (SYS_tgkill, any_of(0, &[own_pid])?),
        (SYS_prlimit64, reads_own_limits(own_pid)?),
        (SYS_ioctl, any_of(1, &ioctls(role))?),
        (SYS_fcntl, any_of(1, FCNTLS)?),
    ];
    // Sessions start threads too: a second thread, with the same list, closes descriptors whose close may hang.
    rules.push((SYS_clone, vec![has(0, CLONE_OF_A_THREAD)?]));
    // This filter allows `clone3`, `filter::no_processes` refuses it, and the C library then uses `clone`.
    rules.push((SYS_clone3, vec![]));
    if matches!(role, Role::Control | Role::Worker | Role::Network) {
        rules.push((SYS_socketpair, vec![pair_of(PACKETS)?, pair_of(STREAM)?]));
    }
    if role == Role::Network {
        rules.push((SYS_socket, any_of(0, SOCKET_FAMILIES)?));
        rules.push((SYS_bind, vec![]));
    }
    if role == Role::Network {
        // `filter::no_writing` makes opening for writing fail.
        rules.push((SYS_openat, vec![]));
    } else if role != Role::Control {
        // Workers read the kernel's information about itself and its devices in /proc and /sys, the only
        // paths that landlock leaves. For other roles the call fails (`filter::no_files`): with many threads,
        // the C library asks for the number of CPUs, and it works without an answer.
        rules.push((SYS_openat, vec![lacks(2, OPEN_FOR_WRITING)?]));
    }
    Ok(rules)
}

/// Opening a file for writing, by `openat`.
pub(crate) fn opening_for_writing() -> Result<Vec<SeccompRule>, BackendError> {
    const ACCESS_MODE: u64 = 3;
    let in_mode = |mode| rule(2, SeccompCmpOp::MaskedEq(ACCESS_MODE), mode);
    Ok(vec![in_mode(1)?, in_mode(2)?, has(2, 0o100)?, has(2, 0o1000)?])
}

fn any_of(argument: u8, values: &[u64]) -> Result<Vec<SeccompRule>, BackendError> {
    values.iter().map(|&value| rule(argument, SeccompCmpOp::Eq, value)).collect()
}

fn lacks(argument: u8, bits: u64) -> Result<SeccompRule, BackendError> {
    rule(argument, SeccompCmpOp::MaskedEq(bits), 0)
}

fn has(argument: u8, bits: u64) -> Result<SeccompRule, BackendError> {
    rule(argument, SeccompCmpOp::MaskedEq(bits), bits)
}

/// Allows reading the process's own limits, but not setting them.
fn reads_own_limits(own_pid: u64) -> Result<Vec<SeccompRule>, BackendError> {
    let of = |pid| {
        let process = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, pid)?;
        let no_new = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
        SeccompRule::new(vec![process, no_new])
    };
    Ok(vec![of(0)?, of(own_pid)?])
}

/// Allows a socket pair whose ends can only send to each other: a datagram socket could send to any path.
fn pair_of(socket_type: u64) -> Result<SeccompRule, BackendError> {
    let family = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, UNIX_SOCKET)?;
    let without_flags = SeccompCmpOp::MaskedEq(SOCKET_TYPE);
    let of_type = SeccompCondition::new(1, SeccompCmpArgLen::Dword, without_flags, socket_type)?;
    SeccompRule::new(vec![family, of_type])
}

/// A rule on one argument. All arguments checked here have 32 bits; the upper bits are ignored.
fn rule(argument: u8, operator: SeccompCmpOp, value: u64) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)?])
}
