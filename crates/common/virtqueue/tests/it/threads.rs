//! Both halves on their own threads, in both ring formats: data, tables and wake-ups arrive.
//!
//! Either each side sleeps as the standard requires: it enables notifications, checks once more, and waits for a bell.
//! Or both sides only poll, so that only the ring orders one side's stores before the other side's loads. Under Miri
//! (`cargo +nightly miri test -p virtqueue --test it threads`) a missing ordering shows as a data race or as a bell
//! that never rings, because a load may return any older value that the orderings allow.
#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest_mem::{GuestAddress, MemoryView};
use virtqueue::{Chain, DeviceQueue, DriverQueue, RingFeatures};

use crate::rig::*;

const QUEUE_SIZE: u16 = 8;
const REQUESTS: u64 = if cfg!(miri) { 20 } else { 20_000 };
/// Maximum number of requests in flight. With three descriptors each, they do not fill the ring.
const DEPTH: u64 = 2;
const DATA: u64 = 0x4_0000;
/// Distance in bytes between the buffers of two requests.
const STRIDE: u64 = 64;
/// Detects a side that hangs, not a side that is slow. Miri's clock counts steps.
const DEADLINE: Duration = Duration::from_secs(if cfg!(miri) { 20 } else { 300 });

/// Replaces the eventfd that two processes would use.
#[derive(Debug, Default)]
struct Bell {
    rung: AtomicBool,
}

impl Bell {
    fn ring(&self) {
        self.rung.store(true, Ordering::Release); // pairs with the acquire in `wait`
    }

    fn wait(&self) {
        let started = Instant::now();
        while !self.rung.swap(false, Ordering::Acquire) {
            assert!(started.elapsed() < DEADLINE, "slept through a notification");
            thread::yield_now();
        }
    }
}

/// How a side waits for the other side.
#[derive(Clone, Copy)]
enum Wait<'b> {
    Poll,
    /// This side's bell, and the other side's bell.
    Sleep(&'b Bell, &'b Bell),
}

fn buffer(token: u64) -> u64 {
    DATA + token % DEPTH * STRIDE
}

/// How the device answers a request.
fn answer(question: u64) -> u64 {
    question.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn read(view: &MemoryView, addr: u64) -> u64 {
    let mut bytes = [0; 8];
    view.read(addr, &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

fn add(driver: &mut DriverQueue, view: &MemoryView, token: u64, indirect: bool) {
    let at = buffer(token);
    view.store(at, &(token + 1000).to_le_bytes()).unwrap();
    let (readable, writable) = ([range(at, 8)], [range(at + 16, 8), range(at + 32, 1)]);
    let table = GuestAddress(TABLE + token % DEPTH * STRIDE);
    if indirect && token.is_multiple_of(2) {
        driver.add_indirect(&readable, &writable, table, token).unwrap();
    } else {
        driver.add(&readable, &writable, token).unwrap();
    }
}

fn drive(mut driver: DriverQueue, view: &MemoryView, indirect: bool, wait: Wait) {
    let (started, mut added, mut done) = (Instant::now(), 0, 0);
    while done < REQUESTS {
        assert!(started.elapsed() < DEADLINE, "the device hangs");
        while added < REQUESTS && added - done < DEPTH {
            add(&mut driver, view, added, indirect);
            added += 1;
        }
        driver.publish();
        if let Wait::Sleep(_, kick) = wait
            && driver.kick_needed()
        {
            kick.ring();
        }
        while let Some(used) = driver.pop_used().unwrap() {
            assert_eq!((used.token, used.written_bytes), (done, 9));
            assert_eq!(read(view, buffer(done) + 16), answer(done + 1000));
            done += 1;
        }
        match wait {
            Wait::Poll => thread::yield_now(),
            Wait::Sleep(call, _) if done < added && !driver.arm_interrupts().unwrap() => {
                call.wait();
                driver.disable_interrupts();
            }
            Wait::Sleep(..) => {}
        }
    }
}

fn serve(mut device: DeviceQueue, view: &MemoryView, wait: Wait) {
    let (started, mut chain, mut done) = (Instant::now(), Chain::with_capacity(QUEUE_SIZE), 0);
    while done < REQUESTS {
        assert!(started.elapsed() < DEADLINE, "the driver hangs");
        device.disable_kicks();
        while let Some(tag) = device.pop(&mut chain).unwrap() {
            let question = read(view, chain.readable()[0].addr);
            view.store(chain.writable()[0].addr, &answer(question).to_le_bytes()).unwrap();
            view.store(chain.writable()[1].addr, &[0]).unwrap();
            device.push_used(tag, 9);
            done += 1;
        }
        device.publish();
        if let Wait::Sleep(_, call) = wait
            && device.needs_notification()
        {
            call.ring();
        }
        match wait {
            Wait::Poll => thread::yield_now(),
            Wait::Sleep(kick, _) if done < REQUESTS && !device.enable_kicks().unwrap() => kick.wait(),
            Wait::Sleep(..) => {}
        }
    }
}

fn both_threads(features: RingFeatures, sleep: bool) {
    let memory = memory();
    let view = MemoryView::new(Arc::clone(&memory));
    let driver = DriverQueue::new(&view, layout(QUEUE_SIZE), features).unwrap();
    let device = DeviceQueue::new(&view, layout(QUEUE_SIZE), features, driver.initial_base()).unwrap();
    let (kick, call) = (Bell::default(), Bell::default());
    let wait = |own, other| if sleep { Wait::Sleep(own, other) } else { Wait::Poll };
    thread::scope(|scope| {
        scope.spawn(|| serve(device, &MemoryView::new(Arc::clone(&memory)), wait(&kick, &call)));
        drive(driver, &view, features.indirect, wait(&call, &kick));
    });
}

const TABLES: RingFeatures = RingFeatures { event_idx: true, indirect: true, packed: false };
const PACKED_TABLES: RingFeatures = RingFeatures { packed: true, ..TABLES };

#[test]
fn split_ring_with_event_idx_and_tables_carries_every_request_and_wakes_both() {
    both_threads(TABLES, true);
}

#[test]
fn split_ring_with_flags_carries_every_request_and_wakes_both() {
    both_threads(PLAIN, true);
}

#[test]
fn packed_ring_with_event_idx_and_tables_carries_every_request_and_wakes_both() {
    both_threads(PACKED_TABLES, true);
}

#[test]
fn packed_ring_with_flags_carries_every_request_and_wakes_both() {
    both_threads(PACKED, true);
}

#[test]
fn split_ring_orders_data_and_tables_on_its_own() {
    both_threads(TABLES, false);
}

#[test]
fn packed_ring_orders_data_and_tables_on_its_own() {
    both_threads(PACKED_TABLES, false);
}
