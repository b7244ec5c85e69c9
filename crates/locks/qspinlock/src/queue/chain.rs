//! The holder's walk of the queue, from the newest waiter to the oldest. It visits each waiter once.
//!
//! A waiter knows the waiter before it, but not the waiter after it. The holder of the lock stores that link in
//! each node, and the oldest waiter in the newest node, for the next walk. So each waiter is visited once, however
//! long the queue is.
//!
//! See also: joining at the newest end (`newcomer.rs`).

use core::sync::atomic::Ordering::{Acquire, Relaxed};

use super::QueueLock;
use crate::atomic::fence;
use crate::node::{Node, link, set_link};
use crate::word::NodeNumber;
use crate::{Platform, Policy};

/// The epoch of a process that was not forked, or that has called exec since.
const FIRST_EPOCH: u32 = 1;

impl<P: Policy, S: Platform> QueueLock<P, S> {
    pub(super) fn node(number: NodeNumber) -> &'static Node {
        &S::nodes()[number.0 as usize]
    }

    /// The oldest waiter of the queue that ends in `tail`. Only the lock's holder may call it, after an
    /// acquire load that read `tail` in the word.
    pub(super) fn find_oldest(tail: NodeNumber) -> NodeNumber {
        let mut newer = tail;
        let oldest = loop {
            let node = Self::node(newer);
            if let Some(known) = link(&node.oldest) {
                break known;
            }
            let Some(older) = link(&node.older) else { break newer };
            set_link(&Self::node(older).newer, Some(newer));
            newer = older;
        };
        set_link(&Self::node(tail).oldest, Some(oldest));
        oldest
    }

    /// Removes `oldest`, which was just found from `tail` and is not `tail`, from the queue. Only the lock's
    /// holder may call it.
    pub(super) fn unlink_oldest(tail: NodeNumber, oldest: NodeNumber) {
        set_link(&Self::node(tail).oldest, link(&Self::node(oldest).newer));
    }

    /// Whether `tail` belongs to a thread of the parent, which does not exist in this forked child. If so, all waiters
    /// before it also belong to the parent.
    pub(super) fn is_left_behind(tail: NodeNumber) -> bool {
        let epoch = S::epoch();
        if epoch == FIRST_EPOCH {
            return false; // a process that was not forked does not touch the node, which another thread is polling
        }
        // Acquire pairs with the release in `join`, whichever load read `tail` in the word: newcomers' loads
        // are relaxed, and must not see the epoch of the node's previous wait.
        fence(Acquire);
        Self::node(tail).epoch.load(Relaxed) != epoch
    }
}
