//! Checks the units with systemd's own tools, the manual pages with man, and the Debian package in a clean Debian.
//!
//! - Three tests install a Debian in a folder (`mmdebstrap`, root, a mirror), in the long run only. Two of them boot
//!   its systemd: one in namespaces (`package/boot.sh`) with the host's kernel, the other in a virtual machine with
//!   Debian's kernel.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use xtask::config_page;
use xtask::guest::{GuestImage, Vm};
use xtask::packages::find_program;
use xtask::sizes::LONG_ENV;
use xtask::skip::{Reason, skip};

use crate::rig;
use crate::rig::{Place, Server, assert_says, bareblk, is_root, output};

fn packaging() -> PathBuf {
    xtask::workspace::root().join("packaging")
}

/// The units, with the path of this program, and instances of the templates.
fn units() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let place = |unit: &str, instance: &str| {
        let text = std::fs::read_to_string(packaging().join(unit)).unwrap();
        let text = text.replace("/usr/bin/bareblk", env!("CARGO_BIN_EXE_bareblk"));
        std::fs::write(folder.path().join(instance), text).unwrap();
    };
    place("bareblk.service", "bareblk.service");
    place("bareblk-exporter.service", "bareblk-exporter.service");
    for instance in ["bareblk@vm1.service", "bareblk@vm1.socket", "bareblk-disk@vm1.socket"] {
        place(&instance.replace("vm1", ""), instance);
    }
    folder
}

fn analyze(arguments: &[&str], folder: &Path) -> Option<Output> {
    let program = find_program("systemd-analyze")?;
    Some(Command::new(program).args(arguments).current_dir(folder).output().unwrap())
}

#[test]
fn units_have_no_word_that_systemd_does_not_know() {
    let folder = units();
    let units = [
        "bareblk.service",
        "bareblk-exporter.service",
        "bareblk@vm1.service",
        "bareblk@vm1.socket",
        "bareblk-disk@vm1.socket",
    ];
    for unit in units {
        let Some(said) = analyze(&["verify", "--man=no", &format!("./{unit}")], folder.path()) else {
            return skip(Reason::NoProgram("systemd-analyze".into()), "");
        };
        let text = String::from_utf8_lossy(&said.stderr);
        // systemd also reports on other units of this machine.
        let ours: Vec<_> = text.lines().filter(|line| line.contains("bareblk")).collect();
        assert!(said.status.success() && ours.is_empty(), "{unit}: {text}");
    }
}

/// Highest accepted exposure, in tenths of the `systemd-analyze security` scale, where 0 is the safest.
const MOST_EXPOSED: &str = "35";

#[test]
fn service_is_not_more_exposed_than_it_was() {
    let folder = units();
    let arguments = ["security", "--offline=yes", "--threshold", MOST_EXPOSED, "./bareblk.service"];
    let Some(said) = analyze(&arguments, folder.path()) else {
        return skip(Reason::NoProgram("systemd-analyze".into()), "");
    };
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stdout));
}

#[test]
fn service_of_one_guest_differs_from_that_of_all_in_its_file_only() {
    let text = |unit: &str| std::fs::read_to_string(packaging().join(unit)).unwrap();
    let settings = |text: String| -> Vec<String> {
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.starts_with("Description="));
        lines.map(|line| line.replace("%i.toml", "bareblk.toml")).collect()
    };
    assert_eq!(settings(text("bareblk.service")), settings(text("bareblk@.service")));
}

#[test]
fn pages_are_there_for_man_to_show() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = bareblk();
    command.arg("man").arg(folder.path());
    output(command);
    let page = folder.path().join("bareblk-serve.1");
    let Some((text, complaints)) = shown(&page) else { return skip(Reason::NoProgram("man".into()), "") };
    assert_says(&text, &["NAME", "bareblk-serve", "--queue-size", "EXIT STATUS", "ENVIRONMENT"]);
    assert_eq!(complaints, "");
}

#[test]
fn page_of_the_configuration_file_is_there_for_man_to_show() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join(config_page::FILE_NAME);
    let document =
        std::fs::read_to_string(xtask::workspace::root().join("docs/reference/config.md")).unwrap();
    std::fs::write(&page, config_page::page(&document)).unwrap();
    let Some((text, complaints)) = shown(&page) else { return skip(Reason::NoProgram("man".into()), "") };
    assert_says(
        &text,
        &["bareblk.toml(5)", "queue-size = power of two", "[default: 1024]", "A CHANGED FILE"],
    );
    assert_eq!(complaints, "");
}

