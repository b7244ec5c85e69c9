//! The bodies of messages: converts the `vhost` crate's structs to and from bytes.
//!
//! This file skips the structs' own validators: the receiver knows the device and checks the values.

use vhost::vhost_user::message::{
    VhostUserConfig, VhostUserConfigFlags, VhostUserMemory, VhostUserMemoryRegion,
    VhostUserSingleMemoryRegion, VhostUserVringAddr, VhostUserVringAddrFlags, VhostUserVringState,
};
use vm_memory::ByteValued;

/// Reads a body of exactly this type; `None` if the body has a different size.
#[must_use]
pub fn read<T: ByteValued>(body: &[u8]) -> Option<T> {
    let mut value = T::zeroed();
    let bytes = value.as_mut_slice();
    if bytes.len() != body.len() {
        return None;
    }
    bytes.copy_from_slice(body);
    Some(value)
}

/// The body of SET_VRING_NUM, SET_VRING_BASE, GET_VRING_BASE and SET_VRING_ENABLE: a queue and a value.
#[must_use]
pub fn vring_state(queue: u16, num: u32) -> Vec<u8> {
    VhostUserVringState::new(queue.into(), num).as_slice().to_vec()
}

/// The body of SET_VRING_ADDR, with addresses in the front-end's address space; stores to the ring are not logged.
#[must_use]
pub fn vring_addresses(queue: u16, descriptors: u64, used: u64, avail: u64) -> Vec<u8> {
    let flags = VhostUserVringAddrFlags::empty();
    VhostUserVringAddr::new(queue.into(), flags, descriptors, used, avail, 0).as_slice().to_vec()
}

/// One region of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    /// Guest-physical address of the region.
    pub guest_addr: u64,
    /// The region's size.
    pub size_bytes: u64,
    /// Address of the region in the front-end's address space.
    pub user_addr: u64,
    /// Offset in the passed file.
    pub file_offset_bytes: u64,
}

impl MemoryRegion {
    /// The body of ADD_MEM_REG and REM_MEM_REG.
    #[must_use]
    pub fn single(self) -> Vec<u8> {
        let Self { guest_addr, size_bytes, user_addr, file_offset_bytes } = self;
        let region = VhostUserSingleMemoryRegion::new(guest_addr, size_bytes, user_addr, file_offset_bytes);
        region.as_slice().to_vec()
    }
}

/// The body of SET_MEM_TABLE.
#[must_use]
pub fn memory_table(regions: impl ExactSizeIterator<Item = MemoryRegion>) -> Vec<u8> {
    let count = u32::try_from(regions.len()).unwrap_or(u32::MAX);
    let mut body = VhostUserMemory::new(count).as_slice().to_vec();
    for region in regions {
        let MemoryRegion { guest_addr, size_bytes, user_addr, file_offset_bytes } = region;
        let region = VhostUserMemoryRegion::new(guest_addr, size_bytes, user_addr, file_offset_bytes);
        body.extend_from_slice(region.as_slice());
    }
    body
}

/// The body of GET_CONFIG and SET_CONFIG: bytes of the configuration space from `offset` on. For GET_CONFIG, only their
/// number matters.
#[must_use]
pub fn config(offset: u32, bytes: &[u8]) -> Vec<u8> {
    let size = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let head = VhostUserConfig::new(offset, size, VhostUserConfigFlags::empty());
    [head.as_slice(), bytes].concat()
}

#[cfg(test)]
mod tests {
    use vhost::vhost_user::message::VhostUserU64;

    use super::*;

    #[test]
    fn bodies_are_laid_out_as_the_specification_says() {
        let words = |words: &[u32]| words.iter().copied().flat_map(u32::to_ne_bytes).collect::<Vec<_>>();
        let longs = |longs: &[u64]| longs.iter().copied().flat_map(u64::to_ne_bytes).collect::<Vec<_>>();
        assert_eq!(vring_state(3, 256), words(&[3, 256]));
        assert_eq!(vring_addresses(3, 5, 6, 7), [words(&[3, 0]), longs(&[5, 6, 7, 0])].concat());
        let region =
            |guest_addr| MemoryRegion { guest_addr, size_bytes: 2, user_addr: 3, file_offset_bytes: 4 };
        assert_eq!(region(1).single(), longs(&[0, 1, 2, 3, 4]));
        let table = memory_table([region(1), region(9)].into_iter());
        assert_eq!(table, [words(&[2, 0]), longs(&[1, 2, 3, 4, 9, 2, 3, 4])].concat());
        assert_eq!(config(32, &[7]), [words(&[32, 1, 0]), vec![7]].concat());
    }

    #[test]
    fn body_of_another_size_is_none() {
        assert_eq!(read::<VhostUserU64>(&7_u64.to_ne_bytes()).map(|body| body.value), Some(7));
        assert!(read::<VhostUserU64>(&[0; 7]).is_none() && read::<VhostUserU64>(&[0; 9]).is_none());
    }
}
