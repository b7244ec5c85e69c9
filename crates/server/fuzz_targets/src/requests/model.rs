//! A simple model of a virtio block device: computes guest memory, disk and used length after a request.
//!
//! Spec: virtio 1.3 §5.2.6.

use std::ops::Range;

/// Bytes of a sector.
pub(super) const SECTOR: usize = 512;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;
const MOST_SEGMENTS: usize = 16;

/// The abilities of the model's disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// The limit of one segment; `None`: discard is not offered.
    pub discard_sectors: Option<u32>,
    pub zeroes_sectors: Option<u32>,
}

/// Guest, disk, and the discarded ranges, which may read as their old content or as zeroes.
#[derive(Debug)]
pub(super) struct World<'w> {
    pub memory: &'w mut [u8],
    pub disk: &'w mut [u8],
    pub discarded: &'w mut Vec<Range<usize>>,
    pub serial: &'w [u8],
    pub limits: Limits,
}

/// A part of a chain.
pub(super) type Part = (u64, u32);

fn place(memory: &[u8], (addr, len): Part) -> Option<Range<usize>> {
    let start = usize::try_from(addr).ok()?;
    let end = start.checked_add(usize::try_from(len).ok()?)?;
    (end <= memory.len()).then_some(start..end)
}

/// The bytes of `parts` in sequence, and which of them are outside the memory.
struct Gathered {
    bytes: Vec<u8>,
    missing: Vec<Range<usize>>,
}

impl Gathered {
    fn new(memory: &[u8], parts: &[Part]) -> Self {
        let (mut bytes, mut missing) = (Vec::new(), Vec::new());
        for &(addr, len) in parts {
            let there = present(memory, (addr, len));
            bytes.extend_from_slice(&memory[there.clone()]);
            let end = bytes.len() - there.len() + place_len(len);
            if bytes.len() < end {
                missing.push(bytes.len()..end);
                bytes.resize(end, 0);
            }
        }
        Self { bytes, missing }
    }

    /// The bytes of `range`, if all of them are in memory.
    fn known(&self, range: Range<usize>) -> Result<&[u8], u8> {
        let touches = |gap: &Range<usize>| gap.start < range.end && range.start < gap.end;
        if self.missing.iter().any(touches) {
            return Err(IOERR);
        }
        self.bytes.get(range).ok_or(IOERR)
    }
}

fn place_len(len: u32) -> usize {
    usize::try_from(len).expect("32 bits")
}

/// The address range of the part's leading bytes that are in memory.
fn present(memory: &[u8], (addr, len): Part) -> Range<usize> {
    let start = usize::try_from(addr).map_or(memory.len(), |start| start.min(memory.len()));
    start..start.saturating_add(place_len(len)).min(memory.len())
}

/// The first `len` bytes of `parts`.
fn cut(parts: &[Part], mut len: u64) -> Vec<Part> {
    let mut first = Vec::new();
    for &(addr, part) in parts {
        let taken = u32::try_from(len).map_or(part, |len| len.min(part));
        len -= u64::from(taken);
        first.push((addr, taken));
    }
    first.retain(|part| part.1 > 0);
    first
}

