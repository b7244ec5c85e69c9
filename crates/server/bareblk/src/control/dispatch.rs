//! Carries out a verb and builds its answer.

use std::path::PathBuf;

use blk_server::{AdminError, Attached, WorkerId};
use serde::Serialize;
use serde_json::{Value, json};
use tracing::info;

use super::answers::jobs::JobsAnswer;
use super::answers::placement::PlacementAnswer;
use super::answers::reports::{HealthAnswer, ListAnswer, Overlaid, ShowAnswer, StatsAnswer, WorkersAnswer};
use super::answers::slow::SlowAnswer;
use super::answers::throttling::LimitAnswer;
use super::protocol::answer::{ErrorKind, Fault, ns};
use super::protocol::verbs::{
    Attach, Flush, Health, JobCancel, Limit, Placement, Remove, Resize, Resume, Show, Slow, Snapshot, Stats,
    Verb, WorkersRemove,
};
use super::refused::Refused;
use super::{Control, disk_names, worker_settings};

/// Carries out `verb`, whose disks may be given by the last parts of their paths.
pub fn execute(mut verb: Verb, control: &dyn Control) -> Result<Value, Fault> {
    name_disks(&mut verb, control)?;
    match &verb {
        Verb::List => value(&ListAnswer::new(&control.report(), control.waiting())),
        Verb::Stats(wanted) => value(&stats(wanted.clone(), control)?),
        Verb::Slow(Slow { disk }) => {
            let (limit, requests) = control.slow_requests(disk).map_err(Fault::from)?;
            value(&SlowAnswer::new(limit, &requests))
        }
        Verb::Jobs => value(&JobsAnswer { jobs: control.jobs() }),
        Verb::Workers => value(&WorkersAnswer::new(&control.report())),
        Verb::Show(Show { disk }) => value(&show(disk, control)?),
        Verb::Health(Health { timeout_ms }) => {
            let silent = control.silent_workers((*timeout_ms).into()).map_err(Fault::from)?;
            value(&HealthAnswer::new(&control.report(), &control.waiting(), &silent))
        }
        Verb::Unpause => Err(Fault::new(
            ErrorKind::NotPaused,
            "this connection holds no disk paused: a pause ends with the connection's next request, or at its time limit",
        )),
        Verb::Placement(Placement { disk, completion_worker: None, .. }) => {
            value(&PlacementAnswer::of(disk, &control.report())?)
        }
        Verb::Limit(Limit { disk, group, set }) if set.is_empty() => {
            value(&LimitAnswer::of(disk.as_deref(), group.as_deref(), &control.report())?)
        }
        changing => {
            let answer = change(changing, control).map_err(Fault::from);
            match &answer {
                Ok(_) => info!(request = %shown(changing), "a control client changed the server"),
                Err(fault) => {
                    info!(request = %shown(changing), "a control client's request failed: {}", fault.message);
                }
            }
            answer
        }
    }
}

/// Carries out [`Verb::Stats`]. Its answer is long, so a session writes it without [`execute`]'s copy of all values.
pub fn stats(mut wanted: Stats, control: &dyn Control) -> Result<StatsAnswer, Fault> {
    name(wanted.disks.iter_mut().flatten().collect(), control)?;
    StatsAnswer::new(&control.report(), &wanted)
}

/// Replaces each disk in the request by its full name.
pub fn name_disks(verb: &mut Verb, control: &dyn Control) -> Result<(), Fault> {
    name(verb.disks_mut(), control)
}

fn name(named: Vec<&mut String>, control: &dyn Control) -> Result<(), Fault> {
    if named.is_empty() {
        return Ok(());
    }
    let disks = control.disks();
    named.into_iter().try_for_each(|disk| disk_names::resolve(disk, &disks).map(|name| *disk = name))
}

