//! The engine that does the work of a placement. A table maps each op to the participant that pushed it and to that
//! participant's token.

use std::io;
use std::sync::Arc;

use rtrb::Producer;

use super::epoll_wait::WorkerWaker;
use super::limits::EngineMaker;
use crate::engine::{Completion, Engine, Event, Op, OpError};

/// The origin of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Route {
    /// The index of the participant's channel, or [`OWN`].
    channel: u32,
    /// The participant's token of the op.
    token: u64,
}

/// Channel of ops that belong to the engine's owner itself.
pub(super) const OWN: u32 = u32::MAX;

/// The table of origins. An op takes an entry when it starts, and its only completion frees the entry.
#[derive(Debug)]
struct Routes {
    places: Box<[Route]>,
    free: Vec<u32>,
}

impl Routes {
    fn new(depth: u32) -> Self {
        let places = (0..depth).map(|_| Route { channel: OWN, token: 0 }).collect();
        Self { places, free: (0..depth).rev().collect() }
    }

    #[inline]
    fn room(&self) -> usize {
        self.free.len()
    }

    /// Returns `None` if the table is full.
    #[inline]
    fn take(&mut self, route: Route) -> Option<u64> {
        let place = self.free.pop()?;
        self.places[place as usize] = route;
        Some(place.into())
    }

    /// Frees the entry `token`.
    #[inline]
    fn give_back(&mut self, token: u64) -> Route {
        #[allow(clippy::cast_possible_truncation)] // `take` returned it
        let place = token as u32;
        self.free.push(place);
        self.places[place as usize]
    }
}

/// The engine with its table. See the module documentation.
pub(super) struct RoutedEngine {
    pub inner: Box<dyn Engine>,
    routes: Routes,
    /// Scratch buffer of `reap`.
    events: Vec<Event>,
}

impl RoutedEngine {
    /// Makes an engine of `depth` and starts it. `is_shared`: several threads will use it.
    pub fn start(make: &EngineMaker, depth: u32, is_shared: bool) -> io::Result<Self> {
        let mut inner = make()?;
        if is_shared {
            inner.check_shareable()?;
        }
        inner.start()?;
        inner.serve_one_disk();
        Ok(Self { inner, routes: Routes::new(depth), events: Vec::with_capacity(depth as usize + 1) })
    }

    #[inline]
    pub fn has_room(&self) -> bool {
        self.routes.room() > 0 && self.inner.room() > 0
    }

    /// Pushes an op of the participant behind `channel`.
    ///
    /// # Errors
    /// Returns the op unchanged if there is no room.
    #[inline]
    #[allow(clippy::result_large_err)] // a refused op is returned whole
    pub fn push(&mut self, mut op: Op, channel: u32) -> Result<(), Op> {
        let token = op.token;
        let Some(place) = self.routes.take(Route { channel, token }) else { return Err(op) };
        op.token = place;
        self.inner.push(op).map_err(|op| {
            self.routes.give_back(place);
            Op { token, ..op }
        })
    }

    /// Passes each completion to `sink`, with the index of its channel.
    #[inline]
    pub fn reap(&mut self, mut sink: impl FnMut(u32, Completion)) {
        self.inner.reap(&mut self.events);
        for event in self.events.drain(..) {
            let Event::Completed(mut completion) = event else { continue };
            let Route { channel, token } = self.routes.give_back(completion.token);
            completion.token = token;
            sink(channel, completion);
        }
    }
}

/// The path of completions to one participant.
pub(super) struct Outlet {
    pub done: Producer<Completion>,
    pub waker: Arc<WorkerWaker>,
    /// The participant's ops in the engine.
    pub inside: usize,
    /// The participant got completions and was not woken since.
    pub touched: bool,
    /// The participant has left. Its completions are dropped.
    pub gone: bool,
}

impl Outlet {
    pub fn new(done: Producer<Completion>, waker: Arc<WorkerWaker>) -> Self {
        Self { done, waker, inside: 0, touched: false, gone: false }
    }

    #[inline]
    pub fn pass_on(&mut self, completion: Completion) {
        if self.gone {
            return;
        }
        let pushed = self.done.push(completion);
        debug_assert!(pushed.is_ok(), "the ring has room for all ops that a participant may have in flight");
        self.touched = true;
    }
}

/// Stores `value` in the first free slot, and returns its index.
pub(super) fn put<T>(places: &mut Vec<Option<T>>, value: T) -> usize {
    let index = places.iter().position(Option::is_none).unwrap_or(places.len());
    if index == places.len() {
        places.push(None);
    }
    places[index] = Some(value);
    index
}

/// The completion of an op that never started.
pub(super) fn unstarted(op: Op, error: OpError) -> Completion {
    let Op { token, buffers, .. } = op;
    Completion { token, result: Err(error), sync_failed: false, stored_bytes: 0, buffers }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_table_takes_no_more_until_a_place_is_given_back() {
        let mut routes = Routes::new(2);
        let route = |token| Route { channel: 3, token };
        let first = routes.take(route(70)).unwrap();
        routes.take(route(71)).unwrap();
        assert_eq!(routes.take(route(72)), None);
        assert_eq!(routes.give_back(first), route(70));
        assert_eq!(routes.take(route(72)), Some(first));
    }
}
