//! Verbs that change the server: disks, workers, queues, reloads and stops.

use super::*;

#[test]
fn disk_is_added_served_resized_and_removed() {
    let place = Place::new();
    let _server = controlled(&place);
    let settings = [("image", place.image("more.raw", MIB)), ("socket", place.socket("more"))];
    let settings = settings.map(|(key, path)| format!("{key}={}", path.display()));
    assert_eq!(output(ctl(&place, &["add", "name=more", &settings[0], &settings[1], "queues=4"])), "more\n");
    assert!(UnixStream::connect(place.socket("more")).is_ok());
    assert_eq!(ok(&place, &["list"])["disks"][1]["queues_offered"], 4);
    output(ctl(&place, &["resize", "more", "2M"]));
    assert_eq!(ok(&place, &["list"])["disks"][1]["size_bytes"], 2 * MIB);
    output(ctl(&place, &["resize", "more", "+1.5M"]));
    assert_eq!(ok(&place, &["list"])["disks"][1]["size_bytes"], 3 * MIB + MIB / 2);
    assert_says(
        &refusal(ctl(&place, &["resize", "more", "+18446744073709551104"])),
        &["more", "cannot grow"],
    );
    eventually("the disk is free to go", || {
        assert_cmd::Command::from_std(ctl(&place, &["remove", "more"]))
            .output()
            .unwrap()
            .status
            .success()
            .then_some(())
    });
    assert!(!place.socket("more").exists());
    assert_eq!(ok(&place, &["list"])["disks"].as_array().unwrap().len(), 1);
}

#[test]
fn disk_that_cannot_be_added_is_refused_with_its_reason_and_nothing_changes() {
    let place = Place::new();
    let mut server = controlled(&place);
    let mut client = Client::new(&place);
    let image = place.image("more.raw", MIB);
    let mut add = |disk: Value| client.error_kind(&json!({"id": 1, "do": "add", "disk": disk}));
    assert_eq!(add(json!({"name": "root", "image": image, "socket": place.socket("x")})), "disk-exists");
    assert_eq!(
        add(json!({"name": "x", "image": image, "socket": place.socket("x"), "qeues": 1})),
        "bad-settings"
    );
    assert_eq!(add(json!({"name": "x", "image": image})), "bad-settings");
    assert_eq!(add(json!({"name": "x", "image": "/no/image", "socket": place.socket("x")})), "bad-settings");
    assert_eq!(add(json!({"name": "x", "image": image, "socket": place.socket("s")})), "failed");
    assert_eq!(add(json!({})), "bad-settings");
    assert_eq!(ok(&place, &["list"])["disks"].as_array().unwrap().len(), 1);
    assert_well(&place, &mut server);
}

#[test]
fn disk_shrinks_by_force_only() {
    let place = Place::new();
    let _server = controlled(&place);
    assert_says(&refusal(ctl(&place, &["resize", "root", "512K"])), &["root", "1048576", "524288", "force"]);
    output(ctl(&place, &["resize", "root", "512K", "--force"]));
    assert_eq!(ok(&place, &["list"])["disks"][0]["size_bytes"], MIB / 2);
}

#[test]
fn disks_that_do_not_exist_are_named_in_the_refusal() {
    let place = Place::new();
    let _server = controlled(&place);
    let words = [
        &["resize", "none", "4M"][..],
        &["resize", "none", "+4M"],
        &["remove", "none"],
        &["attach", "none", "0", "0"],
        &["placement", "none"],
        &["placement", "none", "--completion-worker", "0"],
    ];
    for words in words {
        assert_says(&refusal(ctl(&place, words)), &["there is no disk `none`: the disks are `root`"]);
    }
    assert_says(&refusal(ctl(&place, &["stats", "root", "none"])), &["there is no disk `none`"]);
}

#[test]
fn disk_without_a_name_is_shown_and_found_by_its_file_name() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    let mut command = place.serve(&image, "s");
    command.arg("--control").arg(place.socket("c"));
    let _server = Server::start(command);
    let whole = image.canonicalize().unwrap().display().to_string();
    assert_eq!(ok(&place, &["list"])["disks"][0]["name"], whole);
    for name in ["disk.raw", whole.as_str()] {
        output(ctl(&place, &["resize", name, "+1M"]));
        output(ctl(&place, &["resize", name, "4M"]));
        output(ctl(&place, &["resize", name, "1M", "--force"]));
        assert_eq!(ok(&place, &["stats", name])["disks"][0]["name"], whole);
    }
    let table = output(ctl(&place, &["list"]));
    assert!(table.lines().nth(1).unwrap().trim_start().starts_with("disk.raw "), "{table}");
    let other = place.path("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::copy(&image, other.join("disk.raw")).unwrap();
    let [image, socket] = [("image", other.join("disk.raw")), ("socket", place.socket("s2"))]
        .map(|(key, path)| format!("{key}={}", path.display()));
    output(ctl(&place, &["add", &image, &socket]));
    assert_says(&refusal(ctl(&place, &["remove", "disk.raw"])), &["several disks", &whole, "other/disk.raw"]);
    assert_says(&output(ctl(&place, &["list"])), &[&whole]);
    output(ctl(&place, &["remove", "other/disk.raw"]));
}

#[test]
fn resume_of_a_disk_without_parked_requests_says_so() {
    let place = Place::new();
    let _server = controlled(&place);
    assert_eq!(output(ctl(&place, &["resume", "root"])), "disk root has no parked requests\n");
}

