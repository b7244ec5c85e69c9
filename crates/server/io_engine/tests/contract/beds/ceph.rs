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

impl CephImage {
    /// Makes an image. `None`: there is no cluster.
    pub fn new(size_bytes: u64) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let Some(folder) = std::env::var_os("BAREBLK_CEPH") else {
            skip(Reason::NoCeph, "");
            return None;
        };
        let (number, pid) = (NEXT.fetch_add(1, Ordering::Relaxed), std::process::id());
        let image = Self { folder: folder.into(), name: format!("rbd/test-{pid}-{number}") };
        image.rbd(&["create", &image.name, "--size", &format!("{size_bytes}B")]);
        Some(image)
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

    /// Runs `rbd` with these words; returns its output.
    pub fn rbd(&self, words: &[&str]) -> String {
        self.run("rbd", words)
    }

    /// Runs a program of the cluster; returns its output.
    pub fn run(&self, program: &str, words: &[&str]) -> String {
        let script = format!(". {}/env && exec timeout 60 {program} \"$@\"", self.folder.display());
        let output = Command::new("sh").args(["-c", &script, program]).args(words).output().unwrap();
        assert!(output.status.success(), "{program} {words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
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
