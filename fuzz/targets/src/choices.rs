//! Inputs have two parts: bytes that choose the driver's actions, and the peer's stream.
//!
//! ```text
//!   count of choices (1 byte) │ choices │ stream
//! ```
//! A stream may contain [`RUN`], which expands to many equal bytes, so that a short input can
//! contain a long payload.

/// The choices of an input, which decide the driver's actions.
pub(crate) struct Choices<'a> {
    bytes: &'a [u8],
    /// Number of choices made.
    made: usize,
}

impl<'a> Choices<'a> {
    /// Splits `input` into choices and stream.
    pub(crate) fn split(input: &'a [u8]) -> (Choices<'a>, Vec<u8>) {
        let (count, rest) = input.split_first().unwrap_or((&0, &[]));
        let (bytes, stream) = rest.split_at(rest.len().min((*count).into()));
        (Choices { bytes, made: 0 }, expand(stream))
    }

    /// The next byte. After the last one they repeat with an offset, so that no driver makes the
    /// same choice forever; without any bytes all are 0.
    pub(crate) fn byte(&mut self) -> u8 {
        if self.bytes.is_empty() {
            return 0;
        }
        let (round, at) = (self.made / self.bytes.len(), self.made % self.bytes.len());
        self.made += 1;
        self.bytes[at].wrapping_add((round as u8).wrapping_mul(ROUND_STEP))
    }

    /// A number below `end`, at most 256.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end
    }

    /// One of `options`.
    pub(crate) fn of<T: Copy>(&mut self, options: &[T]) -> T {
        options[self.below(options.len())]
    }

    /// Whether every choice has been made at least once.
    pub(crate) fn are_used_up(&self) -> bool {
        self.made >= self.bytes.len()
    }
}

/// Replaces each run by its bytes, up to [`MAX_STREAM`].
fn expand(stream: &[u8]) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::with_capacity(stream.len()), stream);
    while let Some((&first, tail)) = rest.split_first() {
        let run = rest.strip_prefix(RUN).and_then(|run| run.split_first_chunk::<4>());
        if let Some(([a, b, c, fill], tail)) = run {
            let len = usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c);
            bytes.resize((bytes.len() + len).min(MAX_STREAM), *fill);
            rest = tail;
        } else {
            bytes.push(first);
            rest = tail;
        }
    }
    bytes
}

/// Begins a run: 24 bits of length and the byte to repeat follow.
const RUN: &[u8] = b"\xffRUN";

/// The maximum length of an expanded stream, in bytes.
const MAX_STREAM: usize = 1 << 20;

/// Odd, so that each byte takes every value in time.
const ROUND_STEP: u8 = 0x3b;
