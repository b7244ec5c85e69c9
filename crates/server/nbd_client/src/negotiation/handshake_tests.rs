//! Negotiation with servers that a thread plays, from a script of bytes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use proptest::prelude::*;

use super::*;
use crate::dial::HostDialer;
use crate::negotiation::tls::Tls;
use crate::uri::Address;

const TIMEOUT: Duration = Duration::from_secs(30);

/// Negotiates with a server that sends `script` and then ends the connection.
fn with(script: &[u8]) -> Result<ExportInfo, NbdError> {
    let (client, mut server) = UnixStream::pair().unwrap();
    let script = script.to_vec();
    let playing = std::thread::spawn(move || {
        let _ = server.write_all(&script);
        let _ = server.shutdown(std::net::Shutdown::Write);
        let _ = server.read_to_end(&mut Vec::new());
    });
    let uri = "nbd://server/disk".parse().unwrap();
    let result = negotiate(client.into(), &uri, &HostDialer, TIMEOUT).map(|(_, info)| info);
    playing.join().unwrap();
    result
}

const GREETING_BYTES: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";

fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).unwrap();
    let magic = OPTION_REPLY_MAGIC.to_be_bytes();
    [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &length.to_be_bytes(), data].concat()
}

fn export(size_bytes: u64, flags: u16) -> Vec<u8> {
    let data = [&[0, 0][..], &size_bytes.to_be_bytes(), &flags.to_be_bytes()].concat();
    reply(OPT_GO, REP_INFO, &data)
}

fn blocks(min: u32, preferred: u32, max: u32) -> Vec<u8> {
    let data = [&[0, 3][..], &[min, preferred, max].map(u32::to_be_bytes).concat()].concat();
    reply(OPT_GO, REP_INFO, &data)
}

/// What a server sends up to its answer to `NBD_OPT_GO`, and this answer.
fn go(answer: &[Vec<u8>]) -> Vec<u8> {
    [GREETING_BYTES, &reply(OPT_STRUCTURED_REPLY, REP_ACK, &[]), &answer.concat()].concat()
}

fn ack() -> Vec<u8> {
    reply(OPT_GO, REP_ACK, &[])
}

#[test]
fn properties_of_the_export_are_those_that_the_server_states() {
    let info = with(&go(&[export(1 << 30, 0x16d), blocks(512, 65536, 1 << 20), ack()])).unwrap();
    assert_eq!((info.size_bytes, info.structured), (1 << 30, true));
    assert_eq!(
        (info.min_block_bytes, info.preferred_block_bytes, info.max_block_bytes),
        (512, 65536, 1 << 20)
    );
    assert!(info.can_flush() && info.has_fua() && info.can_trim() && info.can_write_zeroes());
    assert!(info.can_multi_conn() && !info.is_read_only() && !info.is_rotational());
}

/// proto.md, "Block size constraints": 0xffffffff means that there is no limit, whatever the minimum is.
#[test]
fn server_without_a_largest_request_gets_requests_of_the_usual_size() {
    let info = with(&go(&[export(1 << 30, 0x16d), blocks(4096, 65536, u32::MAX), ack()])).unwrap();
    assert_eq!((info.min_block_bytes, info.max_block_bytes), (4096, 32 << 20));
}

#[test]
fn old_server_is_asked_by_name() {
    let answers =
        [reply(OPT_STRUCTURED_REPLY, REP_ERR_UNSUP, &[]), reply(OPT_GO, REP_ERR_UNSUP, &[])].concat();
    let size = [&(1_u64 << 20).to_be_bytes()[..], &3_u16.to_be_bytes()].concat();
    let info = with(&[GREETING_BYTES, &answers, &size].concat()).unwrap();
    assert_eq!((info.size_bytes, info.structured, info.is_read_only()), (1 << 20, false, true));
}

#[test]
fn refusal_is_told_with_the_servers_words() {
    let refused = |kind, words: &str| with(&go(&[reply(OPT_GO, kind, words.as_bytes())])).unwrap_err();
    let text = refused(REP_ERR_UNKNOWN, "never\nheard of it").to_string();
    assert!(text.contains("no export 'disk' (it says: never heard of it)"), "{text}");
    assert!(matches!(refused(REP_ERR_TLS_REQD, ""), NbdError::TlsRequired { .. }));
    assert!(matches!(refused(REP_ERR_POLICY, ""), NbdError::Refused { .. }));
    assert!(refused(REP_ERR_SHUTDOWN, "").may_pass() && !refused(REP_ERR_UNKNOWN, "").may_pass());
}

