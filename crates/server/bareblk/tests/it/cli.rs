//! The program's command line: invalid options and images, `--create`, sockets, and the output of the other commands.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use xtask::skip::{Reason, skip};

use crate::rig;
use crate::rig::{Place, Server, assert_says, bareblk, is_root, output, refusal, wrong_usage};

const MIB: u64 = 1 << 20;

// ---- images that cannot be served

#[test]
fn missing_image_is_named_and_create_is_suggested() {
    let place = Place::new();
    let line = refusal(place.serve(&place.path("none.raw"), "s"));
    assert_says(&line, &["none.raw", "does not exist", "--create SIZE"]);
    assert!(!place.socket("s").exists());
}

#[test]
fn directory_as_image_is_refused() {
    let place = Place::new();
    assert_says(&refusal(place.serve(&place.path(""), "s")), &["is a directory"]);
}

/// The command without the two capabilities with which root can read every file.
fn without_root_powers(command: &Command) -> Option<Command> {
    let mut wrapped = Command::new("setpriv");
    wrapped.arg("--bounding-set=-dac_override,-dac_read_search");
    let works = wrapped.arg("true").stdout(Stdio::null()).stderr(Stdio::null()).status();
    works.ok().filter(std::process::ExitStatus::success)?;
    let mut wrapped = Command::new("setpriv");
    wrapped.arg("--bounding-set=-dac_override,-dac_read_search");
    wrapped.arg(command.get_program()).args(command.get_args()).env_remove("RUST_LOG");
    Some(wrapped)
}

#[test]
fn unreadable_image_says_to_look_at_its_permissions() {
    let place = Place::new();
    let image = place.image("disk.raw", MIB);
    std::fs::set_permissions(&image, std::os::unix::fs::PermissionsExt::from_mode(0o000)).unwrap();
    let mut command = place.serve(&image, "s");
    if is_root() {
        let Some(weakened) = without_root_powers(&command) else {
            return skip(Reason::NoSetpriv, "root reads every file");
        };
        command = weakened;
    }
    assert_says(&refusal(command), &["disk.raw", "cannot be opened for reading", "permissions", "denied"]);
}

#[test]
fn empty_image_is_refused() {
    let place = Place::new();
    assert_says(&refusal(place.serve(&place.image("disk.raw", 0), "s")), &["is empty", "multiple of 512"]);
}

#[test]
fn image_that_ends_inside_a_block_is_told_its_next_size() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", 1_000_000), "s");
    command.args(["--block-size", "4096"]);
    assert_says(&refusal(command), &["1000000 bytes", "block size 4096", "1003520 bytes"]);
}

#[test]
fn block_size_that_is_no_power_of_two_is_refused() {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.args(["--block-size", "1000"]);
    assert_says(&refusal(command), &["1000", "power of two", "512 to 4096"]);
}

/// Every Linux has this file, every user can read it, and sysfs does not support direct I/O.
const FILE_WITHOUT_DIRECT_IO: &str = "/sys/kernel/uevent_seqnum";

#[test]
fn file_system_without_direct_io_suggests_the_page_cache() {
    let place = Place::new();
    let mut command = place.serve(Path::new(FILE_WITHOUT_DIRECT_IO), "s");
    command.arg("--readonly");
    assert_says(&refusal(command), &["O_DIRECT", "refuses", "--cache writeback"]);
}

// ---- --create

#[test]
fn create_over_an_existing_file_leaves_it_alone() {
    let place = Place::new();
    let image = place.path("disk.raw");
    std::fs::write(&image, [7; 4096]).unwrap();
    let mut command = place.serve(&image, "s");
    command.args(["--create", "1M"]);
    assert_says(&refusal(command), &["exists already", "leave out --create"]);
    assert_eq!(std::fs::read(&image).unwrap(), [7; 4096]);
}

#[test]
fn create_makes_an_image_of_that_size_for_its_owner_only() {
    let place = Place::new();
    let image = place.path("disk.raw");
    let mut command = place.serve(&image, "s");
    command.args(["--create", "64M"]);
    let _server = Server::start(command);
    assert_eq!(std::fs::metadata(&image).unwrap().len(), 64 * MIB);
    assert_eq!(rig::mode(&image), 0o600);
}

