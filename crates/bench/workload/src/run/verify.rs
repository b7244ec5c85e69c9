//! Blocks that identify themselves: each is written with a header that is checked when the block is read again.
//!
//! ```text
//! byte 0        8        16         24      28         32
//!      | magic  | offset | sequence | seed  | crc32c   | payload ...
//! ```
//! All fields are little-endian. `offset`: the block's own position in bytes. `sequence`: the number of the write
//! within this run. `seed`: 32 bits from the seeds of run and clone. `crc32c`: the checksum of everything else in the
//! block.
//!
//! - Two writes, or a read and a write, of one block are never in flight together, because their order would be
//!   unknown. Clones have separate spans for the same reason.
//! - A read is checked against this run's last write. A job that only reads checks that each block is intact and at its
//!   offset, whichever run wrote it.

use std::collections::{BTreeMap, HashMap};

/// The bytes "bareblkV".
const MAGIC: u64 = u64::from_le_bytes(*b"bareblkV");
const HEADER_BYTES: usize = 32;
const CRC_AT: usize = 28;

/// A block that differs from the written data.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("verify: block at offset {offset_bytes}: {what}: expected {expected}, found {found}")]
pub struct Mismatch {
    /// The block's offset on the device.
    pub offset_bytes: u64,
    /// The part that differs.
    pub what: &'static str,
    /// The value written.
    pub expected: String,
    /// The value read.
    pub found: String,
}

/// The blocks that one thread has written.
#[derive(Debug)]
pub(crate) struct Verify {
    seed: u32,
    sequence: u64,
    /// Sequence of the last completed write, by offset.
    written: BTreeMap<u64, u64>,
    /// Requests in flight, by offset: a write's sequence, or `None` for a read.
    in_flight: HashMap<u64, Option<u64>>,
    /// The job only reads blocks that an earlier run wrote.
    only_reads: bool,
    block: Vec<u8>,
}

impl Verify {
    pub fn new(seed: u64, clone: u32, block_bytes: u32, only_reads: bool) -> Self {
        #[allow(clippy::cast_possible_truncation)] // 32 bits are enough to tell runs apart
        let seed = (seed ^ (seed >> 32)) as u32 ^ clone.wrapping_mul(0x9e37_79b9);
        let block = vec![0; block_bytes as usize];
        Self { seed, sequence: 0, written: BTreeMap::new(), in_flight: HashMap::new(), only_reads, block }
    }

    /// Whether a request on this block may start: true if none is in flight on it.
    pub fn is_free(&self, offset_bytes: u64) -> bool {
        !self.in_flight.contains_key(&offset_bytes)
    }

    pub fn begin_read(&mut self, offset_bytes: u64) {
        self.in_flight.insert(offset_bytes, None);
    }

    /// Begins a write and returns the block to write.
    pub fn begin_write(&mut self, offset_bytes: u64) -> &[u8] {
        self.sequence += 1;
        self.in_flight.insert(offset_bytes, Some(self.sequence));
        make(&mut self.block, offset_bytes, self.sequence, self.seed);
        &self.block
    }

    /// Call when the write has ended. A failed write leaves a block with unknown content.
    pub fn end_write(&mut self, offset_bytes: u64, is_done: bool) {
        let sequence = self.in_flight.remove(&offset_bytes).flatten();
        match sequence.filter(|_| is_done) {
            Some(sequence) => _ = self.written.insert(offset_bytes, sequence),
            None => _ = self.written.remove(&offset_bytes),
        }
    }

    /// Call when the read has ended; `read` copies the data. Returns whether there was data to check.
    pub fn end_read(&mut self, offset_bytes: u64, read: impl FnOnce(&mut [u8])) -> Result<bool, Mismatch> {
        self.in_flight.remove(&offset_bytes);
        let written = self.written.get(&offset_bytes).copied();
        if written.is_none() && !self.only_reads {
            return Ok(false);
        }
        read(&mut self.block);
        check(&self.block, offset_bytes, written.map(|sequence| (sequence, self.seed)))?;
        Ok(true)
    }

    /// Blocks to read back, in ascending order.
    pub fn offsets(&self) -> Vec<u64> {
        self.written.keys().copied().collect()
    }
}

fn make(block: &mut [u8], offset_bytes: u64, sequence: u64, seed: u32) {
    let (header, payload) = block.split_at_mut(HEADER_BYTES);
    let mixed = offset_bytes ^ sequence.rotate_left(32) ^ u64::from(seed).rotate_left(16);
    fastrand::Rng::with_seed(mixed).fill(payload);
    header[..8].copy_from_slice(&MAGIC.to_le_bytes());
    header[8..16].copy_from_slice(&offset_bytes.to_le_bytes());
    header[16..24].copy_from_slice(&sequence.to_le_bytes());
    header[24..CRC_AT].copy_from_slice(&seed.to_le_bytes());
    let crc = crc(block).to_le_bytes();
    block[CRC_AT..HEADER_BYTES].copy_from_slice(&crc);
}