#[test]
fn workers_come_and_go_and_the_last_one_stays() {
    let place = Place::new();
    let _server = controlled(&place);
    assert_eq!(output(ctl(&place, &["workers", "add", "--nice", "5"])), "worker 1\n");
    let workers = ok(&place, &["workers"]);
    assert_eq!(workers["workers"][1]["settings"]["nice"], 5);
    output(ctl(&place, &["workers", "remove", "0"]));
    assert_says(&refusal(ctl(&place, &["workers", "remove", "1"])), &["worker 1 is the last worker"]);
    assert_says(&refusal(ctl(&place, &["workers", "remove", "0"])), &["there is no worker 0"]);
}

#[test]
fn attach_names_the_queue_or_the_worker_that_does_not_exist() {
    let place = Place::new();
    let _server = controlled(&place);
    let attached = output(ctl(&place, &["attach", "root", "0", "0"]));
    assert_eq!(attached, "queue 0 of disk root does not run yet: it will start on worker 0\n");
    assert_says(&refusal(ctl(&place, &["attach", "root", "64", "0"])), &["`root` has no queue 64", "64"]);
    assert_says(&refusal(ctl(&place, &["attach", "root", "0", "9"])), &["there is no worker 9"]);
}

#[test]
fn placement_shows_the_completion_worker_and_changes_it() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.args([
        "--name",
        "root",
        "--workers",
        "2",
        "--placement",
        "completion",
        "--completion-worker",
        "0",
    ]);
    command.arg("--control").arg(place.socket("c"));
    let server = Server::start(command);
    let shown = output(ctl(&place, &["placement", "root"]));
    assert_says(&shown, &["COMPLETION WORKER", "root", "completion, adaptive"]);
    let wanted = || ok(&place, &["placement", "root"])["placement"]["wanted_completion_worker"].clone();
    assert_eq!(wanted(), 0);
    assert_eq!(output(ctl(&place, &["placement", "root", "--completion-worker", "1"])), "");
    assert_eq!(wanted(), 1);
    output(ctl(&place, &["placement", "root", "--completion-worker", "none"]));
    assert_eq!(wanted(), Value::Null);
    assert_says(&server.log(), &[r#""do":"placement""#, r#""completion_worker":1"#]);
    let no_worker = ctl(&place, &["placement", "root", "--completion-worker", "2"]);
    assert_says(&refusal(no_worker), &["there is no worker 2"]);
    let mut client = Client::new(&place);
    let kind =
        client.error_kind(&json!({"id": 1, "do": "placement", "disk": "root", "completion_worker": -1}));
    assert_eq!((kind, wanted()), (json!("bad-request"), Value::Null));
}

#[test]
fn placement_of_a_disk_without_a_completion_worker_says_so() {
    let place = Place::new();
    let _server = controlled(&place);
    assert_says(&output(ctl(&place, &["placement", "root"])), &["root", "queue"]);
    let refused = ctl(&place, &["placement", "root", "--completion-worker", "0"]);
    assert_says(&refusal(refused), &["`root` has no completion worker", "--placement completion"]);
    let request = json!({"id": 1, "do": "placement", "disk": "root", "completion_worker": null});
    assert_eq!(Client::new(&place).error_kind(&request), "not-placed");
}

#[test]
fn reload_without_a_file_looks_at_the_images_sizes() {
    let place = Place::new();
    let _server = controlled(&place);
    place.image("disk.raw", 2 * MIB);
    assert_eq!(output(ctl(&place, &["reload"])), "nothing to change\n");
    assert_eq!(ok(&place, &["list"])["disks"][0]["size_bytes"], 2 * MIB);
}

#[test]
fn reload_follows_the_configuration_file_and_says_what_it_did() {
    let place = Place::new();
    let disk = |name: &str| {
        let (image, socket) = (place.image(name, MIB), place.socket(name));
        format!("[[disk]]\nname = {name:?}\nimage = {image:?}\nsocket = {socket:?}\n")
    };
    let file = place.path("bareblk.toml");
    let top = format!("control = {:?}\n", place.socket("c"));
    std::fs::write(&file, format!("{top}{}{}", disk("a"), disk("b"))).unwrap();
    let mut command = bareblk();
    command.args(["serve", "--config"]).arg(&file);
    let _server = Server::start(command);
    std::fs::write(&file, format!("{top}{}{}", disk("b"), disk("new"))).unwrap();
    assert_eq!(output(ctl(&place, &["reload"])), "added new\nremoved a\n");
    std::fs::write(&file, "nonsense").unwrap();
    assert_says(&refusal(ctl(&place, &["reload"])), &["bareblk.toml"]);
    assert_eq!(ok(&place, &["list"])["disks"].as_array().unwrap().len(), 2);
}

#[test]
fn changes_are_in_the_log_and_questions_are_not() {
    let place = Place::new();
    let server = controlled(&place);
    output(ctl(&place, &["resize", "root", "2M"]));
    ok(&place, &["list"]);
    assert_says(
        &server.log(),
        &["a control client changed the server", r#""do":"resize""#, r#""size_bytes":2097152"#],
    );
    assert!(!server.log().contains("list"), "{}", server.log());
}

#[test]
fn shutdown_returns_when_the_server_has_stopped() {
    let place = Place::new();
    let server = controlled(&place);
    output(ctl(&place, &["shutdown"]));
    assert!(!place.socket("s").exists() && !place.socket("c").exists());
    server.wait_logged("everything is on stable storage");
    assert_says(&server.log(), &["a control client requested a stop"]);
}

#[test]
fn terminated_server_removes_its_control_socket_and_tells_its_clients() {
    let place = Place::new();
    let server = controlled(&place);
    let mut client = Client::new(&place);
    assert_eq!(server.stop(Signal::TERM).code(), Some(0));
    assert_eq!(client.line().unwrap()["error"]["kind"], "stopping");
    assert_eq!(client.line(), None);
    assert!(!place.socket("c").exists());
}
