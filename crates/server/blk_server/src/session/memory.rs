//! Memory messages: computes the next table of regions from the current one and the front-end's message.
//!
//! Front-ends repeat messages: one front-end sends the same SET_MEM_TABLE four times, and again while it stops. The
//! server keeps regions that are already mapped, and neither maps nor charges them again.
//!
//! Spec: vhost-user, "Memory regions description", "Single memory region description". Running queues get the table in
//! `mod.rs` and `queue/mod.rs`.

use std::sync::Arc;

use guest_mem::{GuestAddress, GuestMemory, MapError, MemoryError, PassedFd, Region, RegionSpec};
use vhost::vhost_user::message::VhostUserMemoryRegion;

use super::wire::Message;

/// ADD_MEM_REG and REM_MEM_REG begin with eight bytes of padding; SET_MEM_TABLE with a count and padding.
const HEAD_BYTES: usize = 8;
const REGION_BYTES: usize = size_of::<VhostUserMemoryRegion>();

#[derive(Debug, thiserror::Error)]
pub(crate) enum MemoryChangeError {
    #[error("memory message has {bytes} bytes, but {wanted} are needed for its regions")]
    BodySize { bytes: usize, wanted: usize },
    #[error("memory message has {fds} file descriptors for {regions} regions")]
    FdCount { fds: usize, regions: usize },
    #[error(transparent)]
    Map(#[from] MapError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// A new table, and whether it lacks regions of the old one.
#[derive(Debug)]
pub(crate) struct Change {
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) removes: bool,
}

/// SET_MEM_TABLE: replaces the table with the message's regions.
pub(crate) fn replaced(now: &GuestMemory, message: Message) -> Result<Change, MemoryChangeError> {
    let count = message.body.first_chunk().map_or(0, |head| u32::from_ne_bytes(*head)) as usize;
    let specs = region_specs(&message.body, count)?;
    if message.fds.len() != count {
        return Err(MemoryChangeError::FdCount { fds: message.fds.len(), regions: count });
    }
    let mapped = specs.into_iter().zip(message.fds).map(|(spec, fd)| map_or_keep(now, spec, fd));
    let memory = GuestMemory::new(mapped.collect::<Result<_, MapError>>()?)?;
    let kept = |old: &Arc<Region>| memory.regions().iter().any(|new| Arc::ptr_eq(old, new));
    let removes = !now.regions().iter().all(kept);
    Ok(Change { memory: Arc::new(memory), removes })
}

/// ADD_MEM_REG: adds one region.
pub(crate) fn added(now: &GuestMemory, mut message: Message) -> Result<Change, MemoryChangeError> {
    let spec = region_specs(&message.body, 1)?[0];
    let (fds, fd) = (message.fds.len(), message.fds.pop());
    let fd = fd.filter(|_| fds == 1).ok_or(MemoryChangeError::FdCount { fds, regions: 1 })?;
    let memory = now.with_region(map_or_keep(now, spec, fd)?)?;
    Ok(Change { memory: Arc::new(memory), removes: false })
}

/// REM_MEM_REG: removes one region. Some front-ends pass its descriptor again; the server closes it unused.
pub(crate) fn removed(now: &GuestMemory, message: &Message) -> Result<Change, MemoryChangeError> {
    let spec = region_specs(&message.body, 1)?[0];
    Ok(Change { memory: Arc::new(now.without_region(&spec)?), removes: true })
}

fn region_specs(body: &[u8], count: usize) -> Result<Vec<RegionSpec>, MemoryChangeError> {
    let wanted = count.saturating_mul(REGION_BYTES).saturating_add(HEAD_BYTES);
    if body.len() != wanted {
        return Err(MemoryChangeError::BodySize { bytes: body.len(), wanted });
    }
    Ok(body[HEAD_BYTES..].chunks_exact(REGION_BYTES).map(region_spec).collect())
}

fn region_spec(bytes: &[u8]) -> RegionSpec {
    let region: VhostUserMemoryRegion = vhost_user::body::read(bytes).unwrap_or_default();
    RegionSpec {
        guest_addr: GuestAddress(region.guest_phys_addr),
        size_bytes: region.memory_size,
        user_addr: region.user_addr,
        file_offset_bytes: region.mmap_offset,
    }
}

fn map_or_keep(now: &GuestMemory, spec: RegionSpec, fd: PassedFd) -> Result<Arc<Region>, MapError> {
    let known = now.regions().iter().find(|region| region.is_same(&spec, &fd));
    match known {
        Some(region) => Ok(Arc::clone(region)),
        None => Region::map_passed(spec, fd).map(Arc::new),
    }
}
