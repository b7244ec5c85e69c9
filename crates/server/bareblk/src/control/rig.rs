//! A server for tests that records its calls. It accepts changes of every disk except `none`.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use blk_server::{AdminError, Attached, ServerReport, SlowRequest, WorkerId, WorkerOptions};
use serde_json::{Map, Value};

use super::answers::jobs::JobReport;
use super::answers::reports::{Overlaid, ReloadAnswer, Waiting};
use super::disk_names::KnownDisk;
use super::protocol::verbs::{JobChange, JobStart, LiveUpgrade};
use super::{Control, Refused};

#[derive(Debug, Default)]
pub struct Told(Mutex<Vec<String>>);

impl Told {
    pub fn calls(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    fn note(&self, call: String) {
        self.0.lock().unwrap().push(call);
    }
}

impl Control for Told {
    fn disks(&self) -> Vec<KnownDisk> {
        let disk = |name: &str| KnownDisk { name: name.into(), image: format!("/images/{name}.raw") };
        let long = KnownDisk { name: "/images/long.raw".into(), image: "/images/long.raw".into() };
        vec![disk("a"), disk("none"), long]
    }

    fn waiting(&self) -> Vec<Waiting> {
        Vec::new()
    }

    fn report(&self) -> ServerReport {
        ServerReport::default()
    }

    fn slow_requests(&self, disk: &str) -> Result<(Option<Duration>, Vec<SlowRequest>), Refused> {
        Err(AdminError::NoDisk { name: disk.into() }.into())
    }

    fn add_worker(&self, options: WorkerOptions) -> Result<WorkerId, Refused> {
        self.note(format!("add_worker {:?} {:?}", options.cpus, options.nice));
        Ok(WorkerId(7))
    }

    fn remove_worker(&self, id: WorkerId, timeout: Duration) -> Result<(), Refused> {
        self.note(format!("remove_worker {id} {timeout:?}"));
        Ok(())
    }

    fn attach(
        &self,
        disk: &str,
        queue: u16,
        worker: WorkerId,
        timeout: Duration,
    ) -> Result<Attached, Refused> {
        if disk == "none" {
            return Err(AdminError::NoDisk { name: disk.into() }.into());
        }
        self.note(format!("attach {disk} {queue} {worker} {timeout:?}"));
        Ok(Attached::WillStart)
    }

    fn set_completion_worker(
        &self,
        disk: &str,
        worker: Option<WorkerId>,
        timeout: Duration,
    ) -> Result<(), Refused> {
        let worker = worker.map(|worker| worker.0);
        self.note(format!("set_completion_worker {disk} {worker:?} {timeout:?}"));
        Ok(())
    }

    fn add_disk(&self, table: Map<String, Value>) -> Result<String, Refused> {
        self.note(format!("add_disk {}", Value::Object(table.clone())));
        Ok(table["name"].as_str().unwrap().to_owned())
    }

    fn remove_disk(&self, name: &str, force: bool, timeout: Duration) -> Result<(), Refused> {
        self.note(format!("remove_disk {name} {force} {timeout:?}"));
        Ok(())
    }

    fn resize_disk(&self, name: &str, size_bytes: u64, force: bool) -> Result<(), Refused> {
        self.note(format!("resize_disk {name} {size_bytes} {force}"));
        Ok(())
    }

    fn resume_disk(&self, name: &str, timeout: Duration) -> Result<usize, Refused> {
        self.note(format!("resume_disk {name} {timeout:?}"));
        Ok(3)
    }

    fn limit_disk(&self, name: &str, set: &Map<String, Value>) -> Result<bool, Refused> {
        self.note(format!("limit_disk {name} {}", Value::Object(set.clone())));
        Ok(true)
    }

    fn limit_group(&self, name: &str, set: &Map<String, Value>) -> Result<bool, Refused> {
        self.note(format!("limit_group {name} {}", Value::Object(set.clone())));
        Ok(true)
    }

    fn flush_disk(&self, name: &str, timeout: Duration) -> Result<(), Refused> {
        self.note(format!("flush_disk {name} {timeout:?}"));
        Ok(())
    }

    fn settings(&self, name: &str) -> Result<BTreeMap<String, String>, Refused> {
        Ok(BTreeMap::from([("name".to_owned(), name.to_owned())]))
    }

    fn silent_workers(&self, timeout: Duration) -> Result<Vec<WorkerId>, Refused> {
        self.note(format!("silent_workers {timeout:?}"));
        Ok(vec![WorkerId(5)])
    }

    fn pause(&self, name: &str, timeout: Duration, hold: &mut dyn FnMut()) -> Result<Duration, Refused> {
        if name == "none" {
            return Err(AdminError::NoDisk { name: name.into() }.into());
        }
        self.note(format!("pause {name} {timeout:?}"));
        hold();
        self.note("continue".into());
        Ok(Duration::from_millis(7))
    }

    fn overlay(&self, files: &[(String, PathBuf)], timeout: Duration) -> Result<Overlaid, Refused> {
        self.note(format!("overlay {files:?} {timeout:?}"));
        Ok(Overlaid { paused: Duration::from_nanos(7), keys: vec!["image=/s".to_owned()] })
    }

    fn snapshot(&self, files: &[(String, PathBuf)], timeout: Duration) -> Result<Duration, Refused> {
        self.note(format!("snapshot {files:?} {timeout:?}"));
        Ok(Duration::from_nanos(7))
    }

    fn jobs(&self) -> Vec<JobReport> {
        Vec::new()
    }

    fn start_job(&self, job: &JobStart) -> Result<(), Refused> {
        self.note(format!("start_job {job:?}"));
        Ok(())
    }

    fn change_job(&self, change: &JobChange) -> Result<(), Refused> {
        self.note(format!("change_job {change:?}"));
        Ok(())
    }

    fn cancel_job(&self, disk: &str) -> Result<(), Refused> {
        self.note(format!("cancel_job {disk}"));
        Ok(())
    }

    fn reload(&self) -> Result<ReloadAnswer, Refused> {
        self.note("reload".into());
        Ok(ReloadAnswer::default())
    }

    fn live_upgrade(
        &self,
        wanted: LiveUpgrade,
        _channel: &UnixStream,
        agree: &mut dyn FnMut() -> io::Result<()>,
    ) -> Result<(), Refused> {
        self.note(format!("live_upgrade {}", wanted.version));
        if wanted.version == 0 {
            return Err(Refused::Settings("not this version".into()));
        }
        agree().unwrap();
        Ok(())
    }

    fn shutdown(&self) {
        self.note("shutdown".into());
    }
}
