//! Serves one client, from its greeting to its end: reads a line, answers it, reads the next.
//!
//! - Only this thread writes answers, so lines never mix.
//! - The server completes a request even if its client disconnects meanwhile.

mod pausing;

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;
use tracing::{debug, info};

use super::Control;
use super::clients::{Client, Clients};
use super::dispatch;
use super::limits::{ANSWER_TIMEOUT, LINE_TIMEOUT, MAX_LINE_BYTES};
use super::line_reader::{LineLimits, LineReader, NoLine};
use super::pace::Pace;
use super::protocol::Greeting;
use super::protocol::answer::{Answer, ErrorKind, Fault};
use super::protocol::request::{BadLine, Request, parse};
use super::protocol::verbs::{LiveUpgrade, Verb};
use crate::live_upgrade::EXTRAS;

use pausing::Pausing;

/// The error about a verb that the monitor socket does not accept.
const ONLY_SHOWS: &str = "this is the monitor socket, which accepts only queries (list, stats, slow, workers, show, \
                          health, and limit without `set`): use the control socket for changes";

/// Serves the client until it disconnects or the server ends the connection. `monitor`: the pace of a client
/// of the monitor socket, which may only query; `None` for the control socket.
pub fn run(client: &Arc<Client>, clients: &Clients, control: &dyn Control, monitor: Option<&Pace>) {
    greet(&client.stream);
    let limits = LineLimits { bytes: MAX_LINE_BYTES, time: LINE_TIMEOUT };
    let mut lines = LineReader::new(&client.stream, limits);
    let mut pausing = None;
    loop {
        let line = lines.next();
        if let Some(end) = client.end() {
            return say_last(&client.stream, end.fault());
        }
        let answered = match line {
            Ok(line) if let Some(pace) = monitor => {
                client.pause(pace.wait());
                pace.charge(|| show(&line, client, control))
            }
            Ok(line) => {
                let has_more = lines.has_more();
                answer(&line, &mut Answering { client, clients, control, has_more, pausing: &mut pausing })
            }
            Err(no_line) => return last_words(no_line).map_or((), |fault| say_last(&client.stream, fault)),
        };
        match answered {
            Ok(Next::Line) => {}
            Ok(Next::End) => return,
            Err(error) => return debug!("a control client disconnected before it got its answer: {error}"),
        }
    }
}

/// Writes the greeting. If the client has disconnected, the next read finds out.
pub fn greet(stream: &UnixStream) {
    let _ = say(stream, &Greeting::ours());
}

/// The last answer to a client that did not send a complete line; `None` if it has disconnected.
fn last_words(no_line: NoLine) -> Option<Fault> {
    let kind = match &no_line {
        NoLine::Ended | NoLine::Io(_) => return None,
        NoLine::Half => ErrorKind::BadRequest,
        NoLine::TooLong { .. } => ErrorKind::LineTooLong,
        NoLine::TooSlow { .. } => ErrorKind::LineTooSlow,
    };
    Some(Fault::new(kind, no_line.to_string()))
}

/// What follows an answer: the next line, or the end of the session.
enum Next {
    Line,
    End,
}

/// What `answer` needs besides the line.
struct Answering<'a> {
    client: &'a Arc<Client>,
    clients: &'a Clients,
    control: &'a dyn Control,
    /// Whether the client has sent more than this line.
    has_more: bool,
    /// The pause that the previous request began, which is over now.
    pausing: &'a mut Option<Pausing>,
}

/// Answers a client of the monitor socket.
fn show(line: &[u8], client: &Client, control: &dyn Control) -> io::Result<Next> {
    match parse(line) {
        Ok(Request { id, verb }) => {
            client.spoke();
            if verb.only_shows() {
                execute(Some(id), verb, client, control)?;
            } else {
                refuse(Some(id), Fault::new(ErrorKind::ReadOnly, ONLY_SHOWS), client)?;
            }
        }
        Err(BadLine { id, fault }) => refuse(id, fault, client)?,
    }
    Ok(Next::Line)
}

/// Carries out the verb, and answers.
fn execute(id: Option<u64>, verb: Verb, client: &Client, control: &dyn Control) -> io::Result<()> {
    match verb {
        Verb::Stats(wanted) => say(&client.stream, &Answer::new(id, dispatch::stats(wanted, control))),
        verb => say(&client.stream, &Answer::new(id, dispatch::execute(verb, control))),
    }
}

fn refuse(id: Option<u64>, fault: Fault, client: &Client) -> io::Result<()> {
    say(&client.stream, &Answer::<Value>::new(id, Err(fault)))
}

