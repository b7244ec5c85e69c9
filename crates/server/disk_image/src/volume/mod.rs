//! A disk that is mapped through the tables of qcow2 images: its layers, and where each byte is.
//!
//! `guest offset → layer 0: L1 (in memory) → L2 slice (slices.rs) → data, zeroes, compressed, or the next layer`
//!
//! - Nothing here does I/O. A slice that is not in memory is named, and the caller reads it (`io_engine`); of a writable top
//!   layer the metadata thread reads it, so that no worker keeps old entries.
//! - The tables of a writable top layer are changed by the metadata thread alone (`metadata/`), which workers ask (`link.rs`).
//! - The files may change at any time. Each entry is read once, checked, and only then used, and a range that it names is
//!   checked against its own file. So a bad entry is an error of one request, and leads to no other file.
//! - All workers of a disk share one volume. A lookup takes no lock and does not allocate.
//! - See also: opening (`image/mapped.rs`), the format (`qcow2`).

pub(crate) mod commit_target;
mod epochs;
#[cfg(all(test, loom))]
mod epochs_model;
mod job_step;
mod layer_file;
pub mod link;
pub mod merge;
pub mod metadata;
pub(crate) mod parts;
mod slices;
pub(crate) mod table_file;
mod top;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use qcow2::{
    BadEntry, CompressedCluster, Compression, EntryProblem, Geometry, Header, L1Entry, L2Entry, RawL2Entry,
    RunKind, Table, Unlinked, Writer,
};
use tracing::{debug, warn};

pub use self::layer_file::LayerFile;
use self::link::{Link, Member};
use self::slices::SliceCache;
use self::table_file::TableFile;

/// Memory for the L2 tables of one disk: with clusters of 64 KiB enough for 512 GiB. It is used as tables are read.
pub const TABLE_CACHE_BYTES: u64 = 64 << 20;
/// The most bytes of an L2 table that are read and kept together.
pub const SLICE_BYTES: u64 = 4096;
/// The least memory for the tables of a writable image: several ops at a time need a slice each.
pub(crate) const LEAST_WRITABLE_CACHE_BYTES: u64 = 16 * SLICE_BYTES;

/// The most clusters that are looked up in a layer with others below it. A run there may be long while those below are
/// short, and each of the short ones looks it up again.
const MOST_UPPER_CLUSTERS: u64 = 64;

/// A disk with its layers, the top first.
#[derive(Debug)]
pub struct Volume {
    files: Vec<LayerFile>,
    layers: Vec<Layer>,
    /// `None`: the disk is read-only.
    writable: Option<Writable>,
}

/// What only a writable disk has.
#[derive(Debug)]
pub(crate) struct Writable {
    link: Arc<Link>,
    /// As it was when the disk was opened.
    header: Header,
    /// Until the metadata thread takes it.
    tables: Mutex<Option<Tables>>,
    /// What a commit unlinked in this image. It is freed once a guest has gone on here.
    unlinked: Mutex<Option<Unlinked>>,
    has_lost_commit: AtomicBool,
}

/// The tables of a writable disk, before its metadata thread takes them.
#[derive(Debug)]
pub(crate) enum Tables {
    /// As the file has them.
    Read(Box<Writer<TableFile>>),
    /// Another server still changes them. They are read again when a guest's requests begin.
    Theirs,
}

/// One image, or one of its backing files.
#[derive(Debug)]
pub(crate) struct Layer {
    /// For the log.
    pub path: PathBuf,
    /// What the layer describes.
    pub size_bytes: u64,
    /// The index of the file with the tables.
    pub file: usize,
    /// The index of the file with the data.
    pub data: usize,
    /// `None`: the layer is raw.
    pub mapping: Option<Mapping>,
    /// A bad entry has been logged.
    pub is_told: AtomicBool,
}

/// The tables of a layer.
#[derive(Debug)]
pub(crate) struct Mapping {
    geometry: Geometry,
    compression: Compression,
    /// Changed only by the metadata thread.
    l1: Box<[AtomicU64]>,
    slices: SliceCache,
}

/// A part of an L2 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceId {
    layer: usize,
    /// Slices are numbered in the order of the guest's offsets.
    number: u64,
}

/// The words of a slice that was just read.
#[derive(Clone, Copy, Debug)]
pub struct LoadedSlice<'a> {
    /// Which slice.
    pub id: SliceId,
    /// Its words, in the host's byte order.
    pub words: &'a [u64],
}

/// How far a lookup has come: it begins in this layer and answers for at most this many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookup {
    layer: usize,
    len_bytes: u64,
}

