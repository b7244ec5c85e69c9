//! A server in the form from which the metrics are written.

use crate::exporter::servers::Figures;

/// A server, with those of its figures that fit the limit of samples.
#[derive(Debug)]
pub struct Server {
    pub label: String,
    pub took_seconds: f64,
    /// `None`: the server did not answer.
    pub figures: Option<Figures>,
    /// The number of samples that were left out.
    pub dropped: u64,
}
