//! SIGBUS in guest memory and mapped images: the one registry of mappings, and the one handler.
//!
//! A front-end owns the files behind its memory and can truncate them at any time. The next access of
//! ours then raises SIGBUS, which by default ends the process with every other disk it serves. The
//! handler puts zeroes in place of the whole mapping, marks the region as poisoned and lets the access
//! finish; whoever owns the session looks at [`faults`] once per pass and ends that session.
//!
//! - The whole mapping, not a page: each page on its own would cost the process two of its limited number
//!   of mappings (`vm.max_map_count`), and a front-end could make it run out with one batch of requests.
//! - Slots are never freed, only re-used: the handler may walk them at any time. A slot's generation is odd
//!   while it changes, so a reader that was interrupted in between sees that it has to pass it by.
//! - The handler calls `mmap` and touches atomics, nothing else: both are safe in a signal.
//! - Images that are mapped (`file_mapping.rs`) are the same case: whoever can write the file can truncate it, and
//!   a full tmpfs raises SIGBUS too. [`faults`] moves then as well; sessions find their own regions in order.
//! - A SIGBUS that is not in a registered region goes to the handler that was there before.
//!
//! Not here: the kernel's own accesses (io_uring): those fail with EFAULT and become I/O errors.

use std::fmt;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// One registered mapping. `start == 0`: free.
#[derive(Default)]
struct Slot {
    claimed: AtomicBool,
    /// Even: the fields below belong together.
    generation: AtomicUsize,
    start: AtomicUsize,
    length_bytes: AtomicUsize,
    poisoned: AtomicBool,
    next: AtomicPtr<Slot>,
}

static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());
static FAULTS: AtomicU64 = AtomicU64::new(0);
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// How many faults this process has survived; when it moves, some region or mapped image is poisoned.
#[must_use]
pub fn faults() -> u64 {
    FAULTS.load(Ordering::Acquire) // pairs with the release in `put_zeroes`: who sees it move finds the region
}

/// A registered mapping.
pub(crate) struct Guard(&'static Slot);

impl Guard {
    pub(crate) fn register(start: usize, length_bytes: usize) -> Self {
        // Miri has no signals, and no files that could be truncated.
        if !cfg!(miri) {
            install_handler();
        }
        let slot = claim_slot();
        slot.poisoned.store(false, Ordering::Relaxed);
        slot.change(start, length_bytes);
        Self(slot)
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        self.0.poisoned.load(Ordering::Relaxed)
    }

    /// Called before the mapping goes away.
    pub(crate) fn unregister(&self) {
        self.0.change(0, 0);
        self.0.claimed.store(false, Ordering::Release); // pairs with the acquire in `claim_slot`
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Guard").field(&self.is_poisoned()).finish()
    }
}

fn claim_slot() -> &'static Slot {
    let free = slots().find(|slot| {
        slot.claimed.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    });
    free.unwrap_or_else(append_slot)
}

fn append_slot() -> &'static Slot {
    let slot: &'static Slot = Box::leak(Box::new(Slot { claimed: AtomicBool::new(true), ..Slot::default() }));
    let mut head = SLOTS.load(Ordering::Relaxed);
    loop {
        slot.next.store(head, Ordering::Relaxed);
        let new = ptr::from_ref(slot).cast_mut();
        match SLOTS.compare_exchange(head, new, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return slot,
            Err(current) => head = current,
        }
    }
}

fn slots() -> impl Iterator<Item = &'static Slot> {
    let mut next = SLOTS.load(Ordering::Acquire); // pairs with the release in `append_slot`
    std::iter::from_fn(move || {
        // SAFETY: 1. null or a slot that `append_slot` leaked: valid for ever; 2. only atomics inside.
        let slot = unsafe { next.as_ref() }?;
        next = slot.next.load(Ordering::Acquire);
        Some(slot)
    })
}

impl Slot {
    /// Only the slot's owner calls this.
    fn change(&self, start: usize, length_bytes: usize) {
        self.generation.fetch_add(1, Ordering::AcqRel); // odd; what follows stays behind it
        self.start.store(start, Ordering::Release);
        self.length_bytes.store(length_bytes, Ordering::Release);
        self.generation.fetch_add(1, Ordering::Release); // even; pairs with the acquires in `read`
    }

    /// Start and length, if they belong together.
    fn read(&self) -> Option<(usize, usize)> {
        let before = self.generation.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Acquire);
        let length_bytes = self.length_bytes.load(Ordering::Acquire);
        let after = self.generation.load(Ordering::Acquire);
        (before == after && before.is_multiple_of(2)).then_some((start, length_bytes))
    }
}

/// The slot and range of the mapping that holds `address`. That mapping cannot go meanwhile: whoever
/// accesses it holds its region.
fn find_slot(address: usize) -> Option<(&'static Slot, usize, usize)> {
    slots().find_map(|slot| {
        let (start, length_bytes) = slot.read()?;
        (start != 0 && address.wrapping_sub(start) < length_bytes).then_some((slot, start, length_bytes))
    })
}

fn install_handler() {
    PREVIOUS.get_or_init(|| {
        let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: 1. all-zero bytes are a valid `sigaction` (no handler, no flags).
        let mut action = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        // SAFETY: 1. `action` is initialised; 2. `handle` has the signature that SA_SIGINFO asks for
        // and does only what a signal handler may do.
        unsafe { libc::sigaction(libc::SIGBUS, &raw const action, previous.as_mut_ptr()) };
        // SAFETY: 1. zeroed above, and filled in if the call succeeded; both are valid.
        unsafe { previous.assume_init() }
    });
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: 1. the kernel passes a valid `siginfo_t` to a SA_SIGINFO handler.
    let info_ref = unsafe { &*info };
    // SAFETY: 1. SIGBUS carries a fault address.
    let address = unsafe { info_ref.si_addr() } as usize;
    let survived = find_slot(address).is_some_and(|(slot, start, bytes)| put_zeroes(slot, start, bytes));
    if !survived {
        pass_on(signal, info, context);
    }
}

/// Replaces the mapping by zeroes of our own and poisons the region.
fn put_zeroes(slot: &Slot, start: usize, length_bytes: usize) -> bool {
    // First: another thread may read our zeroes as soon as they are there, and looks here afterwards.
    slot.poisoned.store(true, Ordering::Relaxed);
    FAULTS.fetch_add(1, Ordering::Release);
    // SAFETY: 1. the range is a registered mapping, start to end, which its owner unregisters before it
    // unmaps, and the accessor that faulted keeps it from being unmapped; 2. it is guest memory or an image: nobody
    // holds a reference into it, and the kernel's transfers go on in either mapping; 3. `mmap` is a bare
    // system call.
    let mapped = unsafe {
        libc::mmap(
            start as *mut libc::c_void,
            length_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    mapped != libc::MAP_FAILED
}

/// Not ours: what was installed before decides; the default action ends the process.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS.get().map_or((libc::SIG_DFL, 0), |p| (p.sa_sigaction, p.sa_flags));
    match previous {
        (libc::SIG_DFL | libc::SIG_IGN, _) => {
            // Returning repeats the access, this time with the default action.
            // SAFETY: 1. resets one signal to its default; async-signal-safe.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        (handler, flags) if flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: 1. installed with SA_SIGINFO, so it has this signature.
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        (handler, _) => {
            // SAFETY: 1. installed without SA_SIGINFO, so it takes the signal number only.
            let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}
