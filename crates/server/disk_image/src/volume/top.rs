//! The top layer of a writable disk, for its metadata thread: changes in memory of what the thread has changed in the file.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;

use qcow2::{RawL2Entry, ReadAt, Writer};

use super::link::Use;
use super::table_file::TableFile;
use super::{LayerFile, Mapping, Volume};
use crate::error::line;

impl Volume {
    /// For the metadata thread: the top layer's file has grown.
    pub(crate) fn grow_top(&self, len_bytes: u64) {
        self.top_file().into_iter().for_each(|file| file.grow(len_bytes));
    }

    /// Tells the metadata thread of a writable disk that a guest's requests begin or have ended; each beginning needs an
    /// end. The thread must have been started. Returns where its answer arrives: nothing arrives if it has ended. `None`:
    /// the disk is read-only.
    ///
    /// The answer to [`Use::Begins`] is an error if the tables cannot be read, or are no longer those of this disk, and
    /// there is no use to end. That to [`Use::Ends`], if the image has leaks.
    #[must_use]
    pub fn order(&self, what: Use) -> Option<Receiver<Result<(), String>>> {
        self.link().map(|link| link.order(what))
    }

    /// [`Use::Begins`], with a number for [`Volume::undo_begin`].
    #[must_use]
    pub fn begin(&self) -> Option<(u64, Receiver<Result<(), String>>)> {
        self.link().map(|link| link.begin())
    }

    /// For a caller of [`Volume::begin`] that waits no longer. It has no effect if the tables could not be read.
    pub fn undo_begin(&self, number: u64) {
        if let Some(link) = self.link() {
            drop(link.order(Use::Undoes(number)));
        }
    }

    /// For the metadata thread: reads the top layer's tables, which another server may have changed, again. No op is in
    /// flight.
    pub(crate) fn read_tables(&self) -> Result<Writer<TableFile>, String> {
        let (Some(writable), Some(top)) = (&self.writable, self.top()) else {
            unreachable!("the disk is writable")
        };
        let Some(file) = self.top_file() else { unreachable!("each layer has a file") };
        let table_file = TableFile::new(Arc::clone(file.file()), file.alignment());
        let len_bytes = table_file.len_bytes().map_err(|error| error.to_string())?;
        let mut writer = Writer::open(table_file).map_err(|error| line(&error))?;
        if !writable.header.is_same_disk(writer.header()) || writer.l1().len() < top.l1.len() {
            return Err("the image is not the one that was opened: restart the server".to_owned());
        }
        // A resize that has failed may have changed the header, and this guest does not know of it.
        writer.limit_disk(self.size_bytes());
        file.grow(len_bytes);
        top.slices.clear();
        for (kept, entry) in top.l1.iter().zip(writer.l1()) {
            kept.store(*entry, Ordering::Release);
        }
        Ok(writer)
    }

    /// Whether the metadata thread could not sync the file: acknowledged writes may be lost.
    #[must_use]
    pub fn has_sync_failed(&self) -> bool {
        self.link().is_some_and(|link| link.has_sync_failed())
    }

    /// Another thread's sync of the file has failed.
    pub fn note_failed_sync(&self) {
        if let Some(link) = self.link() {
            link.note_failed_sync();
        }
    }

    fn top_file(&self) -> Option<&LayerFile> {
        self.layers.first().and_then(|layer| self.files.get(layer.file))
    }

    /// The top layer's file, with its lock. `None`: the disk is read-only.
    pub(crate) fn writable_file(&self) -> Option<&Arc<File>> {
        self.top_file().filter(|_| self.is_writable()).map(LayerFile::file)
    }

    /// Makes all completed writes of a writable disk durable.
    pub(crate) fn sync_top(&self) -> io::Result<()> {
        self.top_file().map_or(Ok(()), |file| file.file().sync_data())
    }

    /// For the log.
    pub(crate) fn top_path(&self) -> &Path {
        self.layers.first().map_or(Path::new(""), |layer| &layer.path)
    }

    /// For the metadata thread: changes an L1 entry of the top layer.
    pub(crate) fn set_l1(&self, index: u64, entry: u64) {
        let slot = self.top().zip(usize::try_from(index).ok()).and_then(|(top, index)| top.l1.get(index));
        if let Some(slot) = slot {
            slot.store(entry, Ordering::Release);
        }
    }

    /// For the metadata thread: changes the entry of a cluster of the top layer, if its slice is in memory.
    pub(crate) fn set_l2(&self, cluster_index: u64, entry: RawL2Entry) {
        let Some(top) = self.top() else { return };
        let (bits, extended) = (top.slice_entries_bits(), top.geometry.has_extended_l2());
        #[allow(clippy::cast_possible_truncation)] // entries of a slice
        let in_slice = (cluster_index & ((1 << bits) - 1)) as usize;
        let word = if extended { 2 * in_slice } else { in_slice };
        top.slices.set(cluster_index >> bits, word, [entry.cluster, entry.subclusters], extended);
    }

    /// For the metadata thread: forgets the slice with the entry of a cluster of the top layer.
    pub(crate) fn forget_l2(&self, cluster_index: u64) {
        if let Some(top) = self.top() {
            top.slices.forget(cluster_index >> top.slice_entries_bits());
        }
    }

    /// The first cluster of a slice of the top layer, and the number of its entries.
    pub(crate) fn clusters_of_slice(&self, number: u64) -> (u64, usize) {
        let bits = self.top().map_or(0, Mapping::slice_entries_bits);
        (number << bits, 1 << bits)
    }

    /// Whether a slice of the top layer may be asked for.
    pub(crate) fn has_slice(&self, number: u64) -> bool {
        let (first, _) = self.clusters_of_slice(number);
        self.top().is_some_and(|top| first < self.size_bytes().div_ceil(top.geometry.cluster_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use qcow2::{Below, NewImage};

    use super::*;
    use crate::geometry::Alignment;
    use crate::{CacheMode, HostOpener, Image, ImageOptions};

    struct Nothing;

    impl Below for Nothing {
        fn read_at(&mut self, _: u64, buffer: &mut [u8]) -> io::Result<()> {
            buffer.fill(0);
            Ok(())
        }

        fn is_zero(&mut self) -> bool {
            true
        }
    }

    /// A resize that failed late has changed the header, and another program may have cut the disk.
    #[test]
    fn guest_goes_on_with_a_header_that_has_a_larger_disk_and_not_with_a_smaller_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.qcow2");
        let file = Arc::new(File::options().read(true).write(true).create_new(true).open(&path).unwrap());
        let table_file = TableFile::new(Arc::clone(&file), Alignment::BUFFERED);
        qcow2::create(&table_file, &NewImage { size_bytes: 1 << 20, backing: None }).unwrap();
        let options = ImageOptions { cache: CacheMode::Writeback, ..ImageOptions::new(&path) };
        let image = Image::open_qcow2(&HostOpener, &options).unwrap();
        let volume = image.backing().volume().unwrap();
        let mut writer = Writer::open(table_file).unwrap();
        // Beyond the L1 table.
        writer.grow_disk(8 << 40, &mut Nothing, 0, &mut ()).unwrap();
        writer.close().unwrap();
        let again = volume.read_tables().unwrap();
        assert_eq!(again.header().size_bytes, 1 << 20);
        file.write_all_at(&512_u64.to_be_bytes(), 24).unwrap();
        assert!(volume.read_tables().unwrap_err().contains("restart the server"));
    }
}
