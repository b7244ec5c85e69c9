//! The options of a connection.

use std::ffi::{OsStr, c_char, c_int};
use std::mem::size_of;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use blk_driver::{Options, PoolOptions, Reconnect};

use crate::call::guarded;
use crate::failure::Failure;
use crate::pointers::{self, Plain};

/// A time limit or deadline that never passes.
pub const BAREBLK_FOREVER: u64 = u64::MAX;

/// bareblk_options.packed: use split rings.
pub const BAREBLK_PACKED_NO: u8 = 0;
/// bareblk_options.packed: use packed rings; connecting fails if the device does not offer them.
pub const BAREBLK_PACKED_YES: u8 = 1;
/// bareblk_options.packed: let the library choose. This version uses split rings, which every device offers.
pub const BAREBLK_PACKED_ANY: u8 = 2;

/// bareblk_options.in_flight_log: use a log if the back-end offers one and reconnect_ns is not 0.
pub const BAREBLK_LOG_ANY: u32 = 0;
/// bareblk_options.in_flight_log: use no log.
pub const BAREBLK_LOG_NO: u32 = 1;
/// bareblk_options.in_flight_log: use a log; connecting fails if the back-end does not offer one.
pub const BAREBLK_LOG_YES: u32 = 2;

/// How to connect. Call bareblk_options_init first, then change fields. Later versions of this library may add fields
/// at the end; struct_size says which fields the caller was compiled with.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bareblk_options {
    /// Size of this structure in bytes, set by bareblk_options_init.
    pub struct_size: u32,
    /// Number of queues to use. Connecting fails if the device has fewer. Default: 1.
    pub queues: u16,
    /// Descriptors per queue: a power of two from 2 to 1024. Default: 256.
    pub queue_size: u16,
    /// Size of the pool of buffers in bytes, rounded up to whole pages. Default: 16 MiB.
    pub pool_bytes: u64,
    /// Time limit for connecting, and for each message to the back-end, in nanoseconds. Default: 5 s.
    pub timeout_ns: u64,
    /// How long to try to reconnect after the back-end disconnected, in nanoseconds; 0: do not reconnect. Default: 0.
    pub reconnect_ns: u64,
    /// BAREBLK_PACKED_NO, BAREBLK_PACKED_YES or BAREBLK_PACKED_ANY. Default: BAREBLK_PACKED_ANY.
    pub packed: u8,
    /// 1: use indirect descriptors if the device offers them. 0: do not. Default: 1.
    pub indirect: u8,
    /// 1: use VIRTIO_F_EVENT_IDX if the device offers it. 0: do not. Default: 1.
    pub event_idx: u8,
    /// 1: the pool uses pages of 2 MiB, which must be reserved (sysctl vm.nr_hugepages). 0: it uses ordinary pages.
    /// Default: 0.
    pub huge_pages: u8,
    /// Whether the back-end logs its requests in flight in memory that outlives it, so that the next back-end can
    /// repeat them: BAREBLK_LOG_ANY, BAREBLK_LOG_NO or BAREBLK_LOG_YES. Default: BAREBLK_LOG_ANY.
    pub in_flight_log: u32,
}

// SAFETY: integers; 4 + 2 + 2 + 3 * 8 + 4 * 1 + 4 = 40 bytes, no padding.
unsafe impl Plain for bareblk_options {}
const _: () = assert!(size_of::<bareblk_options>() == 40);

/// The smallest size that this structure has had in any version.
const MIN_OPTIONS_BYTES: usize = 40;

impl bareblk_options {
    fn initial() -> Self {
        let Options { queues, queue_size, packed, indirect, event_idx, pool, timeout, reconnect, .. } =
            Options::new("");
        Self {
            struct_size: 0,
            queues,
            queue_size,
            pool_bytes: pool.size_bytes,
            timeout_ns: nanoseconds(timeout),
            reconnect_ns: match reconnect {
                Reconnect::Never => 0,
                Reconnect::For(limit) => nanoseconds(limit),
            },
            packed: match packed {
                Some(false) => BAREBLK_PACKED_NO,
                Some(true) => BAREBLK_PACKED_YES,
                None => BAREBLK_PACKED_ANY,
            },
            indirect: indirect.into(),
            event_idx: event_idx.into(),
            huge_pages: pool.huge_pages.into(),
            in_flight_log: BAREBLK_LOG_ANY,
        }
    }

    fn parse(&self, socket: &OsStr) -> Result<Options, Failure> {
        let packed = choice(self.packed, BAREBLK_PACKED_ANY, "options.packed")?;
        let log = match self.in_flight_log {
            BAREBLK_LOG_ANY => None,
            BAREBLK_LOG_NO => Some(false),
            BAREBLK_LOG_YES => Some(true),
            other => {
                let (argument, max) = ("options.in_flight_log", BAREBLK_LOG_YES.into());
                return Err(Failure::OutOfRange { argument, value: other.into(), min: 0, max });
            }
        };
        let flag = |value, argument| Ok::<_, Failure>(choice(value, 1, argument)? == 1);
        let huge_pages = flag(self.huge_pages, "options.huge_pages")?;
        Ok(Options {
            socket: socket.into(),
            queues: self.queues,
            queue_size: self.queue_size,
            packed: (packed != BAREBLK_PACKED_ANY).then_some(packed == BAREBLK_PACKED_YES),
            indirect: flag(self.indirect, "options.indirect")?,
            event_idx: flag(self.event_idx, "options.event_idx")?,
            pool: PoolOptions { size_bytes: self.pool_bytes, huge_pages },
            timeout: Duration::from_nanos(self.timeout_ns),
            reconnect: match self.reconnect_ns {
                0 => Reconnect::Never,
                limit_ns => Reconnect::For(Duration::from_nanos(limit_ns)),
            },
            in_flight_log: log,
        })
    }
}

