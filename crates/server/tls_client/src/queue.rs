//! A queue of bytes: written at its end, read at its start, in place.

/// Bytes on their way.
#[derive(Debug)]
pub(crate) struct Queue {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Queue {
    pub fn with_capacity(capacity: usize) -> Self {
        Self { bytes: vec![0; capacity], start: 0, end: 0 }
    }

    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    pub fn len(&self) -> usize {
        self.end - self.start
    }

    /// How many bytes fit without growing.
    pub fn room_len(&self) -> usize {
        self.bytes.len() - self.len()
    }

    /// The oldest bytes first.
    pub fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub fn consume(&mut self, count: usize) {
        assert!(count <= self.len());
        self.start += count;
        if self.is_empty() {
            self.clear();
        }
    }

    pub fn clear(&mut self) {
        (self.start, self.end) = (0, 0);
    }

    /// All free space, in one piece. [`Self::fill`] says how much of it was written.
    pub fn room(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.len());
        }
        &mut self.bytes[self.end..]
    }

    pub fn fill(&mut self, count: usize) {
        assert!(count <= self.bytes.len() - self.end);
        self.end += count;
    }

    /// Appends, and grows if necessary.
    pub fn append(&mut self, more: &[u8]) {
        if self.room_len() < more.len() {
            self.bytes.resize(self.len() + more.len() + self.start, 0);
        }
        self.room()[..more.len()].copy_from_slice(more);
        self.fill(more.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_in_order_when_the_free_space_is_on_both_sides() {
        let mut queue = Queue::with_capacity(4);
        queue.append(b"abc");
        queue.consume(2);
        assert_eq!(queue.room_len(), 3);
        queue.room().copy_from_slice(b"def");
        queue.fill(3);
        assert_eq!((queue.filled(), queue.room_len()), (&b"cdef"[..], 0));
    }

    #[test]
    fn full_queue_grows_when_bytes_are_appended() {
        let mut queue = Queue::with_capacity(2);
        queue.append(b"ab");
        queue.consume(1);
        queue.append(b"cdef");
        assert_eq!(queue.filled(), b"bcdef");
    }

    #[test]
    fn emptied_queue_has_all_its_room_again() {
        let mut queue = Queue::with_capacity(3);
        queue.append(b"abc");
        queue.consume(3);
        assert!(queue.is_empty());
        assert_eq!(queue.room().len(), 3);
    }
}
