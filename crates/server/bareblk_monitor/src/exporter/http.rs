//! HTTP: one request per connection, a bounded number of connections, and a time limit for each.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::latest::{Format, Latest};

/// Maximum number of connections at once. Further connections wait in the kernel's queue until it is full.
const MAX_CONNECTIONS: usize = 16;
/// Maximum time for a request's header to arrive.
const HEADER_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum duration of a connection: it includes the scrape, and lasts until the client has read the answer.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a request's header.
const MAX_HEADER_BYTES: usize = 16 << 10;
/// The pause after an `accept` that failed for lack of resources.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const NOT_FOUND: &str = "there is no such page: request /metrics, /-/ready or /-/healthy\n";

/// Serves HTTP clients; returns only after an error.
pub async fn serve(listener: std::net::TcpListener, latest: Arc<Latest>) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
        let Ok((stream, _)) = listener.accept().await else {
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let latest = Arc::clone(&latest);
        tokio::spawn(async move {
            // A client that is too slow, or breaks the protocol, loses its connection.
            let _ = timeout(CONNECTION_TIMEOUT, serve_one(stream, latest)).await;
            drop(place);
        });
    }
}

async fn serve_one(stream: TcpStream, latest: Arc<Latest>) -> hyper::Result<()> {
    let answer = service_fn(move |request| {
        let latest = Arc::clone(&latest);
        async move { Ok::<_, Infallible>(answer(&request, &latest).await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEADER_BYTES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), answer)
        .await
}

async fn answer(request: &Request<Incoming>, latest: &Arc<Latest>) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refusal = text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are supported\n");
        refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refusal;
    }
    match request.uri().path() {
        "/metrics" => metrics(wanted(request), latest).await,
        "/-/ready" => ready(latest).await,
        "/-/healthy" => text(StatusCode::OK, "healthy\n"),
        _ => text(StatusCode::NOT_FOUND, NOT_FOUND),
    }
}

fn wanted(request: &Request<Incoming>) -> Format {
    let accepted = request.headers().get_all(ACCEPT).into_iter().filter_map(|value| value.to_str().ok());
    let takes = |accepted: &str| accepted.contains("application/openmetrics-text");
    if accepted.into_iter().any(takes) { Format::OpenMetrics } else { Format::Classic }
}

async fn metrics(format: Format, latest: &Arc<Latest>) -> Response<Full<Bytes>> {
    let scrape = latest.get().await;
    let text_of = match scrape {
        Some(scrape) => scrape.text(format).await,
        None => None,
    };
    match text_of {
        Some(bytes) => response(StatusCode::OK, format.content_type(), bytes),
        None => bug(),
    }
}

async fn ready(latest: &Arc<Latest>) -> Response<Full<Bytes>> {
    match latest.get().await {
        Some(scrape) if scrape.problems.is_empty() => text(StatusCode::OK, "ready\n"),
        Some(scrape) => text(StatusCode::SERVICE_UNAVAILABLE, scrape.problems.join("\n") + "\n"),
        None => bug(),
    }
}

fn bug() -> Response<Full<Bytes>> {
    text(
        StatusCode::INTERNAL_SERVER_ERROR,
        "the exporter has a bug: see its standard error for the details\n",
    )
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    response(status, "text/plain; charset=utf-8", body)
}

fn response(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
