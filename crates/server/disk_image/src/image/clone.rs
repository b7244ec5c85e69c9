//! Clones an image's file: the clone shares the blocks until one of the two is written (`FICLONE`).

use std::fs::File;
use std::io;

use rustix::io::Errno;

use super::Image;
use crate::backing::Backing;
use crate::error::CloneError;
use crate::file::FileKind;

impl Image {
    /// Makes `clone`, a new file, an exact copy of the image, without copying data. The caller has stopped all writes.
    /// The clone is not synced.
    ///
    /// # Errors
    /// [`CloneError`]; `clone` is then unchanged.
    pub fn clone_to(&self, clone: &File) -> Result<(), CloneError> {
        let image = || self.path.clone();
        let file = match &self.backing {
            Backing::File(file) => file,
            Backing::Mapped(_) => return Err(CloneError::Qcow2 { image: image() }),
            Backing::Nbd(_) | Backing::Rbd(_) => return Err(CloneError::Remote { image: image() }),
        };
        if self.kind == FileKind::BlockDevice {
            return Err(CloneError::BlockDevice { image: image() });
        }
        rustix::fs::ioctl_ficlone(clone, &**file).map_err(|errno| match errno {
            Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::NOSYS => {
                CloneError::NoReflink { image: image() }
            }
            Errno::XDEV => CloneError::OtherFileSystem { image: image() },
            errno => CloneError::System { image: image(), source: io::Error::from(errno) },
        })
    }
}
