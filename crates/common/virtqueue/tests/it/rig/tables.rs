//! Random descriptors of a split ring, mostly valid.

use proptest::prelude::*;
use virtqueue::split::RawDescriptor;

use super::{END, INDIRECT, NEXT, SECOND_REGION, TABLE, WRITE};

fn lengths() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 1_u32..5000, 1 => Just(0_u32), 1 => any::<u32>()]
}

fn addresses() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0..END, 1 => END - 16..END + 16, 1 => any::<u64>()]
}

fn plain_descriptor(entries: u16) -> impl Strategy<Value = RawDescriptor> {
    let flags = prop_oneof![
        8 => Just(NEXT),
        3 => Just(NEXT | WRITE),
        2 => Just(WRITE),
        2 => Just(0),
        1 => (0_u16..0x20).prop_map(|flags| flags & !INDIRECT),
    ];
    let next = prop_oneof![6 => 0..entries, 1 => 0..entries + 2, 1 => any::<u16>()];
    (addresses(), lengths(), flags, next).prop_map(|(addr, len_bytes, flags, next)| RawDescriptor {
        addr,
        len_bytes,
        flags,
        next,
    })
}

fn indirect_descriptor(queue_size: u16) -> impl Strategy<Value = RawDescriptor> {
    let addr = prop_oneof![
        6 => (0..16_u64).prop_map(|entry| TABLE + 16 * entry),
        1 => Just(SECOND_REGION - 24),
        1 => addresses(),
    ];
    let entries = 0..u32::from(queue_size) + 2;
    let len_bytes = prop_oneof![8 => entries.prop_map(|n| 16 * n), 1 => lengths(), 1 => Just(65_536 * 16)];
    let flags = prop_oneof![6 => Just(INDIRECT), 1 => Just(INDIRECT | WRITE), 1 => Just(INDIRECT | NEXT)];
    (addr, len_bytes, flags, 0..queue_size).prop_map(|(addr, len_bytes, flags, next)| RawDescriptor {
        addr,
        len_bytes,
        flags,
        next,
    })
}

/// Makes most `next` fields refer to the following entry, and sets WRITE on most entries from
/// `first_writable` on, so that some longer chains are valid.
fn tidy(mut table: Vec<RawDescriptor>, wild: &[bool], first_writable: u16) -> Vec<RawDescriptor> {
    for (index, (descriptor, wild)) in (0_u16..).zip(table.iter_mut().zip(wild)) {
        if !wild {
            descriptor.next = index + 1;
            let write = if index < first_writable { 0 } else { WRITE };
            descriptor.flags = descriptor.flags & !WRITE | write;
        }
    }
    table
}

/// Length of a section of the indirect tables that is consistent on its own.
const STRETCH: usize = 8;

/// A table of `queue_size` descriptors, and entries for indirect tables at [`TABLE`]: mostly valid, some wrong.
pub fn tables(queue_size: u16) -> impl Strategy<Value = (Vec<RawDescriptor>, Vec<RawDescriptor>)> {
    let (count, inner_count) = (usize::from(queue_size), 5 * STRETCH);
    let main = prop_oneof![5 => plain_descriptor(queue_size), 1 => indirect_descriptor(queue_size)];
    let inner = prop_oneof![30 => plain_descriptor(queue_size), 1 => indirect_descriptor(queue_size)];
    let wild = || prop::bool::weighted(0.15);
    (
        prop::collection::vec(main, count),
        prop::collection::vec(wild(), count),
        prop::collection::vec(inner, inner_count),
        prop::collection::vec(wild(), inner_count),
        0..=queue_size,
    )
        .prop_map(|(main, wild_main, inner, wild_inner, first_writable)| {
            let stretches = inner.chunks(STRETCH).zip(wild_inner.chunks(STRETCH));
            let inner =
                stretches.flat_map(|(part, wild)| tidy(part.to_vec(), wild, first_writable)).collect();
            (tidy(main, &wild_main, first_writable), inner)
        })
}
