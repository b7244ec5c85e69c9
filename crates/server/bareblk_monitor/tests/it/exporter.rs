//! `bareblk exporter` with real servers: its figures are right, and Prometheus's tool accepts their text.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use xtask::skip::{Reason, skip};
use xtask::unpacked;

use crate::http::{Exporter, exporter, get, value};
use crate::load::Served;
use crate::rig::{Place, assert_says, bareblk, eventually, output, refusal, wrong_usage};

/// The exporter repeats its figures for a quarter of a second before it asks the servers again.
const STALE: Duration = Duration::from_millis(300);

const ROOT: &str = "server=\"vms\",disk=\"root\"";

fn ctl(served: &Served, words: &[&str]) {
    let mut command = bareblk();
    command.arg("ctl").args(words).arg("--control").arg(served.control());
    output(command);
}

/// The number of answered requests of disk `root`, from the counters and from the histograms.
fn requests(metrics: &str) -> [f64; 2] {
    let ops = ["read", "write", "flush", "other"];
    let sum = |name: &str| {
        ops.iter().filter_map(|op| value(metrics, &format!("{name}{{{ROOT},op=\"{op}\"}}"))).sum::<f64>()
    };
    [sum("bareblk_disk_requests_total"), sum("bareblk_disk_request_duration_seconds_count")]
}

#[test]
fn figures_are_those_of_all_guests_and_survive_moves_and_live_upgrades() {
    let mut served = Served::start();
    let exporter = Exporter::start(&[&served.monitor()], &[]);
    let load = served.load();
    eventually("a read", || requests(&exporter.metrics())[0].gt(&20.0).then_some(()));
    ctl(&served, &["workers", "add"]);
    ctl(&served, &["attach", "root", "0", "1"]);
    let mut sent = load.end();
    let metrics = eventually("all requests are counted", || {
        std::thread::sleep(STALE);
        let metrics = exporter.metrics();
        (requests(&metrics) == [sent as f64; 2]).then_some(metrics)
    });
    let is =
        |sample: &str, wanted: f64| assert_eq!(value(&metrics, sample), Some(wanted), "{sample}\n{metrics}");
    let rounds = sent as f64 / 5.0;
    is(&format!("bareblk_disk_requests_total{{{ROOT},op=\"read\"}}"), rounds * 3.0);
    is(&format!("bareblk_disk_bytes_total{{{ROOT},op=\"read\"}}"), rounds * 3.0 * 4096.0);
    is(&format!("bareblk_disk_bytes_total{{{ROOT},op=\"write\"}}"), rounds * 4096.0);
    is(&format!("bareblk_disk_request_duration_seconds_bucket{{{ROOT},op=\"write\",le=\"+Inf\"}}"), rounds);
    is(&format!("bareblk_disk_queue_moves_total{{{ROOT}}}"), 1.0);
    is(&format!("bareblk_disk_connected{{{ROOT}}}"), 0.0);
    is("bareblk_disk_size_bytes{server=\"vms\",disk=\"spare\"}", 4_194_304.0);
    is("bareblk_worker_queues{server=\"vms\",worker=\"1\"}", 0.0);
    is(&format!("bareblk_build_info{{server=\"vms\",version=\"{}\"}}", env!("CARGO_PKG_VERSION")), 1.0);
    let old = served.server.take().unwrap();
    served.take_over();
    assert_eq!(old.wait_ended().code(), Some(0));
    sent += served.load().end();
    eventually("the requests of both servers", || {
        (requests(&exporter.metrics()) == [sent as f64; 2]).then_some(())
    });
}

#[test]
fn limits_of_disks_and_groups_are_shown_with_their_credit() {
    let served = Served::start();
    ctl(&served, &["limit", "spare", "iops-read=500", "bps=1M"]);
    let metrics = Exporter::start(&[&served.monitor()], &[]).metrics();
    let spare = "server=\"vms\",scope=\"disk\",name=\"spare\"";
    for (sample, wanted) in [
        (format!("bareblk_limit_requests_per_second{{{spare},op=\"read\"}}"), 500.0),
        (format!("bareblk_limit_bytes_per_second{{{spare},op=\"total\"}}"), 1_048_576.0),
        (format!("bareblk_limit_credit_ratio{{{spare},limit=\"bps\"}}"), 1.0),
    ] {
        assert_eq!(value(&metrics, &sample), Some(wanted), "{metrics}");
    }
}

#[test]
fn servers_come_and_go_with_the_files_that_match() {
    let mut served = Served::start();
    let folder = served.monitor().parent().unwrap().to_owned();
    let exporter = Exporter::start(&[&folder.join("*.monitor"), &folder.join("named.monitor")], &[]);
    let up = |server: &str| exporter.value(&format!("bareblk_up{{server=\"{server}\"}}"));
    assert_eq!((up("vms"), up("named")), (Some(1.0), Some(0.0)));
    let ready = exporter.get("/-/ready");
    assert_eq!(ready.status, 503);
    assert_says(&ready.body, &["named.monitor", "there is no server"]);
    served.server.take().unwrap().kill();
    eventually("it is down", || (up("vms") == Some(0.0)).then_some(()));
    served.start_server();
    eventually("it is up", || (up("vms") == Some(1.0)).then_some(()));
    std::fs::remove_file(served.monitor()).unwrap();
    eventually("it is gone", || up("vms").is_none().then_some(()));
}

#[test]
fn exporter_is_ready_if_all_servers_answer() {
    let served = Served::start();
    let exporter = Exporter::start(&[&served.monitor()], &[]);
    assert_eq!((exporter.get("/-/ready").status, exporter.get("/-/healthy").status), (200, 200));
    assert_says(&exporter.get("/").body, &["/metrics"]);
    let place = Place::new();
    let alone = Exporter::start(&[&place.socket("*.monitor")], &[]);
    assert_says(&alone.get("/-/ready").body, &["no socket matches --monitor"]);
}

