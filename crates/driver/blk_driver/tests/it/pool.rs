//! The pool: separate buffers, returned in any order, and the error when it is exhausted.
#![allow(missing_docs, clippy::unwrap_used, clippy::cast_possible_truncation)]

use std::sync::Arc;

use blk_driver::{Buffer, EventFd, MemoryError, Pool, PoolOptions, alone};
use proptest::prelude::*;
use virtqueue::RingFeatures;

fn pool(size_bytes: u64, huge_pages: bool) -> std::io::Result<Pool> {
    let bell = Arc::new(EventFd::new().unwrap());
    alone(2, RingFeatures::default(), PoolOptions { size_bytes, huge_pages }, bell).map(|(_, pool, _)| pool)
}

#[test]
fn pool_is_rounded_up_to_pages_and_its_buffers_begin_at_pages() {
    let pool = pool(4097, false).unwrap();
    let (first, second) = (pool.take(1).unwrap(), pool.take(4096).unwrap());
    assert_eq!((pool.size_bytes(), pool.free_bytes()), (8192, 0));
    assert_eq!((first.range().addr % 4096, first.range().len_bytes), (0, 1));
    assert_eq!(second.range().addr - first.range().addr, 4096);
}

#[test]
fn pool_without_room_in_one_piece_says_what_it_has() {
    let pool = pool(3 * 4096, false).unwrap();
    let buffers: Vec<_> = (0..3).map(|_| pool.take(4096).unwrap()).collect();
    let [first, middle, last]: [Buffer; 3] = buffers.try_into().unwrap();
    drop((first, last));
    let text = "the pool has no 8192 contiguous bytes (8192 of 12288 bytes are free)";
    assert_eq!(pool.take(4097).unwrap_err().to_string(), text);
    drop(middle);
    assert_eq!(pool.take(12288).unwrap().range().len_bytes, 12288);
}

#[test]
fn bytes_written_are_read_again_and_neighbours_are_left_alone() {
    let pool = pool(8192, false).unwrap();
    let (first, second) = (pool.take(4096).unwrap(), pool.take(4096).unwrap());
    second.write(0, &[9; 4096]);
    first.write(4090, b"virtio");
    let (mut bytes, mut untouched) = ([0; 8], [0; 4096]);
    first.read(4088, &mut bytes);
    second.read(0, &mut untouched);
    assert_eq!((&bytes, untouched), (b"\0\0virtio", [9; 4096]));
}

#[test]
#[should_panic(expected = "2 bytes at 511 are outside a buffer of 512")]
fn write_over_the_end_of_a_buffer_panics() {
    pool(4096, false).unwrap().take(512).unwrap().write(511, &[0; 2]);
}

#[test]
fn buffer_outlives_its_pool() {
    let buffer = pool(4096, false).unwrap().take(512).unwrap();
    buffer.write(0, &[7; 512]);
    let mut bytes = [0; 512];
    buffer.read(0, &mut bytes);
    assert_eq!(bytes, [7; 512]);
}

/// Few machines reserve huge pages, and none reserves 64 TiB of them.
#[test]
fn huge_pages_that_are_not_reserved_are_an_error_that_says_how_to() {
    let refused = pool(64 << 40, true).unwrap_err();
    let memory: &MemoryError = refused.get_ref().unwrap().downcast_ref().unwrap();
    assert!(matches!(memory, MemoryError::HugePages { pages: 33_554_432, page_bytes: 2_097_152, .. }));
    assert!(refused.to_string().contains("sysctl vm.nr_hugepages=33554432"), "{refused}");
}

proptest! {
    #[test]
    fn buffers_never_overlap_and_all_come_back(steps in prop::collection::vec((0..5_u32, any::<usize>()), 1..200)) {
        let pool = pool(64 * 4096, false).unwrap();
        let mut buffers: Vec<Buffer> = Vec::new();
        for (pages, at) in steps {
            if pages == 0 && !buffers.is_empty() {
                buffers.swap_remove(at % buffers.len());
            } else if let Ok(buffer) = pool.take(pages * 4096) {
                buffers.push(buffer);
            }
            let mut spans: Vec<_> = buffers.iter().map(Buffer::range).map(|r| (r.addr, u64::from(r.len_bytes))).collect();
            spans.sort_unstable();
            prop_assert!(spans.windows(2).all(|pair| pair[0].0 + pair[0].1.max(1) <= pair[1].0));
        }
        drop(buffers);
        prop_assert_eq!(pool.take(64 * 4096).unwrap().range().len_bytes, 64 * 4096);
    }
}
