//! The test files of an experiment: on the storage under test, and on a RAM disk if there is room.

use std::path::Path;

use super::test_file::TestFile;
use crate::error::LabError;
use crate::experiment::{SampleError, Setup};

/// The folder on the RAM disk.
pub(crate) const TMPFS: &str = "/dev/shm";

/// The location of a test file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Disk,
    Tmpfs,
}

/// The test files of an experiment. Dropping this value removes the files.
#[derive(Debug)]
pub(crate) struct TestFiles {
    disk: Vec<TestFile>,
    /// The files, or the reason why there are none.
    ram: Result<Vec<TestFile>, String>,
}

impl Default for TestFiles {
    /// An empty value, before [`TestFiles::fill`].
    fn default() -> Self {
        Self { disk: Vec::new(), ram: Err(NOT_PREPARED.to_owned()) }
    }
}

const NOT_PREPARED: &str = "not prepared";

impl TestFiles {
    /// Fills `count` files in each of `places`. If the RAM disk has no room for the files, this function still
    /// succeeds, and the RAM disk's samples are unavailable.
    pub fn fill(
        setup: &Setup,
        (places, count): (&[Place], usize),
        tell: &mut dyn FnMut(&str, f64),
    ) -> Result<Self, LabError> {
        let mut files = Self::default();
        if places.contains(&Place::Disk) {
            files.disk = fill(setup, &setup.storage, count, tell)?;
        }
        if places.contains(&Place::Tmpfs) {
            files.ram = match fill(setup, Path::new(TMPFS), count, tell) {
                Err(LabError::Interrupted) => return Err(LabError::Interrupted),
                Err(LabError::Storage { source, .. }) => Err(format!("no test files in {TMPFS}: {source}")),
                other => other.map_err(|error| error.to_string()),
            };
        }
        Ok(files)
    }

    /// The files at `place`.
    pub fn all(&self, place: Place) -> Result<&[TestFile], SampleError> {
        let unavailable = |why: &str| SampleError::Unavailable(why.to_owned());
        match place {
            Place::Disk if self.disk.is_empty() => Err(unavailable(NOT_PREPARED)),
            Place::Disk => Ok(&self.disk),
            Place::Tmpfs => self.ram.as_deref().map_err(|why| unavailable(why)),
        }
    }

    /// The only file at `place`.
    pub fn one(&self, place: Place) -> Result<&TestFile, SampleError> {
        self.all(place)?.first().ok_or_else(|| SampleError::Unavailable(NOT_PREPARED.to_owned()))
    }
}

fn fill(
    setup: &Setup,
    parent: &Path,
    count: usize,
    tell: &mut dyn FnMut(&str, f64),
) -> Result<Vec<TestFile>, LabError> {
    let size_bytes = setup.effort.file_bytes;
    let times = if count == 1 { String::new() } else { format!("{count} × ") };
    let what = format!("filling {times}{} MiB in {}", size_bytes >> 20, parent.display());
    let file = |_| TestFile::fill(parent, size_bytes, &setup.stop, &mut |share| tell(&what, share));
    (0..count).map(file).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::Effort;
    use crate::stop::Stop;

    #[test]
    fn files_are_where_they_were_asked_for_and_nowhere_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_path_buf();
        let effort = Effort { rounds: 1, seconds: 0.0, file_bytes: 1 << 20 };
        let (scratch, storage) = (path.clone(), path.clone());
        let setup = Setup { scratch, storage, effort, program: None, qemu_img: None, stop: Stop::default() };
        let mut told = Vec::new();
        let mut tell = |what: &str, _| told.push(what.to_owned());
        let files = TestFiles::fill(&setup, (&[Place::Disk], 2), &mut tell).unwrap();
        assert_eq!(files.all(Place::Disk).unwrap().len(), 2);
        assert!(files.one(Place::Disk).unwrap().path().starts_with(&path));
        assert_eq!(files.one(Place::Tmpfs).unwrap_err().to_string(), "not prepared");
        assert_eq!(told.last().unwrap(), &format!("filling 2 × 1 MiB in {}", path.display()));
    }
}
