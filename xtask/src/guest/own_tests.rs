//! Runs a test binary again in a guest, so that its tests use the guest's kernel.
//!
//! `current_exe → per-run archive → its storage folder becomes ext4 on a virtio disk → test result: ok. N passed`
//!
//! Storage is a stock block device with ext4, so that O_DIRECT has an effect; `/tmp` and `/dev/shm` are tmpfs.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::image::GuestImage;
use super::output::GuestOutput;
use super::vm::Vm;
use crate::packages;
use crate::sizes::EMULATED_ENV;

/// Size of the disk, which is a sparse file on the host.
const STORAGE_BYTES: u64 = 1 << 30;
const MEMORY_MIB: u64 = 1536;

/// Enough for emulation on a busy machine: more than a hundred times the tests' native duration.
const TIMEOUT: Duration = Duration::from_secs(900);

/// The tests of the running program, to be run in a guest.
#[derive(Debug, Clone)]
pub struct OwnTests {
    image: GuestImage,
    storage: PathBuf,
    programs: Vec<PathBuf>,
    wanted: Vec<String>,
    skipped: Vec<String>,
    temporary_files: &'static str,
    smp: u32,
    memory_nodes: u8,
}

/// All tests passed; these are the details.
#[derive(Debug, Clone)]
pub struct TestsPassed {
    /// The guest's kernel release (`uname -r`).
    pub kernel: String,
    /// The number of tests, counted by the test harness.
    pub count: usize,
    /// The guest's output, including the harness's lines.
    pub output: GuestOutput,
}

impl OwnTests {
    /// All tests except `but`, which is the calling test. The folder `storage`, for the tests' disks, is on ext4.
    #[must_use]
    pub fn new(image: &GuestImage, storage: &str, but: &str) -> Self {
        let (programs, wanted, skipped) = (Vec::new(), Vec::new(), vec![but.to_owned()]);
        let (image, storage, temporary_files) = (image.clone(), storage.into(), "/tmp");
        Self { image, storage, programs, wanted, skipped, temporary_files, smp: 2, memory_nodes: 1 }
    }

    /// Sets the temporary folder, for tests that keep their disks there.
    #[must_use]
    pub fn with_temporary_files_in(mut self, folder: &'static str) -> Self {
        self.temporary_files = folder;
        self
    }

    /// Sets the number of vCPUs (default: 2) and of NUMA nodes (default: 1). Memory and vCPUs are split evenly over the
    /// nodes.
    #[must_use]
    pub fn on(mut self, smp: u32, memory_nodes: u8) -> Self {
        (self.smp, self.memory_nodes) = (smp, memory_nodes);
        self
    }

    /// Adds a program of this machine that the tests start, by its name or path.
    ///
    /// # Errors
    /// The program is not installed.
    pub fn with_program(mut self, name: &str) -> Result<Self> {
        let path = packages::find_program(name);
        self.programs.push(path.with_context(|| format!("`{name}` is not installed"))?);
        Ok(self)
    }

    /// Runs only tests whose path contains `part`; after several calls, any of their parts.
    #[must_use]
    pub fn only(mut self, part: &str) -> Self {
        self.wanted.push(part.to_owned());
        self
    }

    /// Leaves out tests whose path contains `part`.
    #[must_use]
    pub fn without(mut self, part: &str) -> Self {
        self.skipped.push(part.to_owned());
        self
    }

    /// Boots the guest and runs the tests.
    ///
    /// # Errors
    /// The guest cannot run, a test fails, or none runs. The text ends with the console.
    pub fn run(&self) -> Result<TestsPassed> {
        let folder = tempfile::tempdir_in(self.image.cache())?;
        let disk = folder.path().join("storage.raw");
        File::create(&disk)?.set_len(STORAGE_BYTES)?;
        let binary = std::env::current_exe().context("cannot find the path of this test's program")?;
        let mut vm = Vm::new(&self.image).memory_mib(MEMORY_MIB).timeout(TIMEOUT);
        vm = vm.smp(self.smp).memory_nodes(self.memory_nodes);
        vm = vm.qemu_args(["-drive", &drive(&disk)?]).program(binary, "/own-tests").script(&self.script());
        for path in &self.programs {
            vm = vm.program(path, Path::new("/tools").join(path.file_name().unwrap_or_default()));
        }
        passed(vm.run()?)
    }

    fn script(&self) -> String {
        let storage = quoted(&self.storage.to_string_lossy());
        let wanted: String = self.wanted.iter().map(|part| format!(" {}", quoted(part))).collect();
        let skip: String = self.skipped.iter().map(|part| format!(" --skip {}", quoted(part))).collect();
        format!(
            "mkdir -p {storage} && mkfs.ext4 -q /dev/vda && mount /dev/vda {storage} || exit 1
             echo BB:KERNEL=$(uname -r)
             TMPDIR={} {EMULATED_ENV}=1 RUST_BACKTRACE=1 /own-tests --show-output{wanted}{skip}",
            quoted(self.temporary_files)
        )
    }
}

fn drive(disk: &Path) -> Result<String> {
    let path = disk.to_str().context("the disk's path is not UTF-8")?.replace(',', ",,");
    Ok(format!("file={path},format=raw,if=virtio,cache=unsafe,discard=unmap"))
}

/// Quotes the text for the guest's shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

fn passed(output: GuestOutput) -> Result<TestsPassed> {
    let count = output.console.lines().find_map(passed_count);
    match (count, output.exit_code, output.value("KERNEL")) {
        (Some(count), Some(0), Some(kernel)) if count > 0 => {
            let kernel = kernel.to_owned();
            Ok(TestsPassed { kernel, count, output })
        }
        _ => bail!("the tests did not pass in the guest\n{}", output.console),
    }
}

/// The count in `test result: ok. 5 passed; 0 failed; …`; `None` for any other line, such as one with failures.
fn passed_count(line: &str) -> Option<usize> {
    let rest = line.strip_prefix("test result: ok. ")?;
    rest.split_once(" passed; 0 failed;")?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest_said(console: &str) -> Result<TestsPassed> {
        passed(GuestOutput::new(console.to_owned(), Duration::ZERO))
    }

    #[test]
    fn count_and_kernel_are_those_the_guest_named() {
        let passed = guest_said(
            "BB:KERNEL=6.1.0-1-amd64\ntest result: ok. 12 passed; 0 failed; 0 ignored\nBAREBLK-GUEST-EXIT 0\n",
        );
        let passed = passed.unwrap();
        assert_eq!((passed.count, passed.kernel.as_str()), (12, "6.1.0-1-amd64"));
    }

    #[test]
    fn failed_tests_are_an_error_with_the_console() {
        let text = "BB:KERNEL=6.1\ntest a ... FAILED\ntest result: FAILED. 3 passed; 1 failed;\nBAREBLK-GUEST-EXIT 101\n";
        let error = guest_said(text).unwrap_err();
        assert!(error.to_string().contains("test a ... FAILED"));
    }

    #[test]
    fn no_test_at_all_is_an_error() {
        let text = "BB:KERNEL=6.1\ntest result: ok. 0 passed; 0 failed;\nBAREBLK-GUEST-EXIT 0\n";
        assert!(guest_said(text).is_err());
    }

    #[test]
    fn quote_in_a_path_survives_the_shell() {
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
