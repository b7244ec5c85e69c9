//! The answer to a request: its status byte, the used length, and the serial.
//!
//! Spec: virtio 1.3 §5.2.6. Not here: the used ring (`virtqueue`), when data is complete (`blk_server`).

use guest_mem::MemoryView;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// `VIRTIO_BLK_S_OK`.
    Ok = 0,
    /// `VIRTIO_BLK_S_IOERR`: the device or the driver made an error.
    IoErr = 1,
    /// `VIRTIO_BLK_S_UNSUPP`: not a request of this device.
    Unsupp = 2,
}

impl Status {
    /// What a driver reads; `None` if it is none of ours.
    #[must_use]
    pub fn from_byte(byte: u8) -> Option<Self> {
        [Self::Ok, Self::IoErr, Self::Unsupp].into_iter().find(|status| *status as u8 == byte)
    }
}

/// Where the status byte of a request goes. Nothing in it is borrowed: it outlives the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplySlot {
    status_addr: u64,
}

impl ReplySlot {
    #[inline]
    pub(crate) fn new(status_addr: u64) -> Self {
        Self { status_addr }
    }

    /// Guest address of the status byte.
    #[must_use]
    pub fn status_addr(&self) -> u64 {
        self.status_addr
    }

    /// Stores `status` and returns the used length: the bytes stored in the device-writable part, which
    /// are the `data_bytes` stored before and the status byte.
    ///
    /// A request that failed has `data_bytes` 0, and the length is 1: with 0 a driver would not be
    /// allowed to look at the status (virtio 1.3 §2.7.8.3). 0 is returned if the byte has become
    /// unmapped since the request was read.
    #[inline]
    #[must_use]
    pub fn write(&self, view: &MemoryView, status: Status, data_bytes: u64) -> u32 {
        match view.store(self.status_addr, &[status as u8]) {
            // The field has 32 bits; a driver must not make longer chains (virtio 1.3 §2.7.5.2), and too
            // small a length is allowed.
            Ok(()) => u32::try_from(data_bytes.saturating_add(1)).unwrap_or(u32::MAX),
            Err(_) => 0,
        }
    }
}

/// Length of the answer to GET_ID (virtio 1.3 §5.2.6).
pub const DEVICE_ID_BYTES: usize = 20;

/// The serial as GET_ID wants it: NUL-padded, without NUL if it is 20 bytes long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceId([u8; DEVICE_ID_BYTES]);

impl DeviceId {
    /// The first 20 bytes of `serial`; what the standard calls an ASCII string is the caller's business.
    #[must_use]
    pub fn new(serial: &str) -> Self {
        let mut bytes = [0; DEVICE_ID_BYTES];
        for (to, from) in bytes.iter_mut().zip(serial.bytes()) {
            *to = from;
        }
        Self(bytes)
    }

    /// All 20 bytes, to be stored as far as the driver has room.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; DEVICE_ID_BYTES] {
        &self.0
    }
}
