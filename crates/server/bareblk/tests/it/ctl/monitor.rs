//! The monitor socket: who may connect, what it refuses, how a reload and a live upgrade affect it, and clients that
//! misbehave.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::*;

/// A server whose monitor socket has the path at which these tests usually create the control socket.
fn monitored(place: &Place) -> Server {
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.args(["--name", "root", "--monitor"]).arg(place.socket("c"));
    Server::start(command)
}

#[test]
fn monitor_socket_shows_what_the_control_socket_shows_and_refuses_changes() {
    let place = Place::new();
    let mut server = monitored(&place);
    for words in
        [&["stats"][..], &["workers", "list"], &["slow", "root"], &["limit"], &["show", "root"], &["health"]]
    {
        output(ctl(&place, words));
    }
    assert_says(
        &refusal(ctl(&place, &["remove", "root"])),
        &["this is the monitor socket, which accepts only queries", "use the control socket for changes"],
    );
    let mut client = Client::new(&place);
    for request in [
        json!({"id": 1, "do": "limit", "disk": "root", "set": {"iops": 1}}),
        json!({"id": 2, "do": "shutdown"}),
        json!({"id": 3, "do": "take-over", "version": 2}),
    ] {
        assert_eq!(client.error_kind(&request), "read-only");
    }
    assert_eq!(client.ask(&json!({"id": 4, "do": "limit"}))["ok"]["disks"][0]["limits"], json!([]));
    assert_well(&place, &mut server);
    assert!(server.stop(Signal::TERM).success());
    assert!(!place.socket("c").exists());
}

#[test]
fn members_of_the_group_may_look_and_others_may_not_connect() {
    if !is_root() {
        return skip(Reason::NotRoot, "only root can become another user");
    }
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.arg("--monitor").arg(place.socket("c")).args(["--monitor-group", "4321"]);
    let _server = Server::start(command);
    assert_eq!(rig::mode(&place.socket("c")), 0o660);
    open_folder(&place.socket("c"));
    let look = |group: u32| {
        let program = std::fs::File::open(env!("CARGO_BIN_EXE_bareblk")).unwrap();
        let mut command = as_user_4321(&program, &place.socket("c"));
        command.gid(group).output().unwrap()
    };
    let member = look(4321);
    assert!(member.status.success(), "{}", String::from_utf8_lossy(&member.stderr));
    assert_says(&String::from_utf8(look(1234).stderr).unwrap(), &["you may not connect to"]);
}

fn open_folder(socket: &Path) {
    let folder = socket.parent().unwrap();
    std::fs::set_permissions(folder, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
}

#[test]
fn group_without_a_monitor_socket_and_a_path_that_cannot_be_had_are_refused() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let mut command = place.serve(&image, "s");
    command.args(["--monitor-group", "0"]);
    assert_says(&rig::wrong_usage(command), &["--monitor"]);
    for check in [&["--check"][..], &[]] {
        let mut command = place.serve(&image, "s");
        command.arg("--monitor").arg(place.socket("no/folder")).args(check);
        assert_says(&refusal(command), &["monitor", "folder", "create it first"]);
    }
}

/// A configuration file with both sockets; `monitor`: the path of the monitor socket.
fn serve_file(place: &Place, monitor: Option<&Path>) -> Command {
    let (image, socket, control) = (place.path("disk.raw"), place.socket("s"), place.socket("control"));
    let monitor = monitor.map(|path| format!("monitor = {path:?}\n")).unwrap_or_default();
    let text = format!(
        "control = {control:?}\n{monitor}[[disk]]\nname = 'root'\nimage = {image:?}\nsocket = {socket:?}\n"
    );
    std::fs::write(place.path("bareblk.toml"), text).unwrap();
    let mut command = bareblk();
    command.arg("serve").arg("--config").arg(place.path("bareblk.toml"));
    command
}

fn take_over(place: &Place, monitor: Option<&Path>) -> Command {
    let mut command = serve_file(place, monitor);
    command.arg("--take-over").arg(place.socket("control"));
    command
}