impl Lookup {
    /// From the top layer on.
    #[must_use]
    pub fn new(len_bytes: u64) -> Self {
        Self { layer: 0, len_bytes }
    }

    /// From this layer on.
    fn from_layer(layer: usize, len_bytes: u64) -> Self {
        Self { layer, len_bytes }
    }
}

/// Adjacent bytes of the guest with one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Never 0.
    pub len_bytes: u64,
    /// The answer.
    pub place: Place,
}

/// Where the bytes of an extent are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// They are zeroes.
    Zeroes,
    /// In a file, as they are.
    Data {
        /** Its index in [`Volume::files`]. */
        file: usize,
        /** Of the first byte. */
        offset_bytes: u64,
    },
    /// In a compressed cluster.
    Compressed(CompressedPlace),
}

/// A compressed cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedPlace {
    /// The layer's index.
    pub layer: usize,
    /// Where its data are, in the layer's file.
    pub cluster: CompressedCluster,
    /// The extent's first byte in the decompressed cluster.
    pub skip_bytes: u64,
}

/// Adjacent bytes of the guest with one answer for a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WritableExtent {
    /// Never 0.
    pub len_bytes: u64,
    /// The offset in the top layer's file. `None`: the clusters must be claimed first.
    pub host_offset: Option<u64>,
}

/// Why a lookup has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoExtent {
    /// This slice must be read first.
    NotLoaded(SliceId),
    /// An entry breaks the format, or leads out of its file.
    Bad {
        /** The layer's index. */
        layer: usize,
        /** The entry. */
        entry: BadEntry,
    },
}

impl Volume {
    /// `writable`: the top layer's header and tables, if the guest may write.
    pub(crate) fn new(files: Vec<LayerFile>, layers: Vec<Layer>, writable: Option<(Header, Tables)>) -> Self {
        let writable = writable.map(|(header, tables)| {
            let (link, tables) = (Arc::new(Link::new()), Mutex::new(Some(tables)));
            Writable {
                link,
                header,
                tables,
                unlinked: Mutex::default(),
                has_lost_commit: AtomicBool::new(false),
            }
        });
        Self { files, layers, writable }
    }

