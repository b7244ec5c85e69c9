//! Events of a device: changes of its connection and configuration.

use std::ffi::{c_char, c_int};
use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::time::Duration;

use blk_driver::{Device, Event, ReconnectReport};

use crate::device::{bareblk_device, on_device};
use crate::failure::Text;
use crate::options::nanoseconds;
use crate::pointers::{self, Plain};

/// bareblk_event.kind: the device's configuration changed, for example by a resize. bareblk_device_info returns the new
/// configuration.
pub const BAREBLK_EVENT_CONFIG_CHANGED: u32 = 1;
/// bareblk_event.kind: the back-end disconnected.
pub const BAREBLK_EVENT_DISCONNECTED: u32 = 2;
/// bareblk_event.kind: a back-end is connected again. The fields from attempts to kept_rings say what the driver did.
pub const BAREBLK_EVENT_RECONNECTED: u32 = 3;
/// bareblk_event.kind: the driver no longer tries to reconnect; bareblk_event.reason says why. No event follows this
/// one.
pub const BAREBLK_EVENT_GAVE_UP: u32 = 4;

/// Size of bareblk_event.reason in bytes.
pub const BAREBLK_REASON_BYTES: usize = 256;

/// A change of a device's connection or configuration. Later versions of this library may add kinds, and fields at the
/// end: ignore unknown kinds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bareblk_event {
    /// One of BAREBLK_EVENT_*; 0: no event.
    pub kind: u32,
    /// For BAREBLK_EVENT_RECONNECTED: number of attempts to connect. Otherwise 0.
    pub attempts: u32,
    /// For BAREBLK_EVENT_RECONNECTED: how long the device was disconnected, in nanoseconds. Otherwise 0.
    pub away_ns: u64,
    /// For BAREBLK_EVENT_RECONNECTED: number of requests that the driver sent again; 0 if kept_rings is 1.
    pub resubmitted: u64,
    /// For BAREBLK_EVENT_RECONNECTED: number of requests that the driver found completed in the old ring; 0 if
    /// kept_rings is 1.
    pub completed: u64,
    /// For BAREBLK_EVENT_RECONNECTED: number of queues on which the program made no call within a second after the
    /// reconnect. The driver sends their requests again at the next call on the queue; resubmitted and completed do not
    /// include them.
    pub owners_waited_for: u32,
    /// For BAREBLK_EVENT_RECONNECTED: 1 if the queues keep their rings, and the new back-end repeats the requests that
    /// the old one had started (bareblk_options.in_flight_log). Otherwise 0.
    pub kept_rings: u32,
    /// For BAREBLK_EVENT_GAVE_UP: one line of text with a NUL at its end. Otherwise empty.
    pub reason: [c_char; 256],
}

// SAFETY: integers; 4 + 4 + 3 * 8 + 4 + 4 + 256 = 296 bytes, no padding.
unsafe impl Plain for bareblk_event {}
const _: () = assert!(size_of::<bareblk_event>() == 296);

impl bareblk_event {
    fn new(kind: u32, done: &ReconnectReport, reason: &str) -> Self {
        let mut text = Text::<BAREBLK_REASON_BYTES>::new();
        text.append(format_args!("{reason}"));
        Self {
            kind,
            attempts: done.attempts,
            away_ns: nanoseconds(done.away),
            resubmitted: done.resubmitted,
            completed: done.completed,
            owners_waited_for: done.owners_waited_for.into(),
            kept_rings: done.kept_rings.into(),
            reason: text.bytes().map(|byte| c_char::from_ne_bytes([byte])),
        }
    }
}

impl From<&Event> for bareblk_event {
    fn from(event: &Event) -> Self {
        let nothing = ReconnectReport::default();
        match event {
            Event::ConfigChanged(_) => Self::new(BAREBLK_EVENT_CONFIG_CHANGED, &nothing, ""),
            Event::Disconnected => Self::new(BAREBLK_EVENT_DISCONNECTED, &nothing, ""),
            Event::Reconnected(done) => Self::new(BAREBLK_EVENT_RECONNECTED, done, ""),
            Event::GaveUp { reason } => Self::new(BAREBLK_EVENT_GAVE_UP, &nothing, reason),
        }
    }
}

/// Takes the oldest event and stores it in `event`; waits up to `limit_ns` nanoseconds for one (0: does not wait;
/// BAREBLK_FOREVER: no limit). `struct_size`: sizeof (bareblk_event). Several threads may wait at once; each event goes
/// to one of them. The library keeps at most 64 events. Beyond that, it drops the oldest change of the configuration,
/// or the oldest event if there is no such change.
///
/// Returns 1 if it stored an event; 0 if there was none in time (`kind` is 0 then); or an error: BAREBLK_ERR_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_next_event(
    device: *const bareblk_device,
    event: *mut bareblk_event,
    struct_size: usize,
    limit_ns: u64,
) -> c_int {
    let next = |device: &Device| {
        // Checks the arguments before it takes an event.
        let none = bareblk_event::new(0, &ReconnectReport::default(), "");
        // SAFETY: the caller's promise: `struct_size` bytes may be written.
        unsafe { pointers::store_sized(event, struct_size, size_of::<u64>(), &none, "event") }?;
        let Some(next) = device.next_event(Duration::from_nanos(limit_ns)) else { return Ok(0) };
        // SAFETY: as above.
        unsafe { pointers::store_sized(event, struct_size, size_of::<u64>(), &(&next).into(), "event") }?;
        Ok(1)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_device(device, next) }
}

/// Returns a file descriptor that is readable while there are events, for poll and epoll; or an error:
/// BAREBLK_ERR_INVALID. The descriptor belongs to the device: do not read from it, and do not close it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_event_fd(device: *const bareblk_device) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_device(device, |device| Ok(device.event_fd().as_raw_fd())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_of_a_reconnect_is_passed_on() {
        let away = Duration::from_millis(3);
        let report = ReconnectReport {
            attempts: 1,
            away,
            resubmitted: 4,
            completed: 5,
            owners_waited_for: 6,
            kept_rings: true,
        };
        let event = bareblk_event::from(&Event::Reconnected(report));
        assert_eq!((event.kind, event.attempts, event.away_ns), (BAREBLK_EVENT_RECONNECTED, 1, 3_000_000));
        assert_eq!((event.resubmitted, event.completed, event.owners_waited_for), (4, 5, 6));
        assert_eq!(event.kept_rings, 1);
    }

    #[test]
    fn reason_that_is_too_long_is_cut_and_ends_with_nul() {
        let event = bareblk_event::from(&Event::GaveUp { reason: "x".repeat(1000) });
        assert_eq!((event.kind, event.reason[254], event.reason[255]), (BAREBLK_EVENT_GAVE_UP, 0x78, 0));
    }
}