#[test]
fn created_image_and_its_folder_reach_stable_storage_before_it_is_served() {
    let place = Place::new();
    let image = place.path("disk.raw");
    let mut serve = place.serve(&image, "no/such/folder/s");
    serve.args(["--create", "1M"]);
    // One trace file per thread. In a shared file, another thread's line could split the line of a call.
    let mut traced = Command::new("strace");
    traced.args(["-ff", "-y", "-e", "trace=fsync", "-o"]).arg(place.path("calls"));
    traced.arg(serve.get_program()).args(serve.get_args());
    if !Command::new("strace").arg("true").output().is_ok_and(|run| run.status.success()) {
        return skip(Reason::NoStrace, "");
    }
    traced.stdin(Stdio::null()).output().unwrap();
    let folder = image.parent().unwrap();
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let of_threads = files.filter(|file| file.file_stem() == Some("calls".as_ref()));
    let calls: String = of_threads.map(|file| std::fs::read_to_string(file).unwrap()).collect();
    assert_says(&calls, &[&format!("<{}>) = 0", image.display()), &format!("<{}>) = 0", folder.display())]);
}

#[test]
fn image_made_for_a_server_that_cannot_start_is_removed_again() {
    let place = Place::new();
    let image = place.path("disk.raw");
    let mut command = place.serve(&image, "no/such/folder/s");
    command.args(["--create", "1M"]);
    assert_says(&refusal(command), &["folder of socket", "does not exist"]);
    assert!(!image.exists());
}

#[test]
fn create_with_a_senseless_size_is_wrong_usage() {
    let place = Place::new();
    let mut command = place.serve(&place.path("disk.raw"), "s");
    command.args(["--create", "5X"]);
    assert_says(&wrong_usage(command), &["5X", "--create", "K, M, G or T", "(see bareblk serve --help)"]);
}

#[test]
fn create_with_half_a_sector_is_wrong_usage() {
    let place = Place::new();
    let mut command = place.serve(&place.path("disk.raw"), "s");
    command.args(["--create", "1000"]);
    assert_says(&wrong_usage(command), &["1000", "--create", "give a multiple of 512"]);
}

#[test]
fn create_of_a_size_that_is_no_whole_blocks_names_both_options_and_makes_no_file() {
    let place = Place::new();
    let image = place.path("disk.raw");
    let mut command = place.serve(&image, "s");
    command.args(["--create", "5K", "--block-size", "4096"]);
    assert_says(&refusal(command), &["--create", "5120 bytes", "block size 4096", "8192", "--block-size"]);
    assert!(!image.exists());
}

// ---- invalid options, refused before the image is opened

#[test]
fn queue_size_that_is_no_power_of_two_is_refused_before_an_image_is_made() {
    let place = Place::new();
    let image = place.path("disk.raw");
    let mut command = place.serve(&image, "s");
    command.args(["--queue-size", "100", "--create", "1M"]);
    assert_says(&wrong_usage(command), &["--queue-size", "100", "power of two", "2 to 1024"]);
    assert!(!image.exists());
}

#[test]
fn queue_size_above_the_limit_is_refused() {
    let place = Place::new();
    let mut command = place.serve(&place.path("disk.raw"), "s");
    command.args(["--queue-size", "2048"]);
    assert_says(&wrong_usage(command), &["--queue-size", "2048", "2 to 1024"]);
}

#[test]
fn no_queues_at_all_are_refused() {
    let place = Place::new();
    let mut command = place.serve(&place.path("disk.raw"), "s");
    command.args(["--queues", "0"]);
    assert_says(&wrong_usage(command), &["--queues", "'0'", "1 to 256"]);
}

#[test]
fn serial_that_is_too_long_is_refused() {
    let place = Place::new();
    let mut command = place.serve(&place.path("disk.raw"), "s");
    command.args(["--serial", "123456789012345678901"]);
    assert_says(&wrong_usage(command), &["--serial", "123456789012345678901", "1 to 20"]);
}

