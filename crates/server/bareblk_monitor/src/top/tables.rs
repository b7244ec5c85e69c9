//! The columns of each screen, and the rows that fill them. A figure that `bareblk ctl` shows too has the same heading
//! there.

use bareblk::client::format_cpus;

use super::grid::{Alarm, Column, Grid, Order, Row, Value};
use super::latency::Percentiles;
use super::sample::{DiskSample, LimitSample, QueueSample, Sample, State, WorkerSample};
use super::units::float;

const WIDE: u16 = 120;
const USUAL: u16 = 80;
const NARROW: u16 = 40;

const DISKS: &[Column] = &[
    Column::words("SERVER", 0),
    Column::words("DISK", 0),
    Column::figures("IOPS", 0),
    Column::figures("READ/s", WIDE),
    Column::figures("WRITE/s", WIDE),
    Column::figures("FLUSH/s", WIDE),
    Column::figures("ERR/s", WIDE),
    Column::figures("MB/s", 0),
    Column::figures("p50", USUAL),
    Column::figures("p99", 0),
    Column::figures("QD", USUAL),
    Column::figures("HELD", WIDE),
    Column::figures("THR%", 0),
    Column::figures("CREDIT%", USUAL),
    Column::figures("µs/IO", WIDE),
    Column::words("STATE", USUAL),
];
const QUEUES: &[Column] = &[
    Column::words("SERVER", 0),
    Column::words("DISK", 0),
    Column::figures("QUEUE", 0),
    Column::figures("WORKER", 0),
    Column::figures("IOPS", 0),
    Column::figures("MB/s", NARROW),
    Column::figures("QD", NARROW),
    Column::figures("SIZE", USUAL),
    Column::figures("HELD", USUAL),
    Column::figures("KICK/s", USUAL),
    Column::figures("CALL/s", USUAL),
    Column::figures("µs/IO", USUAL),
];
const WORKERS: &[Column] = &[
    Column::words("SERVER", 0),
    Column::figures("WORKER", 0),
    Column::figures("CPU%", 0),
    Column::figures("WAIT%", 0),
    Column::figures("QUEUES", NARROW),
    Column::figures("SUBMIT%", USUAL),
    Column::figures("COMPL%", USUAL),
    Column::figures("SLEEP/s", USUAL),
    Column::words("CPUS", USUAL),
];
const GROUPS: &[Column] = &[
    Column::words("SERVER", 0),
    Column::words("SCOPE", NARROW),
    Column::words("NAME", 0),
    Column::words("LIMIT", 0),
    Column::figures("RATE/s", NARROW),
    Column::figures("USED/s", 0),
    Column::figures("USE%", USUAL),
    Column::figures("CREDIT%", USUAL),
];

/// A server's number, its name if there are several servers, and its last interval.
pub type Of<'s> = (usize, Option<&'s str>, &'s Sample);

/// The kind of rows that a table shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Subject {
    Disks,
    Queues,
    Workers,
    Groups,
}

impl Subject {
    /// The table of all servers.
    pub fn grid<'s>(self, servers: impl Iterator<Item = Of<'s>>) -> Grid {
        let mut grid = Grid { columns: self.columns(), rows: Vec::new() };
        for (place, label, sample) in servers {
            let label = label.map_or(Value::Missing, |label| Value::Words(label.to_owned()));
            grid.rows.extend(self.rows(place, sample).into_iter().map(|mut row| {
                row.cells.insert(0, label.clone());
                row
            }));
        }
        grid
    }

    fn columns(self) -> &'static [Column] {
        match self {
            Self::Disks => DISKS,
            Self::Queues => QUEUES,
            Self::Workers => WORKERS,
            Self::Groups => GROUPS,
        }
    }

    /// The order until the user chooses a different one: the busiest first, but workers by number.
    pub fn usual_order(self) -> Order {
        let heading = match self {
            Self::Disks | Self::Queues => "IOPS",
            Self::Workers => "WORKER",
            Self::Groups => "USED/s",
        };
        let column = self.columns().iter().position(|column| column.heading == heading).unwrap_or(0);
        Order { column, is_reversed: self == Self::Workers }
    }

    fn rows(self, place: usize, sample: &Sample) -> Vec<Row> {
        match self {
            Self::Disks => sample.disks.iter().map(|disk| disk_row(place, disk)).collect(),
            Self::Queues => sample.disks.iter().flat_map(|disk| queue_rows(place, disk)).collect(),
            Self::Workers => sample.workers.iter().map(|worker| worker_row(place, worker)).collect(),
            Self::Groups => sample.limits.iter().map(|limit| limit_row(place, limit)).collect(),
        }
    }
}

