//! Writes a run's files: `DIR/NAME/{result.json,summary.json,*.svg}`, and `DIR/report.html` over all results in `DIR`.
//!
//! `Output::prepare (before the run) → write_all: plots → result.json, summary.json → report.html from all results found`
//!
//! - Each file appears complete or not at all: it is written under a temporary name and renamed.

mod html;

mod json;

mod summary;

mod drawing;

mod plot;

mod curves;

mod stacks;

mod courses;

mod maps;

#[cfg(test)]
pub(crate) mod example;

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::error::LabError;
use crate::result::RunResult;

/// The folder for results, with a subfolder for temporary files that is removed when this value is dropped.
#[derive(Debug)]
pub struct Output {
    folder: PathBuf,
    scratch: Option<TempDir>,
    /// Whether this value created the folder.
    made: bool,
}

impl Output {
    /// Creates the folder, and checks that it is writable and that its results are readable.
    ///
    /// # Errors
    /// [`LabError::Output`], [`LabError::Unreadable`].
    pub fn prepare(folder: &Path) -> Result<Self, LabError> {
        let failed = |source| LabError::output(folder, source);
        let made = !folder.exists();
        fs::create_dir_all(folder).map_err(failed)?;
        let mut output = Self { folder: folder.to_path_buf(), scratch: None, made };
        let scratch = tempfile::Builder::new().prefix(".bareblk-lab-").tempdir_in(folder);
        output.scratch = Some(scratch.map_err(failed)?);
        json::read_all(folder)?;
        Ok(output)
    }

    /// The folder for temporary files.
    #[must_use]
    pub fn scratch(&self) -> &Path {
        self.scratch.as_ref().map_or(&self.folder, TempDir::path)
    }

    /// The folder that `write_all` writes to.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        drop(self.scratch.take());
        if self.made {
            // Removing the folder fails if it contains results, as intended.
            let _ = fs::remove_dir(&self.folder);
        }
    }
}

/// Writes all files of `result`, and the report over all results in `folder`. Returns the report's path.
///
/// # Errors
/// [`LabError`], which names the file.
pub fn write_all(folder: &Path, result: &RunResult) -> Result<PathBuf, LabError> {
    let own = folder.join(&result.experiment.name);
    fs::create_dir_all(&own).map_err(|source| LabError::output(&own, source))?;
    let each = plot::all(result)?.into_iter().chain(stacks::all(result)?);
    let whole = curves::all(result)?.into_iter().chain(courses::all(result)?).chain(maps::all(result)?);
    for (name, svg) in each.chain(whole) {
        write_whole(&own.join(name), svg.as_bytes())?;
    }
    write_whole(&own.join(json::FILE), json::to_text(result).as_bytes())?;
    write_whole(&own.join(summary::FILE), summary::to_text(result).as_bytes())?;
    let report = folder.join("report.html");
    write_whole(&report, html::page(&json::read_all(folder)?)?.as_bytes())?;
    Ok(report)
}

fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), LabError> {
    let failed = |source| LabError::output(path, source);
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    // The usual mode of new files, with the umask applied: a report is meant to be read.
    builder.prefix(".bareblk-lab-").permissions(fs::Permissions::from_mode(0o666));
    let mut file = builder.tempfile_in(folder).map_err(failed)?;
    file.write_all(bytes).and_then(|()| file.as_file().sync_all()).map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}
