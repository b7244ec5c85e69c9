//! A job's steps, which the metadata thread does, and their results.

/// A step of a job (`merge.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeStep {
    /// Copies clusters of the layers below into the top.
    Stream {
        /** A guest's offset, from which the thread looks for clusters that the top lacks. */
        from: u64,
    },
    /// Takes over the image into which the top is to be copied.
    BeginCommit,
    /// Copies what the top has into that image.
    Commit,
    /// Returns the image. Guests' writes no longer need additional claims.
    EndCommit,
    /// Begins to look for leaked clusters of the top.
    BeginReclaim,
    /// Looks for them, or frees some.
    Reclaim,
}

/// How far a job has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The guest's offset up to which the job has looked for clusters to copy. Of a reclaim: how much of its work is done, in
    /// proportion to the disk's size.
    pub to: u64,
    /// What the step has copied.
    pub copied_bytes: u64,
    /// Clusters that a commit has found and not copied yet.
    pub pending_bytes: u64,
    /// The step must wait for requests that began before: ask again soon.
    pub waits_for_requests: bool,
    /// Leaked clusters that a reclaim has freed.
    pub freed_clusters: u64,
    /// Their bytes.
    pub freed_bytes: u64,
    /// A reclaim has nothing left to do.
    pub has_ended: bool,
}
