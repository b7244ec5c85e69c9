//! The handle of a connected device: connecting, memory, disconnecting.

use std::ffi::{c_char, c_int, c_void};
use std::mem::size_of;
use std::os::fd::BorrowedFd;

use blk_driver::{Device, DeviceInfo, UserMemory};

use crate::call::guarded;
use crate::failure::Failure;
use crate::options::{self, bareblk_options};
use crate::pointers::{self, Plain};
use crate::queue::bareblk_queue;

/// A connection to a back-end. Any number of threads may use it at once. Freed by bareblk_disconnect.
#[derive(Debug)]
pub struct bareblk_device {
    pub(crate) device: Device,
}

/// Threads may share devices, and pass queues to each other.
const _: () = {
    const fn is_sync<T: Send + Sync>() {}
    const fn is_send<T: Send>() {}
    is_sync::<bareblk_device>();
    is_send::<bareblk_queue>();
};

/// Connects to the vhost-user-blk socket at the path `socket_path`, negotiates features, shares memory with the
/// back-end and starts the queues. Also starts a thread that serves the connection until bareblk_disconnect.
///
/// `options`: NULL for the default options. `device`: receives the device's handle. `queues`: receives one handle per
/// queue; it has room for `queues_len` handles, at least bareblk_options.queues. The call sets the remaining handles to
/// NULL. The caller owns all handles: it frees each queue with bareblk_queue_free and the device with
/// bareblk_disconnect, in any order.
///
/// Returns 0 or an error: BAREBLK_ERR_INVALID, BAREBLK_ERR_CONNECT. After an error, all handles are NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_connect(
    socket_path: *const c_char,
    options: *const bareblk_options,
    device: *mut *mut bareblk_device,
    queues: *mut *mut bareblk_queue,
    queues_len: usize,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise: `device` may be written.
        unsafe { pointers::store(device, std::ptr::null_mut(), "device") }?;
        // SAFETY: the caller's promise: `queues_len` pointers may be written.
        let handles = unsafe { pointers::slice_mut(queues, queues_len, MAX_QUEUES, "queues") }?;
        handles.fill(std::ptr::null_mut());
        // SAFETY: the caller upholds the contract of the C header.
        let options = unsafe { options::parse(socket_path, options) }?;
        if handles.len() < options.queues.into() {
            let (value, min) = (queues_len as i128, options.queues.into());
            return Err(Failure::OutOfRange { argument: "queues_len", value, min, max: MAX_QUEUES as i128 });
        }
        let (connected, made) = Device::connect(&options)?;
        for (handle, queue) in handles.iter_mut().zip(made) {
            *handle = Box::into_raw(Box::new(bareblk_queue::new(queue)));
        }
        let connected = Box::into_raw(Box::new(bareblk_device { device: connected }));
        // SAFETY: as above.
        unsafe { pointers::store(device, connected, "device") }?;
        Ok(0)
    })
}

/// A queue's index has 16 bits.
const MAX_QUEUES: usize = 1 << 16;

/// [`guarded`], for calls on a device.
///
/// # Safety
/// `device` is NULL, or came from `bareblk_connect` and is not freed before this returns.
pub(crate) unsafe fn on_device(
    device: *const bareblk_device,
    body: impl FnOnce(&Device) -> Result<c_int, Failure>,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise; a live handle is only ever borrowed as shared.
        let device = unsafe { pointers::shared(device, "device") }?;
        body(&device.device)
    })
}

/// The device's configuration (virtio 1.3 §5.2.4) and the result of the negotiation. Later versions of this library may
/// add fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bareblk_info {
    /// Size of the disk, in sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// The negotiated virtio features, as a bit mask.
    pub features: u64,
    /// The negotiated vhost-user protocol features, as a bit mask.
    pub protocol_features: u64,
    /// Logical block size, in bytes.
    pub block_size_bytes: u32,
    /// Maximum number of buffers in a request.
    pub max_segments: u32,
    /// Maximum number of segments in a discard; 0 if the device does not offer discard.
    pub max_discard_segments: u32,
    /// Maximum number of sectors in a segment of a discard.
    pub max_discard_sectors: u32,
    /// Maximum number of segments in a write-zeroes; 0 if the device does not offer write-zeroes.
    pub max_write_zeroes_segments: u32,
    /// Maximum number of sectors in a segment of a write-zeroes.
    pub max_write_zeroes_sectors: u32,
    /// Number of queues of the device.
    pub num_queues: u16,
    /// 1 if the device is read-only; otherwise 0.
    pub read_only: u8,
    /// 1 if the device has a write cache, so that a write is durable only after a flush; otherwise 0.
    pub flush: u8,
    /// Always 0.
    pub reserved: u32,
}

