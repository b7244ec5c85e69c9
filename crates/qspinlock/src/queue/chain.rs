//! The queue as its holder walks it: from the newest waiter to the oldest, each step once.
//!
//! Newcomers know who is before them, not who comes after: that is found by the holder of the lock, who leaves what it
//! found in the newest node for the next walk. So each waiter is visited once, however long the queue is.
//!
//! Not here: joining at the newest end (`newcomer.rs`).

use core::sync::atomic::Ordering::{Acquire, Relaxed};

use super::QueueLock;
use crate::atomic::fence;
use crate::node::{Node, link, set_link};
use crate::word::NodeNumber;
use crate::{Platform, Policy};

/// The epoch of processes that were not forked, or have replaced their program since.
const FIRST_EPOCH: u32 = 1;

impl<P: Policy, S: Platform> QueueLock<P, S> {
    pub(super) fn node(number: NodeNumber) -> &'static Node {
        &S::nodes()[number.0 as usize]
    }

    /// The oldest waiter of the queue that ends in `tail`. Only for the holder of the lock, after an acquire that read
    /// `tail` in the word.
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

    /// Takes `oldest` out of the queue, as just found from `tail`, which is another. Only for the holder of the lock.
    pub(super) fn unlink_oldest(tail: NodeNumber, oldest: NodeNumber) {
        set_link(&Self::node(tail).oldest, link(&Self::node(oldest).newer));
    }

    /// In a forked child: `tail` is a thread of the parent, which does not exist here, and so are all before it.
    pub(super) fn is_left_behind(tail: NodeNumber) -> bool {
        let epoch = S::epoch();
        if epoch == FIRST_EPOCH {
            return false; // keeps the usual process away from the node, which another thread is looking at
        }
        // Acquire pairs with the release in `join`, whichever load read `tail` in the word: newcomers' are relaxed, and
        // must not see the epoch of a node's last wait.
        fence(Acquire);
        Self::node(tail).epoch.load(Relaxed) != epoch
    }
}
