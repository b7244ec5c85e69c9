//! A mapped disk in an engine: its files in the inner engine, and what its ops share.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use disk_image::volume::link::Member;
use disk_image::volume::{SLICE_BYTES, SliceId};
use disk_image::{LayerFile, Volume};
use guest_mem::IoVecs;

use super::copies::Copies;
use super::scratch::Scratch;
use crate::core::turn::Turn;
use crate::engine::{Engine, FileId, FileSpec, WatchId, WatchToken};

/// Parts of ops in flight, for each disk.
pub(super) const MAX_PARTS: usize = 64;
/// Pieces of a part: a part of many small buffers is copied instead.
pub(super) const PART_PIECES: usize = 64;
/// Slices that are read at a time, for each disk.
const MAX_LOADS: usize = 16;
/// The largest block that a file may need to be read in. `disk_image` refuses larger ones.
const MAX_BLOCK_BYTES: u64 = 4096;

/// The watches of this engine for the answers of metadata threads; a worker's own tokens are smaller.
const ANSWERS: u64 = 1 << 62;

/// A disk.
pub(super) struct Attached {
    pub volume: Arc<Volume>,
    /// The link to the metadata thread of a writable disk.
    pub member: Option<Member>,
    news: Option<News>,
    /// The volume's files in the inner engine.
    pub files: Vec<FileId>,
    pub parts: Vec<Part>,
    pub free_parts: Vec<u32>,
    pub loads: Vec<Load>,
    /// Memory of `loads`.
    pub slices: Scratch,
    pub copies: Copies,
    /// Ops that wait for a part, a load, a copy or the inner engine. The first one goes on first.
    pub line: VecDeque<u32>,
    /// What may still be copied in this turn.
    pub turn: Turn,
    /// Ops that have used up the turn, or found it used up. The first one goes on first.
    pub due: VecDeque<u32>,
}

/// A part of an op that the inner engine does with the guest's memory.
#[derive(Default)]
pub(super) struct Part {
    /// The slot of its op.
    pub op: u32,
    /// From the op's start.
    pub start_bytes: u64,
    pub len_bytes: u64,
    /// The volume's file.
    pub file: usize,
    /// While the part is free.
    pub buffers: IoVecs,
}

/// A slice that is being read.
pub(super) struct Load {
    /// `None`: not in use.
    pub id: Option<SliceId>,
    /// The slots of the ops that wait for it.
    pub waiting: Vec<u32>,
    /// The volume's file.
    pub file: usize,
    /// The slice's first byte in the buffer, and its length.
    pub skip_bytes: u64,
    pub len_bytes: u64,
    pub words: Vec<u64>,
    pub buffers: IoVecs,
}

/// The wake-up of the engine by the metadata thread: eight bytes through a pair of sockets.
///
/// An eventfd would not do. If the worker sleeps in another engine, this engine's ring signals an eventfd of its own, and the
/// kernel does not do that reliably while another eventfd is being signalled (see `descriptor` in `io_uring/mod.rs`).
struct News {
    socket: Arc<OwnedFd>,
    watch: WatchId,
}

impl Load {
    fn new() -> Self {
        Self {
            id: None,
            waiting: Vec::new(),
            file: 0,
            skip_bytes: 0,
            len_bytes: 0,
            words: Vec::new(),
            buffers: IoVecs::with_capacity(1),
        }
    }
}

impl Attached {
    /// `place`: the disk's number.
    pub fn attach(inner: &mut dyn Engine, volume: &Arc<Volume>, place: usize) -> io::Result<Self> {
        let slices = Scratch::new(MAX_LOADS as u64, SLICE_BYTES + 2 * MAX_BLOCK_BYTES)?;
        let copies = Copies::new(volume.most_cluster_bytes(), MAX_BLOCK_BYTES)?;
        let files = attach_files(inner, volume)?;
        let (member, news) = match join(inner, volume, place) {
            Ok(joined) => joined.unzip(),
            Err(error) => {
                files.into_iter().for_each(|file| inner.detach_file(file));
                return Err(error);
            }
        };
        let part = || Part { buffers: IoVecs::with_capacity(PART_PIECES), ..Part::default() };
        #[allow(clippy::cast_possible_truncation)] // 64
        let free_parts = (0..MAX_PARTS as u32).collect();
        Ok(Self {
            volume: Arc::clone(volume),
            member,
            news,
            files,
            parts: (0..MAX_PARTS).map(|_| part()).collect(),
            free_parts,
            loads: (0..MAX_LOADS).map(|_| Load::new()).collect(),
            slices,
            copies,
            line: VecDeque::new(),
            turn: Turn::new(),
            due: VecDeque::new(),
        })
    }
}

impl Attached {
    /// Empties the socket, before the answers are taken.
    pub fn read_news(&self) {
        let Some(News { socket, .. }) = &self.news else { return };
        let mut bytes = [0; 64];
        while rustix::io::read(socket, &mut bytes).is_ok_and(|read| read == bytes.len()) {}
    }

    pub fn detach(self, inner: &mut dyn Engine) {
        self.news.into_iter().for_each(|news| inner.unwatch(news.watch));
        self.files.into_iter().for_each(|file| inner.detach_file(file));
    }
}

/// Whether a watch is one for answers.
pub(super) fn is_for_answers(token: WatchToken) -> bool {
    token.0 >= ANSWERS
}

fn attach_files(inner: &mut dyn Engine, volume: &Volume) -> io::Result<Vec<FileId>> {
    let mut files = Vec::new();
    for file in volume.files() {
        match inner.attach_file(spec(file)) {
            Ok(file) => files.push(file),
            Err(error) => {
                files.into_iter().for_each(|file| inner.detach_file(file));
                return Err(error);
            }
        }
    }
    Ok(files)
}

fn join(inner: &mut dyn Engine, volume: &Volume, place: usize) -> io::Result<Option<(Member, News)>> {
    if !volume.is_writable() {
        return Ok(None);
    }
    let (socket, wake) = UnixStream::pair()?;
    socket.set_nonblocking(true)?;
    wake.set_nonblocking(true)?;
    let socket = Arc::new(OwnedFd::from(socket));
    let watch = inner.watch(Arc::clone(&socket), WatchToken(ANSWERS + place as u64))?;
    let member = volume.join(Arc::new(wake.into()));
    Ok(member.map(|member| (member, News { socket, watch })))
}

fn spec(file: &LayerFile) -> FileSpec {
    FileSpec::of_file(Arc::clone(file.file()), file.alignment())
}
