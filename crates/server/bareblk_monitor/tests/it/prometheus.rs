//! A real Prometheus scrapes a real server under load. Its figures must match the client's counts.

use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use xtask::skip::{Reason, skip};
use xtask::unpacked;

use crate::http::{Exporter, get};
use crate::load::Served;
use crate::rig::{Place, bareblk, eventually, output};

/// Killed when dropped.
struct Prometheus {
    child: Child,
    address: SocketAddr,
    _place: Place,
}

impl Prometheus {
    /// `None` if Prometheus is not installed; the test then prints this.
    fn start(exporter: &Exporter) -> Option<Self> {
        let Some(program) = unpacked::program("prometheus", "prometheus").unwrap() else {
            skip(Reason::NoProgram("apt-get".into()), "a real Prometheus scrapes the exporter");
            return None;
        };
        let place = Place::new();
        let alerts = xtask::workspace::root().join("packaging/alerts.yml");
        let config = place.path("prometheus.yml");
        let text = format!(
            "global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}}\n\
             rule_files: [{alerts:?}]\n\
             scrape_configs: [{{job_name: bareblk, static_configs: [{{targets: ['{}']}}]}}]\n",
            exporter.address
        );
        std::fs::write(&config, text).unwrap();
        // Another process may take the port meanwhile; the queries then fail.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut command = Command::new(program);
        command.arg(format!("--config.file={}", config.display()));
        command.arg(format!("--storage.tsdb.path={}", place.path("data").display()));
        command.arg(format!("--web.listen-address={address}"));
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        Some(Self { child, address, _place: place })
    }

    /// The values of an instant query; none while Prometheus starts.
    fn query(&self, query: &str) -> Vec<f64> {
        if std::net::TcpStream::connect(self.address).is_err() {
            return Vec::new();
        }
        let escape = |byte: u8| {
            if byte.is_ascii_alphanumeric() { (byte as char).to_string() } else { format!("%{byte:02X}") }
        };
        let query: String = query.bytes().map(escape).collect();
        let answer = get(self.address, &format!("/api/v1/query?query={query}"), "*/*");
        let answer: Value = serde_json::from_str(&answer.body).unwrap_or_default();
        let results = answer["data"]["result"].as_array().cloned().unwrap_or_default();
        results.iter().map(|result| result["value"][1].as_str().unwrap().parse().unwrap()).collect()
    }

    fn wait(&self, query: &str, wanted: &[f64]) {
        let ask = || (self.query(query) == wanted).then_some(());
        eventually(&format!("{query} is {wanted:?}, not {:?}", self.query(query)), ask);
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn query_of_a_real_prometheus_returns_what_the_client_counted() {
    let mut served = Served::start();
    let exporter = Exporter::start(&[&served.monitor()], &[]);
    let Some(prometheus) = Prometheus::start(&exporter) else { return };
    let load = served.load();
    prometheus.wait("bareblk_up", &[1.0]);
    let is_busy = "sum(rate(bareblk_disk_requests_total{disk=\"root\"}[30s])) > 0";
    eventually("a rate", || (!prometheus.query(is_busy).is_empty()).then_some(()));
    for words in [&["workers", "add"][..], &["attach", "root", "0", "1"], &["attach", "root", "0", "0"]] {
        let mut command = bareblk();
        command.arg("ctl").args(words).arg("--control").arg(served.control());
        output(command);
    }
    let sent = load.end();
    let old = served.server.take().unwrap();
    served.take_over();
    old.wait_ended();
    let sent = (sent + served.load().end()) as f64;
    prometheus.wait("sum(bareblk_disk_requests_total{disk=\"root\"})", &[sent]);
    prometheus.wait("sum(bareblk_disk_request_duration_seconds_count{disk=\"root\"})", &[sent]);
    prometheus.wait("sum(bareblk_disk_request_duration_seconds_bucket{disk=\"root\",le=\"+Inf\"})", &[sent]);
    prometheus.wait("sum(bareblk_disk_bytes_total{op=\"write\"})", &[sent / 5.0 * 4096.0]);
    prometheus.wait("sum(resets(bareblk_disk_requests_total[1h]))", &[0.0]);
    drop(served.server.take());
    prometheus.wait("bareblk_up", &[0.0]);
    prometheus.wait("count(ALERTS{alertname=\"BareblkServerDown\",alertstate=\"pending\"})", &[1.0]);
}
