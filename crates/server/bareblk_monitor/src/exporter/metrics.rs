//! The metrics: names, helps and labels, and where each value comes from. docs/reference/metrics.md lists them.
//!
//! `servers.rs (figures) → fit (series limit) → Metrics → prometheus-client → text`

mod families;
mod fit;
mod writing;

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::servers::{Figures, Scraped};
use families::encode;
use fit::fit;

/// What one scrape brought.
#[derive(Debug)]
pub struct Metrics {
    servers: Vec<Server>,
}

/// A server, with the figures that fit.
#[derive(Debug)]
struct Server {
    label: String,
    took_seconds: f64,
    /// `None`: the server did not answer.
    figures: Option<Figures>,
    /// Samples that were left out.
    dropped: u64,
}

impl Metrics {
    /// At most `max_series` samples about disks, workers and groups.
    pub fn new(scraped: Vec<Scraped>, max_series: usize) -> Self {
        let mut room = max_series;
        let server = |Scraped { label, took, figures }: Scraped| {
            let (figures, dropped) = match figures {
                Ok(mut figures) => {
                    let dropped = fit(&mut figures, &mut room);
                    (Some(figures), dropped)
                }
                Err(_) => (None, 0),
            };
            Server { label, took_seconds: took.as_secs_f64(), figures, dropped }
        };
        Self { servers: scraped.into_iter().map(server).collect() }
    }
}

impl Collector for Metrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        encode(&self.servers, encoder)
    }
}