impl World<'_> {
    fn is_all_memory(&self, parts: &[Part]) -> bool {
        parts.iter().all(|&part| place(self.memory, part).is_some())
    }

    /// Stores `bytes` in `parts`, one after another. All parts must be in memory.
    fn put(&mut self, parts: &[Part], mut bytes: &[u8]) {
        for &part in parts {
            let range = place(self.memory, part).expect("inside the memory");
            let (now, later) = bytes.split_at(range.len());
            self.memory[range].copy_from_slice(now);
            bytes = later;
        }
    }

    /// Stores to the parts, up to the first one that is not completely in memory.
    fn put_as_far(&mut self, parts: &[Part], bytes: &[u8]) -> Result<(), u8> {
        let is_there = |part: &&Part| place(self.memory, **part).is_some();
        let there = parts.iter().take_while(is_there).count();
        self.put(&parts[..there], bytes);
        if there < parts.len() { Err(IOERR) } else { Ok(()) }
    }

    /// Carries out the request; returns the used length.
    pub fn serve(&mut self, readable: &[Part], writable: &[Part]) -> u32 {
        let total: u64 = writable.iter().map(|part| u64::from(part.1)).sum();
        let last = writable.iter().rev().find(|part| part.1 > 0);
        let status_at = last.map(|&(addr, len)| [(addr.saturating_add(u64::from(len) - 1), 1)]);
        let Some(status_at) = status_at.filter(|at| self.is_all_memory(at)) else { return 0 };
        let room = cut(writable, total - 1);
        let (status, stored) = match self.answer(&Gathered::new(self.memory, readable), &room) {
            Ok(stored) => (OK, stored),
            Err(status) => (status, 0),
        };
        self.put(&status_at, &[status]);
        u32::try_from(stored).expect("a small request") + 1
    }

    fn answer(&mut self, said: &Gathered, room: &[Part]) -> Result<usize, u8> {
        let header = said.known(0..16)?;
        let kind = u32::from_le_bytes(header[..4].try_into().expect("four bytes"));
        let sector = u64::from_le_bytes(header[8..].try_into().expect("eight bytes"));
        let data = 16..said.bytes.len();
        let room_len = room.iter().map(|part| place_len(part.1)).sum();
        match kind {
            0 => {
                let range = self.range(sector, room_len)?;
                if !self.is_all_memory(room) {
                    return Err(IOERR);
                }
                let bytes = self.disk[range].to_vec();
                self.put(room, &bytes);
                Ok(room_len)
            }
            1 => {
                let range = self.range(sector, data.len())?;
                self.disk[range].copy_from_slice(said.known(data)?);
                Ok(0)
            }
            4 => Ok(0),
            8 => {
                let mut answer = [0; 20];
                answer[..self.serial.len()].copy_from_slice(self.serial);
                let len = room_len.min(answer.len());
                self.put_as_far(&cut(room, len as u64), &answer[..len])?;
                Ok(len)
            }
            11 | 13 => self.segments(kind == 11, said, data),
            _ => Err(UNSUPP),
        }
    }

    fn range(&self, sector: u64, len: usize) -> Result<Range<usize>, u8> {
        if !len.is_multiple_of(SECTOR) {
            return Err(IOERR);
        }
        let start =
            usize::try_from(sector).ok().and_then(|sector| sector.checked_mul(SECTOR)).ok_or(IOERR)?;
        let end = start.checked_add(len).filter(|&end| end <= self.disk.len()).ok_or(IOERR)?;
        Ok(start..end)
    }

    fn segments(&mut self, is_discard: bool, said: &Gathered, data: Range<usize>) -> Result<usize, u8> {
        if data.is_empty() || !data.len().is_multiple_of(16) || data.len() / 16 > MOST_SEGMENTS {
            return Err(IOERR);
        }
        let bytes = said.known(data)?;
        let flags = |segment: &[u8]| u32::from_le_bytes(segment[12..].try_into().expect("four bytes"));
        let allowed = if is_discard { 0 } else { 1 };
        if bytes.chunks(16).any(|segment| flags(segment) & !allowed != 0) {
            return Err(UNSUPP);
        }
        let most = if is_discard { self.limits.discard_sectors } else { self.limits.zeroes_sectors };
        let most = most.ok_or(UNSUPP)?;
        let mut ranges = Vec::new();
        for segment in bytes.chunks(16) {
            let sector = u64::from_le_bytes(segment[..8].try_into().expect("eight bytes"));
            let sectors = u32::from_le_bytes(segment[8..12].try_into().expect("four bytes"));
            if sectors > most {
                return Err(IOERR);
            }
            ranges.push(self.range(sector, sectors as usize * SECTOR)?);
        }
        for range in ranges {
            if is_discard {
                self.discarded.push(range);
            } else {
                self.disk[range].fill(0);
            }
        }
        Ok(0)
    }
}
