//! Disks of a running server without guests: images that hang, workers that are added and removed.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

use blk_server::WorkerOptions;
use disk_image::{FileId, FileKind, HostOpener, LockHolder, OpenRequest, QueueAttributes};

use super::*;

/// Long enough for a slow machine: only a hang takes longer.
const PATIENCE: Duration = Duration::from_secs(300);

/// The host's files, except that opening an image called `hangs` is reported and waits for the test; removing one is
/// also reported.
#[derive(Debug)]
struct Hanging {
    begun: Mutex<Sender<()>>,
    go_on: Mutex<Receiver<()>>,
}

impl Opener for Hanging {
    fn open_image(&self, path: &Path, request: &OpenRequest) -> io::Result<OwnedFd> {
        if path.ends_with("hangs") {
            self.begun.lock().unwrap().send(()).unwrap();
            let _ = self.go_on.lock().unwrap().recv();
        }
        HostOpener.open_image(path, request)
    }

    fn file_kind(&self, path: &Path) -> io::Result<FileKind> {
        HostOpener.file_kind(path)
    }

    fn canonical_path(&self, path: &Path) -> io::Result<PathBuf> {
        HostOpener.canonical_path(path)
    }

    fn file_id(&self, path: &Path) -> io::Result<FileId> {
        HostOpener.file_id(path)
    }

    fn reopen(&self, file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        HostOpener.reopen(file)
    }

    fn path_of(&self, file: BorrowedFd<'_>) -> io::Result<Option<PathBuf>> {
        HostOpener.path_of(file)
    }

    fn open_configuration(&self, path: &Path) -> io::Result<OwnedFd> {
        HostOpener.open_configuration(path)
    }

    fn queue_attributes(&self, major: u32, minor: u32) -> io::Result<QueueAttributes> {
        HostOpener.queue_attributes(major, minor)
    }

    fn lock_holders(&self, file: FileId) -> Vec<LockHolder> {
        HostOpener.lock_holders(file)
    }

    fn bind_socket(&self, path: &Path) -> io::Result<OwnedFd> {
        HostOpener.bind_socket(path)
    }

    fn set_socket_owner(&self, path: &Path, mode: u32, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        HostOpener.set_socket_owner(path, mode, uid, gid)
    }

    fn connect_socket(&self, path: &Path) -> io::Result<()> {
        HostOpener.connect_socket(path)
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        HostOpener.unlink(path)?;
        if path.ends_with("hangs") {
            self.begun.lock().unwrap().send(()).unwrap();
        }
        Ok(())
    }
}

/// A server with one disk, `first`, on two workers; it reloads a file.
struct Bed {
    folder: tempfile::TempDir,
    begun: Receiver<()>,
    go_on: Sender<()>,
    serving: Arc<Serving>,
}

impl Bed {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("bareblk.toml");
        fs::write(&file, Self::text(folder.path(), "")).unwrap();
        let (begin, begun) = channel();
        let (go_on, wait) = channel();
        let opener: Arc<dyn Opener> = Arc::new(Hanging { begun: Mutex::new(begin), go_on: Mutex::new(wait) });
        let opened = open(&opener, config_file::read(&file, &[], opener.as_ref()).unwrap()).unwrap();
        let serving = Arc::new(opened.start(Arc::new(RemoteAccess::direct()), Arc::default()).unwrap());
        serving.accept_front_ends().unwrap();
        Self { folder, begun, go_on, serving }
    }

    fn text(folder: &Path, more: &str) -> String {
        let folder = folder.display();
        format!(
            "workers = 2\n[[disk]]\nname = 'first'\nimage = '{folder}/first'\nsocket = '{folder}/first.sock'\n\
             create = '1M'\n{more}\n"
        )
    }

    /// Reloads the file with these keys for its only disk.
    fn follow(&self, more: &str) -> Applied {
        let file = self.folder.path().join("bareblk.toml");
        fs::write(&file, Self::text(self.folder.path(), more)).unwrap();
        self.serving.reload().unwrap()
    }

    fn another(&self, name: &str, more: &[(&str, serde_json::Value)]) -> DiskSettings {
        let path =
            |name: String| serde_json::Value::from(self.folder.path().join(name).display().to_string());
        let mut keys = serde_json::Map::new();
        keys.insert("image".into(), path(name.to_owned()));
        keys.insert("socket".into(), path(format!("{name}.sock")));
        keys.insert("create".into(), "1M".into());
        keys.extend(more.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        config_file::disk(&keys, &HostOpener).unwrap()
    }
}

#[test]
fn image_that_hangs_holds_up_neither_questions_nor_a_stop() {
    let bed = Bed::start();
    let (serving, disk) = (Arc::clone(&bed.serving), bed.another("hangs", &[]));
    let adding = std::thread::spawn(move || serving.add(disk));
    bed.begun.recv_timeout(PATIENCE).unwrap();
    assert_eq!(bed.serving.disks().len(), 1);
    assert_eq!(bed.serving.with_server(Server::disk_names).unwrap(), ["first"]);
    let (serving, (done, stopped)) = (Arc::clone(&bed.serving), channel());
    std::thread::spawn(move || done.send(serving.stop()));
    let report = stopped.recv_timeout(PATIENCE).expect("the stop waits for the image");
    assert!(report.unwrap().is_clean());
    assert_eq!(adding.join().unwrap().unwrap_err().to_string(), "the server is stopping");
    bed.go_on.send(()).unwrap();
    bed.begun.recv_timeout(PATIENCE).expect("what came about too late stays");
    assert!(!bed.folder.path().join("hangs").exists() && bed.folder.path().join("first").exists());
}

#[test]
fn workers_of_a_disk_are_named_by_the_numbers_that_they_have_now() {
    let bed = Bed::start();
    bed.serving
        .with_server(|server| {
            assert_eq!(server.add_worker(WorkerOptions::default()).unwrap(), WorkerId(2));
            server.remove_worker(WorkerId(0), PATIENCE).unwrap();
        })
        .unwrap();
    assert_eq!(bed.follow("workers = [1, 2]").changed, ["first"]);
    // The file describes two workers. Worker 0 will exist again after the next start, but not now.
    let applied = bed.follow("workers = [0]");
    assert!(applied.changed.is_empty());
    assert!(applied.refused[0].why.ends_with("there is no worker 0"), "{applied}");
    assert_eq!(bed.follow("workers = 2").changed, ["first"]);
    let refused = bed.serving.add(bed.another("second", &[("workers", serde_json::json!([0]))])).unwrap_err();
    assert!(refused.to_string().contains("worker 0, and the server has 2, numbered 1-2"), "{refused}");
    bed.serving.add(bed.another("third", &[("workers", serde_json::json!([2]))])).unwrap();
}
