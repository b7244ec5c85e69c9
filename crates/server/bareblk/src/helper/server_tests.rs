//! Requests beside one that hangs. `policy.rs` tests the policy, `tests/it/sandbox.rs` the helper as a process.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::super::policy::Policy;
use super::*;

#[path = "../../tests/it/rig/hanging.rs"]
mod hanging;

use hanging::{Call, HangingFolder};

/// Only a hang takes longer; no test passes by waiting this long.
const PATIENCE: Duration = Duration::from_secs(300);

fn policy() -> Policy {
    Policy { complete: true, ..Policy::default() }
}

fn allowing(policy: Policy) -> Arc<State> {
    let state = Arc::<State>::default();
    state.carry_out(Ask::Allow(policy), None).unwrap();
    state
}

fn open(path: &Path, writable: bool) -> Ask {
    Ask::OpenImage { path: path.into(), writable, direct: false, create: None, exclusive: false }
}

/// Asks on another thread, as the helper does.
fn begin_asking(state: &Arc<State>, ask: Ask) -> Receiver<Reply> {
    let (state, (sender, answer)) = (Arc::clone(state), channel());
    std::thread::spawn(move || sender.send(state.carry_out(ask, None)));
    answer
}

fn wait_hung(folder: &HangingFolder, calls: usize) {
    let end = std::time::Instant::now() + PATIENCE;
    while folder.hung() < calls {
        assert!(std::time::Instant::now() < end, "nothing hangs");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn folder_that_hangs_holds_up_nobody_elses_image_or_socket() {
    let Some(hanging) = HangingFolder::mount() else { return };
    let folder = tempfile::tempdir().unwrap();
    let folders = vec![hanging.path().into(), folder.path().into()];
    let state =
        allowing(Policy { image_folders: folders, socket_folders: vec![folder.path().into()], ..policy() });
    let other = folder.path().join("other.raw");
    std::fs::write(&other, [0; 512]).unwrap();
    hanging.hang(Call::Lookup);
    let hangs = begin_asking(&state, open(&hanging.path().join("hangs.raw"), true));
    let removed = begin_asking(&state, Ask::Unlink { path: hanging.path().join("s").into() });
    wait_hung(&hanging, 1);
    let answer = begin_asking(&state, open(&other, true)).recv_timeout(PATIENCE).expect("an answer");
    assert!(matches!(answer.unwrap(), (Answer::Opened, Some(_))));
    let socket = Ask::BindSocket { path: folder.path().join("s").into() };
    let answer = begin_asking(&state, socket).recv_timeout(PATIENCE).expect("an answer");
    assert!(matches!(answer.unwrap(), (Answer::Opened, Some(_))));
    assert!(hangs.try_recv().is_err());
    hanging.let_go();
    // The kernel serves look-ups in one folder one after the other, and chooses which of them hangs.
    drop(hangs.recv_timeout(PATIENCE).expect("an answer"));
    drop(removed.recv_timeout(PATIENCE).expect("an answer"));
}

/// Opening some devices acts on them, so the helper checks a file before it opens it.
#[test]
fn device_that_is_no_disk_is_refused_wherever_it_lies_and_whatever_it_is_called() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("link.raw");
    std::os::unix::fs::symlink("/dev/null", &link).unwrap();
    let state = allowing(Policy {
        image_folders: vec!["/dev".into()],
        images: vec![link.clone().into()],
        ..policy()
    });
    for path in [Path::new("/dev/null"), &link] {
        let refused = state.carry_out(open(path, true), None).unwrap_err();
        assert!(refused.to_string().contains("not an image but a character device"), "{refused}");
    }
    // Nor can the server make the helper reopen the device by passing a descriptor of it.
    let null = File::open("/dev/null").unwrap();
    assert!(state.carry_out(Ask::Reopen, Some(null.into())).is_err());
    let pinned = rustix::fs::open("/dev/null", OFlags::PATH, Mode::empty()).unwrap();
    let refused = state.carry_out(Ask::Reopen, Some(pinned)).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn readonly_image_that_hangs_is_still_known_and_holds_up_nobody() {
    let Some(hanging) = HangingFolder::mount() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (golden, other) = (hanging.path().join("golden.raw"), folder.path().join("other.raw"));
    std::fs::write(&other, [0; 512]).unwrap();
    let state = allowing(Policy {
        readonly_images: vec![golden.clone().into()],
        image_folders: vec![folder.path().into()],
        ..policy()
    });
    drop(state.carry_out(open(&golden, false), None).unwrap());
    hanging.hang(Call::Lookup);
    let answer = begin_asking(&state, open(&other, true)).recv_timeout(PATIENCE).expect("an answer");
    assert!(matches!(answer.unwrap(), (Answer::Opened, Some(_))));
    assert_eq!(hanging.hung(), 0);
}
