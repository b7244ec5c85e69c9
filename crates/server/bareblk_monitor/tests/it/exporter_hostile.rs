//! `bareblk exporter` with HTTP clients that flood, send garbage, or never read, and with sockets of other programs.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::json;

use crate::http::{Exporter, read, value};
use crate::load::Served;
use crate::rig::{Place, assert_says, eventually};
use crate::top_hostile::{FakeServer, evil_answer, ok};

/// Checks that the exporter still answers.
fn assert_well(exporter: &mut Exporter) {
    assert!(exporter.is_running());
    assert_eq!(exporter.get("/-/healthy").status, 200);
}

#[test]
fn garbage_ends_its_own_connection() {
    let place = Place::new();
    let mut exporter = Exporter::start(&[&place.socket("none.monitor")], &[]);
    let huge = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(10_000));
    for sent in ["\r\n\0\u{7f}garbage\r\n\r\n", "GET\r\n\r\n", &huge, &many, "{\"id\":1,\"do\":\"list\"}\n\n"]
    {
        let mut client = exporter.connect();
        // The exporter may close the connection before it has read everything.
        let _ = client.write_all(sent.as_bytes());
        let mut said = String::new();
        let _ = client.read_to_string(&mut said);
        assert!(said.is_empty() || said.starts_with("HTTP/1.1 4"), "{said}");
        assert_well(&mut exporter);
    }
    let mut client = exporter.connect();
    client.write_all(b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n").unwrap();
    assert_eq!(read(client).status, 405);
}

#[test]
fn silent_and_slow_clients_lose_their_connections_to_others() {
    let place = Place::new();
    let mut exporter = Exporter::start(&[&place.socket("none.monitor")], &[]);
    let mut silent: Vec<TcpStream> = (0..40).map(|_| exporter.connect()).collect();
    silent.iter_mut().for_each(|client| client.write_all(b"GET /metrics HTTP/1.1\r\nX").unwrap());
    // All connections are in use; this client comes after them.
    assert_well(&mut exporter);
    let mut said = Vec::new();
    let _ = silent[0].read_to_end(&mut said);
    assert!(!said.starts_with(b"HTTP/1.1 200"), "{said:?}");
}

#[test]
fn clients_that_never_read_lose_their_connections_to_others() {
    let disks: Vec<_> =
        (0..4000).map(|n| json!({"name": format!("disk{n}"), "image": "x".repeat(100)})).collect();
    let server = FakeServer::start(move |request| ok(request, &json!({"disks": disks})));
    let mut exporter = Exporter::start(&[&server.control()], &[]);
    let expect = |what, is_right: &dyn Fn(&str) -> bool| {
        eventually(what, || exporter.metrics_in_time().filter(|text| is_right(text)));
    };
    // The answer is far longer than the kernel's buffers. On a busy machine the first ones may come too late.
    expect("a long answer", &|text| text.len() > 5_000_000);
    let mut deaf: Vec<TcpStream> = (0..40).map(|_| exporter.connect()).collect();
    deaf.iter_mut().for_each(|client| client.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap());
    // All connections are in use; this client comes after them.
    expect("figures of the server", &|text| text.contains("bareblk_up{server=\"fake\"} 1"));
    assert_well(&mut exporter);
}

#[test]
fn flood_of_scrapes_reaches_the_server_four_times_a_second_at_most() {
    let asked = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let count = std::sync::Arc::clone(&asked);
    let server = FakeServer::start(move |request| {
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        ok(request, &json!({}))
    });
    let mut exporter = Exporter::start(&[&server.control()], &[]);
    let begin = std::time::Instant::now();
    std::thread::scope(|scope| {
        (0..8).for_each(|_| _ = scope.spawn(|| (0..50).for_each(|_| _ = exporter.metrics())));
    });
    let most = 2.0 + begin.elapsed().as_secs_f64() * 4.0;
    let asked = asked.load(std::sync::atomic::Ordering::Relaxed) as f64;
    assert!(asked <= most, "{asked} questions for 400 scrapes in {:?}", begin.elapsed());
    assert_well(&mut exporter);
}

#[test]
fn server_that_never_answers_or_answers_wrongly_is_down_and_others_are_not() {
    let served = Served::start();
    for (answer, told) in [
        (None, "did not answer within a second"),
        (Some("garbage\n"), "cannot read the answer"),
        (Some("{\"id\":1,\"ok\":{\"disks\":7}}\n"), "cannot read the answer"),
        (Some("{}\n"), "neither `ok` nor `error`"),
    ] {
        let server = FakeServer::start(move |_| answer.map(str::to_owned));
        let mut exporter = Exporter::start(&[&server.control(), &served.monitor()], &[]);
        let metrics = exporter.metrics();
        assert_eq!(value(&metrics, "bareblk_up{server=\"fake\"}"), Some(0.0), "{metrics}");
        assert_eq!(value(&metrics, "bareblk_up{server=\"vms\"}"), Some(1.0), "{metrics}");
        eventually(told, || exporter.get("/-/ready").body.contains(told).then_some(()));
        assert_well(&mut exporter);
    }
}

#[test]
fn names_and_numbers_of_a_hostile_server_are_text_in_labels() {
    let server = FakeServer::start(|request| {
        let mut answer = evil_answer();
        let name = "a\"} 1\nbareblk_up{server=\"b\\";
        let times = json!({"sum_ns": u64::MAX, "buckets": [[u64::MAX, u64::MAX], [0, 7]]});
        let limits = json!([{"limit": "iops", "credit": u64::MAX}, {"limit": "\n"}]);
        let throttling = json!({"limits": limits, "group": "\n"});
        answer["disks"] = json!([
            {"name": name, "latency": {"read": times}, "throttling": throttling},
            {"name": "x".repeat(100_000)},
            {"name": "ü".repeat(3000)},
        ]);
        ok(request, &answer)
    });
    let mut exporter = Exporter::start(&[&server.control()], &[]);
    let metrics = exporter.metrics();
    assert_says(
        &metrics,
        &["disk=\"a\\\"} 1\\nbareblk_up{server=\\\"b\\\\\"", "bareblk_up{server=\"fake\"} 1"],
    );
    assert!(metrics.lines().all(|line| line.len() < 4096 && !line.starts_with("bareblk_up{server=\"b")));
    assert_well(&mut exporter);
}
