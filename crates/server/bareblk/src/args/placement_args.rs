//! Options that choose which worker submits and completes a disk's requests, and the engine source that they describe.

use std::sync::Arc;

use anyhow::{Result, bail};
use blk_server::{EngineSource, Placement, WorkerId};
use clap::{Args, ValueEnum};
use io_engine::{EngineConfig, EngineKind, EngineOptions, HandOver};

use crate::args::usage::{Contradiction, Wrong};

/// The minimum depth of an engine with a placement: enough for two workers.
const LEAST_DEPTH: u32 = 64;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Placement (experimental)")]
pub struct PlacementArgs {
    /// How requests are submitted and completed
    #[arg(long, value_name = "PLACEMENT", value_enum, default_value_t = PlacementChoice::Queue)]
    pub placement: PlacementChoice,

    /// shared: only the completion worker takes completions, not the worker that submits
    #[arg(long)]
    pub no_reap_on_submit: bool,

    /// shared, completion: the worker that handles completions [default: the first worker that serves the disk]
    #[arg(long, value_name = "N")]
    pub completion_worker: Option<u32>,

    /// completion: when workers hand over their requests: count:N, time:MICROSECONDS or adaptive [default: adaptive]
    #[arg(long, value_name = "POLICY")]
    pub hand_over: Option<HandOver>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlacementChoice {
    /// By the queue's worker, with its own engine
    Queue,
    /// With one engine for all workers of the disk, behind a lock; only io_uring and linux-aio
    Shared,
    /// All by one worker; the others hand their requests over to it
    Completion,
}

impl PlacementArgs {
    /// The placement that the options describe.
    pub fn placement(&self) -> Result<Placement> {
        let Self { placement, no_reap_on_submit, completion_worker, hand_over } = self;
        let is = |wanted| *placement == wanted;
        if *no_reap_on_submit && !is(PlacementChoice::Shared) {
            bail!(Contradiction("--no-reap-on-submit has no effect without --placement shared"));
        }
        if hand_over.is_some() && !is(PlacementChoice::Completion) {
            bail!(Contradiction("--hand-over has no effect without --placement completion"));
        }
        if completion_worker.is_some() && is(PlacementChoice::Queue) {
            let why = "--completion-worker has no effect with --placement queue: each worker completes its own requests";
            bail!(Contradiction(why));
        }
        let completion_worker = completion_worker.map(WorkerId);
        Ok(match placement {
            PlacementChoice::Queue => Placement::Queue,
            PlacementChoice::Shared => {
                Placement::Shared { reap_on_submit: !no_reap_on_submit, completion_worker }
            }
            PlacementChoice::Completion => {
                Placement::Completion { hand_over: hand_over.unwrap_or_default(), completion_worker }
            }
        })
    }
}

/// A disk's own engine source; `None`: the disk uses the server's. `workers`: the server's number of workers.
pub fn engine_source(
    placement: Placement,
    options: &EngineOptions,
    config: &EngineConfig,
    workers: usize,
) -> Result<Option<Arc<EngineSource>>> {
    if placement == Placement::Queue {
        return Ok(None);
    }
    let kind = options.kind();
    let is_shared = matches!(placement, Placement::Shared { .. });
    if is_shared && !matches!(kind, EngineKind::IoUring | EngineKind::LinuxAio) {
        bail!(Wrong(format!(
            "--placement shared needs --engine io_uring or linux-aio: engine {kind} gains nothing from it"
        )));
    }
    if let EngineOptions::IoUring(ring) = options {
        if ring.pin_guest_memory {
            bail!(Contradiction("--pin-guest-memory needs --placement queue"));
        }
        if is_shared && ring.iopoll {
            bail!(Contradiction("--iopoll needs --placement queue or completion"));
        }
    }
    if config.depth < LEAST_DEPTH {
        bail!(
            "an engine depth of {} is too small for --placement {placement}: it must be at least {LEAST_DEPTH}",
            config.depth
        );
    }
    if let Some(WorkerId(worker)) = placement.completion_worker()
        && worker as usize >= workers
    {
        bail!(Wrong(format!(
            "--completion-worker {worker} does not exist: the server has {workers} workers, numbered from 0"
        )));
    }
    let depth = config.depth;
    let config = EngineConfig { several_threads: is_shared, pollable: true, ..config.clone() };
    let options = options.clone();
    let make = move || io_engine::make(options.clone(), &config);
    Ok(Some(EngineSource::placed(format!("{kind}, {placement}"), depth, Box::new(make), placement)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(placement: PlacementChoice) -> PlacementArgs {
        PlacementArgs { placement, no_reap_on_submit: false, completion_worker: None, hand_over: None }
    }

    #[test]
    fn options_without_effect_are_refused_with_what_they_belong_to() {
        let queue = args(PlacementChoice::Queue);
        let shared = args(PlacementChoice::Shared);
        let hand_over = Some(HandOver::by_count(4));
        let refused = [
            PlacementArgs { no_reap_on_submit: true, ..queue.clone() },
            PlacementArgs { completion_worker: Some(1), ..queue.clone() },
            PlacementArgs { hand_over, ..shared.clone() },
        ];
        let lines = refused.map(|args| args.placement().unwrap_err().to_string());
        assert!(lines[0].contains("--placement shared"), "{}", lines[0]);
        assert!(lines[1].contains("--placement queue"), "{}", lines[1]);
        assert!(lines[2].contains("--placement completion"), "{}", lines[2]);
        assert_eq!(queue.placement().unwrap(), Placement::Queue);
    }

    #[test]
    fn engines_and_workers_that_do_not_fit_are_named() {
        let shared = args(PlacementChoice::Shared).placement().unwrap();
        let source =
            |placement, kind: EngineKind| engine_source(placement, &kind.into(), &EngineConfig::default(), 2);
        let sync = source(shared, EngineKind::Sync).unwrap_err().to_string();
        assert_eq!(
            sync,
            "--placement shared needs --engine io_uring or linux-aio: engine sync gains nothing from it"
        );
        let far = PlacementArgs { completion_worker: Some(2), ..args(PlacementChoice::Completion) };
        let far = source(far.placement().unwrap(), EngineKind::Sync).unwrap_err().to_string();
        assert_eq!(far, "--completion-worker 2 does not exist: the server has 2 workers, numbered from 0");
        assert!(source(Placement::Queue, EngineKind::Mmap).unwrap().is_none());
        let source = source(shared, EngineKind::IoUring).unwrap().unwrap();
        assert_eq!(source.name, "io_uring, shared");
    }
}
