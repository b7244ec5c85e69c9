//! The table of all participants' files. A file keeps its number when the owner changes.
//!
//! Each participant attaches its own files. The engine can then cancel only that participant's ops, and each sync uses
//! the worker's own file description.

use std::io;

use crate::engine::{FileId, FileSpec};

#[derive(Debug, Default)]
enum Slot {
    #[default]
    Free,
    Used {
        participant: u64,
        spec: FileSpec,
    },
    /// Detached by its participant. The owner's engine may still have it attached.
    Released,
}

#[derive(Debug, Default)]
pub(super) struct Files(Vec<Slot>);

impl Files {
    pub fn add(&mut self, participant: u64, spec: FileSpec) -> io::Result<FileId> {
        let index = self.0.iter().position(|slot| matches!(slot, Slot::Free)).unwrap_or(self.0.len());
        let id = u32::try_from(index).map_err(|_| io::ErrorKind::QuotaExceeded)?;
        if index == self.0.len() {
            self.0.push(Slot::Free);
        }
        self.0[index] = Slot::Used { participant, spec };
        Ok(FileId(id))
    }

    pub fn spec(&self, file: FileId) -> Option<&FileSpec> {
        match self.0.get(file.0 as usize)? {
            Slot::Used { spec, .. } => Some(spec),
            Slot::Free | Slot::Released => None,
        }
    }

    /// Returns whether the file was attached.
    pub fn release(&mut self, file: FileId) -> bool {
        let slot = self.0.get_mut(file.0 as usize).filter(|slot| matches!(slot, Slot::Used { .. }));
        slot.map(|slot| *slot = Slot::Released).is_some()
    }

    /// All files of a participant.
    pub fn of(&self, participant: u64) -> Vec<FileId> {
        let used = (0..).zip(&self.0);
        let mine =
            used.filter(|(_, slot)| matches!(slot, Slot::Used { participant: of, .. } if *of == participant));
        mine.map(|(id, _)| FileId(id)).collect()
    }

    pub fn release_all(&mut self, participant: u64) {
        for file in self.of(participant) {
            self.release(file);
        }
    }

    /// Frees the numbers of released files, after `forget`.
    pub fn free_released(&mut self, mut forget: impl FnMut(FileId)) {
        for (id, slot) in (0..).zip(&mut self.0) {
            if matches!(slot, Slot::Released) {
                forget(FileId(id));
                *slot = Slot::Free;
            }
        }
    }
}
