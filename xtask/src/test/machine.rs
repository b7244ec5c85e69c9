//! Checks whether this machine explains a skipped test; each check is independent of the test's own.
//!
//! Rights are tried, not guessed: the checks mount a file system, attach a loop device, make a group, and undo it.

use std::path::Path;
use std::process::{Command, Stdio};

use landlock::{AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr};
use xtask::packages::find_program;
use xtask::skip::Reason;

const LOOP_DEVICE: &str = r#"
f=$(mktemp) && truncate -s 1M "$f" && d=$(losetup --find --show "$f") && losetup --detach "$d"
s=$?; rm -f "$f"; exit $s"#;
const TMPFS: &str = r#"
d=$(mktemp -d) && mount -t tmpfs tmpfs "$d" && umount "$d"
s=$?; rmdir "$d"; exit $s"#;
const PRIVATE_MOUNTS: &str = "exec unshare --mount --pid --fork --net mount -t tmpfs tmpfs /mnt";
const EXT4: &str = r#"
d=$(mktemp -d) && mkdir "$d/on" && truncate -s 8M "$d/fs" && mkfs.ext4 -q "$d/fs" \
    && mount -o loop "$d/fs" "$d/on" && umount "$d/on"
s=$?; rm -f "$d/fs"; rmdir "$d/on" "$d"; exit $s"#;
const XFS: &str = r#"
d=$(mktemp -d) && mkdir "$d/on" && truncate -s 320M "$d/fs" && mkfs.xfs -q "$d/fs" \
    && mount -o loop "$d/fs" "$d/on" && umount "$d/on"
s=$?; rm -f "$d/fs"; rmdir "$d/on" "$d"; exit $s"#;
const HUGE_PAGES: &str = r#"
n=/proc/sys/vm/nr_hugepages; had=$(cat $n) && echo $((had + 12)) > $n
free=$(awk '/HugePages_Free/ {print $2}' /proc/meminfo); echo "$had" > $n; [ "$free" -ge 10 ]"#;
/// Writes `$1` bytes with O_DIRECT into a file in the folder `$0`.
const DIRECT_IO: &str = r#"
f=$(mktemp -p "$0") && dd if=/dev/zero of="$f" bs="$1" count=1 oflag=direct
s=$?; rm -f "$f"; exit $s"#;
const CGROUPS: &str = r#"
m=$(awk '$3 == "cgroup2" {print $2; exit}' /proc/mounts); own=$(sed -n 's/^0:://p' /proc/self/cgroup)
d=$m$own/bareblk-probe-$$; [ -n "$m" ] && mkdir "$d" && echo threaded > "$d/cgroup.type"
s=$?; rmdir "$d"; exit $s"#;
const PTRACE: &str = r#"
import ctypes, subprocess
child = subprocess.Popen(["sleep", "60"])
refused = ctypes.CDLL(None).ptrace(0x4206, child.pid, None, None)  # PTRACE_SEIZE
child.kill()
exit(1 if refused else 0)"#;
const DEBIAN: &str = r#"
d=$(mktemp -d) && mmdebstrap --simulate --variant=minbase stable "$d/root"
s=$?; rm -rf "$d"; exit $s"#;

/// Whether the machine really lacks what the reason says.
pub(super) fn explains(reason: &Reason, is_long: bool) -> bool {
    match reason {
        Reason::NotLong => !is_long,
        Reason::NotInAGuest => !Path::new("/own-tests").exists(),
        Reason::NotRoot => !rustix::process::geteuid().is_root(),
        Reason::OneCpu => rustix::thread::sched_getaffinity(None).is_ok_and(|cpus| cpus.count() < 2),
        Reason::KernelBefore(major, minor) => kernel_version() < (*major, *minor),
        Reason::NoProgram(program) => find_program(program).is_none(),
        Reason::NoCompiler(language) => !compiles(language),
        Reason::NoEngine(engine) => lacks_engine(engine),
        Reason::NoLandlock => !has_landlock(),
        Reason::NoLoopDevice => !succeeds(LOOP_DEVICE, &[]),
        Reason::NoTmpfs => !succeeds(TMPFS, &[]),
        Reason::NoExt4 => !succeeds(EXT4, &[]),
        Reason::NoXfs => !succeeds(XFS, &[]),
        Reason::NoFuse => !has_fuse(),
        Reason::NoHugePages => !succeeds(HUGE_PAGES, &[]),
        Reason::NoFreeHugePage => !runs("grep", &["-q", "^HugePages_Free: *[1-9]", "/proc/meminfo"]),
        Reason::NoDirectIo(folder) => !succeeds(DIRECT_IO, &[folder, "4096"]),
        Reason::NoAlignment(folder) => succeeds(DIRECT_IO, &[folder, "1000"]),
        Reason::NoCgroups => !succeeds(CGROUPS, &[]),
        Reason::InOwnCgroup => own_cgroup().is_some_and(|group| group != "/"),
        Reason::NoStrace => !runs("strace", &["true"]),
        Reason::NoPtrace => !runs("python3", &["-c", PTRACE]),
        Reason::NoSetpriv => !runs("setpriv", &["--bounding-set=-dac_override,-dac_read_search", "true"]),
        Reason::HiddenFromNobody => !nobody_runs_us(),
        Reason::NoPrivateMounts => !succeeds(PRIVATE_MOUNTS, &[]),
        Reason::NoOvmf => !Path::new("/usr/share/OVMF/OVMF_CODE_4M.fd").exists(),
        Reason::NoDebian => !succeeds(DEBIAN, &[]),
        Reason::NoCeph => std::env::var_os("BAREBLK_CEPH").is_none(),
    }
}