fn show(disk: &str, control: &dyn Control) -> Result<ShowAnswer, Fault> {
    let settings = control.settings(disk).map_err(Fault::from)?;
    let wanted = Stats { disks: Some(vec![disk.to_owned()]), ..Stats::default() };
    let answer = StatsAnswer::new(&control.report(), &wanted)?;
    let gone = || Refused::Server(AdminError::NoDisk { name: disk.to_owned() });
    let found = answer.disks.into_iter().next().ok_or_else(gone)?;
    Ok(ShowAnswer { disk: found, settings })
}

fn change(verb: &Verb, control: &dyn Control) -> Result<Value, Refused> {
    match verb {
        Verb::WorkersAdd(settings) => {
            let id = control.add_worker(worker_settings::options(settings)?)?;
            Ok(json!({"worker": id.0}))
        }
        Verb::WorkersRemove(WorkersRemove { worker, timeout_ms }) => {
            control.remove_worker(WorkerId(*worker), (*timeout_ms).into())?;
            Ok(json!({}))
        }
        Verb::Attach(Attach { disk, queue, worker, timeout_ms }) => {
            let attached = control.attach(disk, *queue, WorkerId(*worker), (*timeout_ms).into())?;
            Ok(json!({"runs": attached == Attached::Running}))
        }
        Verb::Placement(Placement { disk, completion_worker, timeout_ms }) => {
            if let Some(worker) = completion_worker {
                control.set_completion_worker(disk, worker.map(WorkerId), (*timeout_ms).into())?;
            }
            Ok(json!({}))
        }
        Verb::Add(add) => Ok(json!({"disk": control.add_disk(add.disk.clone())?})),
        Verb::Remove(Remove { disk, force, timeout_ms }) => {
            control.remove_disk(disk, *force, (*timeout_ms).into())?;
            Ok(json!({}))
        }
        Verb::Resize(Resize { disk, size_bytes, force }) => {
            control.resize_disk(disk, *size_bytes, *force)?;
            Ok(json!({}))
        }
        Verb::Resume(Resume { disk, timeout_ms }) => {
            Ok(json!({"resumed": control.resume_disk(disk, (*timeout_ms).into())?}))
        }
        Verb::Limit(limit) => Ok(json!({"until_reload": set_limits(limit, control)?})),
        Verb::Flush(Flush { disk, timeout_ms }) => {
            control.flush_disk(disk, (*timeout_ms).into())?;
            Ok(json!({}))
        }
        Verb::Snapshot(wanted) => snapshot(wanted, control),
        Verb::JobStart(job) => control.start_job(job).map(|()| json!({"disk": job.disk})),
        Verb::JobChange(change) => control.change_job(change).map(|()| json!({})),
        Verb::JobCancel(JobCancel { disk }) => control.cancel_job(disk).map(|()| json!({})),
        Verb::Reload => {
            serde_json::to_value(control.reload()?).map_err(|error| Refused::Failed(error.into()))
        }
        // The other verbs change nothing, or the session carries them out.
        Verb::List
        | Verb::Stats(_)
        | Verb::Slow(_)
        | Verb::Jobs
        | Verb::Workers
        | Verb::Show(_)
        | Verb::Health(_)
        | Verb::Pause(_)
        | Verb::Unpause
        | Verb::Shutdown
        | Verb::LiveUpgrade(_) => Ok(json!({})),
    }
}

fn snapshot(wanted: &Snapshot, control: &dyn Control) -> Result<Value, Refused> {
    let Snapshot { files, overlay, timeout_ms } = wanted;
    let files = files.iter().map(|file| (file.disk.clone(), PathBuf::from(&file.file)));
    let (files, timeout) = (files.collect::<Vec<_>>(), (*timeout_ms).into());
    if *overlay {
        let Overlaid { paused, keys } = control.overlay(&files, timeout)?;
        return Ok(json!({"paused_ns": ns(paused), "keys": keys}));
    }
    Ok(json!({"paused_ns": ns(control.snapshot(&files, timeout)?)}))
}

