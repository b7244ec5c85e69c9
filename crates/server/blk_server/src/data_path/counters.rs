//! Counters of queues and workers: declared once, written by one worker, read by any thread.
//!
//! `plain numbers on the request path → stored once per pass → Server::report → JSON, tables, the balancer`
//!
//! - A line of [`counters!`] declares a counter: its field, JSON key, unit and column. The macro generates the plain
//!   struct with serde, the atomic copy, and all functions that treat every counter alike. A new counter needs a line
//!   here and the code that counts it.
//! - Loads and stores are relaxed: no other data depends on a counter, and a counter has one writer at a time. The
//!   channel through which a queue moves orders the queue's two writers.
//! - A counter starts at 0 with its queue or worker and never decreases. A queue's counters move with it, and its disk
//!   keeps them when it ends (`disk/totals.rs`).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::data_path::latency::LatencyCells;

/// The name of a counter, and the meaning of its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterInfo {
    /// The counter's key in JSON.
    pub key: &'static str,
    /// The unit of the counter's value.
    pub unit: CounterUnit,
    /// Heading of the counter's column in tables; empty if it has no column.
    pub heading: &'static str,
}

/// The unit of a counter's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterUnit {
    /// Events since the start.
    Count,
    /// Bytes since the start.
    Bytes,
    /// Nanoseconds since the start.
    Nanoseconds,
    /// A current value: the counter is a gauge.
    Now,
}