    /// Whether the guest may write.
    #[inline]
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable.is_some()
    }

    /// Makes an engine known to the metadata thread. `wake`: eight bytes written to it wake the engine. `None`: the disk
    /// is read-only.
    #[must_use]
    pub fn join(&self, wake: Arc<OwnedFd>) -> Option<Member> {
        self.writable.as_ref().map(|writable| writable.link.join(wake))
    }

    /// The number of a slice that only the metadata thread reads.
    #[must_use]
    pub fn slice_of_writable(&self, id: SliceId) -> Option<u64> {
        (self.is_writable() && id.layer == 0).then_some(id.number)
    }

    /// A slice that the metadata thread has read.
    #[must_use]
    pub fn loaded<'a>(&self, slice: u64, words: &'a [u64]) -> LoadedSlice<'a> {
        LoadedSlice { id: SliceId { layer: 0, number: slice }, words }
    }

    /// Whether whole clusters can read as zeroes without data. Without `unmap` they keep their space.
    #[must_use]
    pub fn can_zero(&self, unmap: bool) -> bool {
        let geometry = self.top().map(|mapping| mapping.geometry);
        // An unallocated cluster reads as zeroes, but has no space.
        geometry.is_some_and(|geometry| geometry.version() >= 3 || unmap && self.layers.len() == 1)
    }

    fn top(&self) -> Option<&Mapping> {
        self.layers.first().and_then(|layer| layer.mapping.as_ref())
    }

    /// All files, in no particular order.
    #[must_use]
    pub fn files(&self) -> &[LayerFile] {
        &self.files
    }

    /// The number of layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The guest's disk.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.layers.first().map_or(0, |layer| layer.size_bytes)
    }

    /// The longest decompressed cluster of any layer; 0: all layers are raw.
    #[must_use]
    pub fn most_cluster_bytes(&self) -> u64 {
        let mappings = self.layers.iter().filter_map(|layer| layer.mapping.as_ref());
        mappings.map(|mapping| mapping.geometry.cluster_bytes()).max().unwrap_or(0)
    }

    /// Of the clusters in this layer; `None`: the layer is raw.
    #[must_use]
    pub fn compression(&self, layer: usize) -> Option<(Compression, u64)> {
        let mapping = self.layers.get(layer)?.mapping.as_ref()?;
        Some((mapping.compression, mapping.geometry.cluster_bytes()))
    }

    /// The index of the file with this layer's tables and compressed clusters.
    #[must_use]
    pub fn table_file(&self, layer: usize) -> usize {
        self.layers.get(layer).map_or(0, |layer| layer.file)
    }

    /// The first extent at a guest's offset. `lookup` remembers how far the search came, if a slice must be read.
    /// `loaded`: a slice that may not be in the cache any more.
    ///
    /// # Errors
    /// [`NoExtent`].
    #[inline]
    pub fn extent(
        &self,
        offset_bytes: u64,
        lookup: &mut Lookup,
        loaded: Option<LoadedSlice<'_>>,
    ) -> Result<Extent, NoExtent> {
        while let Some(layer) = self.layers.get(lookup.layer) {
            let inside = layer.size_bytes.saturating_sub(offset_bytes);
            if inside == 0 {
                // A backing file may be shorter than what lies on it. What follows its end is not looked up below it.
                break;
            }
            let len_bytes = lookup.len_bytes.min(inside);
            let Some(mapping) = &layer.mapping else {
                return Ok(self.data(layer.data, offset_bytes, len_bytes));
            };
            let most_clusters =
                if lookup.layer + 1 < self.layers.len() { MOST_UPPER_CLUSTERS } else { u64::MAX };
            let run = mapping.run(lookup.layer, offset_bytes, len_bytes, most_clusters, loaded)?;
            lookup.len_bytes = run.len_bytes;
            match run.kind {
                RunKind::Unallocated => lookup.layer += 1,
                RunKind::Zero => break,
                RunKind::Data { host_offset } => {
                    return Ok(self.data(layer.data, host_offset, run.len_bytes));
                }
                RunKind::Compressed(cluster) => {
                    let skip_bytes = mapping.geometry.in_cluster(offset_bytes);
                    let place = CompressedPlace { layer: lookup.layer, cluster, skip_bytes };
                    return Ok(Extent { len_bytes: run.len_bytes, place: Place::Compressed(place) });
                }
            }
        }
        Ok(Extent { len_bytes: lookup.len_bytes, place: Place::Zeroes })
    }

    /// The first extent for a write at a guest's offset.
    ///
    /// # Errors
    /// [`NoExtent`].
    #[inline]
    pub fn writable_extent(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        loaded: Option<LoadedSlice<'_>>,
    ) -> Result<WritableExtent, NoExtent> {
        let Some(mapping) = self.top() else { unreachable!("a writable disk has tables") };
        mapping.writable_run(offset_bytes, len_bytes, loaded)
    }

    /// Data of a file. What is past the end that the file had when it was opened reads as zeroes.
    fn data(&self, file: usize, offset_bytes: u64, len_bytes: u64) -> Extent {
        let stored = self.files.get(file).map_or(0, LayerFile::padded_bytes).saturating_sub(offset_bytes);
        if stored == 0 {
            return Extent { len_bytes, place: Place::Zeroes };
        }
        Extent { len_bytes: len_bytes.min(stored), place: Place::Data { file, offset_bytes } }
    }

    /// Where a slice is: the index of its file, its offset and its length.
    ///
    /// # Errors
    /// Its L1 entry breaks the format, or leads out of the file.
    pub fn place_of(&self, id: SliceId) -> Result<(usize, u64, u64), NoExtent> {
        let layer = self.layers.get(id.layer);
        let (Some(layer), Some(mapping)) = (layer, layer.and_then(|layer| layer.mapping.as_ref())) else {
            unreachable!("only lookups in tables name slices")
        };
        let (index, in_table) = mapping.in_l1(id.number);
        let (raw, table) = mapping.l2_table(id.layer, index)?;
        let len_bytes = mapping.slice_bytes();
        let offset_bytes = table.unwrap_or_default() + in_table * len_bytes;
        let file_bytes = self.files.get(layer.file).map_or(0, |file| file.len_bytes());
        if offset_bytes.checked_add(len_bytes).is_none_or(|end| end > file_bytes) {
            let problem = qcow2::EntryProblem::Outside { offset: offset_bytes, file_bytes };
            let entry = BadEntry { table: Table::L1, index, value: raw, problem };
            return Err(NoExtent::Bad { layer: id.layer, entry });
        }
        Ok((layer.file, offset_bytes, len_bytes))
    }

    /// Keeps a slice for all workers.
    pub fn keep(&self, slice: LoadedSlice<'_>) {
        if let Some(mapping) = self.layers.get(slice.id.layer).and_then(|layer| layer.mapping.as_ref()) {
            mapping.slices.put(slice.id.number, slice.words);
        }
    }

    /// What the metadata thread needs. `None`: the disk is read-only, or there is such a thread.
    pub(crate) fn take_tables(&self) -> Option<(Arc<Link>, Tables)> {
        let writable = self.writable.as_ref()?;
        let tables = writable.tables.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        Some((Arc::clone(&writable.link), tables))
    }

    pub(crate) fn link(&self) -> Option<&Arc<Link>> {
        self.writable.as_ref().map(|writable| &writable.link)
    }

    /// Whether L2 entries of the top layer are two words.
    pub(crate) fn has_extended_l2(&self) -> bool {
        self.top().is_some_and(|top| top.geometry.has_extended_l2())
    }

    /// Logs that a file fails guests, as [`Volume::tell`] does for its layer.
    #[cold]
    pub fn tell_of_file(&self, file: usize, offset_bytes: u64, why: &dyn std::fmt::Display) {
        let layer = self.layers.iter().position(|layer| layer.file == file || layer.data == file);
        if let (Some(layer), Some(file)) = (layer, self.files.get(file)) {
            self.tell(layer, offset_bytes, &format!("{}: {why}", file.path().display()));
        }
    }

    /// Logs why guests get an error: once for each image, because a guest can ask again and again.
    #[cold]
    pub fn tell(&self, layer: usize, offset_bytes: u64, why: &dyn std::fmt::Display) {
        let Some(layer) = self.layers.get(layer) else { return };
        let image = layer.path.display();
        if layer.is_told.swap(true, Ordering::Relaxed) {
            debug!(%image, offset = offset_bytes, "a request fails: {why}");
        } else {
            warn!(%image, offset = offset_bytes, "the image is damaged, and a request fails: {why}; further errors of this image are not logged");
        }
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if let Some(link) = self.link() {
            link.tell_to_close();
        }
    }
}

