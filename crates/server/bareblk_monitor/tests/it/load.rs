//! A real server under load from our driver.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use blk_driver::{Device, Durability, Options, Queue, Reconnect};

use crate::rig::{Place, Server};

/// Far longer than a request takes.
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

    /// Starts the server, for the first time or again.
    pub fn start_server(&mut self) {
        let table = |name: &str| {
            let (image, socket) = (self.place.path(&format!("{name}.raw")), self.place.socket(name));
            format!(
                "[[disk]]\nname = '{name}'\nimage = '{}'\nsocket = '{}'\n",
                image.display(),
                socket.display()
            )
        };
        let config = self.place.path("bareblk.toml");
        let text = format!("control = '{}'\n{}{}", self.control().display(), table("root"), table("spare"));
        std::fs::write(&config, text).unwrap();
        let mut command = crate::rig::bareblk();
        command.arg("serve").arg("--config").arg(config);
        let (server, _) = crate::rig::Starting::new(command).wait_lines(2);
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

    /// Requests answered so far.
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
