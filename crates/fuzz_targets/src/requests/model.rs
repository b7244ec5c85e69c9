//! What a virtio block device must do with a request, read simply: from the bytes of the guest and of the disk to those
//! after it, and to the used length.
//!
//! Spec: virtio 1.3 §5.2.6. Not here: rings, making requests up (`requests.rs`).

/// Bytes of a sector.
pub(super) const SECTOR: usize = 512;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;
const MOST_SEGMENTS: usize = 16;

/// What the disk of the model can do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Of one segment; `None`: not offered.
    pub discard_sectors: Option<u32>,
    pub zeroes_sectors: Option<u32>,
}

/// Guest, disk, and what was discarded, which may read as anything that was there or as zeroes.
#[derive(Debug)]
pub(super) struct World<'w> {
    pub memory: &'w mut [u8],
    pub disk: &'w mut [u8],
    pub discarded: &'w mut Vec<std::ops::Range<usize>>,
    pub serial: &'w [u8],
    pub limits: Limits,
}

/// A part of a chain.
pub(super) type Part = (u64, u32);

fn place(memory: &[u8], (addr, len): Part) -> Option<std::ops::Range<usize>> {
    let start = usize::try_from(addr).ok()?;
    let end = start.checked_add(usize::try_from(len).ok()?)?;
    (end <= memory.len()).then_some(start..end)
}

/// The bytes of `parts` one behind the other, `None` where there is no memory.
fn gather(memory: &[u8], parts: &[Part]) -> Vec<Option<u8>> {
    let one = |&part: &Part| match place(memory, part) {
        Some(range) => memory[range].iter().copied().map(Some).collect::<Vec<_>>(),
        None => (0..u64::from(part.1))
            .map(|at| part.0.checked_add(at).and_then(|at| memory.get(usize::try_from(at).ok()?).copied()))
            .collect(),
    };
    parts.iter().flat_map(one).collect()
}

/// Addresses of the first `len` bytes of `parts`.
fn addresses(parts: &[Part], len: usize) -> Vec<u64> {
    let all =
        parts.iter().flat_map(|&(addr, len)| (0..u64::from(len)).map(move |at| addr.saturating_add(at)));
    all.take(len).collect()
}

impl World<'_> {
    fn is_memory(&self, addr: u64) -> bool {
        addr < self.memory.len() as u64
    }

    fn put(&mut self, addr: u64, byte: u8) {
        let at = usize::try_from(addr).expect("inside the memory");
        self.memory[at] = byte;
    }

    /// Does the request; returns the used length.
    pub fn serve(&mut self, readable: &[Part], writable: &[Part]) -> u32 {
        let total = writable.iter().map(|part| part.1 as usize).sum::<usize>();
        let Some(status_at) = addresses(writable, total).last().copied().filter(|&at| self.is_memory(at))
        else {
            return 0;
        };
        let room = addresses(writable, total - 1);
        let (status, stored) = match self.answer(&gather(self.memory, readable), &room) {
            Ok(stored) => (OK, stored),
            Err(status) => (status, 0),
        };
        self.put(status_at, status);
        u32::try_from(stored).expect("a small request") + 1
    }

    fn answer(&mut self, said: &[Option<u8>], room: &[u64]) -> Result<usize, u8> {
        let header = known(said.get(..16).ok_or(IOERR)?)?;
        let kind = u32::from_le_bytes(header[..4].try_into().expect("four bytes"));
        let sector = u64::from_le_bytes(header[8..].try_into().expect("eight bytes"));
        let data = &said[16..];
        match kind {
            0 => {
                let range = self.range(sector, room.len())?;
                if room.iter().any(|&at| !self.is_memory(at)) {
                    return Err(IOERR);
                }
                range.zip(room).for_each(|(from, &to)| self.put(to, self.disk[from]));
                Ok(room.len())
            }
            1 => {
                let range = self.range(sector, data.len())?;
                self.disk[range].copy_from_slice(&known(data)?);
                Ok(0)
            }
            4 => Ok(0),
            8 => {
                let answer = self.serial.iter().copied().chain(std::iter::repeat(0)).take(20);
                let pairs: Vec<_> = answer.zip(room.iter().copied()).collect();
                self.put_as_far(&pairs)
            }
            11 | 13 => self.segments(kind == 11, data),
            _ => Err(UNSUPP),
        }
    }

    /// Nothing is stored of a buffer that is not all there; buffers before it are.
    fn put_as_far(&mut self, pairs: &[(u8, u64)]) -> Result<usize, u8> {
        if pairs.iter().any(|&(_, at)| !self.is_memory(at)) {
            return Err(IOERR);
        }
        pairs.iter().for_each(|&(byte, at)| self.put(at, byte));
        Ok(pairs.len())
    }

    fn range(&self, sector: u64, len: usize) -> Result<std::ops::Range<usize>, u8> {
        if !len.is_multiple_of(SECTOR) {
            return Err(IOERR);
        }
        let start =
            usize::try_from(sector).ok().and_then(|sector| sector.checked_mul(SECTOR)).ok_or(IOERR)?;
        let end = start.checked_add(len).filter(|&end| end <= self.disk.len()).ok_or(IOERR)?;
        Ok(start..end)
    }

    fn segments(&mut self, is_discard: bool, data: &[Option<u8>]) -> Result<usize, u8> {
        if data.is_empty() || !data.len().is_multiple_of(16) || data.len() / 16 > MOST_SEGMENTS {
            return Err(IOERR);
        }
        let bytes = known(data)?;
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

fn known(bytes: &[Option<u8>]) -> Result<Vec<u8>, u8> {
    bytes.iter().copied().collect::<Option<_>>().ok_or(IOERR)
}
