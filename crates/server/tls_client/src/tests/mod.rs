//! Tests against real servers (nbdkit, qemu-nbd) and against peers that misbehave.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod confined;
mod files;
mod handshakes;
mod pki;
mod refusals;
mod relays;
mod rig;