impl Mapping {
    /// `cache_bytes`: memory for L2 tables.
    pub fn new(geometry: Geometry, compression: Compression, l1: &[u64], cache_bytes: u64) -> Self {
        let slice_bytes = SLICE_BYTES.min(geometry.cluster_bytes());
        let slices = SliceCache::new(usize::try_from(cache_bytes / slice_bytes).unwrap_or(usize::MAX));
        let l1 = l1.iter().map(|entry| AtomicU64::new(*entry)).collect();
        Self { geometry, compression, l1, slices }
    }

    fn slice_bytes(&self) -> u64 {
        SLICE_BYTES.min(self.geometry.cluster_bytes())
    }

    /// The number of entries in a slice is 2 to the power of this.
    #[inline]
    fn slice_entries_bits(&self) -> u32 {
        self.slice_bytes().trailing_zeros() - if self.geometry.has_extended_l2() { 4 } else { 3 }
    }

    /// The L1 index of a slice, and its position in its table.
    fn in_l1(&self, number: u64) -> (u64, u64) {
        let bits = self.geometry.l2_entries_bits() - self.slice_entries_bits();
        (number >> bits, number & ((1 << bits) - 1))
    }

    /// The L1 entry as stored, and the table to which it leads.
    #[inline]
    fn l2_table(&self, layer: usize, index: u64) -> Result<(u64, Option<u64>), NoExtent> {
        let entry = usize::try_from(index).ok().and_then(|index| self.l1.get(index));
        // Acquire: pairs with the release in `Volume::set_l1`.
        let raw = entry.map_or(0, |entry| entry.load(Ordering::Acquire));
        match L1Entry::decode(raw, &self.geometry) {
            Ok(entry) => Ok((raw, entry.l2_table)),
            Err(problem) => {
                Err(NoExtent::Bad { layer, entry: BadEntry { table: Table::L1, index, value: raw, problem } })
            }
        }
    }

    #[inline]
    fn run(
        &self,
        layer: usize,
        offset_bytes: u64,
        len_bytes: u64,
        most_clusters: u64,
        loaded: Option<LoadedSlice<'_>>,
    ) -> Result<qcow2::Run, NoExtent> {
        let geometry = &self.geometry;
        let index = geometry.l1_index(offset_bytes);
        let coverage = geometry.l2_coverage_bytes();
        let (_, table) = self.l2_table(layer, index)?;
        if table.is_none() {
            let len_bytes = len_bytes.min(coverage - offset_bytes % coverage);
            return Ok(qcow2::Run { len_bytes, kind: RunKind::Unallocated });
        }
        let len_bytes = len_bytes.min(most_clusters.saturating_mul(geometry.cluster_bytes()));
        let loaded = loaded.filter(|loaded| loaded.id.layer == layer);
        let found = qcow2::run_in_table(geometry, offset_bytes, len_bytes, |entry| {
            self.l2_entry(index, entry, loaded)
        });
        found.map_err(|stop| stop.in_layer(layer))
    }

