//! The list of all metrics.

use std::fmt;

use bareblk::client::LimitKind;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;

use super::server::Server;
use super::writing::{Head, Number, counter, gauge, histograms, infos, numbers};
use crate::exporter::answer::{Balance, Disk, Worker};
use crate::exporter::histogram::Histogram;
use crate::exporter::servers::Figures;
use crate::limit::Limit;

/// Maximum length of a label's value, in bytes, so that a hostile server cannot exhaust the exporter's memory.
const MAX_LABEL_BYTES: usize = 1024;

/// A metric with one sample for each `T`.
struct Of<T> {
    head: Head,
    value: fn(&T) -> Number,
}

const fn of<T>(head: Head, value: fn(&T) -> Number) -> Of<T> {
    Of { head, value }
}

use Number::{Ns, Real, Whole};

static DISK: [Of<Disk>; 17] = [
    of(gauge("disk_size", Some(Unit::Bytes), "Size of the disk"), |disk| Whole(disk.size_bytes)),
    of(gauge("disk_connected", None, "Connected front-ends"), |disk| Whole(disk.sessions)),
    of(gauge("disk_queues", None, "Running queues"), |disk| Whole(disk.queues_running)),
    of(gauge("disk_read_only", None, "1 if the disk accepts no writes by its configuration"), |disk| {
        Whole(disk.read_only.into())
    }),
    of(
        gauge(
            "disk_failed",
            None,
            "1 if a sync failed or the storage refuses this server, so that the disk accepts no more writes",
        ),
        |disk| Whole(disk.failed.into()),
    ),
    of(gauge("disk_requests_in_flight", None, "Requests in flight, which are not answered yet"), |disk| {
        Whole(disk.totals.in_flight)
    }),
    of(gauge("disk_requests_held", None, "Requests that failed on the host and wait for a retry"), |disk| {
        Whole(disk.totals.held)
    }),
    of(counter("disk_errors", None, "Requests that were answered with an I/O error"), |disk| {
        Whole(disk.totals.errors)
    }),
    of(counter("disk_retries", None, "Retries of held requests"), |disk| Whole(disk.totals.retries)),
    of(counter("disk_slow_requests", None, "Requests that took slow-ms or longer"), |disk| {
        Whole(disk.totals.slow)
    }),
    of(counter("disk_kicks", None, "Notifications from the guest"), |disk| Whole(disk.totals.kicks)),
    of(counter("disk_interrupts", None, "Interrupts to the guest"), |disk| Whole(disk.totals.calls)),
    of(counter("disk_queue_moves", None, "Moves of a queue to another worker"), |disk| {
        Whole(disk.totals.moves)
    }),
    of(
        counter("disk_worker", Some(Unit::Seconds), "Estimated time that workers spent on the disk"),
        |disk| Ns(disk.totals.worker_ns),
    ),
    of(counter("disk_held", Some(Unit::Seconds), "Total time for which requests were held"), |disk| {
        Ns(disk.totals.held_ns)
    }),
    of(counter("disk_throttled_requests", None, "Requests that were held back by a limit"), |disk| {
        Whole(disk.throttling.throttled_requests)
    }),
    of(
        counter("disk_throttled", Some(Unit::Seconds), "Total time that queues were held back by a limit"),
        |disk| Ns(disk.throttling.throttled_ns),
    ),
];
const REQUESTS: Head = counter("disk_requests", None, "Answered requests");
const BYTES: Head = counter("disk", Some(Unit::Bytes), "Bytes read and written");
const DURATION: (&str, &str) =
    ("disk_request_duration", "Time from when the server takes a request from the ring until it answers");
/// Samples of a disk, except for its limits and histograms: these, its info, its requests and its bytes.
pub const DISK_SAMPLES: usize = DISK.len() + 1 + 4 + 2;

