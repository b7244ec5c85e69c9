//! A server takes over from a running one, unnoticed by guests and front-ends: `bareblk serve --take-over
//! CONTROL_SOCKET`.
//!
//! ```text
//! new                                     old
//! {"do":"take-over"} on the control socket → ok, with its extras: from here on frames (wire.rs)
//! Begin, or BeginWith the extras wanted  → Control, Monitor, Disk …, OffersEnd (images, sockets: nothing has stopped)
//! all open, workers and sandbox: Ready   → sessions to cut off end; queues drain; State, Session …, Totals, Job, StatesEnd
//! sessions rebuilt, no ring runs: Prepared → Yours, and it ends
//! rings run
//! ```
//!
//! - `Yours` transfers ownership. Until then the old server can resume, and does so if the new server refuses,
//!   disconnects or takes too long. Until then the new server touches no ring, and it waits for `Yours` without a time
//!   limit, because only the old server knows who owns the disks.
//! - The descriptors are the old server's own: images keep their locks, front-ends their connections.
//! - The new server opens images on other machines itself. The old server releases the storage's lock once no request is
//!   in flight, and the new server takes it before it starts rings.
//!
//! For users: docs/how-to/live-upgrade.md. Sessions and queues are in `blk_server`.

mod messages;

mod new;

mod old;

mod opener;

mod terms;

mod wire;

pub use messages::Message;
pub use new::{Taken, Taker, Wanted};
pub use old::{ControlListener, Listeners, hand_over};
pub use terms::{AT_ONCE, EXTRAS, VERSION};
pub use wire::receive;
