//! In-flight logs that are larger or smaller than the rings: requested before the guest chose its sizes, made by an
//! older server, or made by the front-end.

use super::*;

/// QEMU's default request, whatever its guest's firmware and driver choose later.
const ASKED: u16 = 128;

fn asked(front_end: &FrontEnd) -> Log {
    Log::asked(front_end, 1, ASKED)
}

/// The layout of older servers and of front-ends that make the log: exactly these rings.
pub fn tight(format: Format, queues: u16, queue_size: u16) -> Log {
    let entries = u64::from(queue_size);
    let each = if format == Format::Split { 16 + entries * 16 } else { 32 + entries * 32 };
    let bytes = u64::from(queues) * each.next_multiple_of(64);
    Log { body: inflight(bytes, 0, queues, queue_size), fd: memfd(bytes) }
}

fn options(queue_size: u16) -> Options {
    Options { queue_size, ..Options::default() }
}

/// A server dies with `count` requests in flight. A successor whose disk allows rings of up to `then` descriptors
/// resubmits these requests and no others.
fn dies_and_is_followed(
    format: Format,
    log: impl FnOnce(&FrontEnd) -> Log,
    (queue_size, count): (u16, u64),
    (first, then): (u16, u16),
) {
    let (engine, handle) = faulty();
    let mut rig = Rig::start(Options { queue_size: first, ..engine });
    let mut bed = bed_with(&rig, format, log, queue_size);
    bed.begin_writes(0, 17);
    bed.finish(17);
    hold(&handle);
    bed.begin_writes(20, count);
    assert!(eventually(|| handle.hanging() as u64 == count), "{} of {count} are begun", handle.hanging());

    let crashed = bed.crash(&mut rig, || let_go(&handle));
    rig.start_server(options(then));
    let mut bed = crashed.reconnect(&rig, format);
    bed.finish(count);

    assert_written(&rig, 20..20 + count);
    assert!(eventually(|| writes(&rig) == count), "{} writes", writes(&rig));
    assert!(serves(&mut bed.guest));
}

#[test]
fn rings_longer_than_the_log_that_was_asked_for_lose_nothing() {
    for format in BOTH {
        // 60 requests with three descriptors each reach beyond the first 128 descriptors.
        dies_and_is_followed(format, asked, (256, 60), (1024, 1024));
        dies_and_is_followed(format, asked, (1024, 60), (1024, 1024));
    }
}

#[test]
fn log_is_read_by_a_server_whose_disk_allows_other_rings() {
    for format in BOTH {
        dies_and_is_followed(format, asked, (256, 60), (256, 1024));
        dies_and_is_followed(format, asked, (256, 60), (1024, 256));
    }
}

#[test]
fn log_of_a_server_before_this_one_goes_on_with_its_layout() {
    for format in BOTH {
        dies_and_is_followed(format, |_| tight(format, 1, ASKED), (ASKED, 40), (1024, 1024));
    }
}

#[test]
fn ring_that_has_no_room_in_its_log_is_served_without_one() {
    for format in BOTH {
        let rig = Rig::start(options(1024));
        let log = tight(format, 2, ASKED);
        let mut front_end = connect(&rig, format);
        log.give(&front_end);
        front_end.share_memory(16 * MIB);
        let mut longer = front_end.start_queue(0, 256, format.usual());
        let mut fits = front_end.start_queue(1, ASKED, format.usual());
        let mut has_no_place = front_end.start_queue(2, ASKED, format.usual());
        assert!(serves(&mut longer) && serves(&mut fits) && serves(&mut has_no_place));
        // The server uses only the second half of the log.
        let (half, all) = (log.bytes() as usize / 2, contents(&log.view(), log.bytes()));
        let is_used = |part: &[u8]| part.iter().any(|&byte| byte != 0);
        assert!(!is_used(&all[..half]) && is_used(&all[half..]));
    }
}