static WORKER: [Of<Worker>; 4] = [
    of(gauge("worker_queues", None, "Queues that the worker serves"), |worker| Whole(worker.queues)),
    of(
        counter("worker_cpu", Some(Unit::Seconds), "Processor time of the worker"),
        |worker| Ns(worker.cpu_ns),
    ),
    of(
        counter(
            "worker_wait",
            Some(Unit::Seconds),
            "Time for which the worker was ready to run but had no processor",
        ),
        |w| Ns(w.wait_ns),
    ),
    of(counter("worker_sleeps", None, "How often the worker went to sleep"), |worker| Whole(worker.sleeps)),
];
const PASSES: Head =
    counter("worker_passes", None, "Passes of the worker's loop, by whether they found work");
/// Samples of a worker.
pub const WORKER_SAMPLES: usize = WORKER.len() + 2;

/// Samples of a limit: its rate and its credit.
pub const LIMIT_SAMPLES: usize = 2;

/// Writes all metrics.
pub fn encode(servers: &[Server], mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
    let encoder = &mut encoder;
    of_servers(servers, encoder)?;
    of_disks(servers, encoder)?;
    of_workers(servers, encoder)?;
    of_limits(servers, encoder)
}

/// The servers that answered.
fn up(servers: &[Server]) -> impl Iterator<Item = (&str, &Figures)> {
    servers.iter().filter_map(|server| Some((server.label.as_str(), server.figures.as_ref()?)))
}

fn of_servers(servers: &[Server], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let all = |value: fn(&Server) -> Number| {
        servers.iter().map(move |server| ([("server", short(&server.label))], value(server)))
    };
    let head = gauge("up", None, "1 if the server answered within a second");
    numbers(encoder, &head, all(|server| Whole(server.figures.is_some().into())))?;
    let head = gauge("scrape_duration", Some(Unit::Seconds), "How long the server took to answer");
    numbers(encoder, &head, all(|server| Real(server.took_seconds)))?;
    let head =
        gauge("series_dropped", None, "Samples of the server that were left out because of --max-series");
    numbers(encoder, &head, all(|server| Whole(server.dropped)))?;
    let versions = up(servers)
        .map(|(server, figures)| [("server", short(server)), ("version", short(&figures.version))]);
    infos(encoder, "build", "Version of the server", versions)?;
    let head = counter("cpu", Some(Unit::Seconds), "Processor time of the server's process");
    let times =
        up(servers).map(|(server, figures)| ([("server", short(server))], Ns(figures.stats.process_cpu_ns)));
    numbers(encoder, &head, times)?;
    let head = counter("balance_moves", None, "Moves of queues by the balancer");
    let balances =
        up(servers).filter_map(|(server, figures)| Some((server, figures.stats.balance.as_ref()?)));
    let moves = balances.flat_map(|(server, Balance { moves, failed })| {
        [("moved", moves), ("failed", failed)]
            .map(|(outcome, count)| ([("server", short(server)), ("outcome", outcome)], Whole(*count)))
    });
    numbers(encoder, &head, moves)
}

fn of_disks(servers: &[Server], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let disks = || {
        up(servers).flat_map(|(server, figures)| figures.stats.disks.iter().map(move |disk| (server, disk)))
    };
    let infos_of = disks().map(|(server, disk)| {
        let [server, name] = labels(server, disk);
        let more = [("image", &disk.image), ("socket", &disk.socket), ("engine", &disk.engine)];
        let [image, socket, engine] = more.map(|(key, value)| (key, short(value)));
        [server, name, image, socket, engine]
    });
    infos(encoder, "disk", "Image, socket and engine of the disk", infos_of)?;
    for Of { head, value } in &DISK {
        numbers(encoder, head, disks().map(|(server, disk)| (labels(server, disk), value(disk))))?;
    }
    let requests = disks().flat_map(|(server, disk)| {
        let totals = &disk.totals;
        [("read", totals.reads), ("write", totals.writes), ("flush", totals.flushes), ("other", totals.other)]
            .map(|(op, count)| (by_op(server, disk, op), Whole(count)))
    });
    numbers(encoder, &REQUESTS, requests)?;
    let bytes = disks().flat_map(|(server, disk)| {
        [("read", disk.totals.read_bytes), ("write", disk.totals.written_bytes)]
            .map(|(op, count)| (by_op(server, disk, op), Whole(count)))
    });
    numbers(encoder, &BYTES, bytes)?;
    let durations = disks().flat_map(|(server, disk)| {
        let timed = disk.latency.kinds().into_iter().filter(|(_, times)| !times.buckets.is_empty());
        timed.map(move |(op, times)| (by_op(server, disk, op), Histogram::new(times)))
    });
    histograms(encoder, DURATION.0, DURATION.1, durations)
}

