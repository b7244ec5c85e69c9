//! A server that takes over from a running one: `bareblk serve --take-over CONTROL_SOCKET`. No guest, no front-end notices.
//!
//! ```text
//! new                                     old
//! {"do":"take-over"} on the control socket → ok: from here on frames (wire.rs)
//! Begin                                  → Control, Disk …, OffersEnd (images, sockets: nothing has stopped)
//! all open, workers and sandbox: Ready   → sessions that are to be cut off end; queues drained; State, Session …, OffersEnd's sister StatesEnd
//! sessions rebuilt, no ring runs: Prepared → Yours, and it ends
//! rings run
//! ```
//!
//! - Until `Yours` the old server can go on as if nothing had been, and does if the new one says no, goes, or takes too long.
//!   The new one touches nothing before it, and waits for it without a limit: only the old one knows whose the disks are.
//! - Descriptors are the old server's own: images keep their locks, front-ends their connections.
//!
//! For users: docs/how-to/live-upgrade.md. Not here: sessions and queues (`blk_server`).

mod messages;

mod new;

mod old;

mod opener;

mod terms;

mod wire;

pub use messages::Message;
pub use new::{Taker, Wanted};
pub use old::{Door, hand_over};
pub use terms::{AT_ONCE, VERSION};
pub use wire::receive;
