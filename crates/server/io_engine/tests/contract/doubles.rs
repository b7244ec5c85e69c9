//! Engines that the crate does not have, to show that the traits fit what may come: a peer behind a thread, and a format.

pub mod layer;

pub mod remote;
