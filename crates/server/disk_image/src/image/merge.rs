//! Images after their layers were merged: the top without those below it, or the layer below without the top.
//!
//! ```text
//! stream: Merge::stream … → without_backing (the image to serve) → remove_backing: the header names no backing file
//! commit: begin_commit: the image below is opened for writing → Merge::commit … → end_commit (the image to serve) →
//!         mark_committed_to: marks │ or abandon_commit: nothing has changed for guests
//! ```
//!
//! - The image below is opened for writing only if no other opener has a lock on it: other overlays of it would become
//!   useless.
//! - The caller stops all requests before the new image is made, and serves it only after the last step.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use qcow2::{DiskFormat, ReadAt, Writer, remove_backing};
use tracing::warn;

use super::{Image, ImageOptions, alignment, device_under, open_file, overlay_mark};
use crate::backing::Backing;
use crate::error::{ImageError, line};
use crate::file::{Access, FileId, FileKind};
use crate::limits::{self, DiscardLimits, WriteZeroesLimits};
use crate::lock;
use crate::opener::Opener;
use crate::range::Bounds;
use crate::volume::commit_target::{CommitTarget, TargetKind};
use crate::volume::link::Use;
use crate::volume::merge::Merge;
use crate::volume::table_file::TableFile;
use crate::volume::{LayerFile, Volume};

impl Image {
    /// The volume with the layers to merge.
    ///
    /// # Errors
    /// [`ImageError::NotMerged`]: there is nothing to merge.
    pub fn check_merge(&self) -> Result<&Arc<Volume>, ImageError> {
        match &self.backing {
            Backing::Mapped(_) if self.read_only() => Err(self.not_merged("it is served read-only")),
            Backing::Mapped(volume) if volume.has_snapshots() => Err(self.not_merged(
                "it has internal snapshots, which need its backing file: delete them first (qemu-img snapshot -d)",
            )),
            Backing::Mapped(volume) if volume.layers() > 1 => Ok(volume),
            _ => Err(self.not_merged("it has no backing file")),
        }
    }

    /// The volume whose leaked clusters can be freed.
    ///
    /// # Errors
    /// [`ImageError::NotReclaimed`]: the image has no tables that this disk writes.
    pub fn check_reclaim(&self) -> Result<&Arc<Volume>, ImageError> {
        let why = match &self.backing {
            Backing::Mapped(_) if self.read_only() => "it is served read-only",
            Backing::Mapped(volume) => return Ok(volume),
            _ => "it is no qcow2 image",
        };
        Err(ImageError::NotReclaimed { path: self.path.clone(), why })
    }

    fn not_merged(&self, why: impl Into<String>) -> ImageError {
        ImageError::NotMerged { path: self.path.clone(), why: why.into() }
    }

    /// The path and the format of the image below this one.
    ///
    /// # Errors
    /// [`ImageError::NotMerged`]: there is none.
    pub fn image_below(&self) -> Result<(PathBuf, DiskFormat), ImageError> {
        let volume = self.check_merge()?;
        let below = volume.file_below_top().ok_or_else(|| self.not_merged("it has no backing file"))?;
        let format = if volume.is_mapped_below_top() { DiskFormat::Qcow2 } else { DiskFormat::Raw };
        Ok((below.path().to_owned(), format))
    }

    /// Closes the tables of a written qcow2 image, before another volume uses its file. No request may be in flight.
    ///
    /// # Errors
    /// [`ImageError::NotMerged`]: a job still uses them, or the storage does not answer.
    pub fn close_tables(&self, timeout: Duration) -> Result<(), ImageError> {
        let answer = self.backing.volume().and_then(|volume| volume.order(Use::Closes));
        match answer.map(|answer| answer.recv_timeout(timeout)) {
            None | Some(Ok(Ok(()))) => Ok(()),
            Some(Ok(Err(why))) => Err(self.not_merged(why)),
            Some(Err(_)) => {
                Err(self.not_merged("its tables are not closed: check the storage, and try again"))
            }
        }
    }

    /// This image without those below it, of which it needs nothing any more. The files below are closed with this image.
    ///
    /// # Errors
    /// [`ImageError::NotMerged`].
    pub fn without_backing(&self) -> Result<Self, ImageError> {
        let alone = self.check_merge()?.without_lower_layers();
        Ok(self.with_volume(
            &self.path,
            alone.ok_or_else(|| self.not_merged("it is served read-only"))?,
            self.discard,
        ))
    }

    pub(super) fn with_volume(&self, path: &Path, volume: Volume, discard: Option<DiscardLimits>) -> Self {
        Self {
            claim: None,
            path: path.to_owned(),
            backing: Backing::Mapped(Arc::new(volume)),
            access: self.access,
            cache: self.cache,
            kind: FileKind::Regular,
            bounds: Bounds::new(self.bounds.capacity_bytes(), self.block_size()),
            alignment: self.alignment,
            topology: self.topology,
            discard,
            write_zeroes: Some(WriteZeroesLimits::new(discard.is_some())),
            foreign_format: None,
            adopted: self.adopted,
        }
    }

