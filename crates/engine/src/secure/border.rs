//! Where records end: so much of them as can be told without a key (RFC 8446 §5.1).

use blockmux_tls::HEADER_LEN;

/// How much is missing of the record that came last.
#[derive(Default)]
pub(super) struct Border {
    header: [u8; HEADER_LEN],
    /// Bytes of the header that are here.
    begun: usize,
    /// Bytes that are missing behind it.
    missing: usize,
}

impl Border {
    /// Bytes to the end of the header or, behind it, to that of the record; never none.
    pub(super) fn missing(&self) -> usize {
        if self.missing > 0 { self.missing } else { HEADER_LEN - self.begun }
    }

    /// Whether nothing has come of the next record.
    pub(super) fn is_between(&self) -> bool {
        self.begun == 0 && self.missing == 0
    }

    /// These bytes have come.
    pub(super) fn pass(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (here, rest) = bytes.split_at(self.missing().min(bytes.len()));
            bytes = rest;
            if self.missing > 0 {
                self.missing -= here.len();
                continue;
            }
            self.header[self.begun..][..here.len()].copy_from_slice(here);
            self.begun += here.len();
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
    fn borders_are_found_however_bytes_come() {
        let records = [&[22, 3, 1, 0, 2, 7, 7][..], &[23, 3, 3, 0, 0], &[23, 3, 3, 1, 4], &[9; 260]].concat();
        let borders = [7, 12, 277];
        for step in 1..=records.len() {
            let mut border = Border::default();
            let mut at = 0;
            for part in records.chunks(step) {
                border.pass(part);
                at += part.len();
                assert_eq!(border.is_between(), at == 0 || borders.contains(&at), "{step} {at}");
            }
        }
        // And whoever takes only what is missing meets each of them.
        let (mut border, mut at, mut met) = (Border::default(), 0, Vec::new());
        while at < records.len() {
            let next = at + border.missing();
            border.pass(&records[at..next]);
            at = next;
            met.extend(border.is_between().then_some(at));
        }
        assert_eq!(met, borders);
    }
}
