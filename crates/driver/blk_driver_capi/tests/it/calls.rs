//! The calls for C, made from Rust against a server: cases that would need threads and timing in a C program.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::Read;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::null_mut;

use bareblk_driver::bareblk_code::*;
use bareblk_driver::*;

use crate::connected::{Connected, last_error, limit_ns};
use crate::server;
use crate::server::Disk;

#[test]
fn server_that_stops_is_an_event_and_ends_the_queue() {
    let mut disk = Disk::serve();
    let connected = Connected::to(&disk);

    disk.stop();

    assert_eq!(connected.next_event(), (BAREBLK_EVENT_DISCONNECTED, String::new()));
    let (kind, reason) = connected.next_event();
    assert_eq!((kind, reason.is_empty()), (BAREBLK_EVENT_GAVE_UP, false));
    assert_eq!(connected.wait(), Err(BAREBLK_ERR_DISCONNECTED as i32));
    assert_eq!(connected.push_flush(1, BAREBLK_FOREVER), BAREBLK_ERR_DISCONNECTED as i32);
    assert_eq!(last_error(), "the queue accepts no more requests: queue 0: the back-end has disconnected");
}

#[test]
fn request_in_flight_is_lost_when_the_device_is_disconnected_and_the_queue_stays_to_say_so() {
    let disk = Disk::serve();
    let mut connected = Connected::to(&disk);
    assert_eq!(connected.push_flush(7, BAREBLK_FOREVER), 0); // never submitted

    // SAFETY: the device is not used afterwards.
    unsafe { bareblk_disconnect(std::mem::replace(&mut connected.device, null_mut())) };

    assert_eq!(connected.wait(), Ok(vec![(7, BAREBLK_ERR_LOST as i32)]));
    assert_eq!(connected.wait(), Err(BAREBLK_ERR_DISCONNECTED as i32));
}

#[test]
fn buffer_outlives_its_device() {
    let disk = Disk::serve();
    let connected = Connected::to(&disk);
    let mut buffer = null_mut();
    // SAFETY: the device is alive.
    assert_eq!(unsafe { bareblk_buffer_take(connected.device, 512, &raw mut buffer) }, 0);

    drop(connected);

    let mut read = [0_u8; 4];
    // SAFETY: the buffer is alive, and so is what is copied.
    assert_eq!(unsafe { bareblk_buffer_write(buffer, 508, b"last".as_ptr().cast(), 4) }, 0);
    // SAFETY: as above.
    assert_eq!(unsafe { bareblk_buffer_read(buffer, 508, read.as_mut_ptr().cast(), 4) }, 0);
    assert_eq!(&read, b"last");
    // SAFETY: it is not used afterwards.
    unsafe { bareblk_buffer_release(buffer) };
}

#[test]
fn cancelled_request_ends_at_once_and_its_buffers_return_when_the_device_is_done() {
    let disk = Disk::serve();
    let connected = Connected::to(&disk);
    assert_eq!(connected.push_flush(9, BAREBLK_FOREVER), 0);

    // SAFETY: the queue is alive, and only this thread uses it.
    assert_eq!(unsafe { bareblk_cancel(connected.queue, 9) }, 0);

    assert_eq!(connected.wait(), Ok(vec![(9, BAREBLK_ERR_CANCELLED as i32)]));
    connected.submit();
    assert_eq!(connected.wait(), Ok(vec![(9, BAREBLK_RETURNED as i32)]));
}

#[test]
fn request_whose_deadline_is_now_ends_before_the_device_has_seen_it() {
    let disk = Disk::serve();
    let connected = Connected::to(&disk);
    let mut left_ns = 1;

    assert_eq!(connected.push_flush(9, 0), 0);

    // SAFETY: the queue is alive, and only this thread uses it.
    assert_eq!(unsafe { bareblk_queue_next_deadline(connected.queue, &raw mut left_ns) }, 1);
    assert_eq!(left_ns, 0);
    assert_eq!(connected.wait(), Ok(vec![(9, BAREBLK_ERR_DEADLINE as i32)]));
}

#[test]
fn queue_without_deadlines_says_so() {
    let disk = Disk::serve();
    let connected = Connected::to(&disk);
    let mut left_ns = 1;
    assert_eq!(connected.push_flush(9, BAREBLK_FOREVER), 0);
    // SAFETY: the queue is alive, and only this thread uses it.
    assert_eq!(unsafe { bareblk_queue_next_deadline(connected.queue, &raw mut left_ns) }, 0);
    assert_eq!(left_ns, BAREBLK_FOREVER);
}

#[test]
fn queue_takes_requests_until_it_is_full_and_all_of_them_end() {
    let disk = Disk::serve();
    let connected = Connected::to(&disk);
    let mut pushed = 0;
    while connected.push_flush(pushed, limit_ns()) == 0 {
        pushed += 1;
    }
    assert_eq!(
        last_error(),
        format!("the queue is full ({pushed} requests are in flight): take completions first")
    );
    // SAFETY: the queue is alive, and only this thread uses it.
    assert_eq!(unsafe { bareblk_queue_in_flight(connected.queue) }, 256);

    connected.submit();

    let mut ended = Vec::new();
    while ended.len() < 256 {
        ended.extend(connected.wait().unwrap());
    }
    ended.sort_unstable();
    assert_eq!(ended, (0..pushed).map(|token| (token, BAREBLK_OK as i32)).collect::<Vec<_>>());
    let mut stats = [0_u64; 6];
    // SAFETY: the queue is alive, and this thread's; there is room for as many bytes.
    let asked = unsafe { bareblk_queue_stats(connected.queue, stats.as_mut_ptr().cast(), 48) };
    // The library knows five counters and zeroes the rest.
    assert_eq!((asked, stats[0], stats[1], stats[5]), (0, 256, 256, 0));
}