fn disk_row(place: usize, disk: &DiskSample) -> Row {
    let percent = |percent: Option<f64>| percent.map_or(Value::Missing, Value::Percent);
    let latency = |of: fn(&Percentiles) -> u64| {
        disk.latency.as_ref().map_or(Value::Missing, |latency| Value::Time(of(latency)))
    };
    let alarm = match disk.state {
        State::Failed => Alarm::Failure,
        State::Holding | State::Throttled => Alarm::Attention,
        State::Ok | State::ReadOnly | State::NoGuest => Alarm::None,
    };
    let cells = vec![
        Value::Words(disk.name.clone()),
        Value::Figure(disk.iops),
        Value::Figure(disk.reads_per_s),
        Value::Figure(disk.writes_per_s),
        Value::Figure(disk.flushes_per_s),
        Value::Figure(disk.errors_per_s),
        Value::Figure(disk.mb_per_s()),
        latency(|latency| latency.p50_ns),
        latency(|latency| latency.p99_ns),
        Value::Number(disk.in_flight),
        Value::Number(disk.held),
        percent(disk.throttled_percent),
        percent(disk.credit_percent),
        Value::of(disk.worker_us_per_request),
        Value::Words(disk.state.word().to_owned()),
    ];
    Row { id: (place, disk.name.clone()), name: disk.name.clone(), alarm, cells }
}

fn queue_rows(place: usize, disk: &DiskSample) -> impl Iterator<Item = Row> {
    let row = move |queue: &QueueSample| Row {
        id: (place, format!("{}\0{:05}", disk.name, queue.queue)),
        name: disk.name.clone(),
        alarm: if queue.held > 0 { Alarm::Attention } else { Alarm::None },
        cells: vec![
            Value::Words(disk.name.clone()),
            Value::Number(queue.queue.into()),
            Value::Number(queue.worker.into()),
            Value::Figure(queue.iops),
            Value::Figure(queue.mb_per_s),
            Value::Number(queue.in_flight),
            Value::Number(queue.size.into()),
            Value::Number(queue.held),
            Value::Figure(queue.kicks_per_s),
            Value::Figure(queue.calls_per_s),
            Value::of(queue.worker_us_per_request),
        ],
    };
    disk.queues.iter().map(row)
}

fn worker_row(place: usize, worker: &WorkerSample) -> Row {
    let cells = vec![
        Value::Number(worker.worker.into()),
        Value::Percent(worker.cpu_percent),
        Value::Percent(worker.wait_percent),
        Value::Number(u64::try_from(worker.queues).unwrap_or(u64::MAX)),
        Value::Percent(worker.submission_percent),
        Value::Percent(worker.completion_percent),
        Value::Figure(worker.sleeps_per_s),
        if worker.cpus.is_empty() { Value::Missing } else { Value::Words(format_cpus(&worker.cpus)) },
    ];
    let name = worker.worker.to_string();
    Row { id: (place, format!("{:010}", worker.worker)), name, alarm: Alarm::None, cells }
}

fn limit_row(place: usize, limit: &LimitSample) -> Row {
    let rate = float(limit.rate);
    let cells = vec![
        Value::Words(limit.scope.to_owned()),
        Value::Words(limit.name.clone()),
        Value::Words(limit.limit.clone()),
        Value::Figure(rate),
        Value::Figure(limit.used_per_s),
        Value::Percent(limit.used_per_s * 100.0 / rate.max(1.0)),
        Value::Percent(limit.credit_percent),
    ];
    let id = (place, format!("{}\0{}\0{}", limit.scope, limit.name, limit.limit));
    Row { id, name: limit.name.clone(), alarm: Alarm::None, cells }
}