fn choice(value: u8, max: u8, argument: &'static str) -> Result<u8, Failure> {
    if value > max {
        return Err(Failure::OutOfRange { argument, value: value.into(), min: 0, max: max.into() });
    }
    Ok(value)
}

pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(BAREBLK_FOREVER)
}

/// Fills in the default options. `struct_size`: sizeof (bareblk_options).
///
/// Returns 0 or an error: BAREBLK_ERR_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_options_init(options: *mut bareblk_options, struct_size: usize) -> c_int {
    guarded(|| {
        let known_size = u32::try_from(struct_size).unwrap_or(u32::MAX); // refused below
        let initial = bareblk_options { struct_size: known_size, ..bareblk_options::initial() };
        // SAFETY: the caller upholds the contract of the C header.
        unsafe { pointers::store_sized(options, struct_size, MIN_OPTIONS_BYTES, &initial, "options") }?;
        Ok(0)
    })
}

/// Converts the options for the driver; if `options` is NULL, uses the default options.
///
/// # Errors
/// `socket` is NULL, or a value is out of range.
///
/// # Safety
/// `socket` is NULL or ends with NUL; `options` is NULL, or as many bytes as its `struct_size` says are valid there.
pub(crate) unsafe fn parse(
    socket: *const c_char,
    options: *const bareblk_options,
) -> Result<Options, Failure> {
    if socket.is_null() {
        return Err(Failure::Null { argument: "socket_path" });
    }
    // SAFETY: not NULL as checked; ends with NUL by the caller's promise.
    let socket = OsStr::from_bytes(unsafe { std::ffi::CStr::from_ptr(socket) }.to_bytes());
    if options.is_null() {
        return bareblk_options::initial().parse(socket);
    }
    // SAFETY: the size is the first field of every version, and valid by the caller's promise.
    let struct_size = *unsafe { pointers::shared(options.cast::<u32>(), "options") }? as usize;
    let initial = bareblk_options::initial();
    // SAFETY: the caller upholds the contract of the C header.
    let known = unsafe { pointers::load_sized(options, struct_size, MIN_OPTIONS_BYTES, initial, "options") }?;
    known.parse(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sized(struct_size: usize) -> bareblk_options {
        let struct_size = u32::try_from(struct_size).unwrap();
        bareblk_options { struct_size, ..bareblk_options::initial() }
    }

    fn parse_for_tests(options: &[bareblk_options]) -> Result<Options, Failure> {
        // SAFETY: the path is a literal, and in each test the slice has as many bytes as its `struct_size` says.
        unsafe { parse(c"/run/disk.sock".as_ptr(), options.as_ptr()) }
    }

    #[test]
    fn initial_options_are_those_of_the_driver() {
        let ours = parse_for_tests(&[sized(40)]).unwrap();
        let drivers = Options::new("/run/disk.sock");
        assert_eq!(format!("{ours:?}"), format!("{drivers:?}"));
    }

    #[test]
    fn in_flight_log_is_asked_for_refused_or_left_to_the_device() {
        let with = |in_flight_log| parse_for_tests(&[bareblk_options { in_flight_log, ..sized(40) }]);
        let wanted = [BAREBLK_LOG_ANY, BAREBLK_LOG_NO, BAREBLK_LOG_YES];
        assert_eq!(wanted.map(|log| with(log).unwrap().in_flight_log), [None, Some(false), Some(true)]);
        assert_eq!(
            with(3).unwrap_err().to_string(),
            "options.in_flight_log is 3, but it must be from 0 to 2"
        );
    }

    #[test]
    fn structure_of_a_later_version_is_taken_while_its_new_fields_are_zero() {
        let later = [sized(80), bareblk_options { struct_size: 0, ..ZERO }];
        assert_eq!(parse_for_tests(&later).unwrap().queue_size, 256);
    }

    #[test]
    fn new_field_of_a_later_version_that_is_used_is_refused() {
        let later = [sized(80), bareblk_options { queue_size: 1, ..ZERO }];
        let refused = parse_for_tests(&later).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "byte 46 of options is not 0, but this library knows only its first 40 bytes"
        );
    }

    #[test]
    fn structure_without_a_size_is_refused() {
        let refused = parse_for_tests(&[sized(0)]).unwrap_err();
        assert_eq!(refused.to_string(), "options is 0, but it must be from 40 to 4096");
    }

    const ZERO: bareblk_options = bareblk_options {
        struct_size: 0,
        queues: 0,
        queue_size: 0,
        pool_bytes: 0,
        timeout_ns: 0,
        reconnect_ns: 0,
        packed: 0,
        indirect: 0,
        event_idx: 0,
        huge_pages: 0,
        in_flight_log: 0,
    };
}
