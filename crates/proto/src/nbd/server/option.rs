//! Parsing the data of options, in the receive buffer (proto.md, "Option types").

use blockmux_wire::nbd::NBD_MAX_STRING;
use blockmux_wire::nbd::handshake::Info;

/// Option data with a syntax error, which the text describes for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MalformedOption(pub(super) &'static str);

/// The data of `NBD_OPT_INFO` and `NBD_OPT_GO`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InfoRequest<'a> {
    /// Empty for the default export.
    pub(super) name: &'a str,
    /// `NBD_INFO_*`, big-endian; unknown values are ignored.
    infos: &'a [[u8; 2]],
}

impl<'a> InfoRequest<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Result<InfoRequest<'a>, MalformedOption> {
        let mut fields = OptionFields(data);
        let name = fields.string()?;
        let count = fields.array::<2>().map(u16::from_be_bytes)?;
        let (infos, rest) = fields.0.as_chunks::<2>();
        if infos.len() != usize::from(count) || !rest.is_empty() {
            return Err(MalformedOption("the list of information requests has another length"));
        }
        Ok(InfoRequest { name, infos })
    }

    /// Whether the client requested `info`.
    pub(super) fn asks_for(&self, info: Info) -> bool {
        self.infos.iter().any(|bytes| u16::from_be_bytes(*bytes) == info.0)
    }
}

/// The data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MetaContextRequest<'a> {
    /// Empty for the default export.
    pub(super) name: &'a str,
    /// Whether there is no query: a list then contains every context, a selection none.
    pub(super) is_open: bool,
    /// Whether one of the queries is [`BASE_ALLOCATION`].
    pub(super) names_base_allocation: bool,
    /// Whether one of the queries is `base:`, a wildcard in a list.
    pub(super) names_base: bool,
}

impl<'a> MetaContextRequest<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Result<MetaContextRequest<'a>, MalformedOption> {
        let mut fields = OptionFields(data);
        let name = fields.string()?;
        let count = fields.array::<4>().map(u32::from_be_bytes)?;
        let mut request =
            MetaContextRequest { name, is_open: count == 0, names_base_allocation: false, names_base: false };
        // Each query takes at least 4 bytes of the data, which bounds the loop whatever the count
        // says.
        for _ in 0..count {
            match fields.string()? {
                BASE_ALLOCATION => request.names_base_allocation = true,
                "base:" => request.names_base = true,
                // The document requires other namespaces and other leaves of this one to be
                // ignored.
                query if query.contains(':') => {}
                _ => return Err(MalformedOption("a query without namespace")),
            }
        }
        match fields.0 {
            [] => Ok(request),
            _ => Err(MalformedOption("bytes after the last query")),
        }
    }
}

/// Reads the fields of option data from the front.
struct OptionFields<'a>(&'a [u8]);

impl<'a> OptionFields<'a> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], MalformedOption> {
        let (array, rest) =
            self.0.split_first_chunk().ok_or(MalformedOption("the data ends within a field"))?;
        self.0 = rest;
        Ok(*array)
    }

    /// Reads a string: a 32-bit length, then UTF-8.
    fn string(&mut self) -> Result<&'a str, MalformedOption> {
        let length = u32::from_be_bytes(self.array()?) as usize;
        let (bytes, rest) =
            self.0.split_at_checked(length).ok_or(MalformedOption("the data ends within a string"))?;
        self.0 = rest;
        string(bytes)
    }
}

/// Checks a string (proto.md, "Conventions"): UTF-8 without NUL, at most 4096 bytes.
pub(super) fn string(bytes: &[u8]) -> Result<&str, MalformedOption> {
    if bytes.len() > NBD_MAX_STRING {
        return Err(MalformedOption("a string is longer than 4096 bytes"));
    }
    if bytes.contains(&0) {
        return Err(MalformedOption("a string contains NUL"));
    }
    str::from_utf8(bytes).map_err(|_| MalformedOption("a string is not UTF-8"))
}

/// The only metadata context that the server offers.
pub(super) const BASE_ALLOCATION: &str = "base:allocation";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_info_request_has_a_name_and_a_list() {
        let data = b"\0\0\0\x04disk\0\x02\0\x03\0\x63";
        let request = InfoRequest::parse(data).unwrap();
        assert_eq!(request.name, "disk");
        assert!(request.asks_for(Info::NBD_INFO_BLOCK_SIZE) && !request.asks_for(Info::NBD_INFO_NAME));
    }

    #[test]
    fn a_truncated_or_longer_info_request_is_malformed() {
        let data = b"\0\0\0\x04disk\0\x02\0\x03\0\x63\0";
        for len in (0..data.len() + 1).filter(|len| *len != data.len() - 1) {
            assert!(InfoRequest::parse(&data[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn a_context_request_is_parsed_to_the_named_contexts() {
        let parse = |data| MetaContextRequest::parse(data).unwrap();
        let open = parse(b"\0\0\0\0\0\0\0\0");
        assert!(open.is_open && !open.names_base && !open.names_base_allocation);
        let both = parse(b"\0\0\0\x01d\0\0\0\x03\0\0\0\x0fbase:allocation\0\0\0\x05base:\0\0\0\x04x-a:");
        assert!(both.name == "d" && !both.is_open && both.names_base && both.names_base_allocation);
        let unknown = parse(b"\0\0\0\0\0\0\0\x01\0\0\0\x08base:not");
        assert!(!unknown.is_open && !unknown.names_base && !unknown.names_base_allocation);
    }

    #[test]
    fn a_context_request_must_be_whole() {
        let data = b"\0\0\0\x01d\0\0\0\x01\0\0\0\x0fbase:allocation\0";
        for len in (0..data.len() + 1).filter(|len| *len != data.len() - 1) {
            assert!(MetaContextRequest::parse(&data[..len]).is_err(), "{len} bytes");
        }
        assert!(MetaContextRequest::parse(b"\0\0\0\0\0\0\0\x01\0\0\0\x03abc").is_err());
        assert!(MetaContextRequest::parse(b"\0\0\0\0\xff\xff\xff\xff").is_err());
    }

    #[test]
    fn strings_are_short_utf_8_without_nul() {
        assert_eq!(string("größe".as_bytes()), Ok("größe"));
        assert!(string(&[b'a'; 4096]).is_ok() && string(&[b'a'; 4097]).is_err());
        assert!(string(b"a\0b").is_err() && string(b"\xff").is_err());
    }
}
