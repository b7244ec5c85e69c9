//! Two engines that the crate itself does not contain: a peer behind a thread, and an image format. They show that the
//! traits suffice for such engines.

pub mod layer;

pub mod remote;