/// Declares counters: `/// meaning`, `"JSON key" => field: type, unit, "column";`. The worker stores the counters in
/// `counted`. A reading fetches the counters in `read` from the kernel.
macro_rules! counters {
    (
        $(#[$plain_meta:meta])* pub struct $plain:ident;
        $(#[$meter_meta:meta])* struct $meter:ident;
        counted { $($(#[$doc:meta])* $key:literal => $field:ident: $type:ty, $unit:ident, $heading:literal;)* }
        read { $($(#[$read_doc:meta])*
            $read_key:literal => $read_field:ident: $read_type:ty, $read_unit:ident, $read_heading:literal;)* }
    ) => {
        $(#[$plain_meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct $plain {
            $($(#[$doc])* #[serde(rename = $key, with = "number")] pub $field: $type,)*
            $($(#[$read_doc])* #[serde(rename = $read_key, with = "number")] pub $read_field: $read_type,)*
        }

        impl $plain {
            /// Each counter, in the order of [`Self::values`].
            pub const ALL: &'static [CounterInfo] = &[
                $(CounterInfo { key: $key, unit: CounterUnit::$unit, heading: $heading },)*
                $(CounterInfo { key: $read_key, unit: CounterUnit::$read_unit, heading: $read_heading },)*
            ];

            /// Each counter with its value.
            pub fn values(&self) -> impl Iterator<Item = (&'static CounterInfo, u64)> {
                let numbers = [$(self.$field.to_number(),)* $(self.$read_field.to_number(),)*];
                Self::ALL.iter().zip(numbers)
            }

            /// The sum of these counters and `other`, gauges included.
            #[must_use]
            pub fn plus(&self, other: &Self) -> Self {
                Self {
                    $($field: plus(self.$field, other.$field),)*
                    $($read_field: plus(self.$read_field, other.$read_field),)*
                }
            }

            /// A copy with all gauges set to 0.
            #[must_use]
            pub fn without_gauges(&self) -> Self {
                Self {
                    $($field: counter(CounterUnit::$unit, self.$field),)*
                    $($read_field: counter(CounterUnit::$read_unit, self.$read_field),)*
                }
            }

            /// The increase since `before`; gauges keep their current value.
            #[must_use]
            pub fn since(&self, before: &Self) -> Self {
                Self {
                    $($field: since(CounterUnit::$unit, self.$field, before.$field),)*
                    $($read_field: since(CounterUnit::$read_unit, self.$read_field, before.$read_field),)*
                }
            }
        }

        $(#[$meter_meta])*
        #[derive(Debug, Default)]
        struct $meter {
            $($field: AtomicU64,)*
        }

        impl $meter {
            #[inline]
            fn store(&self, counted: &$plain) {
                $(self.$field.store(counted.$field.to_number(), Relaxed);)*
            }

            fn load(&self) -> $plain {
                $plain {
                    $($field: <$type>::from_number(self.$field.load(Relaxed)),)*
                    $($read_field: <$read_type>::default(),)*
                }
            }
        }
    };
}

counters! {
    /// What a queue has done since its start.
    pub struct QueueCounters;
    struct QueueCells;
    counted {
        /// Reads answered.
        "reads" => reads: u64, Count, "READS";
        /// Bytes read.
        "read_bytes" => read_bytes: u64, Bytes, "MB";
        /// Writes answered.
        "writes" => writes: u64, Count, "WRITES";
        /// Bytes written.
        "written_bytes" => written_bytes: u64, Bytes, "MB";
        /// Flushes answered.
        "flushes" => flushes: u64, Count, "FLUSHES";
        /// Discards and write-zeroes answered, and all requests answered without the engine: get-id, unsupported types,
        /// transfers of 0 bytes, flushes that the disk ignores, refused and malformed requests. A chain that the queue
        /// returns without a status is not counted.
        "other" => other: u64, Count, "OTHER";
        /// Requests answered with IOERR; each is also counted as a read, write, flush or other request.
        "errors" => errors: u64, Count, "ERRORS";
        /// Requests taken but not yet answered.
        "in_flight" => in_flight: u64, Now, "QD";
        /// Parked requests, a part of those in flight.
        "held" => parked: u64, Now, "HELD";
        /// Retries of parked requests.
        "retries" => retries: u64, Count, "";
        /// Time for which requests were parked, counted at each retry.
        "held_ns" => parked_time: Duration, Nanoseconds, "";
        /// Requests that took as long as the disk's `slow-ms`, or longer.
        "slow" => slow: u64, Count, "";
        /// Interrupts sent to the guest (call fd signalled).
        "calls" => calls: u64, Count, "CALLS";
        /// Kicks received.
        "kicks" => kicks: u64, Count, "KICKS";
        /// Moves to another worker.
        "moves" => moves: u64, Count, "MOVES";
        /// Time that the worker spent on the queue's requests, estimated from samples.
        "worker_ns" => worker_time: Duration, Nanoseconds, "";
    }
    read {}
}

counters! {
    /// What a worker has done since its start.
    pub struct WorkerCounters;
    struct WorkerCells;
    counted {
        /// Passes that found work.
        "busy_passes" => busy_passes: u64, Count, "BUSY";
        /// Passes that found no work: polling.
        "idle_passes" => idle_passes: u64, Count, "IDLE";
        /// Times that the worker went to sleep.
        "sleeps" => sleeps: u64, Count, "SLEEPS";
        /// Time spent taking and submitting requests, estimated from samples.
        "submission_ns" => submission_time: Duration, Nanoseconds, "SUBMIT ms";
        /// Time spent on completions, estimated from samples.
        "completion_ns" => completion_time: Duration, Nanoseconds, "COMPL ms";
    }
    read {
        /// Processor time of the worker's thread.
        "cpu_ns" => cpu_time: Duration, Nanoseconds, "CPU ms";
        /// Time for which the worker's thread was ready to run but had no processor.
        "wait_ns" => wait_time: Duration, Nanoseconds, "";
    }
}

impl QueueCounters {
    /// Requests answered.
    #[must_use]
    pub fn requests(&self) -> u64 {
        [self.writes, self.flushes, self.other].into_iter().fold(self.reads, u64::saturating_add)
    }
}

/// A queue's counters and latencies, as other threads read them.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct QueueMeter {
    cells: QueueCells,
    pub(crate) latency: LatencyCells,
}

impl QueueMeter {
    #[inline]
    pub(crate) fn store(&self, counted: &QueueCounters) {
        self.cells.store(counted);
    }

    pub(crate) fn read(&self) -> QueueCounters {
        self.cells.load()
    }
}

/// A worker's counters, as other threads read them.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct WorkerMeter {
    /// The thread ID (TID) of the worker's thread; 0 until the thread runs.
    thread: AtomicU32,
    cells: WorkerCells,
}

impl WorkerMeter {
    /// Records that the calling thread is the worker's.
    pub(crate) fn runs_here(&self) {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.thread.store(thread.unsigned_abs(), Relaxed);
    }

    pub(crate) fn thread(&self) -> u32 {
        self.thread.load(Relaxed)
    }

    #[inline]
    pub(crate) fn store(&self, counted: &WorkerCounters) {
        self.cells.store(counted);
    }

    /// Returns the counters, with the thread's times as the kernel reports them.
    pub(crate) fn read(&self) -> WorkerCounters {
        let (cpu_time, wait_time) = scheduled(self.thread());
        WorkerCounters { cpu_time, wait_time, ..self.cells.load() }
    }
}

/// How long a thread of this process ran, and how long it was ready to run without a processor; zero if unknown.
fn scheduled(thread: u32) -> (Duration, Duration) {
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).unwrap_or_default();
    let mut numbers = text.split_whitespace().map(|number| number.parse().unwrap_or(0));
    let mut next = || Duration::from_nanos(numbers.next().unwrap_or(0));
    (next(), next())
}

/// Converts a counter's type to and from a number, for storage and JSON.
trait Number: Copy + Default {
    fn to_number(self) -> u64;
    fn from_number(number: u64) -> Self;
}

impl Number for u64 {
    #[inline]
    fn to_number(self) -> u64 {
        self
    }

    fn from_number(number: u64) -> Self {
        number
    }
}

/// A duration is stored in nanoseconds, which suffices for 584 years.
impl Number for Duration {
    #[inline]
    fn to_number(self) -> u64 {
        u64::try_from(self.as_nanos()).unwrap_or(u64::MAX)
    }

    fn from_number(number: u64) -> Self {
        Self::from_nanos(number)
    }
}

fn plus<N: Number>(a: N, b: N) -> N {
    N::from_number(a.to_number().saturating_add(b.to_number()))
}

fn counter<N: Number>(unit: CounterUnit, number: N) -> N {
    match unit {
        CounterUnit::Now => N::default(),
        _ => number,
    }
}

fn since<N: Number>(unit: CounterUnit, now: N, before: N) -> N {
    match unit {
        CounterUnit::Now => now,
        _ => N::from_number(now.to_number().saturating_sub(before.to_number())),
    }
}

/// Writes and reads a counter with serde.
mod number {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::Number;

    pub(super) fn serialize<N: Number, S: Serializer>(counter: &N, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(counter.to_number())
    }

    pub(super) fn deserialize<'de, N: Number, D: Deserializer<'de>>(from: D) -> Result<N, D::Error> {
        u64::deserialize(from).map(N::from_number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives each counter a different value: its position in the list, counted from 1.
    fn numbered<T: for<'de> Deserialize<'de>>(all: &[CounterInfo]) -> T {
        let numbers = all.iter().zip(1_u64..).map(|(counter, n)| (counter.key.to_owned(), n.into()));
        serde_json::from_value(serde_json::Value::Object(numbers.collect())).unwrap()
    }

    fn numbers(values: impl Iterator<Item = (&'static CounterInfo, u64)>) -> Vec<u64> {
        values.map(|(_, number)| number).collect()
    }

    #[test]
    fn every_counter_of_a_queue_is_read_as_it_was_stored() {
        let counted: QueueCounters = numbered(QueueCounters::ALL);
        let meter = QueueMeter::default();
        meter.store(&counted);
        assert_eq!(meter.read(), counted);
        let expected: Vec<u64> = (1..).take(QueueCounters::ALL.len()).collect();
        assert_eq!(numbers(meter.read().values()), expected);
    }

    #[test]
    fn every_counter_of_a_worker_is_read_as_it_was_stored_and_its_times_come_from_the_kernel() {
        let counted: WorkerCounters = numbered(WorkerCounters::ALL);
        let meter = WorkerMeter::default();
        meter.store(&counted);
        // No thread has the ID 0, so the kernel reports no times for it.
        let expected = WorkerCounters { cpu_time: Duration::ZERO, wait_time: Duration::ZERO, ..counted };
        assert_eq!(meter.read(), expected);
    }

    #[test]
    fn difference_of_two_readings_subtracts_counters_and_keeps_gauges() {
        let before: QueueCounters = numbered(QueueCounters::ALL);
        let now = QueueCounters { reads: 100, in_flight: 3, parked: 2, ..before };
        let expected = QueueCounters { reads: 99, in_flight: 3, parked: 2, ..QueueCounters::default() };
        assert_eq!(now.since(&before), expected);
    }

    #[test]
    fn sum_adds_all_counters_and_a_sum_without_gauges_has_none() {
        let one: QueueCounters = numbered(QueueCounters::ALL);
        let expected: Vec<u64> = (1..).take(QueueCounters::ALL.len()).map(|number| 2 * number).collect();
        assert_eq!(numbers(one.plus(&one).values()), expected);
        let counters = one.without_gauges();
        assert_eq!(counters, QueueCounters { in_flight: 0, parked: 0, ..one });
    }

    #[test]
    fn keys_of_a_queue_are_those_of_the_protocol() {
        let json = serde_json::to_value(QueueCounters { parked: 5, ..QueueCounters::default() }).unwrap();
        assert_eq!((json["held"].as_u64(), json["worker_ns"].as_u64()), (Some(5), Some(0)));
        assert_eq!(json.as_object().unwrap().len(), QueueCounters::ALL.len());
    }
}
