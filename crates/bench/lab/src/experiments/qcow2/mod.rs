//! `qcow2`: the same load on a raw file and on qcow2 images: with data, new, over a backing file, at the end of a chain.
//!
//! `prepare → raw file, qcow2 images; sample → (new image) → new server process → clients → Figures`
//!
//! - Each sample starts a new server, whose tables in memory are empty at first. The warm-up reads those that it uses.

mod declaration;

use std::path::{Path, PathBuf};

use self::declaration::{Ask, Content, DEPTH, Way, part, this};
use crate::error::LabError;
use crate::experiment::{Bench, Cell, Experiment, Reading, SampleError, Setup};
use crate::experiments::vhost::bench::{BLOCK_BYTES, Part};
use crate::load::disk::clients;
use crate::load::disk::images::Images;
use crate::load::disk::test_file::TestFile;
use crate::load::disk::test_files::{Place, TMPFS};
use crate::load::server::process::{Kind, PEER_MISSING, ServerProcess, Storage, peer_version};
use crate::load::{BlockJob, Figures, cores};
use crate::machine::StoragePlace;
use workload::Client;

pub(super) fn experiment() -> Experiment {
    let make =
        |setup: &Setup| Box::new(Qcow2 { setup: setup.clone(), part: part(), images: Vec::new() }) as Box<_>;
    Experiment { declaration: this(), make }
}

struct Qcow2 {
    setup: Setup,
    part: Part<Way, Ask>,
    /// The images, or why there are none.
    images: Vec<(Place, Result<Images, String>)>,
}

/// An image for a sample.
struct Served {
    path: PathBuf,
    is_qcow2: bool,
}

impl Qcow2 {
    fn images(&self, place: Place) -> Result<&Images, SampleError> {
        let found = self.images.iter().find(|(known, _)| *known == place).map(|(_, images)| images);
        let images = found.ok_or_else(|| SampleError::Unavailable("not prepared".to_owned()))?;
        images.as_ref().map_err(|why| SampleError::Unavailable(why.clone()))
    }

    fn served(&self, images: &Images, way: Way, content: Content) -> Result<Served, SampleError> {
        let stop = &self.setup.stop;
        let path = match (way, content) {
            (Way::Raw { .. }, Content::New) => images.new_raw()?,
            (Way::Raw { .. }, _) => images.raw().to_path_buf(),
            (Way::Chain, _) => images.chain(),
            (_, Content::Full) => images.full(),
            (_, Content::New) => images.new_image(false, stop)?,
            (_, Content::Over) => images.new_image(true, stop)?,
        };
        Ok(Served { path, is_qcow2: !matches!(way, Way::Raw { .. }) })
    }

    fn measure(&self, way: Way, ask: Ask, seconds: f64, seed: u64) -> Result<Figures, SampleError> {
        let images = self.images(ask.place)?;
        let served = self.served(images, way, ask.content)?;
        let own = |workers| Kind::Own { engine: "io_uring", cache: "none", workers, polls: true };
        let (kind, queues) = match way {
            Way::Raw { workers } | Way::Image { workers } => (own(workers), workers),
            Way::Chain => (own(1), 1),
            Way::Peer => (Kind::Peer, 1),
        };
        let storage = match served.is_qcow2 {
            true => Storage::Qcow2 { path: &served.path, backing_folder: images.folder() },
            false => Storage::File(&served.path),
        };
        // On a RAM disk, waking a client would take longer than its request.
        let polls = ask.place == Place::Tmpfs && queues == 1;
        let (program, stop) = (self.setup.program.as_deref(), &self.setup.stop);
        let start = || ServerProcess::start(kind, program, storage, queues, stop);
        let server = if polls { cores::on_the_first(1, start) } else { start() }?;
        let cpus = if polls { vec![cores::at(1)] } else { Vec::new() };
        let job = BlockJob {
            writes: ask.writes,
            block_bytes: BLOCK_BYTES,
            depth: DEPTH,
            jobs: queues,
            file_bytes: images.size_bytes(),
            seconds,
            seed,
        };
        clients::measure(&server, &job, &Client { poll: polls, cpus, ..Client::default() }, false, stop)
    }

    fn make_images(
        &self,
        place: Place,
        tell: &mut dyn FnMut(&str, f64),
    ) -> Result<Result<Images, String>, LabError> {
        let (size_bytes, stop) = (self.setup.effort.file_bytes, &self.setup.stop);
        let parent = match place {
            Place::Disk => self.setup.storage.as_path(),
            Place::Tmpfs => Path::new(TMPFS),
        };
        let what = format!("filling images in {}", parent.display());
        let file = TestFile::fill(parent, size_bytes, stop, &mut |share| tell(&what, share));
        let file = match (place, file) {
            // Not every machine has room there.
            (Place::Tmpfs, Err(error @ LabError::Storage { .. })) => return Ok(Err(error.to_string())),
            (_, file) => file?,
        };
        let images = Images::make(parent, file, stop);
        if stop.is_asked() {
            return Err(LabError::Interrupted);
        }
        Ok(images.map_err(|error| error.to_string()))
    }
}

impl Bench for Qcow2 {
    fn prepare(&mut self, tell: &mut dyn FnMut(&str, f64)) -> Result<(), LabError> {
        for place in [Place::Disk, Place::Tmpfs] {
            let images = self.make_images(place, tell)?;
            self.images.push((place, images));
        }
        Ok(())
    }

    fn sample(&mut self, cell: Cell) -> Result<Reading, SampleError> {
        let (way, ask) = (self.part.ways[cell.variant].1, self.part.loads[cell.workload].1);
        let figures = self.measure(way, ask, cell.seconds, cell.seed)?;
        Ok(self.part.columns.iter().map(|column| figures.get(column.id.as_str()).copied()).collect())
    }

    fn storages(&self) -> Vec<StoragePlace> {
        vec![StoragePlace::of("disk", &self.setup.storage), StoragePlace::of("RAM disk", Path::new(TMPFS))]
    }

    fn notes(&self) -> Vec<String> {
        let peer = peer_version()
            .map_or_else(|| format!("{PEER_MISSING}."), |version| format!("The peer is {version}."));
        let images =
            "The images have clusters of 64 KiB and are made by qemu-img. Servers open them with O_DIRECT.";
        let clients = "The client is this project's driver. With one queue on the RAM disk it polls, on a core of its own; \
            otherwise it sleeps until it is called. '×2': two workers, two queues with the depth each.";
        vec![peer, images.to_owned(), clients.to_owned()]
    }
}
