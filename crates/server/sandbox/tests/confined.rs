//! Confined threads: what they can do, and how a process ends that tries something else.
//!
//! Each case runs in its own process (this program again, with the case's name in its environment), because
//! confinement is permanent.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use sandbox::{EXIT_CODE, EngineCalls, Entry, FileRules, Identity, Kept, Role, confine, enter, enter_apart};
use xtask::skip::{Reason, skip};

const NOTHING: Kept = Kept::Server { scheduling: false, locked_memory: false };

const CASE: &str = "SANDBOX_TEST_CASE";
/// Exit code of a case that ran to its end; nothing else returns it.
const SURVIVED: i32 = 42;

/// Runs `case` in its own process. In that process, it runs the case and does not return.
fn in_a_process(test: &str, case: impl FnOnce()) -> Output {
    if std::env::var_os(CASE).is_some_and(|wanted| wanted == test) {
        case();
        std::process::exit(SURVIVED);
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(CASE, test);
    command.output().unwrap()
}

fn assert_survives(output: &Output) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(SURVIVED), "{:?}: {text}", output.status.signal());
}

fn assert_refused(output: &Output, role: &str, call: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(EXIT_CODE), "{:?}: {text}", output.status.signal());
    let line =
        text.lines().find(|line| line.starts_with("bareblk: sandbox: ")).expect("a line that says why");
    assert!(line.contains(&format!("{role} thread made system call ")), "{line}");
    assert!(line.contains(&format!("({call})")), "{line}");
}

/// Runs `act` on a thread with this role.
fn on_a_thread(role: Role, act: impl FnOnce() + Send + 'static) {
    std::thread::spawn(move || {
        enter(role).unwrap();
        act();
    })
    .join()
    .unwrap();
}

/// Runs `act` on a thread that starts before the process is confined, and has this role.
fn apart(role: Role, rules: FileRules, act: impl FnOnce() + Send + 'static) {
    let (go, wait) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        enter_apart(role, &rules).unwrap();
        wait.recv().unwrap();
        act();
    });
    confine().unwrap();
    go.send(()).unwrap();
    thread.join().unwrap();
}

// ---- refused and reported calls

#[test]
fn network_thread_may_not_start_a_program() {
    let output = in_a_process("network_thread_may_not_start_a_program", || {
        apart(Role::Network, FileRules::default(), || {
            let _ = std::os::unix::process::CommandExt::exec(&mut Command::new("/bin/true"));
        });
    });
    assert_eq!(output.status.code(), Some(EXIT_CODE));
    assert!(String::from_utf8_lossy(&output.stderr).contains("network thread made system call"));
}

#[test]
fn tls_thread_may_not_make_a_pair_of_sockets_of_its_own() {
    let output = in_a_process("tls_thread_may_not_make_a_pair_of_sockets_of_its_own", || {
        confine().unwrap();
        on_a_thread(Role::TlsRelay, || drop(std::os::unix::net::UnixStream::pair()));
    });
    assert_refused(&output, "tls", "socketpair");
}

#[test]
fn control_thread_beside_a_network_thread_may_not_connect() {
    let output = in_a_process("control_thread_beside_a_network_thread_may_not_connect", || {
        apart(Role::Network, FileRules::default(), || ());
        drop(std::net::TcpStream::connect("127.0.0.1:1"));
    });
    assert_refused(&output, "control", "socket");
}

#[test]
fn program_started_by_the_process_is_refused_and_named() {
    let output = in_a_process("program_started_by_the_process_is_refused_and_named", || {
        confine().unwrap();
        let _ = std::os::unix::process::CommandExt::exec(&mut Command::new("/bin/true"));
    });
    // Before that, the library makes other calls that are not allowed either.
    assert_eq!(output.status.code(), Some(EXIT_CODE));
    assert!(String::from_utf8_lossy(&output.stderr).contains("control thread made system call"));
}

#[test]
fn socket_made_by_a_session_is_refused_and_named() {
    let output = in_a_process("socket_made_by_a_session_is_refused_and_named", || {
        confine().unwrap();
        on_a_thread(Role::Session, || drop(std::net::UdpSocket::bind("127.0.0.1:0")));
    });
    assert_refused(&output, "session", "socket");
}

