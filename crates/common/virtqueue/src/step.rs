//! Crash points for tests: points between two stores where a device may die, and points after a log read where the word
//! may change.
//!
//! Unit tests can run a callback at each point, to copy the memory or to store to it. Other builds compile the points
//! away.

/// A point where the device may die: the stores before this call have been made, the later ones have not.
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn may_die_here() {}

/// A point just after a word was read that another process may change.
#[cfg(not(test))]
#[inline(always)]
pub(crate) fn may_change_here() {}

#[cfg(test)]
pub(crate) use observed::{may_change_here, may_die_here, observing, observing_reads};

#[cfg(test)]
mod observed {
    use std::cell::RefCell;

    type Observer = Box<dyn FnMut()>;
    type Place = std::thread::LocalKey<RefCell<Option<Observer>>>;

    thread_local! {
        static OF_STORES: RefCell<Option<Observer>> = const { RefCell::new(None) };
        static OF_READS: RefCell<Option<Observer>> = const { RefCell::new(None) };
    }

    pub(crate) fn may_die_here() {
        pass(&OF_STORES);
    }

    pub(crate) fn may_change_here() {
        pass(&OF_READS);
    }

    fn pass(observer: &'static Place) {
        observer.with_borrow_mut(|observer| {
            if let Some(observe) = observer {
                observe();
            }
        });
    }

    /// Calls `observe` at each crash point that `act` passes.
    pub(crate) fn observing<T>(observe: impl FnMut() + 'static, act: impl FnOnce() -> T) -> T {
        with(&OF_STORES, Box::new(observe), act)
    }

    /// Calls `observe` after each word that `act` reads from a log.
    pub(crate) fn observing_reads<T>(observe: impl FnMut() + 'static, act: impl FnOnce() -> T) -> T {
        with(&OF_READS, Box::new(observe), act)
    }

    fn with<T>(place: &'static Place, observe: Observer, act: impl FnOnce() -> T) -> T {
        place.set(Some(observe));
        let result = act();
        place.set(None);
        result
    }
}
