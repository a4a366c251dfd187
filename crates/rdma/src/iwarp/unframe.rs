//! Removes the markers from received FPDUs (RFC 5044 §4.3).
//!
//! Markers cost a copy of every byte: each FPDU is received whole and reassembled without its
//! markers.

use super::terminate::{BAD_MARKER, SHORT_FRAME, TerminateReason};
use blockmux_wire::iwarp::ddp::TAGGED_LEN;
use blockmux_wire::iwarp::mpa::{LENGTH_LEN, MARKER_INTERVAL, MARKER_LEN, Marker, fpdu_len};
use zerocopy::FromBytes;

/// Position in a stream with markers.
#[derive(Default)]
pub(super) struct Unframer {
    /// Bytes since the beginning of the last marker; 0 if one is due, and at first.
    position: usize,
    /// The last FPDU, without markers.
    fpdu: Vec<u8>,
}

/// Result of [`Unframer::take`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum UnframeStep {
    /// This many bytes are needed.
    Needs(usize),
    /// The FPDU is complete. It has this many bytes with its markers; [`Unframer::fpdu`] returns it
    /// without them.
    Whole(usize),
}

impl Unframer {
    /// The last complete FPDU, without markers.
    pub(super) fn fpdu(&self) -> &[u8] {
        &self.fpdu
    }

    /// Removes the markers of the FPDU at the beginning of `bytes`.
    ///
    /// # Errors
    /// If the FPDU's length or a marker is wrong.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<UnframeStep, TerminateReason> {
        let leading = if self.position == 0 { MARKER_LEN } else { 0 };
        let least = leading.saturating_add(LENGTH_LEN);
        let length = bytes.get(leading..).and_then(|rest| rest.first_chunk::<LENGTH_LEN>());
        let Some(length) = length else { return Ok(UnframeStep::Needs(least)) };
        let len = u16::from_be_bytes(*length);
        if usize::from(len) < TAGGED_LEN {
            return Err(SHORT_FRAME);
        }
        let total = fpdu_len(len);
        let begin = self.position.saturating_add(leading);
        // A marker that is due right after the FPDU belongs to the next one.
        let first = MARKER_INTERVAL.saturating_sub(begin);
        let markers = match total.checked_sub(first) {
            None | Some(0) => 0,
            Some(more) => more.div_ceil(MARKER_INTERVAL.saturating_sub(MARKER_LEN)),
        };
        let stuffed = leading.saturating_add(total).saturating_add(markers.saturating_mul(MARKER_LEN));
        let Some(bytes) = bytes.get(..stuffed) else { return Ok(UnframeStep::Needs(stuffed)) };
        self.remove(bytes)?;
        debug_assert_eq!(self.fpdu.len(), total);
        Ok(UnframeStep::Whole(stuffed))
    }

    fn remove(&mut self, mut bytes: &[u8]) -> Result<(), TerminateReason> {
        self.fpdu.clear();
        let mut back: usize = 0;
        while !bytes.is_empty() {
            if self.position == 0 {
                let (marker, rest) = Marker::read_from_prefix(bytes).map_err(|_| BAD_MARKER)?;
                if usize::from(marker.fpdu_ptr.get()) != back {
                    return Err(BAD_MARKER);
                }
                back = if back == 0 { 0 } else { back.saturating_add(MARKER_LEN) };
                (bytes, self.position) = (rest, MARKER_LEN);
            }
            let here = MARKER_INTERVAL.saturating_sub(self.position).min(bytes.len());
            let (now, rest) = bytes.split_at(here);
            self.fpdu.extend_from_slice(now);
            back = back.saturating_add(here);
            (bytes, self.position) = (rest, self.position.saturating_add(here) % MARKER_INTERVAL);
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::super::framing::Framer;
    use super::*;
    use blockmux_proto::driver::outbox::Outbox;
    use blockmux_volume::{Crc32c, Pool};

    /// FPDUs of these ULPDU lengths, with markers.
    fn stream(lens: &[usize]) -> Vec<u8> {
        let (mut framer, mut outbox) = (Framer::new(true, true, 65536, Pool::new(0)), Outbox::default());
        for len in lens {
            framer.begin(&mut outbox, *len, &[7; 14]);
            framer.put(&mut outbox, &vec![8; len - 14]);
            framer.finish(&mut outbox, *len);
        }
        outbox.take_bytes()
    }

    #[test]
    fn fpdus_are_restored_wherever_markers_fall() {
        let lens: Vec<usize> = (14..1600).chain([64902, 64901, 502, 502, 1010]).collect();
        let stream = stream(&lens);
        let (mut unframer, mut at) = (Unframer::default(), 0);
        for len in lens {
            let Ok(UnframeStep::Whole(taken)) = unframer.take(&stream[at..]) else { panic!("{len} at {at}") };
            let fpdu = unframer.fpdu();
            assert_eq!(fpdu.len(), fpdu_len(len as u16));
            assert_eq!(fpdu[..2], (len as u16).to_be_bytes());
            assert!(fpdu[2..16].iter().all(|byte| *byte == 7));
            assert!(fpdu[16..2 + len].iter().all(|byte| *byte == 8));
            let covered = &stream[at..at + taken - 4];
            assert_eq!(Crc32c::of(covered).to_le_bytes(), fpdu[fpdu.len() - 4..]);
            at += taken;
        }
        assert_eq!(at, stream.len());
    }

    #[test]
    fn it_reports_how_many_bytes_it_needs() {
        let stream = stream(&[600]);
        let mut unframer = Unframer::default();
        let mut needs = 0;
        while let Ok(UnframeStep::Needs(more)) = unframer.take(&stream[..needs]) {
            assert!(more > needs && more <= stream.len());
            needs = more;
        }
        assert_eq!(needs, stream.len());
    }

    #[test]
    fn a_marker_that_points_elsewhere_is_refused() {
        for at in [3, 514, 515] {
            let mut stream = stream(&[600]);
            stream[at] ^= 4;
            assert_eq!(Unframer::default().take(&stream), Err(BAD_MARKER), "{at}");
        }
        assert_eq!(Unframer::default().take(&[0, 0, 0, 0, 0, 13]), Err(SHORT_FRAME));
    }
}
