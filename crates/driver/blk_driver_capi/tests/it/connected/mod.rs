//! The calls for C in shorter form, for tests in Rust: a device and a queue of a server in this process.
#![allow(dead_code, missing_debug_implementations, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::ptr::null_mut;

use bareblk_driver::*;

use crate::server::{Disk, PATIENCE};

pub struct Connected {
    pub device: *mut bareblk_device,
    pub queue: *mut bareblk_queue,
}

impl Connected {
    pub fn to(disk: &Disk) -> Self {
        let socket = CString::new(disk.socket.as_os_str().as_bytes()).unwrap();
        let (mut device, mut queue) = (null_mut(), null_mut());
        // SAFETY: all of it is alive during the call, and one queue is what the usual options ask for.
        let connected =
            unsafe { bareblk_connect(socket.as_ptr(), std::ptr::null(), &raw mut device, &raw mut queue, 1) };
        assert_eq!(connected, 0, "{}", last_error());
        Self { device, queue }
    }

    pub fn push_flush(&self, token: u64, deadline_ns: u64) -> i32 {
        // SAFETY: the queue is alive, and only this thread uses it.
        unsafe { bareblk_push_flush(self.queue, token, deadline_ns) }
    }

    pub fn submit(&self) {
        // SAFETY: the queue is alive, and only this thread uses it.
        assert_eq!(unsafe { bareblk_submit(self.queue) }, 0);
    }

    /// Waits until at least one request has ended; returns all that have.
    pub fn wait(&self) -> Result<Vec<(u64, i32)>, i32> {
        let none = bareblk_completion { token: 0, status: 0, stored_bytes: 0, detail: 0, reserved: 0 };
        let mut out = vec![none; 1000];
        // SAFETY: the queue is alive, and this thread's; there is room for as many.
        let taken = unsafe { bareblk_wait(self.queue, out.as_mut_ptr(), out.len(), limit_ns()) };
        let taken = usize::try_from(taken).map_err(|_| taken)?;
        Ok(out[..taken].iter().map(|done| (done.token, done.status)).collect())
    }

    /// Waits for the next event; returns its kind and reason.
    pub fn next_event(&self) -> (u32, String) {
        let mut event = std::mem::MaybeUninit::<bareblk_event>::uninit();
        // SAFETY: the device is alive; there is room for an event.
        let came = unsafe {
            bareblk_next_event(self.device, event.as_mut_ptr(), size_of::<bareblk_event>(), limit_ns())
        };
        assert_eq!(came, 1, "{}", last_error());
        // SAFETY: written by the call.
        let event = unsafe { event.assume_init() };
        // SAFETY: ended with NUL, as the header says.
        let reason = unsafe { CStr::from_ptr(event.reason.as_ptr()) };
        (event.kind, reason.to_str().unwrap().to_owned())
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        // SAFETY: no other code uses it any more.
        unsafe { bareblk_queue_free(self.queue) };
        // SAFETY: no other code uses it any more.
        unsafe { bareblk_disconnect(self.device) };
    }
}

pub fn limit_ns() -> u64 {
    PATIENCE.as_nanos().try_into().unwrap()
}

pub fn last_error() -> String {
    // SAFETY: ended with NUL, and this thread's, as the header says.
    let text = unsafe { CStr::from_ptr(bareblk_last_error()) };
    text.to_str().unwrap().to_owned()
}