#[test]
fn file_opened_by_a_session_fails_although_the_process_may() {
    let output = in_a_process("file_opened_by_a_session_fails_although_the_process_may", || {
        confine().unwrap();
        std::fs::read("/proc/version").unwrap();
        for role in [Role::Session, Role::EngineThread] {
            on_a_thread(role, || {
                let error = std::fs::read("/proc/version").unwrap_err();
                assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
            });
        }
    });
    assert_survives(&output);
}

#[test]
fn file_made_by_a_session_is_refused_and_named() {
    let output = in_a_process("file_made_by_a_session_is_refused_and_named", || {
        confine().unwrap();
        on_a_thread(Role::Session, || drop(std::fs::File::create("/dev/null")));
    });
    assert_refused(&output, "session", "openat");
}

#[test]
fn file_opened_for_writing_by_a_worker_is_refused_and_for_reading_is_not() {
    let output =
        in_a_process("file_opened_for_writing_by_a_worker_is_refused_and_for_reading_is_not", || {
            confine().unwrap();
            on_a_thread(Role::Worker, || {
                std::fs::read("/proc/version").unwrap();
                drop(std::fs::OpenOptions::new().write(true).open("/dev/null"));
            });
        });
    assert_refused(&output, "worker", "openat");
}

#[test]
fn engine_that_workers_do_not_have_is_refused() {
    let output = in_a_process("engine_that_workers_do_not_have_is_refused", || {
        confine().unwrap();
        sandbox::limit_workers(EngineCalls { io_uring: false, linux_aio: true });
        on_a_thread(Role::Worker, || {
            let nowhere = std::ptr::null_mut::<u8>();
            // SAFETY: 1. the kernel refuses the null pointer, if it reads it at all.
            unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, nowhere) };
        });
    });
    assert_refused(&output, "worker", "io_uring_setup");
}

#[test]
fn memory_that_could_be_run_is_refused() {
    let output = in_a_process("memory_that_could_be_run_is_refused", || {
        confine().unwrap();
        let (prot, flags) = (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: 1. a new mapping, which no code uses.
        unsafe { libc::mmap(std::ptr::null_mut(), 4096, prot, flags, -1, 0) };
    });
    assert_refused(&output, "control", "mmap");
}

#[test]
fn signal_to_another_process_is_refused() {
    let output = in_a_process("signal_to_another_process_is_refused", || {
        confine().unwrap();
        // SAFETY: 1. signal 0 does nothing.
        unsafe { libc::syscall(libc::SYS_tgkill, 1, 1, 0) };
    });
    assert_refused(&output, "control", "tgkill");
}

#[test]
fn file_that_would_send_signals_is_refused() {
    let output = in_a_process("file_that_would_send_signals_is_refused", || {
        confine().unwrap();
        // SAFETY: 1. takes only numbers.
        unsafe { libc::fcntl(0, libc::F_SETOWN, 1) };
    });
    assert_refused(&output, "control", "fcntl");
}

#[test]
fn pair_of_sockets_that_reaches_others_is_refused() {
    let output = in_a_process("pair_of_sockets_that_reaches_others_is_refused", || {
        confine().unwrap();
        drop(std::os::unix::net::UnixDatagram::pair());
    });
    assert_refused(&output, "control", "socketpair");
}

#[test]
fn context_of_linux_aio_set_up_by_an_engine_thread_is_refused_and_its_end_is_not() {
    let test = "context_of_linux_aio_set_up_by_an_engine_thread_is_refused_and_its_end_is_not";
    let output = in_a_process(test, || {
        confine().unwrap();
        sandbox::limit_workers(EngineCalls { io_uring: false, linux_aio: false });
        on_a_thread(Role::EngineThread, || {
            // SAFETY: 1. there is no such context, so the kernel returns an error.
            unsafe { libc::syscall(libc::SYS_io_destroy, 0) };
            let nowhere = std::ptr::null_mut::<u8>();
            // SAFETY: 1. the kernel refuses the null pointer, if it reads it at all.
            unsafe { libc::syscall(libc::SYS_io_setup, 1, nowhere) };
        });
    });
    assert_refused(&output, "engine", "io_setup");
}

// ---- threads without a list

/// More nested filters than the kernel accepts: 32768 instructions (`MAX_INSNS_PER_PATH`, kernel/seccomp.c).
const TOO_MANY: usize = 2000;

/// Adds filters until the kernel accepts no further one for the calling thread.
fn use_up_filters() -> sandbox::SandboxError {
    let refused = std::iter::repeat_with(|| enter(Role::Worker)).take(TOO_MANY).find_map(Result::err);
    refused.expect("a kernel with a limit")
}

#[test]
fn thread_that_gets_no_list_is_told_so() {
    let output = in_a_process("thread_that_gets_no_list_is_told_so", || {
        confine().unwrap();
        assert!(use_up_filters().to_string().contains("does not accept the system-call filter"));
    });
    assert_survives(&output);
}

#[test]
fn engine_thread_that_gets_no_list_ends_the_process_with_a_line() {
    let output = in_a_process("engine_thread_that_gets_no_list_ends_the_process_with_a_line", || {
        confine().unwrap();
        use_up_filters();
        let entry = Entry::of(Role::EngineThread);
        std::thread::spawn(move || entry.enter_or_end()).join().unwrap();
    });
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(EXIT_CODE), "{:?}: {text}", output.status.signal());
    let line = text.lines().find(|line| line.starts_with("bareblk: sandbox: ")).expect("a line");
    assert!(
        line.contains("engine thread cannot install its list") && line.contains("--sandbox off"),
        "{line}"
    );
}

