//! A guest with one queue, its cache mode, and the calls that the server makes for its requests.
#![allow(dead_code, missing_debug_implementations, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use io_engine::{Record, Recorder, Verb};
use rustix::io::ReadWriteFlags;

use crate::rig::{self, FrontEnd, Guest, Options, Rig, code, feature, kind, ready};

/// Offset of the `writeback` byte in the configuration space (virtio 1.3 §5.2.4).
pub const WRITEBACK: u32 = 32;
/// No cache-related bit.
pub const BARE: u64 = feature::USUAL & !feature::FLUSH;

pub struct Bed {
    pub recorder: Recorder,
    pub front_end: FrontEnd,
    pub guest: Guest,
    pub rig: Rig,
}

impl Bed {
    /// Starts a driver that accepts those of the `features` that are offered, on a disk with `--cache none`.
    pub fn start(features: u64) -> Self {
        Self::start_on(Options::default(), features)
    }

    pub fn start_on(options: Options, features: u64) -> Self {
        let recorder = Recorder::new();
        let rig = Rig::start(Options { recorder: Some(recorder.clone()), ..options });
        let (front_end, guest) = ready(&rig, features);
        Self { recorder, front_end, guest, rig }
    }

    /// Sends one request, which must succeed, and returns the calls that the server made for it.
    pub fn calls(&mut self, kind: u32, data: &[u8]) -> Vec<Record> {
        self.recorder.clear();
        assert_eq!(self.guest.request(kind, 0, data, 0).status, Some(0));
        self.recorder.records()
    }

    /// Whether a write is durable when it completes: the call has the flag, or a sync follows.
    pub fn write_is_durable(&mut self) -> bool {
        let calls = self.calls(kind::OUT, &[1; 4096]);
        assert_eq!(calls[0].verb, Verb::Write);
        assert_eq!(calls.len(), 1);
        calls[0].flags & ReadWriteFlags::DSYNC.bits().cast_signed() != 0
    }

    /// Disconnects the front-end and connects it again with the same memory and ring, as QEMU does.
    pub fn reconnect(&mut self, features: u64) {
        let memory = self.front_end.memory.clone();
        self.front_end = self.rig.connect();
        self.front_end.negotiate(features);
        self.front_end.share(memory);
        self.front_end.announce_queue(&self.guest);
        self.front_end.ok(code::SET_VRING_ENABLE, &rig::vring_state(0, 1), &[]);
    }

    pub fn writeback(&self) -> u8 {
        self.front_end.config(WRITEBACK, 1)[0]
    }

    pub fn set_writeback(&self, value: u8) {
        assert_eq!(self.front_end.set_config(WRITEBACK, &[value]), 0);
    }
}

pub fn verbs(calls: &[Record]) -> Vec<Verb> {
    calls.iter().map(|call| call.verb).collect()
}
