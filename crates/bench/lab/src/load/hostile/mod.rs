//! Guests, front-ends and disks that disturb the others on their server.

pub(crate) mod front_end;

pub(crate) mod guest;

pub(crate) mod frozen_disk;