    /// Removes the backing file's name from the header, and the mark from that file. No metadata thread may have the tables.
    ///
    /// # Errors
    /// [`ImageError::NotMerged`]: the header has the name, or none, and both are right.
    pub fn remove_backing(&self) -> Result<(), ImageError> {
        let volume = self.check_merge()?;
        let Some(file) = volume.files().first() else { return Err(self.not_merged("it has no file")) };
        remove_backing(&TableFile::new(Arc::clone(file.file()), file.alignment()))
            .map_err(|error| self.not_merged(line(&error)))?;
        if let Some(below) = volume.file_below_top() {
            overlay_mark::unmark(below.file(), &self.path);
        }
        Ok(())
    }

    /// Opens the image below this one for writing, and gives it to the metadata thread. `options`: this disk's. Waits up to
    /// `options.lock_timeout` for other users of the image below.
    ///
    /// # Errors
    /// [`ImageError`]: the image cannot be written, or another opener needs it as it is.
    pub fn begin_commit(
        &self,
        opener: &dyn Opener,
        options: &ImageOptions,
        merge: &mut Merge,
    ) -> Result<(), ImageError> {
        let volume = self.check_merge()?;
        let Some(below) = volume.file_below_top() else {
            return Err(self.not_merged("it has no backing file"));
        };
        let (size_bytes, own_bytes) = (volume.size_of_layer(1), self.bounds.capacity_bytes());
        if size_bytes > own_bytes {
            return Err(self.not_merged(format!(
                "its backing file {} has {size_bytes} bytes, more than the {own_bytes} of the disk: use ctl stream",
                below.path().display()
            )));
        }
        if volume.has_lost_commit() {
            return Err(self.not_merged(format!(
                "a sync of its backing file {} has failed: check the storage, and restart the server",
                below.path().display()
            )));
        }
        let options = self.options_below(below, options);
        let inspect =
            |source| ImageError::Inspect { path: options.path.clone(), what: "the identity", source };
        let file = open_file(opener, &options)?;
        let (metadata, known) =
            (file.metadata().map_err(inspect)?, below.file().metadata().map_err(inspect)?);
        if FileId::from(&metadata) != FileId::from(&known) {
            return Err(self.not_merged(format!(
                "another file has the name of its backing file {}",
                below.path().display()
            )));
        }
        if !metadata.is_file() {
            return Err(self.not_merged("its backing file is a block device: use ctl stream"));
        }
        overlay_mark::check_committed(below.path(), &file)?;
        overlay_mark::check_other_overlay(opener, below.path(), &file, Some(&self.path))?;
        if let Some(top) = self.file_with_lock() {
            overlay_mark::probe(top).map_err(|error| self.cannot_mark(&error))?;
        }
        let lock = |source| ImageError::Lock { path: options.path.clone(), source };
        if !lock::raise(below.file(), options.lock_timeout).map_err(lock)? {
            let holders = opener.lock_holders(FileId::from(&metadata));
            return Err(ImageError::Locked {
                path: options.path.clone(),
                holders,
                waited: options.lock_timeout,
            });
        }
        let opened = self.open_target(opener, &options, file, volume.is_mapped_below_top());
        let begun = opened
            .and_then(|target| merge.begin_commit(Box::new(target)).map_err(|why| self.not_merged(why)));
        begun.inspect_err(|_| self.abandon_commit(merge))
    }

    fn options_below(&self, below: &LayerFile, options: &ImageOptions) -> ImageOptions {
        ImageOptions {
            path: below.path().to_owned(),
            block_size: Some(self.block_size()),
            access: Access::ReadWrite,
            cache: self.cache,
            create_bytes: None,
            ..options.clone()
        }
    }

    fn open_target(
        &self,
        opener: &dyn Opener,
        options: &ImageOptions,
        file: File,
        is_mapped: bool,
    ) -> Result<CommitTarget, ImageError> {
        let path = || options.path.clone();
        lock::join(&file, Access::ReadWrite).map_err(|source| ImageError::Lock { path: path(), source })?;
        let inspect = |source| ImageError::Inspect { path: path(), what: "the size", source };
        let metadata = file.metadata().map_err(inspect)?;
        let device = device_under(opener, FileKind::Regular, &metadata);
        let alignment = alignment(options, &file, metadata.len(), device.as_ref())?;
        if alignment.offset_bytes > self.block_size() {
            let (block_size_bytes, needed_bytes) = (self.block_size(), alignment.offset_bytes);
            return Err(ImageError::BlockSizeTooSmall { path: path(), block_size_bytes, needed_bytes });
        }
        let file = Arc::new(file);
        let table_file = TableFile::new(Arc::clone(&file), alignment);
        let can_punch = limits::can_punch_holes(&file, metadata.len());
        let kind = if is_mapped {
            let unwritable = |source| ImageError::Qcow2Unwritable { path: path(), source: Box::new(source) };
            let writer = Writer::open(table_file).map_err(unwritable)?;
            // Workers read its tables meanwhile, and an entry of two words is not read in one piece.
            if writer.header().geometry.has_extended_l2() {
                return Err(self.not_merged(
                    "its backing file has extended L2 entries: stop the server, and use qemu-img commit",
                ));
            }
            let has_zero_flag = writer.header().geometry.version() >= 3 || writer.header().backing.is_none();
            self.check_discard(has_zero_flag && can_punch)?;
            TargetKind::Qcow2(Box::new(writer))
        } else {
            self.check_discard(can_punch)?;
            TargetKind::Raw { file: table_file, punches_holes: options.discard }
        };
        Ok(CommitTarget { path: path(), file, alignment, kind, has_sync_failed: false })
    }

