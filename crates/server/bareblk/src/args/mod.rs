//! The options of the command line, with their value parsers.

pub(crate) mod ctl_args;
pub(crate) mod engine_args;
pub(crate) mod image_args;
pub(crate) mod limit_args;
pub(crate) mod monitor_args;
pub(crate) mod placement_args;
pub(crate) mod serve_args;
pub(crate) mod usage;
pub(crate) mod values;
pub(crate) mod vmm_args;
pub(crate) mod worker_args;
