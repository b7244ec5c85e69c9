//! Volumes made of layers of another one, whose files stay open.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use qcow2::{Header, Unlinked, WriteError, Writer};

use super::table_file::TableFile;
use super::{Layer, LayerFile, Mapping, TABLE_CACHE_BYTES, Tables, Volume};

/// The layers of a new volume.
#[derive(Default)]
pub(crate) struct Parts {
    pub files: Vec<LayerFile>,
    pub layers: Vec<Layer>,
}

impl Volume {
    /// The top alone, with a new metadata thread to come. The header must name no backing file before that thread reads
    /// the tables. `None`: the disk is read-only.
    pub(crate) fn without_lower_layers(&self) -> Option<Self> {
        let header = Header { backing: None, ..self.writable.as_ref()?.header.clone() };
        let mut parts = Parts::default();
        parts.copy(self, 0..1, &self.shares(0));
        Some(Self::new(parts.files, parts.layers, Some((header, Tables::Theirs))))
    }

    /// The same layers, with a larger disk. No metadata thread may have the tables.
    pub(crate) fn grown(&self, size_bytes: u64) -> Result<Self, WriteError> {
        let (header, l1) = super::metadata::resize::grow(self, size_bytes)?;
        let shares = self.shares(0);
        let mut parts = Parts::default();
        parts.copy(self, 0..self.layers.len(), &shares);
        if let (Some(top), Some(share)) = (parts.layers.first_mut(), shares.first()) {
            top.size_bytes = header.size_bytes;
            top.mapping = Some(Mapping::new(header.geometry, header.compression, &l1, *share));
        }
        Ok(Self::new(parts.files, parts.layers, Some((header, Tables::Theirs))))
    }

    /// The layers below the top. `writer` has the tables of the first of them, whose file is open for writing.
    /// What it has unlinked is freed when a guest begins to use the new volume: until then this one may be used again.
    ///
    /// # Errors
    /// The reserve cannot be returned to the image.
    pub(crate) fn below_top(
        &self,
        file: LayerFile,
        mut writer: Box<Writer<TableFile>>,
    ) -> Result<Self, WriteError> {
        let Some(old) = self.layers.get(1) else { unreachable!("a commit has two layers") };
        let unlinked = writer.take_unlinked();
        writer.close()?;
        let shares = self.shares(1);
        let share = shares.first().copied().unwrap_or_default();
        let header = writer.header().clone();
        let layer = Layer {
            path: old.path.clone(),
            size_bytes: header.size_bytes,
            file: 0,
            data: 0,
            mapping: Some(Mapping::new(header.geometry, header.compression, writer.l1(), share)),
            is_told: AtomicBool::new(false),
        };
        let mut parts = Parts { files: vec![file], layers: vec![layer] };
        parts.copy(self, 2..self.layers.len(), shares.get(1..).unwrap_or_default());
        let mut volume = Self::new(parts.files, parts.layers, Some((header, Tables::Read(writer))));
        if let Some(writable) = &mut volume.writable {
            writable.unlinked = Mutex::new(unlinked);
        }
        Ok(volume)
    }

    /// A sync of the backing file has failed during a commit. The page cache may have what the storage has lost, so later
    /// commits would not write it again.
    pub(crate) fn note_lost_commit(&self) {
        if let Some(writable) = &self.writable {
            writable.has_lost_commit.store(true, Ordering::Relaxed);
        }
    }

    pub(crate) fn has_lost_commit(&self) -> bool {
        self.writable.as_ref().is_some_and(|writable| writable.has_lost_commit.load(Ordering::Relaxed))
    }

