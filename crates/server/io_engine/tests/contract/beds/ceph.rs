//! A Ceph cluster for tests: the one that `cargo xtask ceph up` has started in the folder that `BAREBLK_CEPH` names.
#![allow(dead_code)] // each test program uses only a part

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use xtask::skip::{Reason, skip};

/// An image of its own in the cluster's pool `rbd`, which is removed with this value.
pub struct CephImage {
    folder: PathBuf,
    name: String,
}

/// The cluster's folder.
pub fn cluster() -> Option<PathBuf> {
    let folder = std::env::var_os("BAREBLK_CEPH").map(PathBuf::from);
    if folder.is_none() {
        skip(Reason::NoCeph, "");
    }
    folder
}

impl CephImage {
    /// Makes an image. `None`: there is no cluster.
    pub fn new(size_bytes: u64) -> Option<Self> {
        cluster().map(|folder| Self::of(folder, size_bytes))
    }

    /// Makes an image in the cluster of this folder.
    pub fn of(folder: PathBuf, size_bytes: u64) -> Self {
        Self::with(folder, size_bytes, &[])
    }

    /// Makes an image with further options of `rbd create`.
    pub fn with(folder: PathBuf, size_bytes: u64, options: &[&str]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let (number, pid) = (NEXT.fetch_add(1, Ordering::Relaxed), std::process::id());
        let image = Self { folder, name: format!("rbd/test-{pid}-{number}") };
        let size = format!("{size_bytes}B");
        image.rbd(&[&["create", &image.name, "--size", &size], options].concat());
        image
    }

    /// The image as `bareblk serve` names it.
    pub fn spec(&self) -> String {
        format!("rbd:{}", self.name)
    }

    /// The image as Ceph's tools name it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The cluster's configuration.
    pub fn conf(&self) -> PathBuf {
        self.folder.join("ceph.conf")
    }

    /// The process of the daemon `mon` or `osd`.
    pub fn pid(&self, daemon: &str) -> i32 {
        let file = self.folder.join(format!("{daemon}.pid"));
        std::fs::read_to_string(file).unwrap().trim().parse().unwrap()
    }

    /// The image's bytes.
    pub fn contents(&self) -> Vec<u8> {
        let file = std::env::temp_dir().join(self.name.replace('/', "-"));
        let path = file.to_str().unwrap();
        self.rbd(&["export", "--no-progress", &self.name, path]);
        let bytes = std::fs::read(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        bytes
    }

    /// Breaks the image's lock as another client would. Returns the address that the cluster then blocklists.
    pub fn break_lock(&self) -> String {
        self.remove_lock(&[])
    }

    /// Removes the image's lock without blocklisting its owner.
    pub fn remove_lock_only(&self) {
        self.remove_lock(&["--rbd_blocklist_on_break_lock=false"]);
    }

    fn remove_lock(&self, options: &[&str]) -> String {
        let locks = self.rbd(&["lock", "ls", self.name()]);
        let lock = locks.lines().find(|line| line.starts_with("client.")).unwrap();
        let words: Vec<&str> = lock.split_whitespace().collect();
        self.rbd(&[&["lock", "rm", self.name(), &words[1..3].join(" "), words[0]], options].concat());
        words[3].to_owned()
    }

    /// Removes the image's header as an administrator can by force: nothing asks the image's clients.
    pub fn remove_header(&self) {
        let info = self.rbd(&["info", self.name()]);
        let id = info.lines().find_map(|line| line.trim().strip_prefix("id: ")).unwrap();
        self.run("rados", &["-p", "rbd", "rm", &format!("rbd_header.{id}")]);
    }

    /// Runs `rbd` with these words; returns its output.
    pub fn rbd(&self, words: &[&str]) -> String {
        self.run("rbd", words)
    }

    /// Runs a program of the cluster; returns its output.
    pub fn run(&self, program: &str, words: &[&str]) -> String {
        let output = self.command(program, words).output().unwrap();
        assert!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// A program of the cluster.
    pub fn command(&self, program: &str, words: &[&str]) -> Command {
        let script = format!(". {}/env && exec timeout 60 {program} \"$@\"", self.folder.display());
        let mut command = Command::new("sh");
        command.args(["-c", &script, program]).args(words);
        command
    }
}

impl Drop for CephImage {
    fn drop(&mut self) {
        // A disk that is still open in this process keeps the image.
        let script =
            format!(". {}/env && timeout 20 rbd rm --no-progress {}", self.folder.display(), self.name);
        let _ = Command::new("sh").args(["-c", &script]).output();
    }
}