#[test]
fn monitor_socket_stays_through_reloads_and_live_upgrades() {
    let place = Place::new();
    place.image("disk.raw", MIB);
    let monitor = place.socket("c");
    let (old, _) = Starting::new(serve_file(&place, Some(&monitor))).wait_lines(2);
    let mut client = Client::new(&place);
    old.signal(Signal::HUP);
    old.wait_logged("configuration reloaded");
    assert!(client.ask(&json!({"id": 1, "do": "list"}))["ok"].is_object());
    let inode = |path: &Path| std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(path).unwrap());
    let before = inode(&monitor);
    let (mut new, _) = Starting::new(take_over(&place, Some(&monitor))).wait_lines(3);
    assert_eq!(old.wait_ended().code(), Some(0));
    assert_eq!((client.line(), inode(&monitor)), (None, before));
    assert_eq!(ok(&place, &["stats"])["pid"], new.pid());
    assert_well(&place, &mut new);
    assert_says(
        &refusal(take_over(&place, Some(&place.socket("elsewhere")))),
        &["the monitor socket is taken over too", "must be the running server"],
    );
    assert_well(&place, &mut new);
    let (last, _) = Starting::new(take_over(&place, None)).wait_lines(3);
    assert_eq!(new.wait_ended().code(), Some(0));
    assert!(!monitor.exists(), "the socket of a server that is gone, and of no other");
    drop(last);
}

#[test]
fn live_upgrade_can_bring_a_monitor_socket() {
    let place = Place::new();
    place.image("disk.raw", MIB);
    let (old, _) = Starting::new(serve_file(&place, None)).wait_lines(2);
    let (mut new, _) = Starting::new(take_over(&place, Some(&place.socket("c")))).wait_lines(3);
    assert_eq!(old.wait_ended().code(), Some(0));
    assert_well(&place, &mut new);
}

/// The pace allows 100 answers at once, then 100 per second. A busy machine gives fewer answers, never more.
#[test]
fn flood_of_requests_gets_a_limited_number_of_answers_however_many_clients_send_it() {
    let place = Place::new();
    let mut server = monitored(&place);
    let begin = Instant::now();
    let requests = "{\"id\": 1, \"do\": \"health\"}\n".repeat(10);
    // The server may refuse a connection, because the previous connection has not ended yet.
    let flood = || {
        let mut client = Client::connect(&place);
        let _ = client.stream.get_mut().write_all(requests.as_bytes());
        let _ = client.stream.get_mut().shutdown(std::net::Shutdown::Write);
        std::iter::from_fn(|| client.line()).filter(|line| line["ok"].is_object()).count()
    };
    let answers: usize = thread::scope(|scope| {
        let floods: Vec<_> = (0..6).map(|_| scope.spawn(|| (0..8).map(|_| flood()).sum::<usize>())).collect();
        floods.into_iter().map(|flood| flood.join().unwrap()).sum()
    });
    // Each of the six clients may exceed the pace by one answer.
    let allowed = 106.0 + begin.elapsed().as_secs_f64() * 100.0;
    assert!(answers > 0 && (answers as f64) < allowed, "{answers} answers in {:?}", begin.elapsed());
    assert_well(&place, &mut server);
}

#[test]
fn flood_of_connections_is_slowed_down_too() {
    let place = Place::new();
    let mut server = monitored(&place);
    let begin = Instant::now();
    (0..300).for_each(|_| drop(Client::new(&place)));
    assert!(begin.elapsed() > Duration::from_millis(1500), "{:?}", begin.elapsed());
    assert_well(&place, &mut server);
}

#[test]
fn clients_that_never_read_or_never_speak_leave_room_for_others() {
    let place = Place::new();
    let mut server = monitored(&place);
    let mut deaf = Client::new(&place);
    let requests = "{\"id\": 1, \"do\": \"stats\"}\n".repeat(1000);
    let _silent: Vec<_> = (0..20).map(|_| Client::connect(&place)).collect();
    assert_well(&place, &mut server);
    // The client's answers fill the socket's buffer, and the server disconnects it.
    while deaf.stream.get_mut().write_all(requests.as_bytes()).is_ok() {}
    assert_well(&place, &mut server);
    assert!(threads(&server, "bareblk-ctl") <= 8 + 32);
}

#[test]
fn monitor_client_above_the_limit_is_told_so_when_nobody_can_make_room() {
    let place = Place::new();
    let _server = monitored(&place);
    let mut clients: Vec<_> = (0..8).map(|_| Client::new(&place)).collect();
    clients.iter_mut().for_each(|client| _ = client.ask(&json!({"id": 1, "do": "list"})));
    assert_says(&refusal(ctl(&place, &["list"])), &["8 clients are connected"]);
}

#[test]
fn connected_monitor_client_does_not_wake_the_server() {
    let place = Place::new();
    let server = monitored(&place);
    let mut client = Client::new(&place);
    client.ask(&json!({"id": 1, "do": "stats"}));
    let switches = || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
        let texts =
            tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).ok());
        let lines = texts.filter_map(|text| {
            Some(text.lines().find(|line| line.starts_with("voluntary_ctxt_switches:"))?.to_owned())
        });
        lines.collect::<Vec<_>>()
    };
    eventually("all threads are asleep", || {
        let before = switches();
        thread::sleep(Duration::from_millis(500));
        (switches() == before).then_some(())
    });
}
