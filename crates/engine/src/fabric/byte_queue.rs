//! Bytes that have arrived for a session, and that it has not taken yet.

/// A queue of bytes, whose owner bounds its length.
#[derive(Default)]
pub(super) struct ByteQueue {
    bytes: Vec<u8>,
    /// Bytes at the front that were taken.
    taken: usize,
}

impl ByteQueue {
    /// Prepares for so many bytes more. Where they would need more memory, bytes that were taken
    /// are removed first.
    pub(super) fn make_room(&mut self, len: usize) {
        if self.taken > 0 && self.bytes.len() + len > self.bytes.capacity() {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
    }

    /// Appends bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Appends so many zeroes, and returns them.
    pub(super) fn push_zeroes(&mut self, len: usize) -> &mut [u8] {
        let start = self.bytes.len();
        self.bytes.resize(start + len, 0);
        &mut self.bytes[start..]
    }

    /// Number of bytes in the queue.
    pub(super) fn len(&self) -> usize {
        self.bytes.len() - self.taken
    }

    /// Removes at most `most` bytes from the front and passes them to `take`.
    pub(super) fn take(&mut self, most: usize, take: impl FnOnce(&[u8])) -> usize {
        let len = self.len().min(most);
        take(&self.bytes[self.taken..self.taken + len]);
        self.taken += len;
        if self.taken == self.bytes.len() {
            self.bytes.clear();
            self.taken = 0;
            if self.bytes.capacity() > KEPT {
                self.bytes = Vec::new();
            }
        }
        len
    }
}

/// Memory that an empty queue keeps, in bytes.
const KEPT: usize = 256 << 10;
