//! A hostile peer's stream as records: `kind (1) │ length (2, big-endian) │ bytes`. Some kinds have
//! no bytes.

/// The rest of a stream.
pub(crate) struct Records<'a>(pub(crate) &'a [u8]);

impl Records<'_> {
    /// The kind of the next record.
    pub(crate) fn kind(&mut self) -> Option<u8> {
        let (&kind, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(kind)
    }

    /// The bytes of the record, or fewer if the stream ends.
    pub(crate) fn bytes(&mut self) -> Vec<u8> {
        let len = self.0.first_chunk().map_or(0, |len| usize::from(u16::from_be_bytes(*len)));
        let rest = self.0.get(2..).unwrap_or_default();
        let (bytes, rest) = rest.split_at(len.min(rest.len()));
        self.0 = rest;
        bytes.to_vec()
    }

    pub(crate) fn are_over(&self) -> bool {
        self.0.is_empty()
    }
}
