//! SIGBUS in guest memory and mapped images: the registry of mappings, and the handler.
//!
//! A front-end owns the files of its memory and can truncate them at any time. The server's next access then raises
//! SIGBUS, which by default ends the process and with it every other disk. The handler replaces the whole mapping with
//! zeroes, marks the region as poisoned and lets the access finish. The session's owner checks [`faults`] once per pass
//! and ends that session.
//!
//! - The handler replaces the whole mapping, not a page. Each single page would cost the process two of its
//!   limited number of mappings (`vm.max_map_count`), and a front-end could exhaust them with one batch of
//!   requests.
//! - Slots are reused but never freed, because the handler may walk them at any time. A slot's generation is odd while
//!   it changes, so an interrupted reader knows that it must skip the slot.
//! - The handler only calls `mmap` and uses atomics: both are safe in a signal handler.
//! - Mapped images (`file_mapping.rs`) work the same way: any process that can write the file can truncate it, and a
//!   full tmpfs raises SIGBUS too. [`faults`] then increases as well, but sessions find their own regions intact.
//! - A SIGBUS outside the registered regions goes to the previously installed handler.

use std::fmt;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// One registered mapping; free if `start` is 0.
#[derive(Default)]
struct Slot {
    claimed: AtomicBool,
    /// Even while the fields below are consistent, odd while they change.
    generation: AtomicUsize,
    start: AtomicUsize,
    length_bytes: AtomicUsize,
    poisoned: AtomicBool,
    next: AtomicPtr<Slot>,
}

static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());
static FAULTS: AtomicU64 = AtomicU64::new(0);
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Number of faults that this process has survived. After an increase, some region or mapped image is poisoned.
#[must_use]
pub fn faults() -> u64 {
    // Acquire: pairs with the release in `put_zeroes`, so that a thread that sees the new count sees the poison.
    FAULTS.load(Ordering::Acquire)
}

/// A registered mapping.
pub(crate) struct Guard(&'static Slot);

impl Guard {
    pub(crate) fn register(start: usize, length_bytes: usize) -> Self {
        // Miri has no signals, and no files that can be truncated.
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

    /// Must be called before the mapping is removed.
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
        // SAFETY: 1. null or a slot that `append_slot` leaked: valid forever; 2. only atomics inside.
        let slot = unsafe { next.as_ref() }?;
        next = slot.next.load(Ordering::Acquire);
        Some(slot)
    })
}

impl Slot {
    /// Only the slot's owner calls this.
    fn change(&self, start: usize, length_bytes: usize) {
        self.generation.fetch_add(1, Ordering::AcqRel); // odd; the following stores stay behind it
        self.start.store(start, Ordering::Release);
        self.length_bytes.store(length_bytes, Ordering::Release);
        self.generation.fetch_add(1, Ordering::Release); // even; pairs with the acquires in `read`
    }

    /// Returns the start and length, or `None` if a writer was changing them.
    fn read(&self) -> Option<(usize, usize)> {
        let before = self.generation.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Acquire);
        let length_bytes = self.length_bytes.load(Ordering::Acquire);
        let after = self.generation.load(Ordering::Acquire);
        (before == after && before.is_multiple_of(2)).then_some((start, length_bytes))
    }
}

/// The slot and range of the mapping that holds `address`. The mapping cannot disappear meanwhile: the
/// accessing thread holds its region.
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
        // SAFETY: 1. `action` is initialised; 2. `handle` has the signature that SA_SIGINFO requires and does
        // only what a signal handler may do.
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

/// Replaces the mapping with zeroes and poisons the region.
fn put_zeroes(slot: &Slot, start: usize, length_bytes: usize) -> bool {
    // Must come first: another thread may read the zeroes as soon as they are mapped, and checks this flag afterwards.
    slot.poisoned.store(true, Ordering::Relaxed);
    FAULTS.fetch_add(1, Ordering::Release);
    // SAFETY: 1. the range is a complete registered mapping; its owner unregisters it before unmapping, and
    // the thread that faulted keeps it from being unmapped; 2. it is guest memory or an image: no reference
    // points into it, and the kernel's transfers continue in either mapping; 3. `mmap` is a bare system call.
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

/// Handles a SIGBUS outside the registered mappings: calls the previously installed handler. The default action ends
/// the process.
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
