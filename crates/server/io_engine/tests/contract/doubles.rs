//! Two engines that the crate does not have: a peer behind a thread, and an image format. They show that the traits
//! suffice for such engines.

pub mod layer;

pub mod remote;
