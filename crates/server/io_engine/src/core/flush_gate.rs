//! Allows one `fdatasync` in flight per file. Flushes that arrive meanwhile share the next one.
//!
//! The kernel reports a failed write-back to only one of two overlapping syncs. The other one succeeds although the
//! same pages are lost, and a guest would believe that its data is safe. When syncs run one after the other, the engine
//! learns of a failed sync before the next one ends.
//!
//! - All ops that end with a sync pass the gate: flushes, and durable ops whose call has no durability flag.
//! - A flush shares only a sync that starts after the flush arrived.
//! - Sharing is also faster: ten flushes at once cost two syncs.
//!
//! Each engine has a gate per file. Workers that share a file have separate gates, and must not flush the file
//! concurrently through the page cache. `blk_server` records that a sync failed.

/// The flushes of one file, each identified by its op.
#[derive(Debug)]
pub(crate) struct FlushGate {
    /// The op whose sync is queued or in the kernel.
    leader: Option<u32>,
    /// Ops that get the leader's result.
    sharing: Vec<u32>,
    /// Ops that arrived after the leader's sync had started.
    waiting: Vec<u32>,
}

/// Initial capacity: more flushes than an ordinary guest has in flight.
const USUAL: usize = 64;

impl FlushGate {
    pub fn new() -> Self {
        Self { leader: None, sharing: Vec::with_capacity(USUAL), waiting: Vec::with_capacity(USUAL) }
    }

    /// Returns true if `op` may start its sync; otherwise `op` waits. A leader that repeats its sync always may.
    pub fn enter(&mut self, op: u32) -> bool {
        if self.leader.is_none_or(|leader| leader == op) {
            self.leader = Some(op);
            return true;
        }
        self.waiting.push(op);
        false
    }

    /// Ends the leader's sync. Calls `share` for each op that gets its result, and returns the op to start next.
    pub fn leave(&mut self, op: u32, share: impl FnMut(u32)) -> Option<u32> {
        if self.leader != Some(op) {
            return None;
        }
        self.sharing.drain(..).for_each(share);
        std::mem::swap(&mut self.sharing, &mut self.waiting);
        self.leader = self.sharing.pop();
        self.leader
    }

    /// Removes all ops whose sync has not started, and calls `end` for each.
    pub fn give_up(&mut self, end: impl FnMut(u32)) {
        self.sharing.drain(..).chain(self.waiting.drain(..)).for_each(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared_at_end_of(gate: &mut FlushGate, op: u32) -> (Vec<u32>, Option<u32>) {
        let mut shared = Vec::new();
        let next = gate.leave(op, |op| shared.push(op));
        (shared, next)
    }

    #[test]
    fn flushes_that_come_during_a_sync_share_the_next_one() {
        let mut gate = FlushGate::new();
        let started: Vec<bool> = (0..4).map(|op| gate.enter(op)).collect();
        let (first, next) = shared_at_end_of(&mut gate, 0);
        let (mut second, last) = shared_at_end_of(&mut gate, next.unwrap());
        second.extend(next);
        second.sort_unstable();
        assert_eq!(started, [true, false, false, false]);
        assert_eq!((first, second, last), (vec![], vec![1, 2, 3], None));
    }

    #[test]
    fn leader_that_tries_again_does_not_wait_for_itself() {
        let mut gate = FlushGate::new();
        assert!(gate.enter(3) && gate.enter(3));
    }

    #[test]
    fn flush_after_all_have_ended_starts_at_once() {
        let mut gate = FlushGate::new();
        gate.enter(7);
        shared_at_end_of(&mut gate, 7);
        assert!(gate.enter(8));
    }

    #[test]
    fn flush_that_came_after_the_next_sync_started_waits_for_the_one_after() {
        let mut gate = FlushGate::new();
        (0..2).for_each(|op| _ = gate.enter(op));
        let (_, second) = shared_at_end_of(&mut gate, 0);
        gate.enter(2);
        let (shared, third) = shared_at_end_of(&mut gate, second.unwrap());
        assert_eq!((second, shared, third), (Some(1), vec![], Some(2)));
    }
}
