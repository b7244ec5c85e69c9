//! Where a device may die: between any two of its stores that its successor reads.
//!
//! In unit tests a thread can have something done at each of these places (a copy of the memory, say); otherwise
//! nothing is left of them.
//!
//! Not here: what a successor makes of it (`in_flight_log/`).

/// The stores before it have been made, the ones after it have not.
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn may_die_here() {}

#[cfg(test)]
pub(crate) use observed::{may_die_here, observing};

#[cfg(test)]
mod observed {
    use std::cell::RefCell;

    type Observer = Box<dyn FnMut()>;

    thread_local! {
        static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
    }

    pub(crate) fn may_die_here() {
        OBSERVER.with_borrow_mut(|observer| {
            if let Some(observe) = observer {
                observe();
            }
        });
    }

    /// Calls `observe` at each place that `act` passes.
    pub(crate) fn observing<T>(observe: impl FnMut() + 'static, act: impl FnOnce() -> T) -> T {
        OBSERVER.set(Some(Box::new(observe)));
        let result = act();
        OBSERVER.set(None);
        result
    }
}