    /// An entry of the table to which an L1 entry leads.
    #[inline]
    fn l2_entry(
        &self,
        l1_index: u64,
        entry: u32,
        loaded: Option<LoadedSlice<'_>>,
    ) -> Result<RawL2Entry, Stop> {
        let (bits, extended) = (self.slice_entries_bits(), self.geometry.has_extended_l2());
        let first = l1_index << (self.geometry.l2_entries_bits() - bits);
        let number = first + u64::from(entry >> bits);
        let in_slice = (entry & ((1 << bits) - 1)) as usize;
        let word = if extended { 2 * in_slice } else { in_slice };
        if let Some(loaded) = loaded.filter(|loaded| loaded.id.number == number) {
            return Ok(entry_in(loaded.words, word, extended));
        }
        let [cluster, subclusters] =
            self.slices.get(number, word, extended).ok_or(Stop::NotLoaded(number))?;
        Ok(RawL2Entry { cluster, subclusters })
    }

    /// The first run of clusters that are written in place, or of those that are not, at most to the table's end.
    #[inline]
    fn writable_run(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        loaded: Option<LoadedSlice<'_>>,
    ) -> Result<WritableExtent, NoExtent> {
        let geometry = &self.geometry;
        let (index, coverage) = (geometry.l1_index(offset_bytes), geometry.l2_coverage_bytes());
        let (_, table) = self.l2_table(0, index)?;
        let most_bytes = len_bytes.min(coverage - offset_bytes % coverage);
        if table.is_none() {
            return Ok(WritableExtent { len_bytes: most_bytes, host_offset: None });
        }
        let loaded = loaded.filter(|loaded| loaded.id.layer == 0);
        let place = |entry: u32| {
            let raw = self.l2_entry(index, entry, loaded)?;
            self.in_place(entry, raw).map_err(Stop::Bad)
        };
        let (first, in_cluster) = (geometry.l2_index(offset_bytes), geometry.in_cluster(offset_bytes));
        let start = place(first).map_err(|stop| stop.in_layer(0))?;
        let mut run_bytes = geometry.cluster_bytes() - in_cluster;
        for entry in first + 1..geometry.l2_entries() {
            let clusters_bytes = run_bytes + in_cluster;
            match (start, place(entry)) {
                _ if run_bytes >= most_bytes => break,
                (None, Ok(None)) => {}
                (Some(start), Ok(Some(next))) if start + clusters_bytes == next => {}
                _ => break,
            }
            run_bytes += geometry.cluster_bytes();
        }
        let host_offset = start.map(|start| start + in_cluster);
        Ok(WritableExtent { len_bytes: run_bytes.min(most_bytes), host_offset })
    }

    /// The host cluster, if its entry says that it is written in place.
    fn in_place(&self, index: u32, raw: RawL2Entry) -> Result<Option<u64>, BadEntry> {
        let bad = |problem: EntryProblem| {
            let (table, index, value) = (Table::L2, index.into(), raw.cluster);
            BadEntry { table, index, value, problem }
        };
        match L2Entry::decode(raw, &self.geometry).map_err(bad)? {
            L2Entry::Standard(cluster) if raw.is_in_place(&self.geometry) => Ok(cluster.host_offset),
            L2Entry::Standard(_) | L2Entry::Compressed(_) => Ok(None),
        }
    }
}

enum Stop {
    NotLoaded(u64),
    Bad(BadEntry),
}

impl Stop {
    fn in_layer(self, layer: usize) -> NoExtent {
        match self {
            Self::NotLoaded(number) => NoExtent::NotLoaded(SliceId { layer, number }),
            Self::Bad(entry) => NoExtent::Bad { layer, entry },
        }
    }
}

impl From<BadEntry> for Stop {
    fn from(entry: BadEntry) -> Self {
        Self::Bad(entry)
    }
}

fn entry_in(words: &[u64], word: usize, extended: bool) -> RawL2Entry {
    let at = |word: usize| words.get(word).copied().unwrap_or_default();
    RawL2Entry { cluster: at(word), subclusters: if extended { at(word + 1) } else { 0 } }
}
