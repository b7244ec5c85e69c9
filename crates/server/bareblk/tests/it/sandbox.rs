//! The real program inside its sandbox: which rights it keeps, which operations still work, and which process performs
//! them.
//!
//! The tests of forbidden calls are beside the lists (`sandbox/tests/confined.rs`). All other tests of this program
//! also run in the sandbox.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use xtask::skip::{Reason, skip};

use crate::rig::hanging::{Call, HangingFolder};
use crate::rig::{
    Place, Server, assert_says, bareblk, ctl, eventually, is_root, output, refusal, wrong_usage,
};

const MIB: u64 = 1 << 20;
/// The user ID that Linux distributions reserve for processes without rights.
const UNPRIVILEGED: &str = "65534";

fn with(mut command: Command, words: &[&str]) -> Command {
    command.args(words);
    command
}

fn controlled(place: &Place, words: &[&str]) -> Command {
    let mut command = with(place.serve(&place.image("disk.raw", 4 * MIB), "s"), words);
    command.arg("--control").arg(place.socket("c"));
    command
}

fn bench(place: &Place, words: &[&str]) {
    let mut command = crate::rig::bench();
    command.arg("--socket").arg(place.socket("s"));
    output(with(with(command, &["--bs=16k", "--iodepth=8", "--json"]), words));
}

/// Writes the disk, reads it back and compares.
fn verify(place: &Place) {
    bench(place, &["--rw=write", "--size=1m", "--verify=crc32c"]);
}

/// Runs a load on this many queues, and so on this many workers.
fn read_and_write(place: &Place, queues: u32) {
    bench(place, &["--rw=randrw", "--size=1m", &format!("--numjobs={queues}")]);
}

/// Returns a field of `/proc/PID/task/TID/status`, by the thread's name.
fn of_each_thread(server: &Server, field: &str) -> BTreeMap<String, String> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
    let status = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).ok());
    let value = |status: &str, field: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.unwrap_or_default().trim().to_owned()
    };
    status.map(|status| (value(&status, "Name"), value(&status, field))).collect()
}

/// The server's child processes.
fn children(server: &Server) -> Vec<i32> {
    let pid = server.pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

// ---- remaining rights

#[test]
fn every_thread_has_a_list_of_calls_and_workers_and_sessions_a_shorter_one() {
    let place = Place::new();
    let server = Server::start(controlled(&place, &["--workers", "2"]));
    let _front_end = std::os::unix::net::UnixStream::connect(place.socket("s")).unwrap();
    eventually("a session", || {
        of_each_thread(&server, "Name").keys().any(|name| name.starts_with("bareblk-sess")).then_some(())
    });
    let modes = of_each_thread(&server, "Seccomp");
    assert!(modes.len() >= 5 && modes.values().all(|mode| mode == "2"), "{modes:?}");
    let filters: BTreeMap<String, u32> = eventually("a session's own list", || {
        let filters = of_each_thread(&server, "Seccomp_filters");
        let filters: BTreeMap<_, _> =
            filters.into_iter().map(|(name, n)| (name, n.parse().unwrap())).collect();
        let of = |start: &str| filters.iter().find(|(name, _)| name.starts_with(start)).map(|(_, n)| *n);
        (of("bareblk-sess") > of("bareblk-accept")).then_some(filters)
    });
    assert_eq!(filters["bareblk-work-0"], filters["bareblk-accept"] + 1, "{filters:?}");
}

/// `CAP_IPC_LOCK` if the server keeps it: a server without `CAP_SYS_RESOURCE` cannot raise the limit of locked memory.
fn locking() -> u64 {
    let (lock, resource) = (1 << 14, 1 << 24);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    let effective = u64::from_str_radix(effective.trim(), 16).unwrap();
    if effective & resource == 0 { effective & lock } else { 0 }
}

#[test]
fn nothing_is_left_of_roots_capabilities() {
    let place = Place::new();
    let server = Server::start(place.serve(&place.image("disk.raw", MIB), "s"));
    for (field, may_stay) in [("CapEff", locking()), ("CapPrm", locking()), ("CapInh", 0), ("CapAmb", 0)] {
        let sets = of_each_thread(&server, field);
        let gone = |set: &String| u64::from_str_radix(set, 16).unwrap() & !may_stay == 0;
        assert!(sets.values().all(gone), "{field}: {sets:?}");
    }
    assert!(of_each_thread(&server, "NoNewPrivs").values().all(|set| set == "1"));
}

#[test]
fn without_a_sandbox_there_is_no_helper_and_no_list_and_the_log_says_so() {
    let place = Place::new();
    let server =
        Server::start(with(place.serve(&place.image("disk.raw", 4 * MIB), "s"), &["--sandbox", "off"]));
    assert!(children(&server).is_empty());
    assert!(of_each_thread(&server, "Seccomp").values().all(|mode| mode == "0"));
    server.wait_logged("--sandbox off");
    verify(&place);
}

#[test]
fn memory_of_the_server_is_kept_out_of_core_files() {
    let place = Place::new();
    let server = Server::start(place.serve(&place.image("disk.raw", MIB), "s"));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.pid())).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
}

