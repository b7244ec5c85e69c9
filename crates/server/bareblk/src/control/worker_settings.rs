//! Converts a worker's options to and from the form that clients use.

use blk_server::{InvalidClass, SchedulingClass, WorkerOptions};

use super::protocol::verbs::WorkerSettings;
use super::refused::Refused;

/// Converts the clients' form to the server's.
pub fn options(settings: &WorkerSettings) -> Result<WorkerOptions, Refused> {
    let WorkerSettings { cpus, nice, class, cgroup } = settings;
    let mut cpus = cpus.clone();
    cpus.sort_unstable();
    cpus.dedup();
    let class = class.as_deref().map(parse_class).transpose().map_err(Refused::Settings)?;
    Ok(WorkerOptions { cpus, nice: *nice, class, cgroup: cgroup.as_ref().map(Into::into) })
}

/// Converts the server's form to the clients'.
pub fn settings(options: &WorkerOptions) -> WorkerSettings {
    let WorkerOptions { cpus, nice, class, cgroup } = options;
    let cgroup = cgroup.as_ref().map(|path| path.to_string_lossy().into_owned());
    WorkerSettings { cpus: cpus.clone(), nice: *nice, class: class.map(|class| class.to_string()), cgroup }
}

fn parse_class(text: &str) -> Result<SchedulingClass, String> {
    let shown = || text.escape_debug().take(64).collect::<String>();
    text.parse().map_err(|why: InvalidClass| format!("class `{}` is invalid: {why}", shown()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_survive_the_way_there_and_back() {
        for class in ["other", "batch", "idle", "fifo:99", "rr:1"] {
            let given = WorkerSettings {
                cpus: vec![0, 3],
                nice: Some(-20),
                class: Some(class.into()),
                cgroup: Some("a/b".into()),
            };
            assert_eq!(settings(&options(&given).unwrap()), given);
        }
    }

    #[test]
    fn class_that_does_not_exist_is_refused_with_those_that_do() {
        for class in ["", "fifo", "fifo:0", "fifo:100", "rr:x", "batch:1", "FIFO:1"] {
            let given = WorkerSettings { class: Some(class.into()), ..WorkerSettings::default() };
            let error = options(&given).unwrap_err().to_string();
            assert!(error.contains(class) && error.contains("fifo:P or rr:P"), "{error}");
        }
    }

    #[test]
    fn cpus_are_taken_in_any_order_and_once() {
        let given = WorkerSettings { cpus: vec![3, 1, 3], ..WorkerSettings::default() };
        assert_eq!(options(&given).unwrap().cpus, [1, 3]);
    }
}
