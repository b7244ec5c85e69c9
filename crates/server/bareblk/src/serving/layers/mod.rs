//! Changes of what lies behind a disk while guests use it: snapshots, overlays, and jobs that merge layers or free clusters.
//!
//! ```text
//! ctl snapshot            → snapshot.rs: clones          │ overlay.rs: new qcow2 images over the present ones
//! ctl stream, ctl commit  → jobs.rs, job.rs: a thread for each job ─▶ stream.rs │ commit.rs: small steps, then another image
//! ctl reclaim             → jobs.rs, job.rs ─▶ reclaim.rs: small steps that free leaked clusters
//! ctl resize              → resize.rs: qcow2 disks
//! new_settings.rs: the settings of a disk with another image
//! ```

mod commit;
pub(crate) mod job;
mod jobs;
mod new_settings;
mod overlay;
mod reclaim;
mod resize;
mod snapshot;
mod stream;