fn labels<'f>(server: &'f str, disk: &'f Disk) -> [(&'static str, &'f str); 2] {
    [("server", short(server)), ("disk", short_of(disk))]
}

fn by_op<'f>(server: &'f str, disk: &'f Disk, op: &'static str) -> [(&'static str, &'f str); 3] {
    let [server, disk] = labels(server, disk);
    [server, disk, ("op", op)]
}

fn of_workers(servers: &[Server], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let workers = || {
        up(servers)
            .flat_map(|(server, figures)| figures.stats.workers.iter().map(move |worker| (server, worker)))
    };
    for Of { head, value } in &WORKER {
        let samples = workers().map(|(server, worker)| {
            ([("server", short(server).to_owned()), ("worker", worker.worker.to_string())], value(worker))
        });
        numbers(encoder, head, samples)?;
    }
    let passes = workers().flat_map(|(server, worker)| {
        [("work", worker.busy_passes), ("nothing", worker.idle_passes)].map(|(found, count)| {
            let labels =
                [("server", short(server)), ("worker", &worker.worker.to_string()), ("found", found)];
            (labels.map(|(key, value)| (key, value.to_owned())), Whole(count))
        })
    });
    numbers(encoder, &PASSES, passes)
}

fn of_limits(servers: &[Server], encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let limits = || up(servers).flat_map(|(server, figures)| limits(server, figures));
    for (is_bytes, head) in [
        (false, gauge("limit_requests_per_second", None, "Limit of requests")),
        (true, gauge("limit_bytes_per_second", None, "Limit of bytes")),
    ] {
        let rates = limits().filter_map(|([server, scope, name], limit)| {
            let kind = LimitKind::of_key(&limit.limit).filter(|kind| kind.is_bytes() == is_bytes)?;
            Some(([server, scope, name, ("op", op_of(kind))], Whole(limit.rate)))
        });
        numbers(encoder, &head, rates)?;
    }
    let head = gauge("limit_credit_ratio", None, "Unused share of a limit's credit: 0 if requests wait");
    let credits = limits().map(|([server, scope, name], limit)| {
        ([server, scope, name, ("limit", short(&limit.limit))], Real(ratio(limit.credit, limit.capacity)))
    });
    numbers(encoder, &head, credits)
}

type LimitLabels<'f> = [(&'static str, &'f str); 3];

/// The limits of disks, then those of groups.
fn limits<'f>(server: &'f str, figures: &'f Figures) -> impl Iterator<Item = (LimitLabels<'f>, &'f Limit)> {
    let disks = figures.stats.disks.iter().map(|disk| ("disk", short_of(disk), &disk.throttling.limits));
    let groups = figures.groups.iter().map(|group| ("group", short(&group.group), &group.limits));
    disks.chain(groups).flat_map(move |(scope, name, limits)| {
        let labels = [("server", short(server)), ("scope", scope), ("name", name)];
        limits.iter().map(move |limit| (labels, limit))
    })
}

/// The value of the label `op` for a limit.
fn op_of(kind: LimitKind) -> &'static str {
    match kind {
        LimitKind::Iops | LimitKind::Bps => "total",
        LimitKind::IopsRead | LimitKind::BpsRead => "read",
        LimitKind::IopsWrite | LimitKind::BpsWrite => "write",
    }
}

#[allow(clippy::cast_precision_loss)]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

fn short_of(disk: &Disk) -> &str {
    short(&disk.name)
}

fn short(text: &str) -> &str {
    text.get(..text.floor_char_boundary(MAX_LABEL_BYTES)).unwrap_or(text)
}