fn crc(block: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&block[..CRC_AT]), &block[HEADER_BYTES..])
}

/// `written`: sequence and seed of the write, if this run knows them.
fn check(block: &[u8], offset_bytes: u64, written: Option<(u64, u32)>) -> Result<(), Mismatch> {
    let differ = |what, expected: String, found: String| Mismatch { offset_bytes, what, expected, found };
    let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| block[at + i]));
    let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| block[at + i]));
    let (magic, offset, sequence, seed) = (u64_at(0), u64_at(8), u64_at(16), u32_at(24));
    if magic != MAGIC {
        let found = format!("{magic:#018x}: damaged, or not written with verify and this bs");
        return Err(differ("magic", format!("{MAGIC:#018x}"), found));
    }
    let (computed, stored) = (crc(block), u32_at(CRC_AT));
    if computed != stored {
        return Err(differ("crc32c", format!("{stored:#010x}"), format!("{computed:#010x}")));
    }
    if offset != offset_bytes {
        return Err(differ("offset", offset_bytes.to_string(), offset.to_string()));
    }
    match written {
        Some((_, expected)) if seed != expected => {
            Err(differ("seed", format!("{expected:#010x}"), format!("{seed:#010x}")))
        }
        Some((expected, _)) if sequence != expected => {
            Err(differ("sequence", expected.to_string(), sequence.to_string()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block that was written at 4096 and completed.
    fn written() -> (Verify, Vec<u8>) {
        let mut verify = Verify::new(7, 0, 512, false);
        let block = verify.begin_write(4096).to_vec();
        verify.end_write(4096, true);
        (verify, block)
    }

    fn read(verify: &mut Verify, offset_bytes: u64, block: &[u8]) -> Result<bool, Mismatch> {
        verify.begin_read(offset_bytes);
        verify.end_read(offset_bytes, |out| out.copy_from_slice(block))
    }

    #[test]
    fn block_that_comes_back_as_written_is_right() {
        let (mut verify, block) = written();
        assert_eq!(read(&mut verify, 4096, &block), Ok(true));
        assert_eq!(verify.offsets(), [4096]);
    }

    #[test]
    fn single_flipped_bit_anywhere_is_found() {
        let (mut verify, block) = written();
        for at in 0..block.len() {
            let mut damaged = block.clone();
            damaged[at] ^= 0x10;
            assert!(read(&mut verify, 4096, &damaged).is_err(), "byte {at}");
        }
    }

    #[test]
    fn block_from_another_place_is_found_by_its_offset() {
        let mut verify = Verify::new(7, 0, 512, true);
        let elsewhere = Verify::new(7, 0, 512, false).begin_write(8192).to_vec();
        let error = read(&mut verify, 4096, &elsewhere).unwrap_err();
        assert_eq!((error.what, error.expected.as_str(), error.found.as_str()), ("offset", "4096", "8192"));
        let line = error.to_string();
        assert_eq!(line, "verify: block at offset 4096: offset: expected 4096, found 8192");
    }

    #[test]
    fn older_write_than_the_last_is_found_by_its_sequence() {
        let (mut verify, first) = written();
        verify.begin_write(4096);
        verify.end_write(4096, true);
        assert_eq!(read(&mut verify, 4096, &first).unwrap_err().what, "sequence");
    }

    #[test]
    fn block_that_this_run_did_not_write_is_not_judged_unless_it_only_reads() {
        assert_eq!(read(&mut Verify::new(7, 0, 512, false), 0, &[0; 512]), Ok(false));
        assert_eq!(read(&mut Verify::new(7, 0, 512, true), 0, &[0; 512]).unwrap_err().what, "magic");
    }

    #[test]
    fn block_whose_write_failed_is_not_judged() {
        let (mut verify, block) = written();
        verify.begin_write(4096);
        verify.end_write(4096, false);
        assert_eq!(read(&mut verify, 4096, &block), Ok(false));
    }

    #[test]
    fn block_in_flight_is_not_free() {
        let mut verify = Verify::new(7, 0, 512, false);
        verify.begin_write(0);
        assert!(!verify.is_free(0) && verify.is_free(512));
        verify.end_write(0, true);
        assert!(verify.is_free(0));
    }
}