    fn check_discard(&self, can_discard: bool) -> Result<(), ImageError> {
        match self.discard {
            Some(_) if !can_discard => {
                Err(self
                    .not_merged("its backing file cannot discard, which its guest relies on: use ctl stream"))
            }
            _ => Ok(()),
        }
    }

    /// Makes the image below this one durable, and returns it. Nothing may be left to commit, and no request in flight.
    ///
    /// # Errors
    /// [`ImageError`]. The commit is over, and guests can go on with this image.
    pub fn end_commit(
        &self,
        opener: &dyn Opener,
        options: &ImageOptions,
        merge: &mut Merge,
    ) -> Result<Self, ImageError> {
        let volume = self.check_merge()?;
        let below = volume.file_below_top().ok_or_else(|| self.not_merged("it has no backing file"))?;
        let mut target = merge.end_commit().ok_or_else(|| self.not_merged("the commit has ended"))?;
        target.sync().map_err(|why| {
            volume.note_lost_commit();
            let _ = target.close();
            self.not_merged(why)
        })?;
        let options = self.options_below(below, options);
        let CommitTarget { file, alignment, kind, .. } = *target;
        match kind {
            TargetKind::Raw { .. } => Self::examine_locked(opener, &options, file),
            TargetKind::Qcow2(writer) => {
                let len_bytes = writer.file().len_bytes();
                let len_bytes = len_bytes.map_err(|error| self.not_merged(error.to_string()))?;
                let cluster_bytes = writer.header().geometry.cluster_bytes();
                let layer = LayerFile::new(options.path.clone(), Arc::clone(&file), alignment, len_bytes);
                let lower = volume.below_top(layer, writer);
                let lower = lower.map_err(|error| self.not_merged(line(&error)))?;
                let can_discard = options.discard && lower.can_zero(true);
                let discard = (can_discard && limits::can_punch_holes(&file, len_bytes))
                    .then(|| DiscardLimits::of_file(self.block_size(), cluster_bytes));
                Ok(self.with_volume(&options.path, lower, discard))
            }
        }
    }

    /// Ends a commit before its end. For guests, nothing has changed.
    pub fn abandon_commit(&self, merge: &mut Merge) {
        let target = merge.end_commit();
        if target.as_ref().is_some_and(|target| target.has_sync_failed)
            && let Some(volume) = self.backing.volume()
        {
            volume.note_lost_commit();
        }
        if let Some(Err(why)) = target.map(|mut target| target.close()) {
            warn!(image = %self.path.display(), "the commit did not complete, and its backing file has leaked clusters: {why}");
        }
        self.lower_lock_below();
    }

    /// Lets other programs read the image below this one again, after a commit that has ended without effect.
    pub fn lower_lock_below(&self) {
        if let Some(below) = self.backing.volume().and_then(|volume| volume.file_below_top())
            && let Err(error) = lock::lower(below.file())
        {
            warn!(image = %below.path().display(), "cannot let other programs read the image again: {error}");
        }
    }

    /// Marks this image as one that must not be served again, and removes the mark of `successor`, the image below it: its
    /// guest goes on there.
    ///
    /// # Errors
    /// [`ImageError::NotMerged`]: this image cannot be marked.
    pub fn mark_committed_to(&self, successor: &Self) -> Result<(), ImageError> {
        let (Some(file), Some(below)) = (self.file_with_lock(), successor.file_with_lock()) else {
            return Err(self.not_merged("the images are not open for writing"));
        };
        if let Err(error) = overlay_mark::mark_committed(file, &successor.path) {
            Self::unmark_committed(file);
            return Err(self.cannot_mark(&error));
        }
        overlay_mark::unmark(below, &self.path);
        Ok(())
    }

    fn unmark_committed(file: &File) {
        if let Err(error) = overlay_mark::unmark_committed(file) {
            warn!("an image stays marked as committed, so the next start refuses it: {error}");
        }
    }

    fn cannot_mark(&self, error: &io::Error) -> ImageError {
        self.not_merged(format!(
            "it cannot be marked as committed (by an extended attribute), so a later start might serve it again: {error}"
        ))
    }
}
