//! Live upgrades that fail: wrong configurations, and new servers that exit, stop answering or send garbage at each
//! step.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;

use super::{Disk, MIB, notices_nothing};
use crate::killed::load::{Load, Overlap, Rings};
use crate::rig::{DEADLINE, assert_says, eventually, refusal};

/// A fake new server, which speaks the protocol step by step.
pub(super) struct Hand(UnixStream);

impl Hand {
    /// Connects and runs the protocol up to the agreement.
    pub(super) fn agreed(disk: &Disk) -> Self {
        let stream = UnixStream::connect(disk.control()).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut lines = BufReader::new(&stream);
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        (&stream).write_all(b"{\"id\":1,\"do\":\"take-over\",\"version\":2}\n").unwrap();
        line.clear();
        lines.read_line(&mut line).unwrap();
        assert_eq!(
            line,
            "{\"id\":1,\"ok\":{\"extras\":[\"totals\",\"monitor\",\"remote\",\"qcow2\",\"qcow2-written\",\"jobs\",\"jobs-reclaim\"]}}\n"
        );
        assert!(lines.buffer().is_empty());
        Self(stream)
    }

    pub(super) fn say(&mut self, message: &str) {
        self.try_say(message).unwrap();
    }

    fn try_say(&mut self, message: &str) -> std::io::Result<()> {
        let length = u32::try_from(message.len()).unwrap().to_le_bytes();
        self.0.write_all(&[&b"bbto"[..], &length, &[0; 4], message.as_bytes()].concat())
    }

    /// Sends a message that the old server may not read any more.
    fn say_too_late(&mut self) {
        let _ = self.try_say("\"Prepared\"");
    }

    /// Reads messages until one contains `wanted`. The kernel closes the descriptors that arrive with messages.
    pub(super) fn hear(&mut self, wanted: &str) -> String {
        loop {
            let mut header = [0; 12];
            self.0.read_exact(&mut header).unwrap();
            let number = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap()) as usize;
            let mut rest = vec![0; number(4) + number(8).div_ceil(64)];
            self.0.read_exact(&mut rest).unwrap();
            let text = String::from_utf8_lossy(&rest[..number(4)]).into_owned();
            if text.contains(wanted) {
                return text;
            }
            assert!(!text.contains("\"No\""), "{text}");
        }
    }

    /// Runs the protocol until the guests are paused.
    fn frozen(disk: &Disk) -> Self {
        let mut hand = Self::ready(disk, "\"Begin\"");
        hand.hear("StatesEnd");
        hand
    }

    /// Runs the protocol until the new server has opened everything.
    pub(super) fn ready(disk: &Disk, begin: &str) -> Self {
        let mut hand = Self::agreed(disk);
        hand.say(begin);
        hand.hear("OffersEnd");
        hand.say("\"Ready\"");
        hand
    }
}

pub(super) fn wait_refused(disk: &Disk, times: usize) {
    let log = || disk.server.as_ref().unwrap().log();
    eventually("it goes on", || (log().matches("live upgrade failed").count() >= times).then_some(()));
}

#[test]
fn old_server_goes_on_when_the_new_one_goes_at_any_step() {
    let mut disk = Disk::new(&["--workers", "2"]);
    let load = Load::connect(disk.socket(), Rings::Split, Overlap::No, 3);
    notices_nothing(load, &mut disk, |disk| {
        drop(Hand::agreed(disk));
        wait_refused(disk, 1);
        let mut hand = Hand::agreed(disk);
        hand.say("\"Begin\"");
        hand.hear("OffersEnd");
        drop(hand);
        wait_refused(disk, 2);
        for times in 3..6 {
            drop(Hand::frozen(disk));
            wait_refused(disk, times);
        }
        disk.hand_on();
    });
}

#[test]
fn only_a_new_server_that_knows_the_totals_gets_them() {
    let mut disk = Disk::new(&[]);
    let load = Load::connect(disk.socket(), Rings::Split, Overlap::No, 11);
    notices_nothing(load, &mut disk, |disk| {
        // Imitates a version without totals, which does not know that message.
        let mut hand = Hand::ready(disk, "\"Begin\"");
        let state = hand.hear("\"State\"");
        assert!(!state.contains("totals"), "{state}");
        assert!(hand.hear("\"").starts_with("{\"Session\""));
        assert_eq!(hand.hear("\""), "\"StatesEnd\"");
        drop(hand);
        wait_refused(disk, 1);
        let mut hand = Hand::ready(disk, "{\"BeginWith\":{\"extras\":[\"totals\",\"more\"]}}");
        hand.hear("Session");
        assert_says(&hand.hear("Totals"), &["\"disk\":\"root\"", "\"reads\":", "\"buckets\":[["]);
        assert_eq!(hand.hear("\""), "\"StatesEnd\"");
        drop(hand);
        wait_refused(disk, 2);
    });
}

#[test]
fn old_server_goes_on_without_a_log_when_the_new_one_says_no_while_the_guest_pauses() {
    let mut disk = Disk::new(&[]);
    let load = Load::connect_with(disk.socket(), Rings::Packed, Overlap::No, false, 4);
    notices_nothing(load, &mut disk, |disk| {
        for times in 1..4 {
            Hand::frozen(disk).say("{\"No\":{\"why\":\"no reason\"}}");
            wait_refused(disk, times);
        }
        assert_says(
            &disk.server.as_ref().unwrap().log(),
            &["the new server refused the live upgrade: no reason"],
        );
        disk.hand_on();
    });
}

