//! Tracks record boundaries, which needs no key (RFC 8446 §5.1).

use blockmux_tls::HEADER_LEN;

/// The position within the current record.
#[derive(Default)]
pub(super) struct RecordBoundary {
    header: [u8; HEADER_LEN],
    /// Received bytes of the header.
    begun: usize,
    /// Missing bytes of the record's body.
    missing: usize,
}

impl RecordBoundary {
    /// Bytes to the end of the record's header or, if that is complete, to the end of the record;
    /// never 0.
    pub(super) fn missing(&self) -> usize {
        if self.missing > 0 { self.missing } else { HEADER_LEN - self.begun }
    }

    /// Whether no byte of the next record was received.
    pub(super) fn is_between(&self) -> bool {
        self.begun == 0 && self.missing == 0
    }

    /// Processes received bytes.
    pub(super) fn pass(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (part, rest) = bytes.split_at(self.missing().min(bytes.len()));
            bytes = rest;
            if self.missing > 0 {
                self.missing -= part.len();
                continue;
            }
            self.header[self.begun..][..part.len()].copy_from_slice(part);
            self.begun += part.len();
            if self.begun == HEADER_LEN {
                self.begun = 0;
                self.missing = usize::from(u16::from_be_bytes([self.header[3], self.header[4]]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_boundaries_are_found_for_any_split() {
        let records = [&[22, 3, 1, 0, 2, 7, 7][..], &[23, 3, 3, 0, 0], &[23, 3, 3, 1, 4], &[9; 260]].concat();
        let boundaries = [7, 12, 277];
        for step in 1..=records.len() {
            let mut boundary = RecordBoundary::default();
            let mut at = 0;
            for part in records.chunks(step) {
                boundary.pass(part);
                at += part.len();
                assert_eq!(boundary.is_between(), at == 0 || boundaries.contains(&at), "{step} {at}");
            }
        }
        // Receiving only the missing bytes stops at each boundary.
        let (mut boundary, mut at, mut met) = (RecordBoundary::default(), 0, Vec::new());
        while at < records.len() {
            let next = at + boundary.missing();
            boundary.pass(&records[at..next]);
            at = next;
            met.extend(boundary.is_between().then_some(at));
        }
        assert_eq!(met, boundaries);
    }
}
