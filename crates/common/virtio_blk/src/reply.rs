//! The answer to a request: its status byte, the used length, and the serial.
//!
//! Spec: virtio 1.3 §5.2.6.

use guest_mem::MemoryView;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// `VIRTIO_BLK_S_OK`.
    Ok = 0,
    /// `VIRTIO_BLK_S_IOERR`: an error of the device or the driver.
    IoErr = 1,
    /// `VIRTIO_BLK_S_UNSUPP`: the device does not support the request.
    Unsupp = 2,
}

impl Status {
    /// Converts a status byte that a driver has read; `None` if the byte is not a known status.
    #[must_use]
    pub fn from_byte(byte: u8) -> Option<Self> {
        [Self::Ok, Self::IoErr, Self::Unsupp].into_iter().find(|status| *status as u8 == byte)
    }
}

/// Where the status byte of a request is stored. It borrows nothing, so it outlives the chain.
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

    /// Stores `status` and returns the used length: `data_bytes`, which were stored in the device-writable
    /// part before, plus the status byte.
    ///
    /// For a failed request the caller passes `data_bytes` 0, and the length is 1: with length 0, a driver must not
    /// read the status (virtio 1.3 §2.7.8.3). Returns 0 if the byte was unmapped after the request was read.
    #[inline]
    #[must_use]
    pub fn write(&self, view: &MemoryView, status: Status, data_bytes: u64) -> u32 {
        match view.store_byte(self.status_addr, status as u8) {
            // The field has 32 bits. A driver must not make longer chains (virtio 1.3 §2.7.5.2), and a length
            // that is too small is allowed.
            Ok(()) => u32::try_from(data_bytes.saturating_add(1)).unwrap_or(u32::MAX),
            Err(_) => 0,
        }
    }
}

/// Length of the answer to GET_ID (virtio 1.3 §5.2.6).
pub const DEVICE_ID_BYTES: usize = 20;

/// The serial in GET_ID's format: NUL-padded, without NUL if it is 20 bytes long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceId([u8; DEVICE_ID_BYTES]);

impl DeviceId {
    /// Takes the first 20 bytes of `serial`. The caller ensures that they are an ASCII string, as the
    /// standard requires.
    #[must_use]
    pub fn new(serial: &str) -> Self {
        let mut bytes = [0; DEVICE_ID_BYTES];
        for (to, from) in bytes.iter_mut().zip(serial.bytes()) {
            *to = from;
        }
        Self(bytes)
    }

    /// All 20 bytes; the device stores as many as the driver has room for.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; DEVICE_ID_BYTES] {
        &self.0
    }
}
