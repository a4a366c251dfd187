//! What members tell each other by notifications of the table's object, as bytes.
//!
//! ```text
//!   magic 7 | version u8 | kind u8 | generation u64 | of a beat: incarnation u64, count u64
//! ```
//! Numbers are big-endian. Anybody who may use the pool can send others: they are ignored.

use crate::member::Beat;
use crate::table::{Generation, Incarnation};

/// A notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A member is alive.
    Beat(Beat),
    /// A member has replaced the table by one of this generation.
    Changed(Generation),
}

impl Notice {
    /// The notification as bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (kind, generation) = match self {
            Notice::Beat(beat) => (BEAT, beat.generation),
            Notice::Changed(generation) => (CHANGED, *generation),
        };
        let mut bytes = [&MAGIC[..], &[VERSION, kind], &generation.0.to_be_bytes()].concat();
        if let Notice::Beat(beat) = self {
            bytes.extend(beat.incarnation.0.to_be_bytes());
            bytes.extend(beat.count.to_be_bytes());
        }
        bytes
    }

    /// Reads what [`Notice::encode`] has written; `None` if it is something else, or of a version
    /// that this program does not know.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Notice> {
        let ([version, kind], rest) = bytes.strip_prefix(MAGIC)?.split_first_chunk()?;
        let (generation, rest) = number(rest)?;
        let generation = Generation(generation);
        if *version != VERSION {
            return None;
        }
        match *kind {
            BEAT => {
                let (incarnation, rest) = number(rest)?;
                let (count, rest) = number(rest)?;
                let beat = Beat { incarnation: Incarnation(incarnation), count, generation };
                rest.is_empty().then_some(Notice::Beat(beat))
            }
            CHANGED => rest.is_empty().then_some(Notice::Changed(generation)),
            _ => None,
        }
    }
}

fn number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u64::from_be_bytes(*number), rest))
}

const MAGIC: &[u8; 7] = b"bmux-gn";
const VERSION: u8 = 1;
const BEAT: u8 = 1;
const CHANGED: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_has_one_encoding_and_other_bytes_are_none() {
        let beat = Beat { incarnation: Incarnation(7), count: u64::MAX, generation: Generation(3) };
        for notice in [Notice::Beat(beat), Notice::Changed(Generation(u64::MAX))] {
            let bytes = notice.encode();
            assert_eq!(Notice::decode(&bytes), Some(notice));
            for len in 0..bytes.len() {
                assert_eq!(Notice::decode(&bytes[..len]), None);
            }
            assert_eq!(Notice::decode(&[&bytes[..], &[0]].concat()), None);
            for at in 0..9 {
                let mut other = bytes.clone();
                other[at] ^= 0x40;
                assert_eq!(Notice::decode(&other), None);
            }
        }
    }
}