#[test]
fn server_that_breaks_the_protocol_is_refused_with_value_and_limit() {
    let endless = vec![reply(OPT_GO, REP_INFO, &[0, 9]); 100];
    let mut huge = reply(OPT_GO, REP_INFO, &[]);
    huge[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
    let cases: [(&[u8], &str); 9] = [
        (b"HTTP/1.1 400 Bad Request\r\n", "instead of NBDMAGIC"),
        (b"NBDMAGIC\0\0B\x02\x81\x86\x12S\0\x03", "old form of negotiation"),
        (&go(&[ack()]), "without its size"),
        (&go(&[export(1, 1), reply(OPT_GO, REP_INFO, &[0, 0, 1]), ack()]), "in 3 bytes"),
        (&go(&endless), "more than 64 replies"),
        (&go(&[huge]), "4294967295 bytes; the limit is 16384"),
        (&go(&[reply(OPT_INFO, REP_ACK, &[])]), "answered option 7"),
        (&go(&[export(1 << 63, 1), ack()]), "9223372036854775808 bytes"),
        (&go(&[export(1 << 20, 1), blocks(8192, 8192, 8192), ack()]), "smallest block is 8192"),
    ];
    for (script, part) in cases {
        let text = with(script).unwrap_err().to_string();
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn server_that_ends_or_says_nothing_is_given_up() {
    assert!(matches!(with(&GREETING_BYTES[..10]), Err(NbdError::Lost { .. })));
    let (client, _server) = UnixStream::pair().unwrap();
    let uri = "nbd://server/disk".parse().unwrap();
    let silent = negotiate(client.into(), &uri, &HostDialer, Duration::from_millis(20)).unwrap_err();
    assert!(matches!(&silent, NbdError::Lost { source, .. } if source.kind() == io::ErrorKind::TimedOut));
}

#[test]
fn export_that_became_weaker_is_not_the_same() {
    let info = with(&go(&[export(1 << 20, 0x16d), ack()])).unwrap();
    let weaker = |size_bytes, flags| info.weakened_in(ExportInfo { size_bytes, flags, ..info }).is_some();
    assert!(!weaker(1 << 20, 0x16d) && !weaker(2 << 20, 0x1ff & !FLAG_READ_ONLY));
    assert!(
        weaker(1 << 19, 0x16d) && weaker(1 << 20, 0x16f) && weaker(1 << 20, 0x169) && weaker(1 << 20, 0x6d)
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_bytes_after_a_right_beginning_give_a_result(noise in prop::collection::vec(any::<u8>(), 0..80)) {
        let _ = with(&go(&[noise]));
    }
}

/// Reports a handshake without doing one, or fails with the error.
#[derive(Debug)]
struct Pretends {
    handshake: Result<(), io::ErrorKind>,
    end: Option<&'static str>,
}

impl Dial for Pretends {
    fn dial(&self, _: &Address, _: Duration) -> io::Result<OwnedFd> {
        unreachable!("the tests connect")
    }

    fn start_tls(&self, socket: OwnedFd, tls: &Tls, _: Duration) -> io::Result<Secured> {
        assert!(matches!(tls, Tls::Psk { username, .. } if username == "vm"));
        self.handshake?;
        let end = self.end;
        Ok(Secured { socket, end: Box::new(move || end.map(str::to_owned)) })
    }
}

/// Negotiates with TLS. Returns what the client has sent, too.
fn with_tls(script: &[u8], dial: &Pretends) -> (Result<ExportInfo, NbdError>, Vec<u8>) {
    let (client, mut server) = UnixStream::pair().unwrap();
    server.write_all(script).unwrap();
    server.shutdown(std::net::Shutdown::Write).unwrap();
    let uri = "nbds://vm@server/disk?tls-psk-file=/keys".parse().unwrap();
    let result = negotiate(client.into(), &uri, dial, TIMEOUT).map(|(_, info)| info);
    let mut sent = Vec::new();
    // Fails if the client has closed a socket with unread bytes; what it sent arrives before.
    let _ = server.read_to_end(&mut sent);
    (result, sent)
}

const WORKS: Pretends = Pretends { handshake: Ok(()), end: None };

fn starttls(answer: u32, message: &[u8]) -> Vec<u8> {
    [GREETING_BYTES, &reply(OPT_STARTTLS, answer, message)].concat()
}

#[test]
fn uri_with_tls_asks_for_it_before_anything_else() {
    let plain = go(&[export(1 << 20, 1), ack()]);
    let script = [&starttls(REP_ACK, &[]), plain.strip_prefix(GREETING_BYTES).unwrap()].concat();
    let (info, sent) = with_tls(&script, &WORKS);
    assert_eq!(info.unwrap().size_bytes, 1 << 20);
    assert_eq!(sent[..20], *b"\0\0\0\x03IHAVEOPT\0\0\0\x05\0\0\0\0");
    assert_eq!(sent[20..32], *b"IHAVEOPT\0\0\0\x08");
}

#[test]
fn server_that_refuses_tls_gets_nothing_more() {
    let (refused, sent) = with_tls(&starttls(REP_ERR_POLICY, b"not here"), &WORKS);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("refuses TLS (it says: not here): enable TLS there"), "{text}");
    assert_eq!(sent.len(), 20);
}

#[test]
fn handshake_that_took_too_long_may_succeed_later_and_another_failure_may_not() {
    let failure = |kind| {
        let dial = Pretends { handshake: Err(kind), end: None };
        with_tls(&starttls(REP_ACK, &[]), &dial).0.unwrap_err()
    };
    assert!(failure(io::ErrorKind::TimedOut).may_pass());
    assert!(!failure(io::ErrorKind::Other).may_pass());
}

#[test]
fn end_of_a_connection_after_the_handshake_has_the_reason_of_tls() {
    let dial = Pretends { end: Some("bad certificate"), ..WORKS };
    let error = with_tls(&starttls(REP_ACK, &[]), &dial).0.unwrap_err();
    assert!(
        matches!(&error, NbdError::Tls { source, .. } if source.to_string() == "bad certificate"),
        "{error:?}"
    );
    let error = with_tls(&starttls(REP_ACK, &[]), &WORKS).0.unwrap_err();
    assert!(matches!(error, NbdError::Lost { .. }), "{error:?}");
}