// ---- operations that still work

#[test]
fn every_engine_serves_verified_io() {
    let place = Place::new();
    let image = place.image("disk.raw", 4 * MIB);
    for engine in ["io_uring", "linux-aio", "posix-aio", "threads", "sync"] {
        let words = ["--engine", engine, "--workers", "2"];
        let server = Server::start(with(place.serve(&image, "s"), &words));
        server.wait_logged(&format!("engine={engine}"));
        verify(&place);
        read_and_write(&place, 2);
        assert!(server.stop(Signal::TERM).success(), "{engine}");
    }
}

/// The kernel may deliver a signal for the process to any thread that does not block it; kill(2) with a thread's ID
/// makes the kernel prefer that thread.
#[test]
fn signal_that_any_thread_could_have_taken_does_its_usual_work() {
    for (engine, sandbox) in [("threads", "on"), ("linux-aio", "on"), ("posix-aio", "on"), ("threads", "off")]
    {
        let place = Place::new();
        let words = ["--engine", engine, "--workers", "2", "--sandbox", sandbox];
        let server = Server::start(controlled(&place, &words));
        read_and_write(&place, 2);
        let _front_end = std::os::unix::net::UnixStream::connect(place.socket("s")).unwrap();
        eventually("a session", || {
            of_each_thread(&server, "Name").keys().any(|name| name.starts_with("bareblk-sess")).then_some(())
        });
        let log = server.log_file();
        let threads = of_each_thread(&server, "Pid");
        for signal in [Signal::HUP, Signal::TERM] {
            // Workers first: a signal that is already pending is not delivered again.
            for thread in threads.values().rev() {
                // Threads may have exited; after the stop, all of them have.
                let _ = kill_process(Pid::from_raw(thread.parse().unwrap()).unwrap(), signal);
            }
        }
        let status = server.wait_ended();
        let text = std::io::read_to_string(log).unwrap();
        assert_eq!(status.code(), Some(0), "{engine} {sandbox} {threads:?}: {text}");
        assert_eq!(text.matches("everything is on stable storage").count(), 1, "{text}");
    }
}

