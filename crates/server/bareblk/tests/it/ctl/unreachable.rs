//! Sockets behind which no server answers, or another program than expected.

use super::*;

#[test]
fn missing_server_is_told_with_what_to_do() {
    let place = Place::new();
    assert_says(&refusal(ctl(&place, &["list"])), &["there is no server at", "--control", "BAREBLK_CONTROL"]);
    controlled(&place).kill();
    assert_says(&refusal(ctl(&place, &["list"])), &["no server listens at", "start the server again"]);
    let mut command = bareblk();
    command.args(["ctl", "list", "--socket"]).arg(place.image("file", 1));
    assert_says(&refusal(command), &["file", "is not a socket"]);
}

#[test]
fn socket_of_a_disk_is_recognised_as_another_one() {
    let place = Place::new();
    let _server = controlled(&place);
    let mut command = bareblk();
    command.args(["ctl", "list", "--socket"]).arg(place.socket("s"));
    assert_says(&refusal(command), &["does not greet as a bareblk server", "is it a disk's socket?"]);
}

/// A fake server that sends `says`, reads one line if `asked`, and then closes the connection.
fn impostor(place: &Place, says: &'static str, asked: bool) -> std::thread::JoinHandle<()> {
    let listener = UnixListener::bind(place.socket("c")).unwrap();
    std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        client.write_all(says.as_bytes()).unwrap();
        if asked {
            BufReader::new(&client).read_line(&mut String::new()).unwrap();
        } else {
            let _ = client.read_to_end(&mut Vec::new());
        }
    })
}

#[test]
fn server_of_another_protocol_is_told_with_both_versions() {
    let place = Place::new();
    let server = impostor(&place, "{\"bareblk\": \"9.9\", \"protocol\": 2}\n", false);
    let line = refusal(ctl(&place, &["list"]));
    assert_says(&line, &["bareblk 9.9", "protocol 2", env!("CARGO_PKG_VERSION"), "speaks 1"]);
    server.join().unwrap();
}

#[test]
fn server_that_goes_away_in_the_middle_leaves_open_what_was_done() {
    let place = Place::new();
    let server = impostor(&place, "{\"bareblk\": \"0.1.0\", \"protocol\": 1}\n", true);
    let line = refusal(ctl(&place, &["remove", "root"]));
    assert_says(&line, &["closed the connection before it answered", "it may have carried out the request"]);
    server.join().unwrap();
}

#[test]
fn answer_of_a_hostile_server_does_not_reach_the_terminal_as_it_is() {
    let place = Place::new();
    let says = "{\"bareblk\": \"1\", \"protocol\": 1}\n{\"id\": 1, \"error\": {\"kind\": \"x\", \"message\": \"a\\u001b[2Jb\\nc\"}}\n";
    let server = impostor(&place, says, true);
    let line = refusal(ctl(&place, &["list"]));
    assert!(!line.contains('\x1b'), "{line:?}");
    server.join().unwrap();
}