fn answer(line: &[u8], answering: &mut Answering<'_>) -> io::Result<Next> {
    let Answering { client, clients, control, has_more, ref mut pausing } = *answering;
    let before = pausing.take();
    let request = match parse(line) {
        Ok(request) => request,
        Err(BadLine { id, fault }) => {
            refuse(id, fault, client)?;
            return Ok(Next::Line);
        }
    };
    client.spoke();
    let id = Some(request.id);
    if request.verb == Verb::Shutdown {
        // Answers first: the stop may end this thread.
        let said = say(&client.stream, &Answer::new(id, Ok(Value::Object(serde_json::Map::new()))));
        clients.keep_until_stopped(client);
        info!("a control client requested a stop");
        control.shutdown();
        return said.map(|()| Next::End);
    }
    if let Verb::LiveUpgrade(wanted) = request.verb {
        return live_upgrade(wanted, id, client, control);
    }
    if let Verb::Pause(pause) = request.verb {
        let mut answer = || say(&client.stream, &Answer::new(id, Ok(Value::Object(serde_json::Map::new()))));
        match pausing::pause(pause, has_more, &client.stream, control, &mut answer) {
            Ok(over) => **pausing = Some(over),
            Err(fault) => refuse(id, fault, client)?,
        }
        return Ok(Next::Line);
    }
    match (request.verb, before) {
        (Verb::Unpause, Some(over)) => say(&client.stream, &Answer::new(id, over.answer()))?,
        (verb, _) => execute(id, verb, client, control)?,
    }
    Ok(Next::Line)
}

/// Once the server agrees, the connection carries frames instead of lines.
fn live_upgrade(
    wanted: LiveUpgrade,
    id: Option<u64>,
    client: &Client,
    control: &dyn Control,
) -> io::Result<Next> {
    let mut agreed = false;
    let mut agree = || {
        agreed = true;
        say(&client.stream, &Answer::new(id, Ok(serde_json::json!({"extras": EXTRAS}))))
    };
    let outcome = control.live_upgrade(wanted, &client.stream, &mut agree);
    match outcome {
        Err(refused) if !agreed => {
            refuse(id, refused.into(), client)?;
            Ok(Next::Line)
        }
        _ => Ok(Next::End),
    }
}

/// Writes the last line of a connection. It does not matter if the line is lost.
pub fn say_last(stream: &UnixStream, fault: Fault) {
    let _ = say(stream, &Answer::<Value>::new(None, Err(fault)));
}

fn say(stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    write_within(stream, &line, ANSWER_TIMEOUT)
}