#[test]
fn serial_with_a_line_break_is_refused_in_one_line() {
    let place = Place::new();
    let mut command = place.serve(&place.path("disk.raw"), "s");
    command.args(["--serial", "a\nb"]);
    assert_says(&wrong_usage(command), &["--serial", r"a\nb", "printable ASCII"]);
}

#[test]
fn unknown_socket_owner_is_refused() {
    let place = Place::new();
    let mut command = place.serve(&place.path("disk.raw"), "s");
    command.args(["--socket-owner", "nobody-has-this-name"]);
    assert_says(&refusal(command), &["--socket-owner", "nobody-has-this-name", "does not exist"]);
}

#[test]
fn senseless_log_filter_is_refused() {
    let place = Place::new();
    let mut command = place.serve(&place.path("disk.raw"), "s");
    command.env("RUST_LOG", "a=b=c");
    assert_says(&refusal(command), &["RUST_LOG=a=b=c"]);
}

#[test]
fn unknown_option_is_wrong_usage() {
    let mut command = bareblk();
    command.args(["serve", "disk.raw", "--socket", "s", "--no-such-option"]);
    assert_says(&wrong_usage(command), &["--no-such-option", "(see bareblk serve --help)"]);
}

#[test]
fn serving_without_a_socket_is_wrong_usage() {
    let mut command = bareblk();
    command.args(["serve", "disk.raw"]);
    assert_says(&wrong_usage(command), &["required", "--socket <PATH>"]);
}

#[test]
fn time_limit_with_a_unit_is_wrong_usage() {
    let place = Place::new();
    let mut command = place.serve(&place.path("disk.raw"), "s");
    command.args(["--lock-timeout", "5m"]);
    assert_says(&wrong_usage(command), &["5m", "--lock-timeout", "give whole seconds"]);
}

#[test]
fn no_arguments_at_all_show_the_help() {
    let run = assert_cmd::Command::from_std(bareblk()).assert().code(2);
    assert_says(&String::from_utf8_lossy(&run.get_output().stderr), &["Usage:", "Commands:", "Examples:"]);
}

#[test]
fn unknown_cache_mode_is_told_the_five() {
    let place = Place::new();
    let mut command = place.serve(&place.path("disk.raw"), "s");
    command.args(["--cache", "direct"]);
    let known = ["--cache", "direct", "none", "writeback", "writethrough", "directsync", "unsafe"];
    assert_says(&wrong_usage(command), &known);
}

#[test]
fn unknown_owner_of_the_write_cache_is_told_the_two() {
    let place = Place::new();
    let mut command = place.serve(&place.path("disk.raw"), "s");
    command.args(["--wce", "off"]);
    assert_says(&wrong_usage(command), &["--wce", "off", "guest", "fixed"]);
}

/// Starts a server with these options, stops it, and returns its log.
fn log_of(options: &[&str]) -> String {
    let place = Place::new();
    let mut command = place.serve(&place.image("disk.raw", MIB), "s");
    command.args(options);
    let server = Server::start(command);
    let mut log = server.log_file();
    assert!(server.stop(Signal::TERM).success());
    std::io::read_to_string(&mut log).unwrap()
}

#[test]
fn each_cache_mode_is_served_and_logged() {
    let logs = ["none", "writeback", "writethrough", "directsync"].map(|mode| log_of(&["--cache", mode]));
    assert_says(&logs[0], &["cache=none", "wce=guest", "everything is on stable storage"]);
    assert_says(&logs[1], &["cache=writeback", "everything is on stable storage"]);
    assert_says(&logs[2], &["cache=writethrough", "everything is on stable storage"]);
    assert_says(&logs[3], &["cache=directsync", "everything is on stable storage"]);
}

#[test]
fn fixed_write_cache_is_logged() {
    assert_says(&log_of(&["--cache", "directsync", "--wce=fixed"]), &["wce=fixed"]);
}

#[test]
fn unsafe_cache_warns_when_it_starts_and_claims_nothing_when_it_stops() {
    let log = log_of(&["--cache", "unsafe"]);
    assert_says(&log, &["WARN", "lost if the host crashes", "nothing was flushed (--cache unsafe)"]);
    assert!(!log.contains("stable storage"), "{log}");
}

// ---- sockets that cannot be created

