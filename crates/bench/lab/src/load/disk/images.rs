//! qcow2 images of a test file, made by qemu-img, and new ones for each sample.
//!
//! `TestFile → qemu-img convert → full image → nine empty images above it: a chain`

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::program;
use super::test_file::TestFile;
use crate::experiment::SampleError;
use crate::stop::Stop;

/// Tells the user how to install the program.
const MISSING: &str = "qemu-img is not installed: apt install qemu-utils";
/// Layers of the chain.
pub(crate) const LAYERS: usize = 10;

/// The images on one storage. Dropping this value removes them.
#[derive(Debug)]
pub(crate) struct Images {
    folder: TempDir,
    raw: TestFile,
}

impl Images {
    /// Makes the images of a test file beside it.
    pub fn make(parent: &Path, raw: TestFile, stop: &Stop) -> Result<Self, SampleError> {
        let folder = tempfile::Builder::new().prefix(".bareblk-lab-").tempdir_in(parent);
        let made = Self { folder: folder.map_err(|error| SampleError::because("a folder", &error))?, raw };
        let mut convert = Command::new("qemu-img");
        convert.args(["convert", "-f", "raw", "-O", "qcow2"]).arg(made.raw.path()).arg(made.full());
        program::run(&mut convert, "qemu-img", MISSING, stop)?;
        for layer in 1..LAYERS {
            made.create(&made.layer(layer), Some(&made.layer(layer - 1)), stop)?;
        }
        let settled =
            File::open(made.full()).and_then(|file| file.sync_data()).and_then(|()| made.raw.settle());
        settled.map_err(|error| SampleError::because("an image", &error))?;
        Ok(made)
    }

    pub fn raw(&self) -> &Path {
        self.raw.path()
    }

    pub fn size_bytes(&self) -> u64 {
        self.raw.size_bytes()
    }

    /// The image with all data.
    pub fn full(&self) -> PathBuf {
        self.layer(0)
    }

    /// The last of the chain, without data.
    pub fn chain(&self) -> PathBuf {
        self.layer(LAYERS - 1)
    }

    /// The folder of all images.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn layer(&self, layer: usize) -> PathBuf {
        self.folder.path().join(format!("layer-{layer}.qcow2"))
    }

    /// A new raw file without blocks.
    pub fn new_raw(&self) -> Result<PathBuf, SampleError> {
        let path = self.folder.path().join("new.raw");
        let made = File::create(&path).and_then(|file| file.set_len(self.size_bytes()));
        made.map_err(|error| SampleError::because("a file", &error))?;
        Ok(path)
    }

    /// A new image without data, over the full one if `is_over`.
    pub fn new_image(&self, is_over: bool, stop: &Stop) -> Result<PathBuf, SampleError> {
        let path = self.folder.path().join("new.qcow2");
        self.create(&path, is_over.then(|| self.full()).as_deref(), stop)?;
        Ok(path)
    }

    fn create(&self, path: &Path, backing: Option<&Path>, stop: &Stop) -> Result<(), SampleError> {
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2"]);
        if let Some(backing) = backing {
            create.args(["-F", "qcow2", "-b"]).arg(backing);
        }
        create.arg(path).arg(self.size_bytes().to_string());
        program::run(&mut create, "qemu-img", MISSING, stop).map(drop)
    }
}
