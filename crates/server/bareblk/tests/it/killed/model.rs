//! Models what each sector of a disk may hold, given the writes that were sent and acknowledged.
//!
//! - A value is allowed until a later write to the sector is acknowledged; "later" means sent after the value's own
//!   write was acknowledged. So after two overlapping writes, either value may be read. An acknowledged write is never
//!   lost.
//! - A read may return every value that was allowed at some time between its start and its end.
//! - If reads and writes are copies in memory (page cache, mapping), a read may see a half-written sector, which is a
//!   mixture of allowed values. That happens on bare Linux as under any VMM. The sector does not remain a mixture.
//! - Each sector contains the number of its write and its own number, so the model detects stale, torn and misdirected
//!   writes.
#![allow(dead_code)] // each test binary uses only a part

use std::ops::Range;

pub const SECTOR_BYTES: usize = 512;

/// The number of a write, in the order of sending; 0 stands for the zeroes of a new disk.
pub type Version = u32;

/// A write that was sent.
struct Write {
    sectors: Range<u64>,
    zeroes: bool,
    sent: u64,
}

/// A value that a sector may hold.
#[derive(Clone, Copy)]
struct Candidate {
    version: Version,
    answered: Option<u64>,
}

pub struct Model {
    writes: Vec<Write>,
    /// The allowed values, by sector.
    candidates: Vec<Vec<Candidate>>,
    clock: u64,
    /// Whether a read may see a mixture of allowed values.
    pub may_tear: bool,
    pub sectors_checked: u64,
}

/// A read in flight, and the values that were allowed at its start.
pub struct Read {
    pub first: u64,
    allowed: Vec<Allowed>,
    /// Writes with this number or a higher one were sent later.
    next_version: Version,
}

/// The allowed values of one sector when a read of it was sent.
struct Allowed {
    versions: Vec<Version>,
    /// Whether a write to the sector is in flight.
    is_being_written: bool,
}

impl Model {
    pub fn new(sectors: u64) -> Self {
        let zeroes = Candidate { version: 0, answered: Some(0) };
        Self {
            writes: vec![Write { sectors: 0..sectors, zeroes: true, sent: 0 }],
            candidates: (0..sectors).map(|_| vec![zeroes]).collect(),
            clock: 1,
            may_tear: false,
            sectors_checked: 0,
        }
    }

    pub fn sectors(&self) -> u64 {
        self.candidates.len() as u64
    }

