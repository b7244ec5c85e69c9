//! The core's calls to a test's recorder (`record.rs`).

use super::op::OpState;
use crate::backend::Call;
use crate::config::EngineConfig;
use crate::record::{Record, Recorder};

/// The recorder, if the test uses one.
#[derive(Debug)]
pub(super) struct Recording {
    recorder: Option<Recorder>,
    /// The log position of each op's call in flight, by the op's index.
    places: Vec<usize>,
}

impl Recording {
    pub fn of(config: &EngineConfig) -> Self {
        Self { recorder: config.recorder.clone(), places: Vec::new() }
    }

    #[inline]
    pub fn is_on(&self) -> bool {
        self.recorder.is_some()
    }

    #[inline]
    pub fn issued(&mut self, index: u32, op: &OpState, call: &Call) {
        let Some(recorder) = &self.recorder else { return };
        let index = index as usize;
        if index >= self.places.len() {
            self.places.resize(index + 1, 0);
        }
        self.places[index] = recorder.issued(record_of(op, call));
    }

    #[inline]
    pub fn completed(&self, index: u32, result: i32) {
        if let Some(recorder) = &self.recorder {
            recorder.completed(self.places[index as usize], result);
        }
    }
}

fn record_of(op: &OpState, call: &Call) -> Record {
    let Call { verb, flags, offset_bytes, len_bytes, .. } = *call;
    Record {
        verb,
        file: op.file,
        token: op.token,
        flags,
        offset_bytes,
        len_bytes,
        issued: 0,
        completed: None,
    }
}