#[test]
fn socket_path_that_is_too_long_is_told_the_limit() {
    let place = Place::new();
    let mut command = bareblk();
    command.arg("serve").arg(place.image("disk.raw", MIB));
    command.arg("--socket").arg(format!("/tmp/{}", "x".repeat(103)));
    assert_says(&refusal(command), &["108 bytes", "at most 107", "shorter path"]);
}

#[test]
fn socket_in_a_missing_folder_is_refused() {
    let place = Place::new();
    let line = refusal(place.serve(&place.image("disk.raw", MIB), "no/s"));
    assert_says(&line, &["no/s", "folder", "does not exist"]);
}

#[test]
fn socket_of_a_live_server_is_refused_and_stays() {
    let place = Place::new();
    let mut server = Server::start(place.serve(&place.image("a.raw", MIB), "s"));
    let line = refusal(place.serve(&place.image("b.raw", MIB), "s"));
    assert_says(&line, &["in use by a running server"]);
    assert!(server.is_running() && place.socket("s").exists());
}

#[test]
fn regular_file_in_the_sockets_place_is_refused_and_stays() {
    let place = Place::new();
    std::fs::write(place.socket("s"), "precious").unwrap();
    let line = refusal(place.serve(&place.image("disk.raw", MIB), "s"));
    assert_says(&line, &["regular file", "not a socket"]);
    assert_eq!(std::fs::read_to_string(place.socket("s")).unwrap(), "precious");
}

// ---- output of the other commands