    pub fn writes(&self) -> usize {
        self.writes.len() - 1
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn next_version(&self) -> Version {
        Version::try_from(self.writes.len()).unwrap()
    }

    /// Whether a write to one of `sectors` is in flight.
    pub fn is_being_written(&self, sectors: Range<u64>) -> bool {
        let mut candidates = sectors.flat_map(|sector| &self.candidates[sector as usize]);
        candidates.any(|candidate| candidate.answered.is_none())
    }

    pub fn begin_write(&mut self, sectors: Range<u64>, zeroes: bool) -> Version {
        let (version, sent) = (self.next_version(), self.tick());
        for sector in sectors.clone() {
            self.candidates[sector as usize].push(Candidate { version, answered: None });
        }
        self.writes.push(Write { sectors, zeroes, sent });
        version
    }

    pub fn end_write(&mut self, version: Version) {
        let answered = self.tick();
        let Write { sectors, sent, .. } = &self.writes[version as usize];
        for sector in sectors.clone() {
            let candidates = &mut self.candidates[sector as usize];
            candidates.retain(|other| {
                other.version == version || other.answered.is_none_or(|answered| answered > *sent)
            });
            let own = candidates.iter_mut().find(|candidate| candidate.version == version).unwrap();
            own.answered = Some(answered);
        }
    }

    pub fn begin_read(&self, sectors: Range<u64>) -> Read {
        let allowed = |sector: u64| Allowed {
            versions: self.candidates[sector as usize].iter().map(|one| one.version).collect(),
            is_being_written: self.is_being_written(sector..sector + 1),
        };
        Read {
            first: sectors.start,
            allowed: sectors.map(allowed).collect(),
            next_version: self.next_version(),
        }
    }

    /// Checks what the read returned. The error names the problem.
    pub fn end_read(&mut self, read: &Read, bytes: &[u8]) -> Result<(), String> {
        if bytes.len() != read.allowed.len() * SECTOR_BYTES {
            return Err(format!("{} bytes instead of {} sectors", bytes.len(), read.allowed.len()));
        }
        for ((sector, allowed), bytes) in (read.first..).zip(&read.allowed).zip(bytes.chunks(SECTOR_BYTES)) {
            self.check(sector, bytes, allowed, read.next_version).map_err(|found| {
                let (versions, newer) = (&allowed.versions, read.next_version);
                format!(
                    "sector {sector} holds {found}; it may hold one of {versions:?}, or one from {newer} on"
                )
            })?;
        }
        self.sectors_checked += read.allowed.len() as u64;
        Ok(())
    }

    /// Checks the disk's contents while no request is in flight.
    pub fn check_all(&mut self, first: u64, bytes: &[u8]) -> Result<(), String> {
        let read = self.begin_read(first..first + (bytes.len() / SECTOR_BYTES) as u64);
        self.end_read(&read, bytes)
    }

    /// Checks one sector. The error shows its contents.
    fn check(&self, sector: u64, bytes: &[u8], allowed: &Allowed, newer: Version) -> Result<(), String> {
        let Allowed { versions, is_being_written } = allowed;
        let write = |version: Version| self.writes.get(version as usize);
        let is_here = |version: Version| write(version).is_some_and(|write| write.sectors.contains(&sector));
        if bytes.iter().all(|&byte| byte == 0) {
            let mut possible = versions.iter().copied().chain(newer..self.next_version());
            let any =
                possible.any(|version| is_here(version) && write(version).is_some_and(|write| write.zeroes));
            return if any { Ok(()) } else { Err("zeroes".to_owned()) };
        }
        let version = Version::from_le_bytes(bytes[..4].try_into().unwrap());
        let mut whole = [0; SECTOR_BYTES];
        fill_sector(&mut whole, version, sector);
        if bytes != whole {
            let newer: Vec<_> = (newer..self.next_version()).filter(|&version| is_here(version)).collect();
            let is_being_written = *is_being_written || !newer.is_empty();
            let possible = [versions.as_slice(), &newer].concat();
            if self.may_tear && is_being_written && self.is_mixture(sector, bytes, &possible) {
                return Ok(());
            }
            let claimed = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
            return Err(format!(
                "no whole sector of one write: its start says write {version}, sector {claimed}"
            ));
        }
        let may_be = versions.contains(&version) || version >= newer && is_here(version);
        if may_be { Ok(()) } else { Err(format!("what write {version} made")) }
    }
}

impl Model {
    /// Whether each byte comes from one of these writes.
    fn is_mixture(&self, sector: u64, bytes: &[u8], versions: &[Version]) -> bool {
        let of = |&version: &Version| {
            let mut whole = [0; SECTOR_BYTES];
            if !self.writes[version as usize].zeroes {
                fill_sector(&mut whole, version, sector);
            }
            whole
        };
        let wholes: Vec<_> = versions.iter().map(of).collect();
        bytes.iter().enumerate().all(|(at, &byte)| wholes.iter().any(|whole| whole[at] == byte))
    }
}

/// The bytes of write `version`, from sector `first` on.
pub fn content(version: Version, first: u64, sectors: usize) -> Vec<u8> {
    let mut bytes = vec![0; sectors * SECTOR_BYTES];
    for (sector, bytes) in (first..).zip(bytes.chunks_mut(SECTOR_BYTES)) {
        fill_sector(bytes, version, sector);
    }
    bytes
}

fn fill_sector(bytes: &mut [u8], version: Version, sector: u64) {
    let mut state = u64::from(version) << 32 ^ sector ^ 0x9e37_79b9_7f4a_7c15;
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let value = match at {
            0 => u64::from(version),
            1 => sector,
            _ => state,
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

#[test]
fn value_is_allowed_until_a_later_write_is_answered() {
    let mut model = Model::new(8);
    let first = model.begin_write(2..4, false);
    let (old, new) = (vec![0; 1024], content(first, 2, 2));
    assert!(model.check_all(2, &old).is_ok() && model.check_all(2, &new).is_ok());
    model.end_write(first);
    assert!(model.check_all(2, &old).is_err() && model.check_all(2, &new).is_ok());
    let second = model.begin_write(3..5, false);
    model.end_write(second);
    assert!(model.check_all(2, &new).unwrap_err().contains("sector 3 holds what write 1 made"));
}

#[test]
fn of_writes_in_flight_together_either_may_stay() {
    let mut model = Model::new(8);
    let (first, second) = (model.begin_write(0..1, false), model.begin_write(0..1, false));
    model.end_write(first);
    model.end_write(second);
    assert!(model.check_all(0, &content(first, 0, 1)).is_ok());
    assert!(model.check_all(0, &content(second, 0, 1)).is_ok());
    assert!(model.check_all(0, &[0; 512]).is_err());
}

#[test]
fn read_may_return_what_was_written_while_it_ran() {
    let mut model = Model::new(8);
    let read = model.begin_read(0..1);
    let version = model.begin_write(0..1, false);
    model.end_write(version);
    assert!(
        model.end_read(&read, &content(version, 0, 1)).is_ok() && model.end_read(&read, &[0; 512]).is_ok()
    );
}

#[test]
fn sector_may_be_torn_only_in_memory_and_only_while_it_is_written() {
    let mut model = Model::new(8);
    let first = model.begin_write(0..1, false);
    model.end_write(first);
    let second = model.begin_write(0..1, false);
    let mut torn = content(second, 0, 1);
    torn[100..].copy_from_slice(&content(first, 0, 1)[100..]);
    assert!(model.check_all(0, &torn).unwrap_err().contains("no whole sector"));
    model.may_tear = true;
    assert!(model.check_all(0, &torn).is_ok());
    let third = model.begin_write(0..1, false);
    model.end_write(second);
    model.end_write(third);
    assert!(model.check_all(0, &torn).is_err());
}

#[test]
fn sectors_of_other_places_and_torn_ones_are_told() {
    let mut model = Model::new(8);
    let version = model.begin_write(0..4, false);
    model.end_write(version);
    let astray = content(version, 1, 1);
    assert!(model.check_all(0, &astray).unwrap_err().contains("sector 1"));
    let mut torn = content(version, 0, 1);
    torn[511] ^= 1;
    assert!(model.check_all(0, &torn).unwrap_err().contains("no whole sector"));
}
