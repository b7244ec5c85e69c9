//! `libqspinlock_preload.so`: under `LD_PRELOAD`, replaces an unchanged program's pthread locks with queued locks.
//!
//! ```text
//! program ─▶ pthread_spin_*                                   ─▶ spin.rs    4 bytes, in place
//!         ─▶ pthread_mutex_*, mtx_*   ─▶ which kind? ─ plain  ─▶ mutex.rs   in place
//!         ─▶ pthread_cond_*,  cnd_*                  ─▶ cond.rs    in place, waiters on their own stacks
//!         ─▶ pthread_rwlock_*                        ─▶ rwlock.rs  in place, readers shared
//!                                        └ shared with other processes, robust, priorities ─▶ real.rs (the C library)
//! ```
//!
//! - Supports glibc 2.30 and later, on x86-64 and aarch64. Objects keep glibc's size, static initialisers and the
//!   position of the word that holds their kind. So each call recognises the kinds that are not replaced, and passes
//!   them on to the C library.
//! - A spin lock of the C library does not record whether it is process-shared. So process-shared spin locks are
//!   replaced too, by a lock that needs only the four bytes (`spin/shared.rs`). **All processes that use one must run
//!   under this library.**
//! - No call allocates memory, ends the process, or changes `errno`. Only the C library's cancellation unwinds through
//!   a call; the frames there have no destructors.
//! - The calls work before `main`, in `atexit` handlers, in late destructors, after `fork`, and inside an allocator.
//! - Detected misuse returns an error: `EPERM` for unlocking a lock that is not held, or a recursive or error-checking
//!   mutex of another thread; `EBUSY` for destroying a lock that is held or has waiters.
//!
//! The C library's calls to itself are not replaced. Its C11 locks call its pthread functions directly, so the C11
//! calls are replaced too (`c11.rs`); barriers, semaphores and `call_once` use none of the replaced objects. The
//! library cannot replace locks in statically linked programs, or in libraries that are loaded with `RTLD_DEEPBIND` or
//! by `dlmopen`, or linked with `-Bsymbolic` against their own C library. Limits for users:
//! `docs/how-to/qspinlock-preload.md`.

#[cfg(not(all(
    target_os = "linux",
    target_env = "gnu",
    target_pointer_width = "64",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
compile_error!("qspinlock_preload supports only glibc on x86-64 and aarch64: it uses glibc's lock layouts");

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
