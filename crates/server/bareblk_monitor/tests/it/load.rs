//! A real server under load from our driver.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blk_driver::{Device, Durability, Options, Queue, Reconnect};

use crate::rig::{Place, Server};

/// Time limit of a request, far longer than any request takes.
const LIMIT: Duration = Duration::from_secs(60);

/// A server with the disks `root`, which has a guest, and `spare`, which has none.
pub struct Served {
    pub place: Place,
    pub server: Option<Server>,
}

impl Served {
    pub fn start() -> Self {
        let mut served = Self { place: Place::new(), server: None };
        served.place.image("root.raw", 4 << 20);
        served.place.image("spare.raw", 4 << 20);
        served.start_server();
        served
    }

    pub fn control(&self) -> PathBuf {
        self.place.socket("control.sock")
    }

    pub fn monitor(&self) -> PathBuf {
        self.place.socket("vms.monitor")
    }

    /// Starts or restarts the server.
    pub fn start_server(&mut self) {
        let table = |name: &str| {
            let (image, socket) = (self.place.path(&format!("{name}.raw")), self.place.socket(name));
            format!(
                "[[disk]]\nname = '{name}'\nimage = '{}'\nsocket = '{}'\n",
                image.display(),
                socket.display()
            )
        };
        let sockets =
            format!("control = '{}'\nmonitor = '{}'\n", self.control().display(), self.monitor().display());
        let text = format!("{sockets}{}{}", table("root"), table("spare"));
        std::fs::write(self.place.path("bareblk.toml"), text).unwrap();
        self.serve(&[], 3);
    }

    /// Starts a server that takes over from the running one.
    pub fn take_over(&mut self) {
        self.serve(&["--take-over".as_ref(), self.control().as_os_str()], 5);
    }

    /// `lines`: the number of lines that the server prints before it serves.
    fn serve(&mut self, more: &[&OsStr], lines: usize) {
        let mut command = crate::rig::bareblk();
        command.arg("serve").arg("--config").arg(self.place.path("bareblk.toml")).args(more);
        let (server, _) = crate::rig::Starting::new(command).wait_lines(lines);
        self.server = Some(server);
    }

    /// Puts a load on `root`.
    pub fn load(&self) -> Load {
        Load::start(self.place.socket("root"))
    }
}

/// A guest that reads and writes until it is dropped.
pub struct Load {
    ends: Arc<AtomicBool>,
    requests: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    fn start(socket: PathBuf) -> Self {
        let options = Options { reconnect: Reconnect::For(LIMIT), ..Options::new(socket) };
        let (device, mut queues) = Device::connect(&options).unwrap();
        let (ends, requests) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (its_end, count) = (Arc::clone(&ends), Arc::clone(&requests));
        let thread = thread::spawn(move || {
            run(&mut queues[0], &its_end, &count);
            drop(device);
        });
        Self { ends, requests, thread: Some(thread) }
    }

    /// Ends the guest. Returns the requests that were answered.
    pub fn end(mut self) -> u64 {
        self.ends.store(true, Relaxed);
        self.thread.take().unwrap().join().unwrap();
        self.requests()
    }

    /// The number of requests that were answered so far.
    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }
}

fn run(queue: &mut Queue, ends: &AtomicBool, count: &AtomicU64) {
    let mut data = vec![0; 4096];
    while !ends.load(Relaxed) {
        for sector in [0, 8, 16] {
            queue.read_blocking(sector, &mut data, LIMIT).unwrap();
        }
        // A write and a flush.
        queue.write_blocking(24, &data, Durability::Durable, LIMIT).unwrap();
        count.fetch_add(5, Relaxed);
        thread::sleep(Duration::from_millis(1));
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.ends.store(true, Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