#[test]
fn silent_new_server_is_not_waited_for_while_guests_pause() {
    let mut disk = Disk::new(&[]);
    let load = Load::connect(disk.socket(), Rings::Split, Overlap::No, 5);
    notices_nothing(load, &mut disk, |disk| {
        let mut hand = Hand::frozen(disk);
        hand.hear("did not answer within");
        wait_refused(disk, 1);
        hand.say_too_late();
        disk.hand_on();
    });
}

#[test]
fn nonsense_on_the_channel_ends_the_conversation_and_nothing_else() {
    let mut disk = Disk::new(&[]);
    let load = Load::connect(disk.socket(), Rings::Split, Overlap::No, 6);
    notices_nothing(load, &mut disk, |disk| {
        let nonsense: [&[u8]; 4] = [
            b"{\"id\":2,\"do\":\"list\"}\n",
            b"bbto\xff\xff\xff\xff\xff\xff\xff\xff",
            b"bbto\x03\0\0\0\0\0\0\0{]}",
            b"bbto\x07\0\0\0\x01\0\0\0\"Begin\"\0",
        ];
        for (times, bytes) in nonsense.into_iter().enumerate() {
            Hand::agreed(disk).0.write_all(bytes).unwrap();
            wait_refused(disk, times + 1);
        }
        // Sends a valid message at the wrong time.
        Hand::agreed(disk).say("\"Yours\"");
        wait_refused(disk, nonsense.len() + 1);
        let mut hand = Hand::frozen(disk);
        hand.say("\"Ready\"");
        hand.hear("Prepared was expected");
        wait_refused(disk, nonsense.len() + 2);
    });
}

#[test]
fn second_new_server_and_other_versions_are_refused_at_once() {
    let mut disk = Disk::new(&[]);
    let first = Hand::agreed(&disk);
    assert_says(&refusal(disk.taker()), &["another live upgrade is running"]);
    drop(first);
    wait_refused(&disk, 1);
    let mut stream = UnixStream::connect(disk.control()).unwrap();
    stream.write_all(b"{\"id\":1,\"do\":\"take-over\",\"version\":1}\n").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert_says(&text, &["bad-settings", "version 1 of the live upgrade protocol", "restart it instead"]);
    disk.stop();
}

#[test]
fn stop_while_guests_pause_for_a_new_server_is_a_stop_in_order() {
    let mut disk = Disk::new(&[]);
    let mut load = Load::connect(disk.socket(), Rings::Split, Overlap::No, 8);
    load.work();
    let mut hand = Hand::frozen(&disk);
    disk.stop();
    hand.say_too_late();
}

fn with(mut command: Command, args: &[&str]) -> Command {
    command.args(args);
    command
}

#[test]
fn configuration_that_a_guest_would_notice_is_refused_with_both_values() {
    let mut disk = Disk::new(&[]);
    let load = Load::connect(disk.socket(), Rings::Split, Overlap::No, 7);
    notices_nothing(load, &mut disk, |disk| {
        let differing: [(&[&str], &[&str]); 5] = [
            (&["--readonly"], &["`root`", "readonly is false in the running server but true in the new one"]),
            (&["--cache", "writeback"], &["`root`", "cache is none", "writeback in the new one"]),
            (&["--queue-size", "128"], &["`root`", "queue-size is 1024", "128 in the new one"]),
            (&["--serial", "other"], &["`root`", "serial is ", "other in the new one"]),
            (&["--wce", "fixed"], &["`root`", "wce is guest", "fixed in the new one"]),
        ];
        for (args, said) in differing {
            assert_says(&refusal(with(disk.taker(), args)), said);
        }
        disk.hand_on();
    });
}

#[test]
fn other_image_socket_name_or_control_socket_is_refused() {
    let mut disk = Disk::new(&[]);
    let other = disk.place.image("other.raw", 4 * MIB);
    let control = disk.control().display().to_string();
    let with_name = |mut command: Command, name: &str| {
        command.args(["--name", name, "--queues", "2", "--control", &control, "--take-over", &control]);
        command
    };
    let refused = |command| refusal(command);
    assert_says(
        &refused(with_name(disk.place.serve(&other, "s"), "root")),
        &["is not the file that the running server serves"],
    );
    assert_says(
        &refused(with_name(disk.place.serve(&disk.image, "t"), "root")),
        &["socket is", "make them the same"],
    );
    assert_says(
        &refused(with_name(disk.place.serve(&disk.image, "s"), "x")),
        &["`root`", "not in the new configuration"],
    );
    let mut without = disk.place.serve(&disk.image, "s");
    without.arg("--take-over").arg(disk.control());
    assert_says(&refused(without), &["the control socket is taken over too", "add --control"]);
    disk.hand_on();
    disk.stop();
}

#[test]
fn nobody_at_the_control_socket_is_told_as_by_ctl() {
    let disk = Disk::new(&[]);
    let nobody = disk.place.socket("nobody");
    let mut command = disk.place.serve(&disk.image, "t");
    command.arg("--control").arg(&nobody).arg("--take-over").arg(&nobody);
    assert_says(&refusal(command), &["there is no server at"]);
}