// SAFETY: integers; 3 * 8 + 6 * 4 + 2 + 2 * 1 + 4 = 56 bytes, no padding.
unsafe impl Plain for bareblk_info {}
const _: () = assert!(size_of::<bareblk_info>() == 56);

impl From<DeviceInfo> for bareblk_info {
    fn from(info: DeviceInfo) -> Self {
        Self {
            capacity_sectors: info.capacity_sectors,
            features: info.features,
            protocol_features: info.protocol_features,
            block_size_bytes: info.block_size_bytes,
            max_segments: info.max_segments,
            max_discard_segments: info.max_discard_segments,
            max_discard_sectors: info.max_discard_sectors,
            max_write_zeroes_segments: info.max_write_zeroes_segments,
            max_write_zeroes_sectors: info.max_write_zeroes_sectors,
            num_queues: info.num_queues,
            read_only: info.read_only.into(),
            flush: info.flush.into(),
            reserved: 0,
        }
    }
}

/// Stores the device's latest configuration in `info`. `struct_size`: sizeof (bareblk_info).
///
/// Returns 0 or an error: BAREBLK_ERR_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_device_info(
    device: *const bareblk_device,
    info: *mut bareblk_info,
    struct_size: usize,
) -> c_int {
    let ask = |device: &Device| {
        let known = bareblk_info::from(device.info());
        // SAFETY: the caller's promise: `struct_size` bytes may be written.
        unsafe { pointers::store_sized(info, struct_size, size_of::<u64>(), &known, "info") }?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_device(device, ask) }
}

/// Returns the process id of the back-end as the socket reports it (SO_PEERCRED: the process that called listen); 0 if
/// that process has no id in this PID namespace; or an error: BAREBLK_ERR_INVALID.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_peer_pid(device: *const bareblk_device) -> c_int {
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_device(device, |device| Ok(device.peer_pid().unwrap_or(0))) }
}

/// Lets requests use the program's own memory: `len_bytes` bytes of the file `fd` (a memfd, for example) from
/// `offset_bytes` on, which the program has mapped at `addr` with MAP_SHARED. `offset_bytes` must be a multiple of the
/// page size. In a bareblk_range, such memory is addressed by its pointer.
///
/// The caller keeps `fd` and may close it when the call has returned. The library and the back-end have their own
/// mappings of the file: the program's mapping only defines the addresses, and the program may unmap it before
/// bareblk_unregister.
///
/// The call waits until the back-end has mapped the memory. While the driver tries to reconnect, the call succeeds, and
/// the next back-end gets the memory when it connects.
///
/// Returns 0 or an error: BAREBLK_ERR_INVALID, BAREBLK_ERR_MEMORY, BAREBLK_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_register(
    device: *const bareblk_device,
    fd: c_int,
    offset_bytes: u64,
    addr: *const c_void,
    len_bytes: u64,
) -> c_int {
    let register = |device: &Device| {
        if addr.is_null() {
            return Err(Failure::Null { argument: "addr" });
        }
        if fd < 0 {
            let max = c_int::MAX.into();
            return Err(Failure::OutOfRange { argument: "fd", value: fd.into(), min: 0, max });
        }
        // SAFETY: not -1 as checked; open during this call by the caller's promise, and if it is not, the kernel
        // reports that.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let duplicated = fd.try_clone_to_owned();
        let fd = duplicated
            .map_err(|source| Failure::Descriptor { fd: std::os::fd::AsRawFd::as_raw_fd(&fd), source })?;
        device.register(UserMemory { fd, offset_bytes, len_bytes, addr: addr.addr() as u64 })?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_device(device, register) }
}

/// Removes the memory that was registered at `addr`. No request in flight may use it; later requests that use it are
/// refused. When the call returns 0, the back-end has unmapped the memory or has disconnected.
///
/// Returns 0 or an error: BAREBLK_ERR_NOT_REGISTERED, BAREBLK_ERR_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_unregister(device: *const bareblk_device, addr: *const c_void) -> c_int {
    let unregister = |device: &Device| {
        device.unregister(addr.addr() as u64)?;
        Ok(0)
    };
    // SAFETY: the caller upholds the contract of the C header.
    unsafe { on_device(device, unregister) }
}

/// Ends the connection and frees the device's handle; waits for at most two messages to the back-end, each limited by
/// bareblk_options.timeout_ns. NULL has no effect.
///
/// Requests in flight end with BAREBLK_ERR_LOST. The handles of queues and buffers stay valid, and the program can
/// still take the completions. A back-end that hangs, or answers too early, may still store into the buffers of reads:
/// take all completions before you use those buffers again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_disconnect(device: *mut bareblk_device) {
    if device.is_null() {
        return;
    }
    guarded(|| {
        // SAFETY: 1. not NULL, hence from `Box::into_raw` in `bareblk_connect`; 2. freed once, by the caller's promise.
        drop(unsafe { Box::from_raw(device) });
        Ok(0)
    });
}
