//! The PSK identities that a ClientHello offers (RFC 8446 §4.1.2, §4.2.11).

/// Returns the identities in a ClientHello without its header, at most [`MAX_OFFERED`]. Returns
/// none from a malformed message; the library reports that.
#[must_use]
pub(crate) fn identities(message: &[u8]) -> Vec<&[u8]> {
    let mut at = HelloReader(message);
    let Some(mut extensions) = at.extensions() else { return Vec::new() };
    while let Some((kind, body)) = extensions.extension() {
        if kind == PRE_SHARED_KEY {
            let Some(list) = HelloReader(body).with_length(2) else { return Vec::new() };
            let mut list = HelloReader(list);
            return std::iter::from_fn(|| list.identity()).take(MAX_OFFERED).collect();
        }
    }
    Vec::new()
}

struct HelloReader<'a>(&'a [u8]);

impl<'a> HelloReader<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    /// Reads a length of `width` bytes and a vector of that length.
    fn with_length(&mut self, width: usize) -> Option<&'a [u8]> {
        let len = self.bytes(width)?.iter().fold(0, |len, &byte| len << 8 | usize::from(byte));
        self.bytes(len)
    }

    /// Skips version, random, session identifier, cipher suites and compression methods, and
    /// returns the extensions.
    fn extensions(&mut self) -> Option<HelloReader<'a>> {
        self.bytes(2 + 32)?;
        self.with_length(1)?;
        self.with_length(2)?;
        self.with_length(1)?;
        self.with_length(2).map(HelloReader)
    }

    fn extension(&mut self) -> Option<(u16, &'a [u8])> {
        let kind = self.bytes(2)?;
        Some((u16::from_be_bytes([kind[0], kind[1]]), self.with_length(2)?))
    }

    /// Reads an identity and skips its obfuscated ticket age.
    fn identity(&mut self) -> Option<&'a [u8]> {
        let identity = self.with_length(2)?;
        self.bytes(4)?;
        Some(identity)
    }
}

const PRE_SHARED_KEY: u16 = 41;
/// Maximum number of identities that a server looks up for one client.
pub(crate) const MAX_OFFERED: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(psk: &[u8]) -> Vec<u8> {
        let mut hello = vec![3, 3];
        hello.extend([7; 32]);
        hello.extend([1, 9, 0, 2, 0x13, 1, 1, 0]);
        let mut extensions = vec![0, 43, 0, 3, 2, 3, 4, 0, 41];
        extensions.extend((psk.len() as u16).to_be_bytes());
        extensions.extend(psk);
        hello.extend((extensions.len() as u16).to_be_bytes());
        hello.extend(extensions);
        hello
    }

    #[test]
    fn identities_are_found_behind_everything_else() {
        let message = hello(&[0, 15, 0, 2, b'a', b'b', 0, 0, 0, 0, 0, 1, b'c', 0, 0, 0, 0, 0, 33, 32]);
        assert_eq!(identities(&message), [b"ab".as_slice(), b"c"]);
    }

    #[test]
    fn truncated_messages_and_wrong_lengths_offer_only_whole_identities() {
        let message = hello(&[0, 8, 0, 2, b'a', b'b', 0, 0, 0, 0, 0, 3, 2, 9, 9]);
        for len in 0..message.len() {
            assert!(identities(&message[..len]).is_empty(), "{len}");
            let mut spoilt = message.clone();
            spoilt[len] = 0xff;
            assert!(identities(&spoilt).len() <= 1);
        }
        assert!(identities(&hello(&[])).is_empty());
        assert!(identities(&hello(&[0, 3, 0, 9, 1])).is_empty());
    }

    #[test]
    fn the_number_of_identities_is_limited() {
        let many: Vec<u8> = [0, 1, b'x', 0, 0, 0, 0].repeat(MAX_OFFERED + 1);
        let mut psk = (many.len() as u16).to_be_bytes().to_vec();
        psk.extend(many);
        assert_eq!(identities(&hello(&psk)).len(), MAX_OFFERED);
    }
}
