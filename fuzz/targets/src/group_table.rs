//! The table of a gateway group, as an object may have it, and notifications about it.

use blockmux_group::table::HEAD_LEN;
use blockmux_group::{Notice, Table};
use blockmux_volume::Crc32c;

/// Bytes are refused, or they are the encoding of the table that they are read as; also with the
/// right sum.
pub(crate) fn group_table(input: &[u8]) {
    if let Some(notice) = Notice::decode(input) {
        assert_eq!(notice.encode(), input);
    }
    reads_back(input);
    let mut bytes = input.to_vec();
    if let Some((head, body)) = bytes.split_at_mut_checked(HEAD_LEN + 4) {
        let sum = Crc32c::of(body).value().to_be_bytes();
        head[HEAD_LEN..].copy_from_slice(&sum);
    }
    reads_back(&bytes);
}

fn reads_back(bytes: &[u8]) {
    if let Ok(table) = Table::decode(bytes) {
        assert_eq!(table.encode(), bytes);
    }
}