/// Returns whether a reload will restore the limits of the configuration file.
fn set_limits(limit: &Limit, control: &dyn Control) -> Result<bool, Refused> {
    match (&limit.disk, &limit.group) {
        (Some(disk), None) => control.limit_disk(disk, &limit.set),
        (None, Some(group)) => control.limit_group(group, &limit.set),
        _ => Err(Refused::Settings("limit: `set` needs either `disk` or `group`".into())),
    }
}

/// The request as text for the log, which records all changes. The limit of a line also limits this text.
fn shown(verb: &Verb) -> String {
    serde_json::to_string(verb).unwrap_or_default()
}

fn value(answer: &impl Serialize) -> Result<Value, Fault> {
    serde_json::to_value(answer).map_err(|error| Fault::new(ErrorKind::Failed, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::super::answers::reports::ReloadAnswer;
    use super::super::protocol::request::parse;
    use super::super::protocol::verbs::Add;
    use super::super::rig::Told;
    use super::*;

    fn done(line: &str) -> (Result<Value, Fault>, Vec<String>) {
        let told = Told::default();
        let answer = execute(parse(line.as_bytes()).unwrap().verb, &told);
        (answer, told.calls())
    }

    #[test]
    fn each_change_reaches_the_server_with_its_values() {
        let lines = [
            (
                r#"{"id":1,"do":"workers-add","cpus":[1],"nice":5}"#,
                "add_worker [1] Some(5)",
                json!({"worker": 7}),
            ),
            (
                r#"{"id":1,"do":"workers-remove","worker":3,"timeout_ms":20}"#,
                "remove_worker 3 20ms",
                json!({}),
            ),
            (
                r#"{"id":1,"do":"attach","disk":"a","queue":1,"worker":2}"#,
                "attach a 1 2 10s",
                json!({"runs": false}),
            ),
            (
                r#"{"id":1,"do":"placement","disk":"a","completion_worker":3}"#,
                "set_completion_worker a Some(3) 10s",
                json!({}),
            ),
            (
                r#"{"id":1,"do":"placement","disk":"a","completion_worker":null,"timeout_ms":0}"#,
                "set_completion_worker a None 0ns",
                json!({}),
            ),
            (r#"{"id":1,"do":"add","disk":{"name":"x"}}"#, r#"add_disk {"name":"x"}"#, json!({"disk": "x"})),
            (r#"{"id":1,"do":"remove","disk":"a","force":true}"#, "remove_disk a true 10s", json!({})),
            (r#"{"id":1,"do":"resize","disk":"a","size_bytes":512}"#, "resize_disk a 512 false", json!({})),
            (r#"{"id":1,"do":"resume","disk":"a"}"#, "resume_disk a 10s", json!({"resumed": 3})),
            (
                r#"{"id":1,"do":"limit","disk":"a","set":{"iops":5}}"#,
                r#"limit_disk a {"iops":5}"#,
                json!({"until_reload": true}),
            ),
            (
                r#"{"id":1,"do":"limit","group":"g","set":{"bps":null}}"#,
                r#"limit_group g {"bps":null}"#,
                json!({"until_reload": true}),
            ),
            (r#"{"id":1,"do":"flush","disk":"a","timeout_ms":20}"#, "flush_disk a 20ms", json!({})),
            (
                r#"{"id":1,"do":"snapshot","files":[{"disk":"long.raw","file":"/s"}]}"#,
                r#"snapshot [("/images/long.raw", "/s")] 10s"#,
                json!({"paused_ns": 7}),
            ),
            (
                r#"{"id":1,"do":"health","timeout_ms":5}"#,
                "silent_workers 5ms",
                json!({"healthy": false, "workers": 0, "disks": 0, "silent_workers": [5], "failed_disks": [], "refused_disks": [], "waiting_disks": [], "holding_disks": []}),
            ),
            (r#"{"id":1,"do":"reload"}"#, "reload", json!(ReloadAnswer::default())),
        ];
        for (line, call, answer) in lines {
            assert_eq!(done(line), (Ok(answer), vec![call.to_owned()]), "{line}");
        }
    }

    #[test]
    fn jobs_reach_the_server_with_their_values() {
        let lines = [
            (
                r#"{"id":1,"do":"job-start","disk":"long.raw","kind":"commit","rate":5}"#,
                r#"start_job JobStart { disk: "/images/long.raw", kind: Commit, rate: 5, paused: false }"#,
                json!({"disk": "/images/long.raw"}),
            ),
            (
                r#"{"id":1,"do":"job-change","disk":"long.raw","paused":true}"#,
                r#"change_job JobChange { disk: "/images/long.raw", paused: Some(true), rate: None }"#,
                json!({}),
            ),
            (r#"{"id":1,"do":"job-cancel","disk":"long.raw"}"#, "cancel_job /images/long.raw", json!({})),
        ];
        for (line, call, answer) in lines {
            assert_eq!(done(line), (Ok(answer), vec![call.to_owned()]), "{line}");
        }
    }

    #[test]
    fn overlay_is_another_snapshot_and_says_what_the_next_start_needs() {
        let line = r#"{"id":1,"do":"snapshot","files":[{"disk":"long.raw","file":"/s"}],"overlay":true}"#;
        let call = r#"overlay [("/images/long.raw", "/s")] 10s"#.to_owned();
        assert_eq!(done(line), (Ok(json!({"paused_ns": 7, "keys": ["image=/s"]})), vec![call]));
    }

    #[test]
    fn refusal_of_the_server_keeps_its_kind_and_its_words() {
        let (answer, _) = done(r#"{"id":1,"do":"attach","disk":"none","queue":1,"worker":2}"#);
        assert_eq!(answer, Err(Fault::new(ErrorKind::NoDisk, "there is no disk `none`")));
    }

    #[test]
    fn disk_may_be_given_by_the_end_of_its_path() {
        let (answer, calls) = done(r#"{"id":1,"do":"remove","disk":"long.raw"}"#);
        assert_eq!(
            (answer, calls),
            (Ok(json!({})), vec!["remove_disk /images/long.raw false 10s".to_owned()])
        );
        let (answer, calls) = done(r#"{"id":1,"do":"remove","disk":"other"}"#);
        assert_eq!(calls, Vec::<String>::new());
        assert!(answer.unwrap_err().message.starts_with("there is no disk `other`: the disks are `a`"));
    }

    #[test]
    fn placement_that_is_only_asked_for_changes_nothing() {
        let (answer, calls) = done(r#"{"id":1,"do":"placement","disk":"a"}"#);
        assert_eq!(answer, Err(Fault::new(ErrorKind::NoDisk, "there is no disk `a`")));
        assert_eq!(calls, Vec::<String>::new());
    }

    #[test]
    fn statistics_of_a_disk_that_does_not_exist_are_refused_by_name() {
        let (answer, _) = done(r#"{"id":1,"do":"stats","disks":["none"]}"#);
        assert_eq!(answer, Err(Fault::new(ErrorKind::NoDisk, "there is no disk `none`")));
        let (answer, _) = done(r#"{"id":1,"do":"slow","disk":"none"}"#);
        assert_eq!(answer, Err(Fault::new(ErrorKind::NoDisk, "there is no disk `none`")));
    }

    #[test]
    fn wrong_settings_of_a_worker_do_not_reach_the_server() {
        let (answer, calls) = done(r#"{"id":1,"do":"workers-add","class":"royal"}"#);
        assert_eq!(answer.unwrap_err().kind, ErrorKind::BadSettings);
        assert_eq!(calls, Vec::<String>::new());
    }

    #[test]
    fn request_in_the_log_has_no_line_breaks() {
        let disk = [("image".to_owned(), Value::from("a\nb"))].into_iter().collect();
        assert!(!shown(&Verb::Add(Add { disk })).contains('\n'));
    }
}