// ---- operations that still work

/// Each thread starts the next one of the same kind, `left` times; they pass `last` on.
fn engine_threads_in_a_row(left: usize, last: std::sync::mpsc::Sender<()>) {
    let entry = Entry::of(Role::EngineThread);
    let next = std::thread::Builder::new().stack_size(64 << 10).spawn(move || {
        entry.enter_or_end();
        match left {
            0 => last.send(()).unwrap(),
            _ => engine_threads_in_a_row(left - 1, last),
        }
    });
    next.unwrap();
}

#[test]
fn engine_threads_start_one_another_for_ever() {
    let output = in_a_process("engine_threads_start_one_another_for_ever", || {
        confine().unwrap();
        let (last, ended) = std::sync::mpsc::channel();
        on_a_thread(Role::Worker, move || engine_threads_in_a_row(TOO_MANY, last));
        ended.recv().unwrap();
    });
    assert_survives(&output);
}

#[test]
fn crash_ends_the_process_by_its_own_signal() {
    let output = in_a_process("crash_ends_the_process_by_its_own_signal", || {
        confine().unwrap();
        on_a_thread(Role::Worker, || {
            // Rust's handler removes itself the first time.
            for _ in 0..2 {
                // SAFETY: 1. takes only a number.
                unsafe { libc::raise(libc::SIGSEGV) };
            }
        });
    });
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
}

#[test]
fn descriptors_are_doubled_and_the_helper_is_asked() {
    let output = in_a_process("descriptors_are_doubled_and_the_helper_is_asked", || {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        confine().unwrap();
        on_a_thread(Role::Worker, || {
            let pair = |of_type| socketpair(AddressFamily::UNIX, of_type, SocketFlags::CLOEXEC, None);
            let (one, _other) = pair(SocketType::SEQPACKET).unwrap();
            pair(SocketType::STREAM).unwrap();
            let flags = rustix::fs::fcntl_getfl(one.try_clone().unwrap()).unwrap();
            rustix::fs::fcntl_setfl(&one, flags).unwrap();
        });
    });
    assert_survives(&output);
}

#[test]
fn network_thread_and_its_threads_connect_and_read_only_the_files_that_they_need() {
    let output =
        in_a_process("network_thread_and_its_threads_connect_and_read_only_the_files_that_they_need", || {
            let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let address = server.local_addr().unwrap();
            let [wanted, other] = ["/etc/passwd", "/etc/group"];
            let rules = FileRules { readable: vec![wanted.into()], connects: true, ..FileRules::default() };
            apart(Role::Network, rules, move || {
                let own = std::thread::spawn(move || {
                    assert!(std::net::TcpStream::connect(address).is_ok());
                    assert!(std::fs::read(wanted).is_ok());
                    std::fs::read(other).is_ok()
                });
                if own.join().unwrap() {
                    // Without landlock, only system calls are restricted.
                    eprintln!("files are not restricted");
                }
            });
            server.accept().unwrap();
        });
    assert_survives(&output);
}

