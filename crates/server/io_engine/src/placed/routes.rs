//! Whose op is whose: the real engine knows an op by its place here, which leads back to the worker's own name for it.
//!
//! Not here: the ops (`owner.rs`, `shared/`).

/// Where an op came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Route {
    /// Index of the worker's channel; [`OWN`]: whoever has the engine.
    pub channel: u32,
    /// The worker's name for the op.
    pub token: u64,
}

/// No channel: the op never left its worker.
pub(super) const OWN: u32 = u32::MAX;

/// Taken once; each place is given back by the op's only completion.
#[derive(Debug)]
pub(super) struct Routes {
    places: Box<[Route]>,
    free: Vec<u32>,
}

impl Routes {
    pub fn new(depth: u32) -> Self {
        let places = (0..depth).map(|_| Route { channel: OWN, token: 0 }).collect();
        Self { places, free: (0..depth).rev().collect() }
    }

    #[inline]
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// `None`: no room.
    #[inline]
    pub fn take(&mut self, route: Route) -> Option<u64> {
        let place = self.free.pop()?;
        self.places[place as usize] = route;
        Some(place.into())
    }

    /// Where the op named `token` came from; its place is free again.
    #[inline]
    pub fn give_back(&mut self, token: u64) -> Route {
        #[allow(clippy::cast_possible_truncation)] // one of ours
        let place = token as u32;
        self.free.push(place);
        self.places[place as usize]
    }
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
