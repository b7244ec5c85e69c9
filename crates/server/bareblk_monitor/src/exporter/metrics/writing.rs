//! Writes one metric with all its samples.

use std::fmt;

use prometheus_client::encoding::{
    CounterValueEncoder, DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet,
    GaugeValueEncoder,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

use crate::exporter::histogram::{Histogram, seconds};

/// The type of exemplar labels, which the encoder requires although there are no exemplars.
type NoLabels = [(&'static str, &'static str); 0];

/// The properties that all samples of a metric share.
#[derive(Debug)]
pub struct Head {
    kind: MetricType,
    /// The metric's name without the prefix, the unit and `_total`.
    name: &'static str,
    unit: Option<Unit>,
    help: &'static str,
}

pub const fn counter(name: &'static str, unit: Option<Unit>, help: &'static str) -> Head {
    Head { kind: MetricType::Counter, name, unit, help }
}

pub const fn gauge(name: &'static str, unit: Option<Unit>, help: &'static str) -> Head {
    Head { kind: MetricType::Gauge, name, unit, help }
}

/// A value, in the unit that the server uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    Whole(u64),
    /// Nanoseconds, written as seconds.
    Ns(u64),
    Real(f64),
}

impl EncodeCounterValue for Number {
    fn encode(&self, encoder: &mut CounterValueEncoder<'_>) -> fmt::Result {
        match self {
            Self::Whole(value) => EncodeCounterValue::encode(value, encoder),
            Self::Ns(value) => EncodeCounterValue::encode(&seconds(*value), encoder),
            Self::Real(value) => EncodeCounterValue::encode(value, encoder),
        }
    }
}

impl EncodeGaugeValue for Number {
    fn encode(&self, encoder: &mut GaugeValueEncoder<'_>) -> fmt::Result {
        match self {
            Self::Whole(value) => EncodeGaugeValue::encode(value, encoder),
            Self::Ns(value) => EncodeGaugeValue::encode(&seconds(*value), encoder),
            Self::Real(value) => EncodeGaugeValue::encode(value, encoder),
        }
    }
}

/// Writes a counter or a gauge.
pub fn numbers<L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    head: &Head,
    samples: impl Iterator<Item = (L, Number)>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(head.name, head.help, head.unit.as_ref(), head.kind)?;
    for (labels, number) in samples {
        let mut sample = metric.encode_family(&labels)?;
        match head.kind {
            MetricType::Counter => sample.encode_counter::<NoLabels, _, f64>(&number, None)?,
            _ => sample.encode_gauge(&number)?,
        }
    }
    Ok(())
}

/// Writes a metric whose only information is in its labels. The encoder appends `_info` to the name.
pub fn infos<L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    samples: impl Iterator<Item = L>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Info)?;
    samples.into_iter().try_for_each(|labels| metric.encode_info(&labels))
}

/// Writes a histogram of seconds.
pub fn histograms<L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    samples: impl Iterator<Item = (L, Histogram)>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Histogram)?;
    for (labels, Histogram { sum_seconds, count, buckets }) in samples {
        let mut sample = metric.encode_family(&labels)?;
        sample.encode_histogram::<NoLabels>(sum_seconds, count, &buckets, None)?;
    }
    Ok(())
}
