//! `libqspinlock_preload.so`: under `LD_PRELOAD`, the pthread locks of a program that knows nothing of it are queued ones.
//!
//! ```text
//! program ─▶ pthread_spin_*                                   ─▶ spin.rs    4 bytes, in place
//!         ─▶ pthread_mutex_*, mtx_*   ─▶ which kind? ─ plain  ─▶ mutex.rs   in place
//!         ─▶ pthread_cond_*,  cnd_*                  ─▶ cond.rs    in place, waiters on their own stacks
//!         ─▶ pthread_rwlock_*                        ─▶ rwlock.rs  in place, readers shared
//!                                        └ shared with other processes, robust, priorities ─▶ real.rs (the C library)
//! ```
//!
//! - For glibc from 2.30 on, on x86-64 and aarch64. Objects keep glibc's size, static initialisers and the place of the
//!   word that says their kind; so the kinds that are not replaced can be told apart and are passed on, all calls alike.
//! - Process-shared spin locks cannot be told apart by the C library's word, so they are replaced as well, by one that
//!   needs no memory but its four bytes (`spin/shared.rs`). **All processes that use one must run under this library.**
//! - Nothing is allocated, no call ends the process, nothing unwinds but the C library's own cancellation, which runs
//!   through frames that have nothing to drop. `errno` stays as it was.
//! - Works before `main`, in handlers of `atexit`, in late destructors, after `fork`, and inside an allocator.
//! - A program's mistakes get an error where they are seen: unlocking what nobody holds, or another thread of a
//!   recursive or error-checking mutex, is `EPERM`; destroying what is held or waited for is `EBUSY`.
//!
//! Not here: calls that the C library makes to itself. Those of its C11 locks are replaced (`c11.rs`); barriers,
//! semaphores and `call_once` use none of the replaced objects. What cannot be replaced: statically linked programs,
//! libraries loaded with `RTLD_DEEPBIND` or by `dlmopen`, or linked with `-Bsymbolic` against a C library of their own.
//! Limits for users: `docs/qspinlock-preload.md`.

#[cfg(not(all(
    target_os = "linux",
    target_env = "gnu",
    target_pointer_width = "64",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
compile_error!("the layouts are those of glibc on x86-64 and aarch64, and of nothing else");

mod spin;

mod mutex;

mod cond;

mod rwlock;

mod c11;

mod old_names;

mod patience;

mod thread;

mod real;

mod version;