#[test]
fn threads_of_every_role_wait_allocate_and_end() {
    let output = in_a_process("threads_of_every_role_wait_allocate_and_end", || {
        confine().unwrap();
        for role in [Role::Control, Role::Session, Role::Worker, Role::EngineThread, Role::TlsRelay] {
            on_a_thread(role, || {
                let (sender, receiver) = std::sync::mpsc::channel();
                sender.send(vec![1_u8; 1 << 20]).unwrap();
                assert_eq!(receiver.recv().unwrap().len(), 1 << 20);
                std::thread::sleep(std::time::Duration::from_millis(1));
            });
        }
        on_a_thread(Role::Worker, || {
            std::thread::spawn(|| ()).join().unwrap();
        });
    });
    assert_survives(&output);
}

#[test]
fn panic_with_a_trace_is_told_on_every_thread_and_aborts_as_ever() {
    let output = in_a_process("panic_with_a_trace_is_told_on_every_thread_and_aborts_as_ever", || {
        // No other thread runs in this process.
        // SAFETY: 1. no other thread reads the environment now.
        unsafe { std::env::set_var("RUST_BACKTRACE", "1") };
        confine().unwrap();
        for role in [Role::Control, Role::Session, Role::Worker, Role::EngineThread, Role::TlsRelay] {
            let ended = std::thread::spawn(move || {
                enter(role).unwrap();
                panic!("{role} fails");
            });
            assert!(ended.join().is_err());
        }
        on_a_thread(Role::Session, || std::process::abort());
    });
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("session fails") && text.contains("engine fails"), "{text}");
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{text}");
}

#[test]
fn without_confinement_roles_mean_nothing() {
    let output = in_a_process("without_confinement_roles_mean_nothing", || {
        on_a_thread(Role::Session, || drop(std::fs::read("/proc/version").unwrap()));
    });
    assert_survives(&output);
}

// ---- files and privileges

#[test]
fn files_outside_the_rules_are_not_opened() {
    let output = in_a_process("files_outside_the_rules_are_not_opened", || {
        let enforced = sandbox::restrict_files(&FileRules::default()).unwrap();
        if enforced == sandbox::Enforcement::None {
            return skip(Reason::NoLandlock, "");
        }
        std::fs::read("/proc/self/status").unwrap();
        for path in ["/etc/passwd", "/dev/null"] {
            let error = std::fs::read(path).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{path}");
        }
    });
    assert_survives(&output);
}

#[test]
fn nothing_is_left_of_roots_capabilities_and_core_files_are_off() {
    let output = in_a_process("nothing_is_left_of_roots_capabilities_and_core_files_are_off", || {
        sandbox::drop_privileges(Identity::default(), NOTHING).unwrap();
        sandbox::keep_out_of_core_files().unwrap();
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().to_owned()
        };
        for name in ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"] {
            assert_eq!(u64::from_str_radix(&field(name), 16).unwrap(), 0, "{name}");
        }
        assert_eq!(field("NoNewPrivs:"), "1");
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
        let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
        assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
        assert!(matches!(
            rustix::process::dumpable_behavior().unwrap(),
            rustix::process::DumpableBehavior::NotDumpable
        ));
    });
    assert_survives(&output);
}

#[test]
fn root_becomes_another_user_for_good() {
    if !rustix::process::geteuid().is_root() {
        return skip(Reason::NotRoot, "only root can become another user");
    }
    let output = in_a_process("root_becomes_another_user_for_good", || {
        let nobody = Identity { user: Some(65534), group: Some(65534) };
        sandbox::drop_privileges(nobody, Kept::Server { scheduling: true, locked_memory: false }).unwrap();
        assert_eq!(rustix::process::geteuid().as_raw(), 65534);
        assert!(sandbox::drop_privileges(Identity { user: Some(0), group: None }, NOTHING).is_err());
        let kept = rustix::thread::capabilities(None).unwrap();
        assert_eq!(kept.permitted, rustix::thread::CapabilitySet::SYS_NICE);
    });
    assert_survives(&output);
}
