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

/// A session with a back-end. Several threads may use it at once, until bareblk_disconnect.
#[derive(Debug)]
pub struct bareblk_device {
    pub(crate) device: Device,
}

/// Threads share devices, and pass queues on.
const _: () = {
    const fn is_sync<T: Send + Sync>() {}
    const fn is_send<T: Send>() {}
    is_sync::<bareblk_device>();
    is_send::<bareblk_queue>();
};

/// Connects to a vhost-user-blk socket, negotiates, shares memory and starts the queues.
///
/// `options`: NULL for the usual options. `queues`: room for `queues_len` handles, at least as many as the options ask
/// for (usually 1); the call sets the rest to NULL. The caller owns the handles: free each queue with
/// bareblk_queue_free, and the device with bareblk_disconnect, in any order.
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
        // SAFETY: the caller's promise: it may be written.
        unsafe { pointers::store(device, std::ptr::null_mut(), "device") }?;
        // SAFETY: the caller's promise: `queues_len` pointers may be written.
        let handles = unsafe { pointers::slice_mut(queues, queues_len, MAX_QUEUES, "queues") }?;
        handles.fill(std::ptr::null_mut());
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise; a live handle is only ever shared.
        let device = unsafe { pointers::shared(device, "device") }?;
        body(&device.device)
    })
}

/// What the device says about itself (virtio 1.3 §5.2.4). Later versions of this library may add fields at its end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct bareblk_info {
    /// Size of the disk, in sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// Virtio features that both sides agreed on.
    pub features: u64,
    /// vhost-user protocol features that both sides agreed on.
    pub protocol_features: u64,
    /// Size of a logical block, in bytes.
    pub block_size_bytes: u32,
    /// Most buffers in a request.
    pub max_segments: u32,
    /// Most segments in a discard; 0: the device has no discard.
    pub max_discard_segments: u32,
    /// Most sectors in each of these segments.
    pub max_discard_sectors: u32,
    /// Most segments in a write-zeroes; 0: the device has no write-zeroes.
    pub max_write_zeroes_segments: u32,
    /// Most sectors in each of these segments.
    pub max_write_zeroes_sectors: u32,
    /// Queues that the device has.
    pub num_queues: u16,
    /// 1: the device accepts no writes.
    pub read_only: u8,
    /// 1: the device has a write cache that can be flushed.
    pub flush: u8,
    /// 0.
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

/// Stores the device's latest description. struct_size: sizeof (bareblk_info).
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
    // SAFETY: the caller's promise.
    unsafe { on_device(device, ask) }
}

/// Returns the process id of the back-end, as the socket names it; 0 if it is not visible from here; or an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_peer_pid(device: *const bareblk_device) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { on_device(device, |device| Ok(device.peer_pid().unwrap_or(0))) }
}

/// Lets requests use the caller's own memory: `len_bytes` of a file (a memfd), from `offset_bytes` on (a multiple of
/// the page size), that the caller has mapped at `addr` with MAP_SHARED. Requests name it by its pointers.
///
/// The caller keeps the descriptor and may close it afterwards. This library and the back-end map the file themselves:
/// the caller's mapping only gives the addresses, and may be unmapped without bareblk_unregister.
///
/// Errors: BAREBLK_ERR_INVALID, BAREBLK_ERR_MEMORY, BAREBLK_ERR_SYSTEM.
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
        // SAFETY: not -1 as checked; open during this call by the caller's promise, and if it is not, the kernel says so.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let duplicated = fd.try_clone_to_owned();
        let fd = duplicated
            .map_err(|source| Failure::Descriptor { fd: std::os::fd::AsRawFd::as_raw_fd(&fd), source })?;
        device.register(UserMemory { fd, offset_bytes, len_bytes, addr: addr.addr() as u64 })?;
        Ok(0)
    };
    // SAFETY: the caller's promise.
    unsafe { on_device(device, register) }
}

/// Removes the memory that was registered at `addr`. No request that uses it may be in flight; later requests are
/// refused. When the call returns, the back-end has unmapped the memory, or is disconnected.
///
/// Errors: BAREBLK_ERR_NOT_REGISTERED, BAREBLK_ERR_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bareblk_unregister(device: *const bareblk_device, addr: *const c_void) -> c_int {
    let unregister = |device: &Device| {
        device.unregister(addr.addr() as u64)?;
        Ok(0)
    };
    // SAFETY: the caller's promise.
    unsafe { on_device(device, unregister) }
}

/// Ends the session and frees its handle, within the time limits of two messages. Requests in flight end with
/// BAREBLK_ERR_LOST; the handles of queues and buffers stay. A back-end that hangs, or answers too early, may still
/// store into the buffers of lost reads: take all completions before you use such buffers again. NULL does nothing.
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
