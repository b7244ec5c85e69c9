//! Clients that break the control protocol: garbage, half a line, too many clients at once, clients that never read.

use super::*;

#[test]
fn garbage_is_answered_and_the_next_request_too() {
    let place = Place::new();
    let mut server = controlled(&place);
    let mut client = Client::new(&place);
    client.send(b"GET / HTTP/1.1\r\n\xff\0\n[]\n\n");
    let kinds: Vec<_> = (0..4).map(|_| client.line().unwrap()["error"]["kind"].clone()).collect();
    assert_eq!(kinds, ["not-json", "not-json", "bad-request", "not-json"]);
    assert_eq!(client.ask(&json!({"id": 9, "do": "workers"}))["id"], 9);
    assert_well(&place, &mut server);
}

#[test]
fn unknown_verbs_and_fields_are_refused_and_what_exists_is_named() {
    let place = Place::new();
    let _server = controlled(&place);
    let mut client = Client::new(&place);
    let answer = client.ask(&json!({"id": 1, "do": "dance"}));
    assert_eq!(answer["error"]["kind"], "unknown-verb");
    assert_says(answer["error"]["message"].as_str().unwrap(), &["dance", "list, stats, slow, workers"]);
    let answer = client.ask(&json!({"id": 2, "do": "list", "all": true}));
    assert_says(answer["error"]["message"].as_str().unwrap(), &["unknown field `all`"]);
}

#[test]
fn half_a_line_is_not_waited_for_without_end() {
    let place = Place::new();
    let mut server = controlled(&place);
    let mut client = Client::new(&place);
    client.send(b"{\"id\": 1, \"do\": \"shut");
    assert_eq!(client.line().unwrap()["error"]["kind"], "line-too-slow");
    assert_eq!(client.line(), None);
    assert_well(&place, &mut server);
}

#[test]
fn line_of_ten_megabytes_is_refused_and_not_kept() {
    let place = Place::new();
    let mut server = controlled(&place);
    let mut client = Client::new(&place);
    // The server closes the connection before it has read everything.
    let _ = client.stream.get_mut().write_all(&vec![b'x'; 10_000_000]);
    assert_eq!(client.line().unwrap()["error"]["kind"], "line-too-long");
    assert_eq!(client.line(), None);
    assert_well(&place, &mut server);
}

#[test]
fn hundred_idle_clients_do_not_keep_the_operator_out() {
    let place = Place::new();
    let mut server = controlled(&place);
    let mut clients: Vec<_> = (0..100).map(|_| Client::connect(&place)).collect();
    assert_well(&place, &mut server);
    assert_eq!(clients[0].line().unwrap()["protocol"], 1);
    assert_eq!(clients[0].line().unwrap()["error"]["kind"], "made-room");
    eventually("only as many as may be are left", || (threads(&server, "bareblk-ctl") <= 32).then_some(()));
}

#[test]
fn client_above_the_limit_is_told_so_when_nobody_can_make_room() {
    let place = Place::new();
    let _server = controlled(&place);
    let mut clients: Vec<_> = (0..32).map(|_| Client::new(&place)).collect();
    clients.iter_mut().for_each(|client| _ = client.ask(&json!({"id": 1, "do": "list"})));
    assert_says(&refusal(ctl(&place, &["list"])), &["32 clients are connected"]);
    clients.pop();
    eventually("there is room again", || {
        assert_cmd::Command::from_std(ctl(&place, &["list"])).output().unwrap().status.success().then_some(())
    });
}

#[test]
fn client_that_never_reads_loses_its_connection_and_nothing_else() {
    let place = Place::new();
    let mut server = controlled(&place);
    let mut client = Client::new(&place);
    let requests = "{\"id\": 1, \"do\": \"stats\"}\n".repeat(1000);
    // The answers total a megabyte, more than a socket buffers. Sending fails once the server closes the connection.
    while client.stream.get_mut().write_all(requests.as_bytes()).is_ok() {}
    assert_well(&place, &mut server);
    eventually("its thread ends", || (threads(&server, "bareblk-ctl") == 0).then_some(()));
}

#[test]
fn client_that_is_killed_in_the_middle_leaves_nothing_behind() {
    let place = Place::new();
    let mut server = controlled(&place);
    let mut watcher = ctl(&place, &["stats", "--watch", "3600"]).stdout(Stdio::null()).spawn().unwrap();
    eventually("it is connected", || (threads(&server, "bareblk-ctl") == 1).then_some(()));
    watcher.kill().unwrap();
    watcher.wait().unwrap();
    eventually("its thread ends", || (threads(&server, "bareblk-ctl") == 0).then_some(()));
    assert_well(&place, &mut server);
}

#[test]
fn idle_clients_do_not_wake_the_server() {
    let place = Place::new();
    let server = controlled(&place);
    let mut clients: Vec<_> = (0..8).map(|_| Client::new(&place)).collect();
    clients.iter_mut().for_each(|client| _ = client.ask(&json!({"id": 1, "do": "list"})));
    eventually("all are asleep", || {
        let before = switches(&server);
        std::thread::sleep(std::time::Duration::from_millis(500));
        (switches(&server) == before).then_some(())
    });
}

/// Voluntary context switches of the control socket's threads.
fn switches(server: &Server) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
    let texts = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).ok());
    let ours = texts.filter(|text| text.contains("bareblk-ctl") || text.contains("bareblk-control"));
    let count = |text: String| {
        let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
        line.trim().parse::<u64>().unwrap()
    };
    ours.map(count).sum()
}
