//! What the writer needs: the image's file, what lies below the image, and whom it tells about changes.

use std::io;
use std::ops::Range;

use crate::read_at::ReadAt;
use crate::tables::RawL2Entry;

/// A file that a [`Writer`](crate::Writer) changes.
///
/// The writer's offsets and lengths are multiples of 4 KiB, also those of its reads, so the file may be open for direct
/// I/O; the memory of its buffers is not aligned. [`repair`](crate::repair::repair) uses multiples of 512 bytes.
pub trait WriteAt: ReadAt {
    /// Writes all of `data`.
    ///
    /// # Errors
    /// The data cannot be written. Each of their sectors has its old or its new content.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Makes all that was written before durable, and the file's length (fdatasync).
    ///
    /// # Errors
    /// The data may be lost. The writer changes nothing any more.
    fn sync_data(&self) -> io::Result<()>;

    /// Sets the file's length. New bytes read as zeroes.
    ///
    /// # Errors
    /// The length is as before.
    fn set_len(&self, len_bytes: u64) -> io::Result<()>;

    /// Frees the range, which lies inside of the file; it reads as zeroes afterwards.
    ///
    /// # Errors
    /// Each sector of the range has its old content, or zeroes.
    fn punch_hole(&self, offset: u64, len_bytes: u64) -> io::Result<()>;
}

impl<T: WriteAt + ?Sized> WriteAt for &T {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        (**self).write_at(offset, data)
    }

    fn sync_data(&self) -> io::Result<()> {
        (**self).sync_data()
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        (**self).set_len(len_bytes)
    }

    fn punch_hole(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        (**self).punch_hole(offset, len_bytes)
    }
}

/// What the guest sees where the image has nothing: its backing file.
pub trait Below {
    /// Fills the buffer with the guest's bytes, with zeroes past the end of the backing file.
    ///
    /// # Errors
    /// The bytes cannot be read.
    fn read_at(&mut self, guest_offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// These bytes will be read soon. Up to 4 MiB are announced at once, or one cluster.
    fn will_read(&mut self, guest_bytes: Range<u64>) {
        let _ = guest_bytes;
    }

    /// There is no backing file: all bytes are zeroes.
    fn is_zero(&mut self) -> bool;
}

/// The mapping that other threads read. The writer calls it after it wrote to the file, and before it returns.
pub trait View {
    /// The file has a new length, which is never less than what entries lead to.
    fn file_grew(&mut self, len_bytes: u64);

    /// The L1 entry has this value, in the host's byte order. The L2 table that it names has the same entries as the
    /// one before.
    fn l1_changed(&mut self, index: u64, entry: u64);

    /// The entry of a guest's cluster has this value, or had it already. `cluster_index`: the guest's offset, shifted
    /// by the cluster bits.
    fn l2_changed(&mut self, cluster_index: u64, entry: RawL2Entry);

    /// The file has an entry for the guest's cluster that cannot be read now: it must be asked for again.
    fn l2_unknown(&mut self, cluster_index: u64);
}

/// No other thread reads the mapping.
impl View for () {
    fn file_grew(&mut self, _: u64) {}

    fn l1_changed(&mut self, _: u64, _: u64) {}

    fn l2_changed(&mut self, _: u64, _: RawL2Entry) {}

    fn l2_unknown(&mut self, _: u64) {}
}
