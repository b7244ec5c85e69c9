//! A limit as the server sends it, for `top` and for the exporter.

use serde::Deserialize;

/// A limit and its use, in requests or bytes.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Limit {
    /// The key of the limit, such as `iops-read`.
    pub limit: String,
    /// Units per second.
    pub rate: u64,
    /// Units that may be used at once.
    pub credit: u64,
    /// The credit after a long pause.
    pub capacity: u64,
    /// Units used since the limit was set.
    pub used: u64,
}
