//! The image below a disk's top, open for writing, into which a job copies the top.
//!
//! - A raw file is written in place. Of a qcow2 image this is the only writer; its guest's view is made anew afterwards.
//! - The volume's workers go on reading this layer, and keep entries of it. So they learn at once how long its file is, and
//!   clusters that entries lose are not freed before the end.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qcow2::{Below, RawL2Entry, View, WriteAt, WriteError, Writer};

use super::LayerFile;
use super::table_file::TableFile;
use crate::error::line;
use crate::geometry::Alignment;

/// The image below the top.
#[derive(Debug)]
pub(crate) struct CommitTarget {
    pub path: PathBuf,
    pub file: Arc<File>,
    pub alignment: Alignment,
    pub kind: TargetKind,
    /// What was copied may be lost, although the page cache has it.
    pub has_sync_failed: bool,
}

/// Its format.
#[derive(Debug)]
pub(crate) enum TargetKind {
    Raw {
        file: TableFile,
        /** Space of zeroes is freed. */
        punches_holes: bool,
    },
    Qcow2(Box<Writer<TableFile>>),
}

/// The target's file, as workers know it. Its tables have no other view: guests see none of the changes.
struct Length<'a>(Option<&'a LayerFile>);

impl View for Length<'_> {
    fn file_grew(&mut self, len_bytes: u64) {
        self.0.into_iter().for_each(|file| file.grow(len_bytes));
    }

    fn l1_changed(&mut self, _: u64, _: u64) {}

    fn l2_changed(&mut self, _: u64, _: RawL2Entry) {}

    fn l2_unknown(&mut self, _: u64) {}
}

impl CommitTarget {
    /// Gives the image's disk this size, if it is smaller.
    ///
    /// # Errors
    /// For people.
    pub fn grow(
        &mut self,
        size_bytes: u64,
        known: Option<&LayerFile>,
        below: &mut dyn Below,
        below_bytes: u64,
    ) -> Result<(), String> {
        match &mut self.kind {
            TargetKind::Raw { file, .. } => {
                let grown = qcow2::ReadAt::len_bytes(file).and_then(|len_bytes| {
                    if len_bytes < size_bytes { file.set_len(size_bytes) } else { Ok(()) }
                });
                grown.map_err(|error| failed(&self.path, &error))
            }
            TargetKind::Qcow2(writer) => {
                let grown = writer.grow_disk(size_bytes, below, below_bytes, &mut Length(known));
                grown.map_err(|error| failed(&self.path, &error))
            }
        }
    }

    /// Writes guest data. `known`: the file, as the volume's workers know it. `data`: of the top's cluster size, with zeroes past the disk's end.
    ///
    /// # Errors
    /// For people.
    pub fn write(
        &mut self,
        offset: u64,
        data: &[u8],
        known: Option<&LayerFile>,
        below: &mut dyn Below,
    ) -> Result<(), String> {
        let written = match &mut self.kind {
            TargetKind::Raw { file, .. } => {
                let size_bytes = qcow2::ReadAt::len_bytes(file);
                size_bytes.and_then(|size_bytes| {
                    let inside = size_bytes.saturating_sub(offset).min(data.len() as u64);
                    let inside = usize::try_from(inside).unwrap_or(usize::MAX);
                    file.write_at(offset, data.get(..inside).unwrap_or(data))
                })
            }
            TargetKind::Qcow2(writer) => {
                let written = writer.overwrite(offset, data, below, &mut Length(known));
                return written.map_err(|error| self.failed(&error));
            }
        };
        written.map_err(|error| failed(&self.path, &error))
    }

    /// Lets the range read as zeroes.
    ///
    /// # Errors
    /// For people.
    pub fn zero(
        &mut self,
        range: Range<u64>,
        known: Option<&LayerFile>,
        below: &mut dyn Below,
    ) -> Result<(), String> {
        if let TargetKind::Raw { file, punches_holes: true } = &self.kind {
            let punched = file.punch_hole(range.start, range.end - range.start);
            return punched.map_err(|error| failed(&self.path, &error));
        }
        if let TargetKind::Qcow2(writer) = &mut self.kind {
            let (cluster_bytes, size_bytes) =
                (writer.header().geometry.cluster_bytes(), writer.header().size_bytes);
            let is_whole = |at: u64| at.is_multiple_of(cluster_bytes) || at == size_bytes;
            if is_whole(range.start) && is_whole(range.end) {
                match self.zero_clusters(range.clone(), known, below) {
                    Err(WriteError::NoZeroFlag) => {}
                    done => return done.map_err(|error| failed(&self.path, &error)),
                }
            }
        }
        let zeroes =
            vec![0; usize::try_from(range.end - range.start).unwrap_or(usize::MAX).next_multiple_of(4096)];
        self.write(range.start, &zeroes, known, below)
    }

    fn zero_clusters(
        &mut self,
        range: Range<u64>,
        known: Option<&LayerFile>,
        below: &mut dyn Below,
    ) -> Result<(), WriteError> {
        let TargetKind::Qcow2(writer) = &mut self.kind else { return Err(WriteError::NoZeroFlag) };
        let mut at = range.start;
        while at < range.end {
            at = writer.zero(at..range.end, false, below, &mut Length(known))?;
        }
        Ok(())
    }

    /// Makes durable what was written.
    ///
    /// # Errors
    /// For people. The image must not become the disk's.
    pub fn sync(&mut self) -> Result<(), String> {
        let synced = match &mut self.kind {
            TargetKind::Raw { file, .. } => file.sync_data().map_err(WriteError::Sync),
            TargetKind::Qcow2(writer) => writer.sync(),
        };
        synced.map_err(|error| self.failed(&error))
    }

    /// Ends the job without a result. Clusters that entries have lost are leaks: a worker may still read them.
    ///
    /// # Errors
    /// For people: the image has further leaks.
    pub fn close(&mut self) -> Result<(), String> {
        match &mut self.kind {
            TargetKind::Raw { .. } => Ok(()),
            TargetKind::Qcow2(writer) => {
                drop(writer.take_unlinked());
                writer.close().map_err(|error| failed(&self.path, &error))
            }
        }
    }
}

impl CommitTarget {
    fn failed(&mut self, error: &WriteError) -> String {
        self.has_sync_failed |= matches!(error, WriteError::Sync(_));
        failed(&self.path, error)
    }
}

fn failed(path: &Path, error: &(dyn std::error::Error + 'static)) -> String {
    format!("image {}: {}", path.display(), line(error))
}