#[test]
fn version_is_printed() {
    let mut command = bareblk();
    command.arg("--version");
    assert_eq!(output(command), concat!("bareblk ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn help_of_serve_has_examples_and_explains_signals() {
    let mut command = bareblk();
    command.args(["serve", "--help"]);
    assert_says(&output(command), &["Examples:", "--create 20G", "SIGTERM", "SIGHUP", "RUST_LOG"]);
}

#[test]
fn help_of_serve_explains_each_cache_mode() {
    let mut command = bareblk();
    command.args(["serve", "--help"]);
    assert_says(
        &output(command),
        &["Cache modes", "directsync    O_DIRECT;", "flushes are ignored", "--wce fixed"],
    );
}

fn completions(shell: &str) -> String {
    let mut command = bareblk();
    command.args(["completions", shell]);
    output(command)
}

#[test]
fn completions_know_the_options_in_every_shell() {
    assert_says(&completions("bash"), &["_bareblk", "--lock-timeout", "complete -F"]);
    assert_says(&completions("zsh"), &["#compdef bareblk", "--lock-timeout"]);
    assert_says(&completions("fish"), &["complete -c bareblk", "lock-timeout"]);
}

#[test]
fn bash_completes_the_names_of_a_servers_disks() {
    let place = Place::new();
    let mut serve = place.serve(&place.image("disk.raw", 1 << 20), "s");
    serve.args(["--name", "vm1-root", "--control"]).arg(place.socket("c"));
    let _server = Server::start(serve);
    let script = place.path("completions.bash");
    std::fs::write(&script, completions("bash")).unwrap();
    let complete = |words: &str| {
        let control = place.socket("c").display().to_string();
        let program = env!("CARGO_BIN_EXE_bareblk");
        let words = words.replace('@', &control);
        let run = format!(
            "source {}; COMP_WORDS=({program} {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _bareblk_with_disks {program} \"${{COMP_WORDS[COMP_CWORD]}}\" x; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            script.display()
        );
        let mut bash = std::process::Command::new("bash");
        bash.args(["-c", &run]).env_remove("BAREBLK_CONTROL");
        output(bash)
    };
    assert_eq!(complete("ctl --control @ resize vm"), "vm1-root\n");
    assert_eq!(complete("ctl stats --control @ --watch 1 ''"), "vm1-root\n");
    assert_says(&complete("ctl resize --control @ --for"), &["--force"]);
    assert!(!complete("ctl --control @ resize vm1-root ''").contains("vm1-root"));
    assert!(!complete("ctl resume --control /nowhere v").contains("vm1-root"));
}

fn vmm_args(args: &[&str]) -> String {
    let mut command = bareblk();
    command.args(["vmm-args", "--socket", "/run/vm1.sock"]).args(args);
    output(command)
}

#[test]
fn vmm_args_for_qemu_share_the_memory_and_set_the_queue_size() {
    assert_says(
        &vmm_args(&["--memory", "2G", "--qemu-version", "7.2"]),
        &[
            "-m 2G",
            "-object memory-backend-memfd,id=bareblk-mem,size=2G,share=on",
            "-machine memory-backend=bareblk-mem",
            "-chardev socket,id=bareblk-vm1,path=/run/vm1.sock,reconnect=1",
            "-device vhost-user-blk-pci,chardev=bareblk-vm1,disable-legacy=on,queue-size=1024",
        ],
    );
}

#[test]
fn vmm_args_for_libvirt_share_the_memory_and_set_the_queue_size() {
    assert_says(
        &vmm_args(&["--vmm", "libvirt", "--queues", "4", "--queue-size", "256"]),
        &[
            "<source type='memfd'/>",
            "<access mode='shared'/>",
            "<disk type='vhostuser' device='disk'>",
            "<driver name='qemu' type='raw' queues='4' queue_size='256'/>",
            "<source type='unix' path='/run/vm1.sock'>",
        ],
    );
}

#[test]
fn vmm_args_for_cloud_hypervisor_share_the_memory_and_set_the_queue_size() {
    assert_says(
        &vmm_args(&["--vmm", "cloud-hypervisor", "--queues", "4", "--memory", "1536M"]),
        &[
            "--memory size=1536M,shared=on",
            "--disk vhost_user=true,socket=/run/vm1.sock,num_queues=4,queue_size=1024",
        ],
    );
}

#[test]
fn vmm_args_for_firecracker_and_crosvm_name_the_socket() {
    assert_says(
        &vmm_args(&["--vmm", "firecracker"]),
        &[
            "-X PUT http://localhost/drives/bareblk_vm1 ",
            r#""socket":"/run/vm1.sock""#,
            "Writeback",
            "--take-over",
        ],
    );
    assert_says(&vmm_args(&["--vmm", "crosvm"]), &["--vhost-user block,socket=/run/vm1.sock\n"]);
}

#[test]
fn vmm_args_take_the_socket_as_a_word_and_need_exactly_one_disk() {
    let command = |words: &[&str]| {
        let mut command = bareblk();
        command.arg("vmm-args").args(words);
        command
    };
    assert_says(&output(command(&["/run/vm1.sock"])), &["path=/run/vm1.sock,reconnect"]);
    for words in [&[][..], &["s", "--socket", "s"], &["s", "--disk", "d"], &["s", "--control", "c"]] {
        wrong_usage(command(words));
    }
}

#[test]
fn vmm_args_ask_the_server_for_socket_and_queue_size() {
    let place = Place::new();
    let mut serve = place.serve(&place.image("disk.raw", 1 << 20), "s");
    serve.args(["--queue-size", "256", "--queues", "2", "--control"]).arg(place.socket("c"));
    let _server = Server::start(serve);
    let command = |words: &[&str]| {
        let mut command = bareblk();
        command.args(["vmm-args", "--disk", "disk.raw", "--control"]).arg(place.socket("c")).args(words);
        command
    };
    let text = output(command(&["--vmm", "cloud-hypervisor", "--queues", "2"]));
    assert_says(&text, &[&format!("socket={},num_queues=2,queue_size=256", place.socket("s").display())]);
    assert_says(&refusal(command(&["--queues", "3"])), &["--queues 3", "offers only 2"]);
    assert_says(&refusal(command(&["--queue-size", "512"])), &["--queue-size 512", "allows only 256"]);
    let mut none = bareblk();
    none.args(["vmm-args", "--disk", "none", "--control"]).arg(place.socket("c"));
    assert_says(&refusal(none), &["there is no disk `none`"]);
}

#[test]
fn vmm_args_refuse_a_queue_size_no_server_accepts() {
    let mut command = bareblk();
    command.args(["vmm-args", "--socket", "s", "--queue-size", "100"]);
    assert_says(&wrong_usage(command), &["--queue-size", "100", "power of two"]);
}
