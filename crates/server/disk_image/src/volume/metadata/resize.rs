//! Makes the disk of a qcow2 image larger, while no metadata thread has its tables.

use std::sync::Arc;

use qcow2::{Header, WriteError, Writer};

use super::below::{Lower, Memory};
use crate::volume::Volume;
use crate::volume::table_file::TableFile;

/// Returns the header and the L1 table of the larger disk.
pub(in crate::volume) fn grow(volume: &Volume, size_bytes: u64) -> Result<(Header, Vec<u64>), WriteError> {
    let Some(file) = volume.files().first() else { unreachable!("each layer has a file") };
    let mut writer = Writer::open(TableFile::new(Arc::clone(file.file()), file.alignment()))?;
    let mut memory = Memory::default();
    let mut lower = Lower { volume, first: 1, memory: &mut memory };
    writer.grow_disk(size_bytes, &mut lower, volume.size_of_layer(1), &mut ())?;
    let grown = (writer.header().clone(), writer.l1().to_vec());
    writer.close()?;
    Ok(grown)
}
