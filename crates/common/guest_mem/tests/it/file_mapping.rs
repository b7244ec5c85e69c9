//! A file mapped for copies in and out: what both sides see, and truncation while it is mapped.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::fs::File;
use std::os::unix::fs::FileExt;

use guest_mem::{FileMapping, MappingAccess};
use rustix::fs::{MemfdFlags, memfd_create};

const PAGE: u64 = 4096;

fn memfd(size_bytes: u64) -> File {
    let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(size_bytes).unwrap();
    file
}

fn read(mapping: &FileMapping, offset_bytes: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0xee; len];
    // SAFETY: 1. the vector has the given length, and is not accessed meanwhile.
    unsafe { mapping.copy_to(offset_bytes, out.as_mut_ptr(), len) };
    out
}

fn write(mapping: &FileMapping, offset_bytes: u64, bytes: &[u8]) {
    // SAFETY: 1. the slice has the given length, and no code writes to it.
    unsafe { mapping.copy_from(offset_bytes, bytes.as_ptr(), bytes.len()) };
}

#[test]
fn bytes_pass_both_ways_between_mapping_and_file() {
    let file = memfd(2 * PAGE);
    let mapping = FileMapping::of_file(&file, 2 * PAGE, MappingAccess::ReadWrite).unwrap();
    file.write_all_at(b"file", PAGE - 2).unwrap();
    write(&mapping, 5, b"mapping");
    let mut out = [0; 7];
    file.read_exact_at(&mut out, 5).unwrap();
    assert_eq!((read(&mapping, PAGE - 2, 4), &out), (b"file".to_vec(), b"mapping"));
    assert!(!mapping.is_poisoned());
}

#[test]
fn length_need_not_be_in_whole_pages_and_the_last_byte_is_reachable() {
    let file = memfd(PAGE + 1);
    let mapping = FileMapping::of_file(&file, PAGE + 1, MappingAccess::ReadWrite).unwrap();
    write(&mapping, PAGE, &[7]);
    assert_eq!((read(&mapping, PAGE, 1), mapping.len_bytes()), (vec![7], PAGE + 1));
}

#[test]
#[should_panic(expected = "outside the mapping")]
fn copy_beyond_the_length_is_refused_although_the_page_goes_on() {
    let mapping = FileMapping::of_file(memfd(100), 100, MappingAccess::ReadOnly).unwrap();
    read(&mapping, 99, 2);
}

#[test]
#[should_panic(expected = "outside the mapping")]
fn copy_from_behind_the_end_is_refused() {
    let mapping = FileMapping::of_file(memfd(PAGE), PAGE, MappingAccess::ReadOnly).unwrap();
    read(&mapping, u64::MAX, 2);
}

#[test]
#[should_panic(expected = "read-only")]
fn writing_through_a_read_only_mapping_is_refused() {
    let mapping = FileMapping::of_file(memfd(PAGE), PAGE, MappingAccess::ReadOnly).unwrap();
    write(&mapping, 0, &[1]);
}

#[test]
fn empty_mapping_and_one_beyond_the_address_space_are_refused() {
    let kind = |len_bytes| {
        let refused = FileMapping::of_file(memfd(PAGE), len_bytes, MappingAccess::ReadOnly);
        refused.unwrap_err().kind()
    };
    assert_eq!([kind(0), kind(u64::MAX), kind(1 << 63)], [std::io::ErrorKind::InvalidInput; 3]);
}

#[test]
fn truncated_file_poisons_its_mapping_and_a_new_one_is_sound() {
    let file = memfd(3 * PAGE);
    file.write_all_at(&[1; 3 * PAGE as usize], 0).unwrap();
    let mapping = FileMapping::of_file(&file, 3 * PAGE, MappingAccess::ReadWrite).unwrap();
    let other = FileMapping::of_file(&file, 3 * PAGE, MappingAccess::ReadWrite).unwrap();
    file.set_len(PAGE).unwrap();
    assert_eq!(read(&mapping, PAGE, 4), [0; 4]);
    assert_eq!((mapping.is_poisoned(), other.is_poisoned()), (true, false));
    write(&mapping, 0, &[9]);
    let anew = FileMapping::of_file(&file, PAGE, MappingAccess::ReadWrite).unwrap();
    assert_eq!((read(&anew, 0, 2), anew.is_poisoned()), (vec![1, 1], false));
}

#[test]
fn mapping_made_in_the_slot_of_a_poisoned_one_is_not_poisoned() {
    let file = memfd(PAGE);
    let mapping = FileMapping::of_file(&file, PAGE, MappingAccess::ReadWrite).unwrap();
    file.set_len(0).unwrap();
    read(&mapping, 0, 1);
    let was_poisoned = mapping.is_poisoned();
    drop(mapping);
    file.set_len(PAGE).unwrap();
    let mappings = [(); 4].map(|()| FileMapping::of_file(&file, PAGE, MappingAccess::ReadWrite).unwrap());
    assert!(
        was_poisoned && mappings.iter().all(|mapping| read(mapping, 0, 1) == [0] && !mapping.is_poisoned())
    );
}
