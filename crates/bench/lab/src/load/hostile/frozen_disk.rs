//! A disk that hangs on demand: an image on a separate file system, mounted from a file, which can be frozen.
//!
//! `make → mounted → freeze → Frozen dropped: thaws … dropped: unmounted, removed`
//!
//! - A shell reads commands from its standard input and executes them. It runs in its own process group and cleans up
//!   when its input closes. So however this program ends, the file system is thawed and unmounted.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use tempfile::TempDir;

/// Size of the image.
pub(crate) const IMAGE_BYTES: u64 = 8 << 20;
/// Size of the file system.
const FS_BYTES: u64 = 32 << 20;
/// The shell answers each line with one line: `ok`, or the error.
const SHELL: &str = r#"
cd "$0" || exit 1
answer() { if said=$("$@" 2>&1); then echo ok; else echo "$said" | tr '\n' ' '; echo; return 1; fi; }
make() { mkfs.ext4 -q -O ^has_journal fs && mount -o loop fs on; }
answer make || exit 1
while read -r what; do
  case $what in
    freeze) answer fsfreeze -f on ;;
    thaw) answer fsfreeze -u on ;;
  esac
done
fsfreeze -u on 2>/dev/null
umount --lazy on
rm -f fs
rmdir on
cd / && rmdir "$0"
"#;

/// A disk that can be made to hang.
#[derive(Debug)]
pub(crate) struct FrozenDisk {
    shell: Child,
    /// The shell's standard input. Closing it ends the shell.
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    image: PathBuf,
    /// The directory with the file and the mount point.
    _folder: TempDir,
}

impl FrozenDisk {
    /// Makes the disk in a new directory in `parent`.
    ///
    /// # Errors
    /// Why the disk cannot be made: no right to mount, no loop device, or a missing program.
    pub fn make(parent: &Path) -> Result<Self, String> {
        Self::try_make(parent).map_err(|error| format!("there is no file system to freeze: {error}"))
    }

    fn try_make(parent: &Path) -> io::Result<Self> {
        if !rustix::process::geteuid().is_root() {
            return Err(io::Error::other("only root can mount a file system"));
        }
        let folder = tempfile::Builder::new().prefix(".bareblk-lab-").tempdir_in(parent.canonicalize()?)?;
        let on = folder.path().join("on");
        std::fs::create_dir(&on)?;
        File::create(folder.path().join("fs"))?.set_len(FS_BYTES)?;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SHELL]).arg(folder.path()).process_group(0);
        let mut shell = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let (orders, answers) = (shell.stdin.take(), shell.stdout.take());
        let answers = BufReader::new(answers.ok_or(io::ErrorKind::BrokenPipe)?);
        let mut made = Self { shell, orders, answers, image: on.join("disk.raw"), _folder: folder };
        made.answer()?;
        // Writes the whole image, so that later writes need no new blocks.
        let mut image = File::create(&made.image)?;
        (0..IMAGE_BYTES >> 20).try_for_each(|_| image.write_all(&vec![1; 1 << 20]))?;
        image.sync_all()?;
        Ok(made)
    }

    pub fn image(&self) -> &Path {
        &self.image
    }

    /// Freezes the file system: writes wait until the result is dropped.
    pub fn freeze(&mut self) -> io::Result<Frozen<'_>> {
        self.order("freeze")?;
        Ok(Frozen(self))
    }

    fn order(&mut self, what: &str) -> io::Result<()> {
        let orders = self.orders.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        writeln!(orders, "{what}")?;
        self.answer()
    }

    fn answer(&mut self) -> io::Result<()> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        match line.trim() {
            "ok" => Ok(()),
            "" => Err(io::Error::other("the shell that mounts and freezes the file system did not answer")),
            why => Err(io::Error::other(why.to_owned())),
        }
    }
}

impl Drop for FrozenDisk {
    fn drop(&mut self) {
        drop(self.orders.take());
        let _ = self.shell.wait();
    }
}

/// Hanging storage; dropping it thaws the file system.
#[derive(Debug)]
pub(crate) struct Frozen<'d>(&'d mut FrozenDisk);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        if self.0.order("thaw").is_err() {
            // The shell thaws the file system when its input closes.
            drop(self.0.orders.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use xtask::skip::{Reason, skip};

    use super::*;

    #[test]
    fn write_waits_until_it_goes_on_and_nothing_is_left() {
        let parent = tempfile::tempdir().unwrap();
        let mut disk = match FrozenDisk::make(parent.path()) {
            Ok(disk) => disk,
            Err(why) => return skip(Reason::NoExt4, why),
        };
        let image = disk.image().to_path_buf();
        let frozen = disk.freeze().unwrap();
        let writer =
            std::thread::spawn(move || File::options().append(true).open(image).unwrap().write(b"x"));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!writer.is_finished());
        drop(frozen);
        assert_eq!(writer.join().unwrap().unwrap(), 1);
        drop(disk);
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }

    #[test]
    fn storage_goes_on_when_its_shell_loses_its_input() {
        let parent = tempfile::tempdir().unwrap();
        let mut disk = match FrozenDisk::make(parent.path()) {
            Ok(disk) => disk,
            Err(why) => return skip(Reason::NoExt4, why),
        };
        let mut file = File::options().append(true).open(disk.image()).unwrap();
        std::mem::forget(disk.freeze().unwrap());
        // The kernel closes the pipe in the same way when a program is killed.
        drop(disk.orders.take());
        assert_eq!(file.write(b"x").unwrap(), 1);
        drop((file, disk));
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
