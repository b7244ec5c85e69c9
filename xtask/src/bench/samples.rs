//! The times that criterion keeps: one file of samples per benchmark.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

/// The time of one request: minimum, median and maximum of criterion's samples.
#[derive(Debug, Serialize, PartialEq)]
pub(super) struct Time {
    pub(super) depth: u32,
    unit: &'static str,
    runs: usize,
    pub(super) min: f64,
    pub(super) median: f64,
    pub(super) max: f64,
}

/// Reads the last samples of `group` at this depth. `home` is criterion's folder.
pub(super) fn read(home: &Path, group: &str, depth: u32) -> Result<Time> {
    let path = home.join(group).join("depth").join(depth.to_string()).join("new").join("sample.json");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    time(depth, &serde_json::from_str(&text)?)
}

/// For each sample, criterion keeps the number of batches and their time in nanoseconds.
fn time(depth: u32, sample: &Value) -> Result<Time> {
    let numbers = |name: &str| {
        let array = sample[name].as_array().with_context(|| format!("criterion's sample has no {name}"))?;
        Ok::<_, anyhow::Error>(array.iter().filter_map(Value::as_f64).collect::<Vec<_>>())
    };
    let (batches, times) = (numbers("iters")?, numbers("times")?);
    let per_request = |(time, batches): (&f64, &f64)| time / batches / f64::from(depth);
    let mut each: Vec<f64> = times.iter().zip(&batches).map(per_request).collect();
    each.sort_by(f64::total_cmp);
    let at = |index: usize| each.get(index).map(|ns| (ns * 10.0).round() / 10.0).context("no samples");
    let (min, median) = (at(0)?, at(each.len() / 2)?);
    Ok(Time { depth, unit: "ns per request", runs: each.len(), min, median, max: at(each.len() - 1)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_a_request_is_the_batchs_shared_out() {
        let sample = serde_json::json!({ "iters": [1.0, 2.0, 1.0], "times": [640.0, 1408.0, 6400.0] });
        let time = time(64, &sample).unwrap();
        assert_eq!((time.runs, time.min, time.median, time.max), (3, 10.0, 11.0, 100.0));
    }

    #[test]
    fn sample_without_numbers_is_an_error() {
        assert!(time(1, &serde_json::json!({})).is_err());
        assert!(time(1, &serde_json::json!({ "iters": [], "times": [] })).is_err());
    }
}