/// The page as man shows it, and man's warnings.
fn shown(page: &Path) -> Option<(String, String)> {
    let mut man = Command::new(find_program("man")?);
    man.args(["--warnings", "-l"]).arg(page).env("MANPAGER", "cat");
    let said = man.env("MANWIDTH", "100").env("LC_ALL", "C.UTF-8").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Some((text(&said.stdout), text(&said.stderr)))
}

// ---- the package

const IN_THE_CHROOT: &str = "
set -e
dpkg -i /bareblk.deb
bareblk --version
bareblk top --help
if bareblk bench --help 2> /missing; then exit 1; fi
grep 'install the package bareblk-bench' /missing
dpkg -i /bareblk-bench.deb
test -s /usr/share/man/man1/bareblk-serve.1.gz
test -s /usr/share/man/man5/bareblk.toml.5.gz
test -s /usr/share/man/man1/bareblk-lab-run.1.gz
grep -q iodepth_batch /usr/share/bash-completion/completions/bareblk
getent passwd bareblk
dpkg -s bareblk | grep -q '^Status: install ok installed'
grep -q /etc/bareblk/bareblk.toml /var/lib/dpkg/info/bareblk.conffiles
mkdir -p /run/bareblk
bareblk serve /disk.raw --create 64M --socket /run/bareblk/s > /log 2>&1 & server=$!
for i in $(seq 300); do test -S /run/bareblk/s && break; kill -0 $server || { cat /log; exit 1; }; sleep 0.1; done
bareblk bench --socket /run/bareblk/s --rw randwrite --bs 4k --size 4M --verify crc32c
kill $server
wait $server
if dpkg --remove bareblk 2> /dev/null; then exit 1; fi
dpkg --purge bareblk-bench
test ! -e /usr/bin/bareblk-bench
dpkg --remove bareblk
test -e /etc/bareblk/bareblk.toml
dpkg --purge bareblk
test ! -e /etc/bareblk/bareblk.toml
echo all is well
";

/// The first tool that is not installed.
fn missing(tools: &[&str]) -> Option<String> {
    tools.iter().find(|tool| find_program(tool).is_none()).map(|tool| (*tool).to_owned())
}

/// A Debian in a folder. Only root on a Debian system can make it, and only the long run does; otherwise the test
/// prints the reason.
struct Debian {
    place: tempfile::TempDir,
}

impl Debian {
    fn new(packages: &str) -> Option<Self> {
        let skipped = |reason, why: &str| {
            skip(reason, why);
            None
        };
        if std::env::var(LONG_ENV).as_deref() != Ok("1") {
            return skipped(Reason::NotLong, "makes a whole Debian");
        }
        if let Some(tool) = missing(&["mmdebstrap", "dpkg-deb", "chroot", "unshare"]) {
            return skipped(Reason::NoProgram(tool), "");
        }
        if !is_root() {
            return skipped(Reason::NotRoot, "only root makes a Debian and enters it");
        }
        let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut make = Command::new("mmdebstrap");
        make.args(["--quiet", "--variant=minbase", &format!("--include={packages}"), &release()]);
        let made = make.arg(place.path().join("root")).output().unwrap();
        if !made.status.success() {
            let said = String::from_utf8_lossy(&made.stderr);
            return skipped(Reason::NoDebian, said.lines().last().unwrap_or_default());
        }
        for (from, to) in built_packages(place.path()).iter().zip(["bareblk.deb", "bareblk-bench.deb"]) {
            std::fs::copy(from, place.path().join("root").join(to)).unwrap();
        }
        Some(Self { place })
    }