    /// For the metadata thread, when a guest begins to use the volume.
    pub(crate) fn take_unlinked(&self) -> Option<Unlinked> {
        self.writable.as_ref()?.unlinked.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// For the metadata thread: what [`Volume::take_unlinked`] would return.
    pub(crate) fn with_unlinked<T>(&self, see: impl FnOnce(Option<&Unlinked>) -> T) -> T {
        match &self.writable {
            Some(writable) => see(writable.unlinked.lock().unwrap_or_else(PoisonError::into_inner).as_ref()),
            None => see(None),
        }
    }

    /// The file of the layer below the top. `None`: there is none.
    pub(crate) fn file_below_top(&self) -> Option<&LayerFile> {
        self.files.get(self.layers.get(1)?.file)
    }

    /// Whether the layer below the top has tables.
    pub(crate) fn is_mapped_below_top(&self) -> bool {
        self.layers.get(1).is_some_and(|layer| layer.mapping.is_some())
    }

    /// Whether the top of a writable disk has internal snapshots.
    pub(crate) fn has_snapshots(&self) -> bool {
        self.writable.as_ref().is_some_and(|writable| writable.header.snapshots.count > 0)
    }

    /// What this layer describes. 0: there is no such layer.
    pub(crate) fn size_of_layer(&self, layer: usize) -> u64 {
        self.layers.get(layer).map_or(0, |layer| layer.size_bytes)
    }

    /// The most memory that the tables of each layer need.
    pub(crate) fn needs(&self) -> impl Iterator<Item = u64> {
        self.layers.iter().map(|layer| {
            let mapping = layer.mapping.as_ref();
            mapping.map_or(0, |mapping| {
                (mapping.l1.len() as u64).saturating_mul(mapping.geometry.cluster_bytes())
            })
        })
    }

    /// Memory for the tables of the layers from `first` on.
    fn shares(&self, first: usize) -> Vec<u64> {
        let needs: Vec<u64> = self.needs().skip(first).collect();
        let mut shares = divide(TABLE_CACHE_BYTES, &needs);
        if let Some(share) = shares.first_mut() {
            *share = (*share).max(super::LEAST_WRITABLE_CACHE_BYTES);
        }
        shares
    }
}

impl Parts {
    /// Adds all layers of a volume whose tables are closed. `image`: the file of its top.
    pub fn copy_below(&mut self, from: &Volume, image: LayerFile, shares: &[u64]) {
        let at = self.files.len();
        self.copy(from, 0..from.layers.len(), shares);
        // The copy has the file of the top first.
        if let Some(file) = self.files.get_mut(at) {
            *file = image;
        }
    }

    fn copy(&mut self, from: &Volume, range: Range<usize>, shares: &[u64]) {
        let layers = from.layers.get(range).unwrap_or_default();
        for (layer, share) in layers.iter().zip(shares) {
            let file = self.copy_file(from, layer.file);
            let data = if layer.data == layer.file { file } else { self.copy_file(from, layer.data) };
            let mapping = layer.mapping.as_ref().map(|mapping| {
                let l1: Vec<u64> = mapping.l1.iter().map(|entry| entry.load(Ordering::Acquire)).collect();
                Mapping::new(mapping.geometry, mapping.compression, &l1, *share)
            });
            let (path, size_bytes) = (layer.path.clone(), layer.size_bytes);
            self.layers.push(Layer {
                path,
                size_bytes,
                file,
                data,
                mapping,
                is_told: AtomicBool::new(false),
            });
        }
    }

    fn copy_file(&mut self, from: &Volume, index: usize) -> usize {
        if let Some(file) = from.files.get(index) {
            let (path, open) = (file.path().to_owned(), Arc::clone(file.file()));
            self.files.push(LayerFile::new(path, open, file.alignment(), file.len_bytes()));
        }
        self.files.len() - 1
    }
}

/// Divides the memory for tables among the layers, by what they need at most.
pub(crate) fn divide(cache_bytes: u64, needs_bytes: &[u64]) -> Vec<u64> {
    let total: u128 = needs_bytes.iter().map(|need| u128::from(*need)).sum();
    let share = |need: &u64| {
        let share = u128::from(cache_bytes) * u128::from(*need) / total.max(1);
        (*need).min(u64::try_from(share).unwrap_or(u64::MAX))
    };
    needs_bytes.iter().map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_that_all_fit_are_all_kept_and_others_share_what_there_is() {
        assert_eq!(divide(100, &[10, 0, 20]), [10, 0, 20]);
        assert_eq!(divide(100, &[300, 100]), [75, 25]);
        assert_eq!(divide(100, &[u64::MAX, u64::MAX]), [50, 50]);
    }
}