/// Runs `sh -c script $0 $1 …`.
fn succeeds(script: &str, arguments: &[&str]) -> bool {
    runs("sh", &[&["-c", script], arguments].concat())
}

fn runs(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// The kernel's major and minor version, read from a text like `6.1.0-18-amd64`.
fn kernel_version() -> (u32, u32) {
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Checks CC and CXX for C++, because the tests use both.
fn compiles(language: &str) -> bool {
    let named = |variable: &str, usual: &str| std::env::var(variable).unwrap_or_else(|_| usual.into());
    let mut compilers = vec![named("CC", "cc")];
    if language == "c++" {
        compilers.push(named("CXX", "c++"));
    }
    compilers.iter().all(|compiler| runs(compiler, &["-x", language, "-fsyntax-only", "/dev/null"]))
}

/// A seccomp filter, for example a container's, may refuse an engine's calls.
fn lacks_engine(engine: &str) -> bool {
    let has_filter = read("/proc/self/status").is_some_and(|status| status.contains("Seccomp:\t2"));
    match engine {
        "io_uring" => {
            let is_off = read("/proc/sys/kernel/io_uring_disabled").is_some_and(|value| value.trim() != "0");
            has_filter || is_off || kernel_version() < (5, 15)
        }
        "linux-aio" => has_filter || !Path::new("/proc/sys/fs/aio-max-nr").exists(),
        "posix-aio" => !runs("getconf", &["GNU_LIBC_VERSION"]),
        _ => false,
    }
}

fn has_landlock() -> bool {
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    ruleset.handle_access(AccessFs::Execute).and_then(Ruleset::create).is_ok()
}

fn has_fuse() -> bool {
    let opens = std::fs::File::options().read(true).write(true).open("/dev/fuse").is_ok();
    let has_helper = ["fusermount3", "fusermount"].iter().any(|helper| find_program(helper).is_some());
    opens && (has_helper || succeeds(TMPFS, &[]))
}

/// The process's control group in the version 2 hierarchy.
fn own_cgroup() -> Option<String> {
    let groups = read("/proc/self/cgroup")?;
    groups.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

/// Tries this program, which is in the folder of the test programs.
fn nobody_runs_us() -> bool {
    let Ok(program) = std::env::current_exe() else { return false };
    let as_nobody = ["--reuid", "65534", "--regid", "65534", "--clear-groups", "test", "-x"];
    runs("setpriv", &[&as_nobody[..], &[&program.to_string_lossy()]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_that_the_machine_does_not_have_is_not_explained() {
        assert!(!explains(&Reason::NoProgram("sh".into()), false));
        assert!(!explains(&Reason::KernelBefore(2, 6), false));
        assert!(!explains(&Reason::NoEngine("threads".into()), false));
        assert!(!explains(&Reason::NotLong, true));
    }

    #[test]
    fn reason_that_the_machine_has_is_explained() {
        assert!(explains(&Reason::NoProgram("bareblk-no-such-program".into()), false));
        assert!(explains(&Reason::KernelBefore(999, 0), false));
        assert!(explains(&Reason::NotLong, false));
    }

    #[test]
    fn script_gets_its_arguments_and_its_end_is_the_answer() {
        assert!(succeeds("[ $0 = a ] && [ $1 = b ]", &["a", "b"]));
        assert!(!succeeds("exit 3", &[]));
    }
}