#[test]
fn disks_beyond_the_limit_of_series_are_left_out_and_counted() {
    let served = Served::start();
    let exporter = Exporter::start(&[&served.monitor()], &["--max-series", "35"]);
    let metrics = exporter.metrics();
    assert!(metrics.contains("disk=\"root\"") && !metrics.contains("disk=\"spare\""), "{metrics}");
    assert_eq!(value(&metrics, "bareblk_series_dropped{server=\"vms\"}"), Some(24.0));
    let samples = |metrics: &str| metrics.lines().filter(|line| line.contains("disk=\"root\"")).count();
    assert_eq!(samples(&metrics), 24, "the number of samples that each disk counts for\n{metrics}");
}

#[test]
fn nothing_wakes_up_between_two_scrapes() {
    let served = Served::start();
    let exporter = Exporter::start(&[&served.monitor()], &[]);
    exporter.metrics();
    let switches = |pid: u32| {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let texts =
            tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).ok());
        let line = |text: String| {
            text.lines().find(|line| line.starts_with("voluntary_ctxt_switches:")).map(str::to_owned)
        };
        texts.filter_map(line).collect::<Vec<_>>()
    };
    let both = || [served.server.as_ref().unwrap().pid(), exporter.pid()].map(switches);
    eventually("both are asleep", || {
        let before = both();
        std::thread::sleep(Duration::from_millis(500));
        (both() == before).then_some(())
    });
}

#[test]
fn wrong_arguments_are_errors_in_one_line() {
    let with = |words: &[&str]| {
        let mut command = exporter();
        command.args(words);
        command
    };
    assert_says(&wrong_usage(with(&[])), &["--monitor"]);
    assert_says(&wrong_usage(with(&["--monitor", "[a"])), &["--monitor [a"]);
    assert_says(&wrong_usage(with(&["--monitor", "a", "--listen", "9778"])), &["'9778' for '--listen"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let refused = refusal(with(&["--monitor", "a", "--listen", &address]));
    assert_says(&refused, &["cannot listen at", &address, "choose another address"]);
}

/// `None` if promtool is not installed; the test then prints this.
fn promtool(words: &[&str], input: &str) -> Option<String> {
    let Some(program) = unpacked::program("prometheus", "promtool").unwrap() else {
        skip(Reason::NoProgram("apt-get".into()), "promtool checks the text and the alerts");
        return None;
    };
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let run = child.wait_with_output().unwrap();
    let said = [run.stdout, run.stderr].map(|said| String::from_utf8(said).unwrap()).concat();
    assert!(run.status.success(), "{said}");
    Some(said)
}

#[test]
fn promtool_finds_no_fault_in_the_metrics() {
    let served = Served::start();
    let load = served.load();
    ctl(&served, &["limit", "spare", "iops=500"]);
    let exporter = Exporter::start(&[&served.monitor()], &[]);
    eventually("a request of each kind", || requests(&exporter.metrics())[1].gt(&5.0).then_some(()));
    if let Some(said) = promtool(&["check", "metrics"], &exporter.metrics()) {
        assert_eq!(said, "", "its advice");
    }
    drop(load);
    let text =
        get(exporter.address, "/metrics", "application/openmetrics-text; version=1.0.0, text/plain;q=0.5");
    assert_says(&text.head, &["application/openmetrics-text; version=1.0.0"]);
    assert!(text.body.ends_with("\n# EOF\n"), "{}", text.body);
    assert_says(&text.body, &["# TYPE bareblk_disk_requests counter\n", "bareblk_disk_requests_total{"]);
}

fn packaged(name: &str) -> String {
    std::fs::read_to_string(xtask::workspace::root().join(name)).unwrap()
}

#[test]
fn promtool_accepts_the_alerts() {
    let path = xtask::workspace::root().join("packaging/alerts.yml");
    if let Some(said) = promtool(&["check", "rules", path.to_str().unwrap()], "") {
        assert_says(&said, &["SUCCESS"]);
    }
}

/// Words that begin with the prefix of all metrics.
fn metrics_in(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("bareblk_") && *word != "bareblk_monitor").collect()
}

#[test]
fn alerts_and_dashboard_use_metrics_that_exist_and_the_page_lists_all() {
    let served = Served::start();
    let load = served.load();
    ctl(&served, &["limit", "spare", "iops=500", "bps=1M"]);
    let exporter = Exporter::start(&[&served.monitor()], &[]);
    eventually("a request of each kind", || requests(&exporter.metrics())[1].gt(&5.0).then_some(()));
    let metrics = exporter.metrics();
    drop(load);
    let known = metrics_in(&metrics);
    for file in ["packaging/alerts.yml", "packaging/grafana.json"] {
        let text = packaged(file);
        let used = metrics_in(&text);
        let unknown: Vec<_> = used.difference(&known).collect();
        assert!(used.len() > 5 && unknown.is_empty(), "{file}: {unknown:?}");
        assert!(!file.ends_with(".json") || serde_json::from_str::<serde_json::Value>(&text).is_ok());
    }
    let page = packaged("docs/reference/metrics.md");
    let types = metrics.lines().filter_map(|line| line.strip_prefix("# TYPE bareblk_")?.split(' ').next());
    let missing: Vec<_> =
        types.filter(|name| !page.contains(&format!("`{}`", name.trim_end_matches("_total")))).collect();
    assert!(missing.is_empty(), "docs/reference/metrics.md lacks {missing:?}");
    assert!(Path::new(&xtask::workspace::root().join("packaging/bareblk-exporter.service")).exists());
}
