//! A server as it is shown.

use crate::exporter::servers::Figures;

/// A server, with the figures that fit.
#[derive(Debug)]
pub struct Server {
    pub label: String,
    pub took_seconds: f64,
    /// `None`: the server did not answer.
    pub figures: Option<Figures>,
    /// Samples that were left out.
    pub dropped: u64,
}
