//! Images made by QEMU's tools, in a folder that ends with its test, and an opener that stays inside the folder.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::{Chain, ChainError, DiskFormat, FileId, Opened, Opener, Role};
use fastrand::Rng;
use tempfile::TempDir;
use xtask::skip::{Reason, skip};

/// A folder for images. `None`: QEMU's tools are not installed; the test must return.
pub fn bed() -> Option<Bed> {
    for tool in ["qemu-img", "qemu-io"] {
        if Command::new(tool).arg("--version").output().is_err() {
            skip(Reason::NoProgram(tool.into()), "Debian: package qemu-utils");
            return None;
        }
    }
    Some(Bed { folder: tempfile::tempdir().unwrap() })
}

/// A folder for images.
pub struct Bed {
    folder: TempDir,
}

impl Bed {
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs `qemu-img` in the folder.
    pub fn img(&self, words: &[&str]) -> Output {
        Command::new("qemu-img").args(words).current_dir(self.folder.path()).output().unwrap()
    }

    /// Runs `qemu-img`, which must succeed.
    pub fn img_ok(&self, words: &[&str]) -> String {
        let output = self.img(words);
        assert!(output.status.success(), "qemu-img {words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// `options`: those of `qemu-img create -o`, or nothing.
    pub fn create(&self, name: &str, options: &str, size_bytes: u64) {
        let size = size_bytes.to_string();
        let options: &[&str] = if options.is_empty() { &[] } else { &["-o", options] };
        self.img_ok(&[&["create", "-q", "-f", "qcow2"], options, &[name, &size]].concat());
    }

    /// Runs commands of `qemu-io` on an image, all of which must succeed.
    pub fn io(&self, name: &str, commands: &[String]) {
        let mut command = Command::new("qemu-io");
        command.current_dir(self.folder.path()).args(["-f", "qcow2", "-d", "unmap", "-t", "unsafe"]);
        commands.iter().for_each(|words| _ = command.args(["-c", words]));
        let output = command.arg(name).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let failed = said.lines().any(|line| line.contains("failed") || line.contains("error"));
        assert!(output.status.success() && !failed, "qemu-io {commands:?}: {said}{output:?}");
    }

    /// What QEMU reads from the image.
    pub fn content(&self, name: &str) -> Vec<u8> {
        self.img_ok(&["convert", "-t", "unsafe", "-f", "qcow2", "-O", "raw", name, "converted.raw"]);
        std::fs::read(self.path("converted.raw")).unwrap()
    }

    pub fn chain(&self, name: &str) -> Result<Chain<std::fs::File>, ChainError> {
        Chain::open(
            &self.path(name),
            DiskFormat::Qcow2,
            &mut InFolder(self.folder.path().canonicalize().unwrap()),
        )
    }

    /// Our reading equals QEMU's: as a whole, and in pieces at random places.
    #[track_caller]
    pub fn assert_same(&self, name: &str, rng: &mut Rng) {
        let expected = self.content(name);
        let mut chain = self.chain(name).unwrap();
        assert_eq!(chain.size_bytes(), expected.len() as u64);
        let mut whole = vec![0xa5; expected.len()];
        chain.read_at(0, &mut whole).unwrap();
        assert_eq!(first_difference(&whole, &expected), None, "{name}");
        for _ in 0..40 {
            let start = rng.usize(..=expected.len());
            let len = rng.usize(..=(expected.len() - start).min(200_000));
            let mut piece = vec![0xa5; len];
            chain.read_at(start as u64, &mut piece).unwrap();
            assert_eq!(first_difference(&piece, &expected[start..start + len]), None, "{name} at {start}");
        }
    }
}

fn first_difference(ours: &[u8], theirs: &[u8]) -> Option<usize> {
    ours.iter().zip(theirs).position(|(our, their)| our != their)
}

/// Opens only files in one folder.
pub struct InFolder(pub PathBuf);

impl Opener for InFolder {
    type File = std::fs::File;

    fn open(&mut self, path: &Path, _role: Role) -> io::Result<Opened<Self::File>> {
        if !path.canonicalize()?.starts_with(&self.0) {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "outside of the allowed folder"));
        }
        let file = std::fs::File::open(path)?;
        let metadata = file.metadata()?;
        Ok(Opened { file, id: FileId { device: metadata.dev(), inode: metadata.ino() } })
    }
}

/// Commands of `qemu-io` that write, zero and discard at random places, in units of `unit` bytes.
pub fn random_writes(rng: &mut Rng, size_bytes: u64, unit: u64, count: usize) -> Vec<String> {
    let units = size_bytes / unit;
    let command = |rng: &mut Rng| {
        let start = rng.u64(..units);
        let longest = if rng.u8(..4) == 0 { 700 } else { 40 };
        let len = rng.u64(1..=(units - start).min(longest));
        let (at, len, pattern) = (start * unit, len * unit, rng.u8(1..));
        match rng.u8(..8) {
            0 => format!("write -z {at} {len}"),
            1 => format!("write -z -u {at} {len}"),
            2 => format!("discard {at} {len}"),
            _ => format!("write -P {pattern} {at} {len}"),
        }
    };
    (0..count).map(|_| command(rng)).collect()
}

/// Commands that write different clusters compressed.
pub fn compressed_writes(rng: &mut Rng, size_bytes: u64, cluster_bytes: u64, count: usize) -> Vec<String> {
    let clusters = rng.choose_multiple(0..size_bytes / cluster_bytes, count);
    let command =
        |cluster| format!("write -c -P {} {} {cluster_bytes}", rng.u8(1..), cluster * cluster_bytes);
    clusters.into_iter().map(command).collect()
}
