//! Decompresses one cluster: a raw deflate stream, or a Zstandard frame.
//!
//! `data up to the end of their last sector → exactly one cluster, or an error`
//!
//! - What follows the compressed data in their last sector belongs to another cluster and is not read.
//! - Output never exceeds the cluster: a stream that would go on is an error.
//! - Memory: 32 KiB for deflate; for Zstandard the frame's window, at most [`MAX_WINDOW_BYTES`], and two blocks.

use std::fmt;
use std::io::Read;

use flate2::{Decompress, FlushDecompress, Status};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use crate::error::DecompressError;
use crate::header::Compression;

/// The largest window that RFC 8878 recommends to support. A cluster has at most 2 MiB.
const MAX_WINDOW_BYTES: u64 = 8 << 20;

/// Decompresses clusters one after the other, and keeps its memory between them.
pub struct Decompressor {
    stream: Stream,
}

enum Stream {
    Zlib(Decompress),
    Zstd(Box<FrameDecoder>),
}

impl fmt::Debug for Decompressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let compression = match self.stream {
            Stream::Zlib(_) => Compression::Zlib,
            Stream::Zstd(_) => Compression::Zstd,
        };
        f.debug_struct("Decompressor").field("compression", &compression).finish()
    }
}

impl Decompressor {
    /// For an image of this compression type.
    #[must_use]
    pub fn new(compression: Compression) -> Self {
        let stream = match compression {
            Compression::Zlib => Stream::Zlib(Decompress::new(false)),
            Compression::Zstd => {
                let mut decoder = FrameDecoder::new();
                decoder.set_max_window_size(MAX_WINDOW_BYTES);
                Stream::Zstd(Box::new(decoder))
            }
        };
        Self { stream }
    }

    /// Fills `cluster` from `data`. After an error its content is undefined.
    ///
    /// # Errors
    /// The data are not one compressed cluster of this length.
    pub fn decompress(&mut self, data: &[u8], cluster: &mut [u8]) -> Result<(), DecompressError> {
        match &mut self.stream {
            Stream::Zlib(stream) => inflate(stream, data, cluster),
            Stream::Zstd(decoder) => decode(decoder, data, cluster),
        }
    }
}

fn inflate(stream: &mut Decompress, data: &[u8], cluster: &mut [u8]) -> Result<(), DecompressError> {
    let (want_bytes, mut beyond) = (cluster.len(), [0]);
    stream.reset(false);
    loop {
        let (read, have_bytes) = (total(stream.total_in()), total(stream.total_out()));
        // A full cluster needs room for one more byte, so that the stream's end is seen.
        let output = match cluster.get_mut(have_bytes..) {
            Some(rest) if !rest.is_empty() => rest,
            _ => &mut beyond[..],
        };
        let input = data.get(read..).unwrap_or_default();
        // `Finish` would not resume after a full output.
        let status =
            stream.decompress(input, output, FlushDecompress::None).map_err(DecompressError::Deflate)?;
        let (read_now, have_now) = (total(stream.total_in()), total(stream.total_out()));
        match status {
            _ if have_now > want_bytes => return Err(DecompressError::TooLong { want_bytes }),
            Status::StreamEnd if have_now == want_bytes => return Ok(()),
            Status::Ok | Status::BufError if (read_now, have_now) != (read, have_bytes) => {}
            _ => return Err(DecompressError::Truncated { have_bytes: have_now, want_bytes }),
        }
    }
}

/// A count of bytes in memory.
fn total(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn decode(decoder: &mut FrameDecoder, data: &[u8], cluster: &mut [u8]) -> Result<(), DecompressError> {
    let (want_bytes, mut have_bytes, mut source) = (cluster.len(), 0, data);
    let zstd = |error| DecompressError::Zstd(Box::new(error));
    decoder.reset(&mut source).map_err(zstd)?;
    loop {
        let rest = &mut cluster[have_bytes..];
        have_bytes += decoder.read(rest).unwrap_or_default();
        if decoder.can_collect() > 0 {
            return Err(DecompressError::TooLong { want_bytes });
        }
        if decoder.is_finished() {
            break;
        }
        decoder.decode_blocks(&mut source, BlockDecodingStrategy::UptoBlocks(1)).map_err(zstd)?;
    }
    if have_bytes < want_bytes {
        return Err(DecompressError::Truncated { have_bytes, want_bytes });
    }
    Ok(())
}