    fn root(&self) -> PathBuf {
        self.place.path().join("root")
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.root().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// Returns the script's output and checks that it succeeded.
    fn run(&self, script: &str) -> String {
        // The folder has its own /proc, which is unmounted when the script ends.
        let enter = "mount -t proc proc \"$0/proc\" && exec chroot \"$0\" sh -c \"$1\"";
        let mut run = Command::new("unshare");
        run.args(["--mount", "--pid", "--fork", "--kill-child", "--", "sh", "-c", enter]);
        let run = run.arg(self.root()).arg(script).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
        assert!(run.status.success(), "{out}\n{err}");
        out.into_owned()
    }
}

#[test]
fn package_installs_serves_and_goes_in_a_clean_debian() {
    let Some(debian) = Debian::new("systemd") else { return };
    let said = debian.run(IN_THE_CHROOT);
    assert_says(&said, &[&format!("bareblk {}", env!("CARGO_PKG_VERSION")), "write:"]);
    assert!(said.ends_with("all is well\n"), "{said}");
}

const UNDER_SYSTEMD: [(&str, &str); 5] = [
    (
        "etc/bareblk/bareblk.toml",
        "control = '/run/bareblk/control.sock'\n\
         [[disk]]\nname = 'vm1'\nimage = '/var/lib/bareblk/vm1.raw'\nsocket = '/run/bareblk/vm1.sock'\ncreate = '16M'\n\
         [[disk]]\nname = 'vm2'\nimage = '/var/lib/bareblk/vm2.raw'\nsocket = '/run/bareblk/vm2.sock'\ncreate = '16M'\n",
    ),
    ("etc/systemd/system/bareblk.service.d/watchdog.conf", "[Service]\nWatchdogSec=3s\n"),
    ("etc/systemd/system/test.target", "[Unit]\nRequires=bareblk-disk@vm1.socket test.service\n"),
    (
        "etc/systemd/system/test.service",
        "[Unit]\nDefaultDependencies=no\nAfter=bareblk-disk@vm1.socket\n\
         [Service]\nType=oneshot\nTimeoutStartSec=120\nStandardOutput=file:/bareblk.log\nStandardError=inherit\n\
         ExecStart=/bin/bash /inside.sh\nExecStopPost=/bin/systemctl --force --force poweroff\n",
    ),
    ("inside.sh", include_str!("package/inside.sh")),
];

#[test]
fn units_serve_under_a_real_systemd() {
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    if !mounts.lines().any(|line| line.split(' ').nth(2) == Some("cgroup2")) {
        return skip(Reason::NoCgroups, "");
    }
    let Some(debian) = Debian::new("systemd,systemd-sysv") else { return };
    debian.run("dpkg -i /bareblk.deb /bareblk-bench.deb && groupadd --force kvm");
    UNDER_SYSTEMD.iter().for_each(|(path, text)| debian.write(path, text));
    let boot = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/package/boot.sh");
    let mut command = Command::new("bash");
    command.arg(boot).arg(debian.root());
    let booted = assert_cmd::Command::from_std(command).timeout(5 * rig::DEADLINE).output().unwrap();
    let log = std::fs::read_to_string(debian.root().join("bareblk.log")).unwrap_or_default();
    assert!(log.ends_with("all is well\n"), "{log}\n{}", String::from_utf8_lossy(&booted.stderr));
}

/// Files that make the service print its script's exit status on the console.
const ON_A_CONSOLE: [(&str, &str); 2] = [
    (
        "etc/systemd/system/test.service.d/console.conf",
        "[Service]\nStandardOutput=tty\nTTYPath=/dev/console\nTimeoutStartSec=300\n\
         ExecStopPost=\nExecStopPost=/bin/bash /end.sh\n",
    ),
    (
        "end.sh",
        "(echo; echo BAREBLK-GUEST-EXIT $EXIT_STATUS) > /dev/console; exec systemctl --force --force poweroff\n",
    ),
];

/// The program under test also serves the machine's root disk.
#[test]
fn units_serve_under_the_systemd_of_a_virtual_machine() {
    if let Some(tool) = missing(&["qemu-system-x86_64", "mke2fs"]) {
        return skip(Reason::NoProgram(tool), "");
    }
    let Some(debian) = Debian::new("systemd,systemd-sysv") else { return };
    debian.run("dpkg -i /bareblk.deb /bareblk-bench.deb && groupadd --force kvm");
    UNDER_SYSTEMD.iter().chain(&ON_A_CONSOLE).for_each(|(path, text)| debian.write(path, text));
    let place = Place::new();
    let disk = place.path("root.raw");
    let mut make = Command::new("mke2fs");
    make.args(["-q", "-t", "ext4", "-d"]).arg(debian.root()).arg(&disk).arg("1G");
    let made = make.output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let _server = Server::start(place.serve(&disk, "s"));
    let image = GuestImage::prepare(|step| eprintln!("{step}")).unwrap();
    let boot = "mount -t ext4 /dev/vda /mnt && echo /lib/systemd/systemd --unit=test.target > /switch";
    let vm = Vm::new(&image).disk_socket(place.socket("s"), 2).script(boot).timeout(6 * rig::DEADLINE);
    let said = vm.run().unwrap();
    assert_eq!(said.exit_code, Some(0), "{}", said.console);
    assert_says(&said.console, &["all is well"]);
}

/// Builds both packages from the programs under test. The server's package is first.
fn built_packages(folder: &Path) -> Vec<PathBuf> {
    rig::monitor_program();
    let programs = rig::bench_program();
    let mut xtask = Command::new(env!("CARGO"));
    xtask.args(["run", "--quiet", "--package", "xtask", "--", "deb", "--programs"]);
    xtask.arg(programs.parent().unwrap()).arg("--out").arg(folder).current_dir(xtask::workspace::root());
    let made = xtask.output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    String::from_utf8(made.stdout).unwrap().lines().map(PathBuf::from).collect()
}

/// dpkg's description of the package, and the paths in it.
fn contents(package: &Path) -> (String, Vec<String>) {
    let ask = |option: &str| {
        let told = Command::new("dpkg-deb").arg(option).arg(package).output().unwrap();
        assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
        String::from_utf8(told.stdout).unwrap()
    };
    let paths = ask("--contents");
    let paths = paths.lines().filter_map(|line| line.rsplit_once(" ./")).map(|(_, path)| path.to_owned());
    (ask("--info"), paths.collect())
}

#[test]
fn each_package_has_its_programs_with_pages_and_completions_and_no_file_is_in_both() {
    if let Some(tool) = missing(&["dpkg-deb", "strip"]) {
        return skip(Reason::NoProgram(tool), "");
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let made = built_packages(folder.path());
    let [server, bench] = made.as_slice() else { panic!("{made:?}") };
    let (server, bench) = (contents(server), contents(bench));
    let has = |of: &(String, Vec<String>), path: &str| of.1.iter().any(|entry| entry == path);
    for (path, is_bench) in [
        ("usr/bin/bareblk", false),
        ("usr/bin/bareblk-monitor", false),
        ("usr/bin/bareblk-bench", true),
        ("usr/share/man/man1/bareblk-serve.1.gz", false),
        ("usr/share/man/man1/bareblk-top.1.gz", false),
        ("usr/share/man/man1/bareblk-bench.1.gz", true),
        ("usr/share/man/man1/bareblk-lab-run.1.gz", true),
        ("usr/share/man/man5/bareblk.toml.5.gz", false),
        ("usr/lib/systemd/system/bareblk.service", false),
        ("usr/lib/systemd/system/bareblk-exporter.service", false),
        ("usr/share/man/man1/bareblk-exporter.1.gz", false),
        ("usr/share/bareblk/alerts.yml", false),
        ("usr/share/bareblk/grafana.json", false),
        ("usr/share/bash-completion/completions/bareblk", false),
    ] {
        assert_eq!((has(&server, path), has(&bench, path)), (!is_bench, is_bench), "{path}");
    }
    let files = |paths: &[String]| {
        paths.iter().filter(|path| !path.is_empty() && !path.ends_with('/')).cloned().collect::<Vec<_>>()
    };
    let both: Vec<_> = files(&server.1).into_iter().filter(|path| has(&bench, path)).collect();
    assert_eq!(both, Vec::<String>::new());
    assert_says(&server.0, &["Package: bareblk\n", "Suggests: bareblk-bench, libgnutls30, librbd1\n"]);
    let same = format!("bareblk (= {}-1)", env!("CARGO_PKG_VERSION"));
    assert_says(&bench.0, &["Package: bareblk-bench\n", &same]);
}

/// This machine's Debian release, because a program built on this machine needs its C library.
fn release() -> String {
    let text = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    name.unwrap_or("stable").to_owned()
}
