//! The metrics: names, helps and labels, and where each value comes from. docs/reference/metrics.md lists them.
//!
//! `servers.rs (figures) → fit (series limit) → Metrics → prometheus-client → text`

mod families;
mod fit;
mod server;
mod writing;

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::servers::Scraped;
use families::encode;
use fit::fit;
use server::Server;

/// The figures of one scrape.
#[derive(Debug)]
pub struct Metrics {
    servers: Vec<Server>,
}

impl Metrics {
    /// Keeps at most `max_series` samples about disks, workers and groups.
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
