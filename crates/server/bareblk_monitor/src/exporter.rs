//! `bareblk exporter`: serves the figures of running servers to Prometheus.
//!
//! ```text
//! GET /metrics → http.rs → latest.rs → servers.rs (one thread each) → monitor sockets
//!                                    → answer.rs → metrics.rs (histogram.rs) → text
//! ```
//!
//! - Between two requests, the exporter does nothing and causes no work in the servers.
//! - A server that is hostile or hangs only makes its own figures disappear.
//! - HTTP clients may be hostile, too: http.rs limits their number and their time, latest.rs how often servers are asked.

mod answer;
mod histogram;
mod http;
mod latest;
mod metrics;
mod servers;

use std::process::ExitCode;

use anyhow::{Context, Result};
use bareblk::command_line::{ExporterArgs, Wrong, print};

use latest::Latest;
use servers::Servers;

/// Runs the command; it returns only with an error.
///
/// # Errors
/// A pattern is invalid, or the exporter cannot listen at the address.
pub fn run(args: ExporterArgs) -> Result<ExitCode> {
    let ExporterArgs { monitor, listen, max_series } = args;
    let servers = Servers::new(&monitor).map_err(Wrong)?;
    let listener = std::net::TcpListener::bind(listen)
        .with_context(|| format!("cannot listen at {listen}: choose another address with --listen"))?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    print(&format!("bareblk: metrics at http://{address}/metrics\n"))?;
    let latest = Latest::new(servers, max_series);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    runtime.block_on(http::serve(listener, latest)).context("cannot serve HTTP")?;
    Ok(ExitCode::FAILURE)
}