/// Writes all bytes within the limit, in as many parts as the client's socket takes.
fn write_within(mut stream: &UnixStream, mut bytes: &[u8], limit: Duration) -> io::Result<()> {
    let deadline = Instant::now() + limit;
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            // If the buffer is full, the next iteration checks whether time is left.
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read};

    use super::super::rig::Told;
    use super::*;

    /// Sends `sent` as a client of the control socket and closes. Returns all answers, and the calls that the server
    /// received.
    fn talk(sent: &str) -> (Vec<Value>, Told) {
        talk_at(sent, None)
    }

    /// Like [`talk`], but with `monitor` as a client of the monitor socket, at this pace.
    fn talk_at(sent: &str, monitor: Option<&Pace>) -> (Vec<Value>, Told) {
        let (mut client_end, server_end) = UnixStream::pair().unwrap();
        client_end.write_all(sent.as_bytes()).unwrap();
        client_end.shutdown(std::net::Shutdown::Write).unwrap();
        let (clients, told) = (Clients::new(1), Told::default());
        let client = clients.add(server_end).unwrap();
        run(&client, &clients, &told, monitor);
        clients.forget(&client);
        drop((client, clients));
        let lines =
            BufReader::new(client_end).lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap());
        (lines.collect(), told)
    }

    #[test]
    fn greeting_comes_first_and_names_the_protocol() {
        let (lines, _) = talk("");
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(lines, [serde_json::json!({"bareblk": version, "protocol": 1})]);
    }

    #[test]
    fn requests_are_answered_in_their_order_and_with_their_ids() {
        let (lines, told) =
            talk("{\"id\": 5, \"do\": \"list\"}\nnonsense\n{\"id\": 3, \"do\": \"reload\"}\n");
        let ids: Vec<_> = lines[1..].iter().map(|line| line["id"].clone()).collect();
        assert_eq!(ids, [Value::from(5), Value::Null, Value::from(3)]);
        assert_eq!(lines[2]["error"]["kind"], "not-json");
        assert_eq!(told.calls(), ["reload"]);
    }

    #[test]
    fn monitor_socket_shows_and_refuses_each_verb_that_does_more() {
        let changing = [
            r#""do":"workers-add""#,
            r#""do":"workers-remove","worker":1"#,
            r#""do":"attach","disk":"a","queue":0,"worker":1"#,
            r#""do":"placement","disk":"a""#,
            r#""do":"add","disk":{"name":"x"}"#,
            r#""do":"remove","disk":"a""#,
            r#""do":"resize","disk":"a","size_bytes":512"#,
            r#""do":"resume","disk":"a""#,
            r#""do":"limit","disk":"a","set":{"iops":1}"#,
            r#""do":"flush","disk":"a""#,
            r#""do":"pause","disk":"a""#,
            r#""do":"unpause""#,
            r#""do":"snapshot","files":[]"#,
            r#""do":"reload""#,
            r#""do":"shutdown""#,
            r#""do":"take-over","version":2"#,
        ];
        for fields in changing {
            let (lines, told) = talk_at(&format!("{{\"id\":1,{fields}}}\n"), Some(&Pace::new()));
            assert_eq!(lines[1]["error"]["kind"], "read-only", "{fields}: {lines:?}");
            assert_eq!(told.calls(), Vec::<String>::new());
        }
        let showing =
            ["list", "stats", "workers", "limit"].map(|verb| format!("{{\"id\":1,\"do\":\"{verb}\"}}\n"));
        let (lines, _) = talk_at(&showing.concat(), Some(&Pace::new()));
        assert!(lines[1..].iter().all(|line| line["ok"].is_object()) && lines.len() == 5, "{lines:?}");
    }

    #[test]
    fn half_a_request_is_not_done_and_told() {
        let (lines, told) = talk("{\"id\": 5, \"do\": \"reload\"}");
        assert_eq!(lines[1]["error"]["kind"], "bad-request");
        assert_eq!(told.calls(), Vec::<String>::new());
    }

    #[test]
    fn pause_is_answered_before_it_ends_and_ends_with_the_next_request() {
        let (lines, told) = talk(
            "{\"id\":1,\"do\":\"pause\",\"disk\":\"a\"}\n{\"id\":2,\"do\":\"unpause\"}\n{\"id\":3,\"do\":\"unpause\"}\n",
        );
        assert_eq!(
            lines[1..3],
            [
                serde_json::json!({"id": 1, "ok": {}}),
                serde_json::json!({"id": 2, "ok": {"paused_ns": 7_000_000}}),
            ]
        );
        assert_eq!(
            (&lines[3]["id"], &lines[3]["error"]["kind"]),
            (&Value::from(3), &Value::from("not-paused"))
        );
        assert_eq!(told.calls(), ["pause a 10s", "continue"]);
    }

    #[test]
    fn pause_of_a_client_that_leaves_ends_and_one_that_fails_is_told() {
        let (lines, told) = talk("{\"id\":1,\"do\":\"pause\",\"disk\":\"a\"}\n");
        assert_eq!((lines.len(), told.calls()), (2, vec!["pause a 10s".to_owned(), "continue".to_owned()]));
        let (lines, _) = talk("{\"id\":1,\"do\":\"pause\",\"disk\":\"none\"}\n");
        assert_eq!(lines[1]["error"]["kind"], "no-disk");
    }

    #[test]
    fn stop_is_answered_before_it_is_asked_for_and_nothing_is_done_after_it() {
        let (lines, told) = talk("{\"id\": 1, \"do\": \"shutdown\"}\n{\"id\": 2, \"do\": \"reload\"}\n");
        assert_eq!(lines[1..], [serde_json::json!({"id": 1, "ok": {}})]);
        assert_eq!(told.calls(), ["shutdown"]);
    }

    #[test]
    fn live_upgrade_ends_the_lines_once_it_is_agreed_and_only_then() {
        let (lines, told) = talk(
            "{\"id\":1,\"do\":\"take-over\",\"version\":0}\n{\"id\":2,\"do\":\"take-over\",\"version\":1}\n{\"id\":3,\"do\":\"reload\"}\n",
        );
        assert_eq!(
            (&lines[1]["id"], &lines[1]["error"]["kind"]),
            (&Value::from(1), &Value::from("bad-settings"))
        );
        assert_eq!(
            lines[2..],
            [
                serde_json::json!({"id": 2, "ok": {"extras": ["totals", "monitor", "remote", "qcow2", "qcow2-written", "jobs", "jobs-reclaim"]}})
            ]
        );
        assert_eq!(told.calls(), ["live_upgrade 0", "live_upgrade 1"]);
    }

    #[test]
    fn answer_that_nobody_reads_is_given_up() {
        let (mut client, server) = UnixStream::pair().unwrap();
        let error = write_within(&server, &vec![b'x'; 8 << 20], Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(server);
        let mut arrived = Vec::new();
        client.read_to_end(&mut arrived).unwrap();
        assert!(arrived.len() < 8 << 20);
    }
}