#[test]
fn mapped_image_serves_verified_io() {
    let place = Place::in_memory();
    let server =
        Server::start(with(place.serve(&place.image("disk.raw", 4 * MIB), "s"), &["--engine", "mmap"]));
    verify(&place);
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn workers_that_share_a_disk_open_its_image_through_the_helper() {
    let place = Place::new();
    let image = place.image("disk.raw", 4 * MIB);
    let server = Server::start(with(place.serve(&image, "s"), &["--workers", "3"]));
    read_and_write(&place, 3);
    assert!(!server.log().contains("cannot open the image again"), "{}", server.log());
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn disk_is_added_by_a_server_that_could_not_open_it_itself() {
    if !is_root() {
        return skip(Reason::NotRoot, "only root can switch to another user or group");
    }
    let place = Place::new();
    let server = Server::start(controlled(&place, &["--user", UNPRIVILEGED, "--group", UNPRIVILEGED]));
    assert!(
        of_each_thread(&server, "Uid")
            .values()
            .all(|ids| ids.split_whitespace().all(|id| id == UNPRIVILEGED))
    );
    let image = place.image("more.raw", MIB);
    std::fs::set_permissions(&image, std::fs::Permissions::from_mode(0o600)).unwrap();
    let (image, socket) =
        (format!("image={}", image.display()), format!("socket={}", place.socket("m").display()));
    output(ctl(&place, &["add", "name=more", &image, &socket]));
    output(ctl(&place, &["resize", "more", "2M"]));
    output(ctl(&place, &["workers", "add"]));
    output(ctl(&place, &["attach", "more", "0", "1"]));
    read_and_write(&place, 2);
    server.signal(Signal::HUP);
    output(ctl(&place, &["remove", "more"]));
    assert_eq!(std::fs::metadata(place.path("more.raw")).unwrap().len(), 2 * MIB);
    // The socket belongs to root, as the server did when it started.
    assert_eq!(std::fs::metadata(place.socket("s")).unwrap().uid(), 0);
    output(ctl(&place, &["shutdown"]));
    assert!(!place.socket("s").exists() && !place.socket("c").exists());
}

#[test]
fn file_with_a_name_of_a_group_is_followed() {
    let place = Place::new();
    let (file, image) = (place.path("bareblk.toml"), place.image("disk.raw", MIB));
    let text = |more: &str| {
        let (image, socket) = (image.display(), place.socket("s").display().to_string());
        format!("[[disk]]\nname = 'root'\nimage = '{image}'\nsocket = '{socket}'\n{more}\n")
    };
    std::fs::write(&file, text("")).unwrap();
    let server = Server::start(with(bareblk(), &["serve", "--config", file.to_str().unwrap()]));
    let own = rustix::process::getegid().as_raw();
    std::fs::write(&file, text(if own == 0 { "socket-group = 'root'" } else { "" })).unwrap();
    server.signal(Signal::HUP);
    server.wait_logged("configuration reloaded");
    let more = place.image("new.raw", MIB);
    let added = format!(
        "[[disk]]\nname = 'new'\nimage = '{}'\nsocket = '{}'",
        more.display(),
        place.socket("n").display()
    );
    std::fs::write(&file, text(&added)).unwrap();
    server.signal(Signal::HUP);
    eventually("the new disk's socket", || place.socket("n").exists().then_some(()));
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn who_connects_is_told_that_the_server_listens() {
    let place = Place::new();
    let server = Server::start(controlled(&place, &[]));
    for socket in ["s", "c"] {
        let stream = std::os::unix::net::UnixStream::connect(place.socket(socket)).unwrap();
        let peer = rustix::net::sockopt::socket_peercred(&stream).unwrap();
        assert_eq!(peer.pid.as_raw_nonzero().get().unsigned_abs(), server.pid());
    }
}

// ---- control groups

/// A threaded control group below `folder`, removed when dropped; by then it must be empty.
struct Group(PathBuf);

impl Group {
    fn new(folder: &Path, name: &str) -> Option<Self> {
        let group = Self(folder.join(format!("bareblk-test-{}-{name}", std::process::id())));
        let made = std::fs::create_dir(&group.0);
        let made = made.and_then(|()| std::fs::write(group.0.join("cgroup.type"), "threaded"));
        made.inspect_err(|error| skip(Reason::NoCgroups, error)).ok()?;
        Some(group)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// The mount point of the hierarchy, and this process's own group.
fn hierarchy() -> Option<(PathBuf, PathBuf)> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mount =
        mounts.lines().find(|line| line.contains(" - cgroup2 ")).and_then(|line| line.split(' ').nth(4));
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap();
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"));
    let found = mount.zip(own).map(|(mount, own)| (PathBuf::from(mount), Path::new(mount).join(own)));
    if found.is_none() {
        skip(Reason::NoCgroups, "no hierarchy");
    }
    found
}

#[test]
fn workers_join_groups_named_at_the_start_and_no_other_of_the_host() {
    let Some((mount, own)) = hierarchy() else { return };
    let groups = ["named", "other"].map(|name| Group::new(&own, name));
    let [Some(named), Some(other)] = &groups else { return };
    let place = Place::new();
    let server = Server::start(controlled(&place, &["--worker-cgroup", named.path()]));
    let added = output(ctl(&place, &["workers", "add", "--cgroup", named.path()]));
    assert_says(&added, &["1"]);
    let threads = std::fs::read_to_string(named.0.join("cgroup.threads")).unwrap();
    assert_eq!(threads.lines().count(), 2, "{threads}");
    if server.log().contains("no landlock") {
        return skip(Reason::NoLandlock, "");
    }
    if own != mount {
        return skip(Reason::InOwnCgroup, format!("{} is below it", other.path()));
    }
    let refused = refusal(ctl(&place, &["workers", "add", "--cgroup", other.path()]));
    assert_says(&refused, &["no permission to join", "sandbox"]);
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn workers_that_clients_add_join_groups_below_the_servers_own() {
    let Some((mount, _)) = hierarchy() else { return };
    let service = mount.join(format!("bareblk-test-{}-service", std::process::id()));
    if let Err(error) = std::fs::create_dir(&service) {
        return skip(Reason::NoCgroups, error);
    }
    let place = Place::new();
    let mut inside = Command::new("sh");
    let script = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
    let command = controlled(&place, &[]);
    inside.args(["-c", script]).arg(&service).arg(command.get_program()).args(command.get_args());
    let server = Server::start(inside);
    let below = Group::new(&service, "below").unwrap();
    output(ctl(&place, &["workers", "add", "--cgroup", below.path()]));
    let threads = std::fs::read_to_string(below.0.join("cgroup.threads")).unwrap();
    assert_eq!(threads.lines().count(), 1, "{threads}");
    assert!(server.stop(Signal::TERM).success());
    drop(below);
    // The helper exits after the server.
    eventually("nobody is in the group", || std::fs::remove_dir(&service).ok());
}

// ---- the helper

#[test]
fn helper_ends_with_a_server_that_is_killed() {
    let place = Place::new();
    let server = Server::start(place.serve(&place.image("disk.raw", MIB), "s"));
    let helpers = children(&server);
    assert_eq!(helpers.len(), 1);
    server.kill();
    // The process that inherits the helper reaps it.
    eventually("the helper's end", || {
        let state = std::fs::read_to_string(format!("/proc/{}/stat", helpers[0])).unwrap_or_default();
        (state.is_empty() || state.contains(") Z ")).then_some(())
    });
}

#[test]
fn helper_holds_no_image() {
    let place = Place::new();
    let server = Server::start(controlled(&place, &["--workers", "2"]));
    read_and_write(&place, 2);
    let open = std::fs::read_dir(format!("/proc/{}/fd", children(&server)[0])).unwrap();
    let open: Vec<_> = open.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok()).collect();
    assert!(!open.iter().any(|path| path.ends_with("disk.raw")), "{open:?}");
}

#[test]
fn signals_for_the_whole_group_do_not_take_the_helper_away() {
    let place = Place::new();
    let server = Server::start(place.serve(&place.image("disk.raw", MIB), "s"));
    let helper = Pid::from_raw(children(&server)[0]).unwrap();
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        kill_process(helper, signal).unwrap();
    }
    assert_eq!(server.stop(Signal::TERM).code(), Some(0));
    assert!(!place.socket("s").exists());
}

#[test]
fn without_its_helper_a_server_goes_on_and_says_what_it_cannot_do() {
    let place = Place::new();
    let server = Server::start(controlled(&place, &[]));
    let helper = Pid::from_raw(children(&server)[0]).unwrap();
    kill_process(helper, Signal::KILL).unwrap();
    let image = format!("image={}", place.image("more.raw", MIB).display());
    let socket = format!("socket={}", place.socket("m").display());
    assert_says(&refusal(ctl(&place, &["add", &image, &socket])), &["helper has ended"]);
    verify(&place);
}

#[test]
fn clients_add_images_from_the_folders_allowed_only() {
    let (place, other) = (Place::new(), Place::new());
    let folder = place.path("allowed");
    std::fs::create_dir(&folder).unwrap();
    let server = Server::start(controlled(&other, &["--allow-folders", folder.to_str().unwrap()]));
    let add = |image: &Path, socket: &Path| {
        ctl(&other, &["add", &format!("image={}", image.display()), &format!("socket={}", socket.display())])
    };
    std::fs::rename(place.image("inside.raw", MIB), folder.join("inside.raw")).unwrap();
    output(add(&folder.join("inside.raw"), &other.socket("i")));
    output(add(&other.image("beside.raw", MIB), &other.socket("b")));
    let outside = place.image("outside.raw", MIB);
    let line = refusal(add(&outside, &other.socket("o")));
    assert_says(&line, &["outside.raw must not be opened: the sandbox does not allow", "--allow-folders"]);
    assert!(!line.contains("permissions"), "{line}");
    std::os::unix::fs::symlink(&outside, folder.join("link.raw")).unwrap();
    assert_says(&refusal(add(&folder.join("link.raw"), &other.socket("o"))), &["--allow-folders"]);
    assert_says(&refusal(add(&other.image("last.raw", MIB), &place.socket("o"))), &["--allow-folders"]);
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn clients_add_nothing_below_dev_unless_its_folder_is_allowed() {
    let place = Place::in_memory();
    let add = |image: &Path| {
        let socket = format!("socket={}", place.socket("o").display());
        ctl(&place, &["add", &format!("image={}", image.display()), &socket])
    };
    let beside = place.image("beside.raw", MIB);
    let server = Server::start(controlled(&place, &[]));
    assert_says(&refusal(add(&beside)), &["beside.raw", "--allow-folders"]);
    assert!(server.stop(Signal::TERM).success());
    let folder = beside.parent().unwrap().to_str().unwrap();
    let server = Server::start(controlled(&place, &["--cache", "writeback", "--allow-folders", folder]));
    output(add(&beside));
    assert!(server.stop(Signal::TERM).success());
}

#[test]
fn image_that_hangs_when_it_is_opened_holds_up_no_other_that_is_added() {
    let Some(hanging) = HangingFolder::mount() else { return };
    let place = Place::new();
    let folder = hanging.path().to_str().unwrap();
    let server = Server::start(controlled(&place, &["--allow-folders", folder]));
    let add = |image: &Path, name: &str| {
        let words = [("image", image), ("socket", &place.socket(name)), ("name", Path::new(name))];
        let words = words.map(|(key, value)| format!("{key}={}", value.display()));
        ctl(&place, &["add", &words[0], &words[1], &words[2]])
    };
    hanging.hang(Call::Open);
    let mut hangs = add(&hanging.path().join("hangs.raw"), "hangs").spawn().unwrap();
    eventually("a call hangs", || (hanging.hung() > 0).then_some(()));
    output(add(&place.image("other.raw", MIB), "other"));
    assert!(hangs.try_wait().unwrap().is_none());
    hanging.let_go();
    assert_eq!(hangs.wait().unwrap().code(), Some(1));
    assert!(server.stop(Signal::TERM).success());
}

/// A loop device on an image; detached when dropped.
pub struct Loop(pub PathBuf);

impl Loop {
    pub fn new(image: &Path) -> Option<Self> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(image).output();
        let path = made.ok().filter(|made| made.status.success()).map(|made| made.stdout);
        let Some(path) = path else {
            skip(Reason::NoLoopDevice, "");
            return None;
        };
        Some(Self(PathBuf::from(String::from_utf8(path).unwrap().trim())))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

fn add_as(place: &Place, image: &Path, name: &str) -> Command {
    let socket = format!("socket={}", place.socket(name).display());
    ctl(place, &["add", &format!("image={}", image.display()), &socket, &format!("name={name}")])
}

#[test]
fn block_device_is_served_and_what_lies_beside_it_is_not_for_clients() {
    let place = Place::new();
    let images = ["one.raw", "two.raw"].map(|name| place.image(name, 4 * MIB));
    let [Some(one), Some(two)] = images.map(|image| Loop::new(&image)) else { return };
    let folder = place.path("links");
    std::fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink(&one.0, folder.join("disk.raw")).unwrap();
    std::fs::rename(place.image("beside.raw", MIB), folder.join("beside.raw")).unwrap();
    for image in [one.0.clone(), folder.join("disk.raw")] {
        let command = with(place.serve(&image, "s"), &["--control", place.socket("c").to_str().unwrap()]);
        let server = Server::start(command);
        verify(&place);
        for other in [&two.0, &folder.join("beside.raw")] {
            assert_says(&refusal(add_as(&place, other, "other")), &["--allow-folders"]);
        }
        assert!(server.stop(Signal::TERM).success());
    }
}

#[test]
fn clients_add_block_devices_from_folders_allowed_and_nothing_else_of_them() {
    let place = Place::new();
    let Some(device) = Loop::new(&place.image("one.raw", 4 * MIB)) else { return };
    let server = Server::start(controlled(&place, &["--allow-folders", "/dev"]));
    output(add_as(&place, &device.0, "device"));
    assert_says(&refusal(add_as(&place, Path::new("/dev/null"), "null")), &["/dev/null", "character device"]);
    output(ctl(&place, &["remove", "device"]));
    output(add_as(&place, &device.0, "again"));
    assert!(server.stop(Signal::TERM).success());
}

// ---- impossible settings

#[test]
fn somebody_elses_rights_are_refused_to_who_is_not_root() {
    if !is_root() {
        return skip(Reason::NotRoot, "only root can start a program as another user");
    }
    let place = Place::in_memory();
    let image = place.image("disk.raw", MIB);
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid", UNPRIVILEGED, "--regid", UNPRIVILEGED, "--clear-groups"])
        .arg(env!("CARGO_BIN_EXE_bareblk"));
    command.arg("serve").arg(image).arg("--socket").arg(place.socket("s"));
    let output = with(command, &["--user", "1", "--group", "1"]).output();
    let Ok(output) = output else { return skip(Reason::NoProgram("setpriv".into()), "") };
    let line = String::from_utf8(output.stderr).unwrap();
    if line.contains("Permission denied") {
        return skip(Reason::HiddenFromNobody, line);
    }
    assert_eq!(output.status.code(), Some(1), "{line}");
    assert_says(&line, &["sandbox", "only root can switch to another user or group", "--sandbox off"]);
    assert_eq!(line.lines().count(), 1, "{line}");
}

#[test]
fn options_that_need_the_sandbox_are_refused_without_it() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let line = wrong_usage(with(place.serve(&image, "s"), &["--sandbox", "off", "--user", "0"]));
    assert_says(&line, &["--user", "--sandbox on"]);
    let line = wrong_usage(with(place.serve(&image, "s"), &["--allow-folders", "/tmp"]));
    assert_says(&line, &["--allow-folders", "--control"]);
    let line = wrong_usage(with(place.serve(&image, "s"), &["--user", "4000000000"]));
    assert_says(&line, &["--user", "--group"]);
    let line = wrong_usage(with(place.serve(&image, "s"), &["--user", "no-such-user"]));
    assert_says(&line, &["no-such-user", "does not exist"]);
}
