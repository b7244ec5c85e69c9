//! What lies below an image, for copies: the lower layers of the volume, through the slices that workers use, too.
//!
//! `extent → data of a file | a decompressed cluster | zeroes | a slice to read, and again`

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use qcow2::{Below, Decompressor, ReadAt};

use super::read_ahead::{ReadAhead, Source};
use crate::volume::table_file::TableFile;
use crate::volume::{CompressedPlace, Extent, LoadedSlice, Lookup, NoExtent, Place, SliceId, Volume};

/// Memory of the reader between its calls.
#[derive(Debug, Default)]
pub(super) struct Memory {
    words: Vec<u64>,
    data: Vec<u8>,
    cluster: Vec<u8>,
    /// By layer.
    decompressors: Vec<Option<Decompressor>>,
    /// `None`: nothing is read ahead.
    ahead: Option<ReadAhead>,
}

impl Memory {
    pub(super) fn with(ahead: Option<ReadAhead>) -> Self {
        Self { ahead, ..Self::default() }
    }
}

/// The layers from `first` on.
#[derive(Debug)]
pub(super) struct Lower<'a> {
    pub volume: &'a Volume,
    /// 1: those below the top.
    pub first: usize,
    pub memory: &'a mut Memory,
}

impl Below for Lower<'_> {
    fn read_at(&mut self, guest_offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let (mut at, mut rest) = (guest_offset, buffer);
        while !rest.is_empty() {
            let ahead = self.memory.ahead.as_mut().map_or(0, |ahead| ahead.take(at, rest));
            if ahead > 0 {
                (at, rest) = (at + ahead as u64, &mut rest[ahead..]);
                continue;
            }
            let extent = self.extent(at, rest.len() as u64)?;
            let len = usize::try_from(extent.len_bytes).unwrap_or(usize::MAX).min(rest.len());
            let (part, after) = rest.split_at_mut(len);
            match extent.place {
                Place::Zeroes => part.fill(0),
                Place::Data { file, offset_bytes } => {
                    let start = Instant::now();
                    self.read(file, offset_bytes, part)?;
                    if let Some(ahead) = &mut self.memory.ahead {
                        ahead.note_read(len, start.elapsed());
                    }
                }
                Place::Compressed(place) => self.decompress(&place, part)?,
            }
            (at, rest) = (at + len as u64, after);
        }
        Ok(())
    }

    fn will_read(&mut self, guest_bytes: Range<u64>) {
        let mut at = guest_bytes.start;
        while at < guest_bytes.end && self.memory.ahead.is_some() {
            // The read itself tells of errors.
            let Ok(extent) = self.extent(at, guest_bytes.end - at) else { break };
            let len_bytes = extent.len_bytes.min(guest_bytes.end - at);
            if let Place::Data { file, offset_bytes } = extent.place {
                self.announce(at, len_bytes, file, offset_bytes);
            }
            at += len_bytes;
        }
    }

    fn is_zero(&mut self) -> bool {
        self.volume.layers() <= self.first
    }
}

impl Lower<'_> {
    pub(super) fn extent(&mut self, at: u64, len_bytes: u64) -> io::Result<Extent> {
        let mut lookup = Lookup::from_layer(self.first, len_bytes);
        let mut loaded: Option<SliceId> = None;
        loop {
            let words = loaded.map(|id| LoadedSlice { id, words: &self.memory.words });
            match self.volume.extent(at, &mut lookup, words) {
                Ok(extent) => return Ok(extent),
                Err(NoExtent::NotLoaded(id)) => {
                    self.load(id)?;
                    loaded = Some(id);
                }
                Err(NoExtent::Bad { layer, entry }) => {
                    self.volume.tell(layer, at, &entry);
                    return Err(io::Error::new(io::ErrorKind::InvalidData, entry));
                }
            }
        }
    }

    fn load(&mut self, id: SliceId) -> io::Result<()> {
        let (file, offset_bytes, len_bytes) = self.volume.place_of(id).map_err(|bad| match bad {
            NoExtent::Bad { entry, .. } => io::Error::new(io::ErrorKind::InvalidData, entry),
            NoExtent::NotLoaded(_) => unreachable!("L1 tables are in memory"),
        })?;
        let mut bytes = vec![0; usize::try_from(len_bytes).unwrap_or(usize::MAX)];
        self.read(file, offset_bytes, &mut bytes)?;
        self.memory.words.clear();
        self.memory.words.extend(bytes.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)));
        self.volume.keep(LoadedSlice { id, words: &self.memory.words });
        Ok(())
    }

    /// A part of a file. What the file had not when it was opened is zeroes.
    fn source(&self, file: usize, offset: u64, len: usize) -> Source {
        let Some(layer_file) = self.volume.files().get(file) else { unreachable!("a layer names its files") };
        let had = usize::try_from(layer_file.len_bytes().saturating_sub(offset)).unwrap_or(usize::MAX);
        let file = TableFile::new(Arc::clone(layer_file.file()), layer_file.alignment());
        Source { file, offset, has_bytes: had.min(len) }
    }

    /// Forgets what was read ahead. To be called at the end of a batch: later, other data may be there.
    pub(super) fn forget(&mut self) {
        if let Some(ahead) = &mut self.memory.ahead {
            ahead.forget();
        }
    }

    fn announce(&mut self, guest_offset: u64, len_bytes: u64, file: usize, offset: u64) {
        let len = usize::try_from(len_bytes).unwrap_or(usize::MAX);
        let source = self.source(file, offset, len);
        if let Some(ahead) = &mut self.memory.ahead {
            ahead.announce(guest_offset, len, source);
        }
    }

    fn read(&self, file: usize, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let Source { file: table_file, has_bytes, .. } = self.source(file, offset, buffer.len());
        let (inside, past) = buffer.split_at_mut(has_bytes);
        past.fill(0);
        if table_file.read_at(offset, inside)? < inside.len() {
            self.volume.tell_of_file(file, offset, &"another process has cut it off");
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    fn decompress(&mut self, place: &CompressedPlace, part: &mut [u8]) -> io::Result<()> {
        let Some((compression, cluster_bytes)) = self.volume.compression(place.layer) else {
            unreachable!("only layers with tables have compressed clusters")
        };
        let mut data = std::mem::take(&mut self.memory.data);
        data.resize(usize::try_from(place.cluster.len_bytes()).unwrap_or(usize::MAX), 0);
        let read = self.read(self.volume.table_file(place.layer), place.cluster.host_offset, &mut data);
        self.memory.data = data;
        read?;
        let memory = &mut *self.memory;
        memory.cluster.resize(usize::try_from(cluster_bytes).unwrap_or(usize::MAX), 0);
        if memory.decompressors.len() <= place.layer {
            memory.decompressors.resize_with(place.layer + 1, || None);
        }
        let decompressor =
            memory.decompressors[place.layer].get_or_insert_with(|| Decompressor::new(compression));
        if let Err(error) = decompressor.decompress(&memory.data, &mut memory.cluster) {
            let why = format!("compressed data at {:#x}: {error}", place.cluster.host_offset);
            self.volume.tell(place.layer, place.cluster.host_offset, &why);
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        let start = usize::try_from(place.skip_bytes).unwrap_or(usize::MAX);
        let found = memory.cluster.get(start..).and_then(|rest| rest.get(..part.len()));
        let Some(found) = found else { unreachable!("an extent is inside its cluster") };
        part.copy_from_slice(found);
        Ok(())
    }
}