#[test]
fn armed_queue_signals_its_descriptor_when_something_ends() {
    let disk = Disk::serve();
    let connected = Connected::to(&disk);
    // SAFETY: the queue is alive, and only this thread uses it.
    assert_eq!(unsafe { bareblk_arm(connected.queue) }, 0);
    assert_eq!(connected.push_flush(1, BAREBLK_FOREVER), 0);
    // SAFETY: the queue is alive, and only this thread uses it.
    let fd = unsafe { bareblk_completion_fd(connected.queue) };

    connected.submit();

    // SAFETY: the queue keeps it open.
    let copy = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().unwrap();
    let signalled = server::wait_readable(&copy);
    assert!(signalled);
    // SAFETY: the queue is alive, and only this thread uses it.
    assert_eq!(unsafe { bareblk_clear_signal(connected.queue) }, 0);
    assert_eq!(
        std::fs::File::from(copy).read(&mut [0; 8]).unwrap_err().kind(),
        std::io::ErrorKind::WouldBlock
    );
    assert_eq!(connected.wait(), Ok(vec![(1, BAREBLK_OK as i32)]));
}

#[test]
fn blocking_calls_write_zero_and_read() {
    let disk = Disk::serve();
    let connected = Connected::to(&disk);
    let (queue, mut bytes) = (connected.queue, vec![0x5a_u8; 4096]);
    let middle = bareblk_segment { sector: 2, sectors: 4, flags: BAREBLK_UNMAP };

    // SAFETY: the queue is alive, and this thread's, here and below; the bytes are alive during the call.
    let written = unsafe {
        bareblk_write_blocking(queue, 0, bytes.as_ptr().cast(), bytes.len(), BAREBLK_DURABLE, limit_ns())
    };
    // SAFETY: as above.
    let zeroed = unsafe { bareblk_write_zeroes_blocking(queue, &raw const middle, 1, limit_ns()) };
    // SAFETY: as above.
    let flushed = unsafe { bareblk_flush_blocking(queue, limit_ns()) };
    // SAFETY: as above.
    let read = unsafe { bareblk_read_blocking(queue, 0, bytes.as_mut_ptr().cast(), bytes.len(), limit_ns()) };

    assert_eq!((written, zeroed, flushed, read), (0, 0, 0, 0), "{}", last_error());
    let expected = [vec![0x5a; 1024], vec![0; 2048], vec![0x5a; 1024]].concat();
    assert!(bytes == expected);
    assert!(disk.bytes(0, 4096) == expected);
}

#[test]
fn discard_and_the_serial_go_through() {
    let disk = Disk::serve();
    let connected = Connected::to(&disk);
    let all = bareblk_segment { sector: 0, sectors: 8, flags: 0 };
    let mut id = [0xff_u8; BAREBLK_ID_BYTES];
    // SAFETY: the queue is alive, and this thread's, here and below.
    let discarded = unsafe { bareblk_discard_blocking(connected.queue, &raw const all, 1, limit_ns()) };
    // SAFETY: as above; there is room for an id.
    let asked =
        unsafe { bareblk_get_id_blocking(connected.queue, id.as_mut_ptr().cast(), id.len(), limit_ns()) };
    assert_eq!((discarded, asked), (0, 0), "{}", last_error());
    assert!(id.is_ascii() && id[0] != 0, "{id:?}");
}

#[test]
fn program_of_an_older_version_gets_what_it_knows_and_nothing_behind_it() {
    let disk = Disk::serve();
    let connected = Connected::to(&disk);
    let mut older = [u64::MAX; 2];
    // SAFETY: the device is alive; there is room for as many bytes.
    let asked = unsafe { bareblk_device_info(connected.device, older.as_mut_ptr().cast(), 8) };
    assert_eq!((asked, older), (0, [server::IMAGE_BYTES / 512, u64::MAX]));
}

#[test]
fn device_serves_one_thread_while_another_waits_for_an_event() {
    let mut disk = Disk::serve();
    let connected = Connected::to(&disk);
    let device = connected.device as usize;
    let waiting = std::thread::spawn(move || {
        let mut event = MaybeUninit::<bareblk_event>::uninit();
        let device = device as *const bareblk_device;
        // SAFETY: the device is alive until this thread was joined; there is room for an event.
        unsafe { bareblk_next_event(device, event.as_mut_ptr(), size_of::<bareblk_event>(), BAREBLK_FOREVER) }
    });
    let file = server::memfd(4096);
    let (fd, addr) = (file.as_raw_fd(), 0x7000_0000 as *const _);

    // SAFETY: the device is alive, here and below; the descriptor is open.
    let registered = unsafe { bareblk_register(connected.device, fd, 0, addr, 4096) };
    // SAFETY: as above.
    let unregistered = unsafe { bareblk_unregister(connected.device, addr) };

    assert_eq!((registered, unregistered), (0, 0), "{}", last_error());
    disk.stop();
    assert_eq!(waiting.join().unwrap(), 1);
}
