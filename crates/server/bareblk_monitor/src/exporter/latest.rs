//! The latest figures, and their text. The exporter asks the servers only when an HTTP client requests figures, at most
//! four times a second.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hyper::body::Bytes;
use prometheus_client::encoding::{prometheus_text, text};
use prometheus_client::registry::Registry;
use tokio::sync::Mutex;
use tokio::task;

use super::metrics::Metrics;
use super::servers::Servers;

/// Figures that are younger than this answer further requests too.
const FRESH: Duration = Duration::from_millis(250);

/// Asks the servers once for all HTTP clients, and keeps the answers.
#[derive(Debug)]
pub struct Latest {
    servers: Servers,
    max_series: usize,
    /// Locked by the scrape that asks the servers; the other scrapes wait for its answer.
    last: Mutex<Option<(Instant, Arc<Scrape>)>>,
}

/// The answers of all servers.
#[derive(Debug)]
pub struct Scrape {
    registry: Registry,
    /// Why figures are missing: one line for each server without figures.
    pub problems: Vec<String>,
    texts: [OnceLock<Bytes>; 2],
}

/// A format of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus's own text format, which every tool can read.
    Classic,
    OpenMetrics,
}

impl Format {
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Classic => prometheus_text::CONTENT_TYPE,
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

impl Latest {
    pub fn new(servers: Servers, max_series: usize) -> Arc<Self> {
        Arc::new(Self { servers, max_series, last: Mutex::default() })
    }

    /// `None`: a bug ended the thread that asks.
    pub async fn get(self: &Arc<Self>) -> Option<Arc<Scrape>> {
        let mut last = self.last.lock().await;
        if let Some((at, scrape)) = &*last
            && at.elapsed() < FRESH
        {
            return Some(Arc::clone(scrape));
        }
        let this = Arc::clone(self);
        let scrape = task::spawn_blocking(move || Arc::new(this.scrape())).await.ok()?;
        *last = Some((Instant::now(), Arc::clone(&scrape)));
        Some(scrape)
    }

    fn scrape(&self) -> Scrape {
        let scraped = self.servers.scrape();
        let mut problems: Vec<String> =
            scraped.iter().filter_map(|server| server.figures.as_ref().err().cloned()).collect();
        if scraped.is_empty() {
            problems.push("no socket matches --monitor".to_owned());
        }
        let mut registry = Registry::with_prefix("bareblk");
        registry.register_collector(Box::new(Metrics::new(scraped, self.max_series)));
        Scrape { registry, problems, texts: Default::default() }
    }
}

impl Scrape {
    /// `None`: a bug in the encoder.
    pub async fn text(self: Arc<Self>, format: Format) -> Option<Bytes> {
        task::spawn_blocking(move || self.encoded(format)).await.ok()?
    }

    fn encoded(&self, format: Format) -> Option<Bytes> {
        let [classic, open_metrics] = &self.texts;
        let (place, encode): (_, fn(&mut String, &Registry) -> std::fmt::Result) = match format {
            Format::Classic => (classic, prometheus_text::encode),
            Format::OpenMetrics => (open_metrics, text::encode),
        };
        if let Some(text) = place.get() {
            return Some(text.clone());
        }
        let mut text = String::new();
        encode(&mut text, &self.registry).ok()?;
        Some(place.get_or_init(|| text.into()).clone())
    }
}
