//! One `fdatasync` in flight per file; flushes that come meanwhile share the next one.
//!
//! The kernel reports a page that it could not write back to one sync only. Of two syncs that overlap, one gets the error
//! and the other succeeds although the same pages are lost: a guest would be told that its data is safe. If they come one
//! after the other, the engine knows that a sync failed before the next one ends.
//!
//! - All ops that end with a sync pass the gate: flushes, and durable ops whose call has no flag for it.
//! - A flush shares only a sync that starts after it.
//! - Fewer syncs are also faster: ten flushes at once cost two.
//!
//! One gate per file and engine: workers that share a file have a gate each, and must not flush it side by
//! side through the page cache. Not here: remembering that a sync failed (`blk_server`).

/// Flushes of one file, by op.
#[derive(Debug)]
pub(crate) struct FlushGate {
    /// Its sync is queued or in the kernel.
    leader: Option<u32>,
    /// They get the leader's result.
    sharing: Vec<u32>,
    /// They came after the leader had started.
    waiting: Vec<u32>,
}

/// Room for flushes at once, without allocating: a guest sends one per queue and flush of its own.
const USUAL: usize = 64;

impl FlushGate {
    pub fn new() -> Self {
        Self { leader: None, sharing: Vec::with_capacity(USUAL), waiting: Vec::with_capacity(USUAL) }
    }

    /// Whether `op` is to be started; it waits otherwise. The leader, whose sync is repeated, goes on.
    pub fn enter(&mut self, op: u32) -> bool {
        if self.leader.is_none_or(|leader| leader == op) {
            self.leader = Some(op);
            return true;
        }
        self.waiting.push(op);
        false
    }

    /// The leader ended. Calls `share` for each that gets its result, and returns the op to start next.
    pub fn leave(&mut self, op: u32, share: impl FnMut(u32)) -> Option<u32> {
        if self.leader != Some(op) {
            return None;
        }
        self.sharing.drain(..).for_each(share);
        std::mem::swap(&mut self.sharing, &mut self.waiting);
        self.leader = self.sharing.pop();
        self.leader
    }

    /// Lets go of all that have not started, and calls `end` for each.
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
