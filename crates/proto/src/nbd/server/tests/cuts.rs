//! Tests with the client's bytes cut at any place, and with changed bytes.

use super::*;
use std::time::Instant;

/// A whole session: handshake, all commands in one form, valid and invalid, and the disconnect. A
/// client that does not request `infos` need not respect the block sizes.
fn everything(headers: Option<Opt>, infos: &[Info]) -> Vec<u8> {
    let ext = headers == Some(Opt::NBD_OPT_EXTENDED_HEADERS);
    let head = |command, flags, offset, length: u32| match ext {
        true => ext_request(command, flags, offset, length.into()),
        false => request(command, flags, offset, length),
    };
    let payload = if ext { CmdFlags::PAYLOAD_LEN.bits() } else { 0 };
    let mut bytes = FLAGS.to_vec();
    bytes.extend(option(Opt::NBD_OPT_LIST, b""));
    bytes.extend(option(Opt(99), b"what is this"));
    if let Some(headers) = headers {
        bytes.extend(option(headers, b""));
        let data = context_data("", &["base:allocation"]);
        bytes.extend(option(Opt::NBD_OPT_LIST_META_CONTEXT, &data));
        bytes.extend(option(Opt::NBD_OPT_SET_META_CONTEXT, &data));
    }
    bytes.extend(option(Opt::NBD_OPT_INFO, &info_data("frozen", &[Info::NBD_INFO_NAME])));
    bytes.extend(option(Opt::NBD_OPT_GO, &info_data("disk0", infos)));
    for (offset, len) in [(512, 512), (SIZE, 512), (65536, 66 << 10)] {
        bytes.extend(head(Cmd::NBD_CMD_WRITE, payload, offset, len));
        bytes.extend(pattern(len as usize));
    }
    for command in [Cmd::NBD_CMD_READ, Cmd::NBD_CMD_TRIM, Cmd::NBD_CMD_CACHE, Cmd::NBD_CMD_BLOCK_STATUS] {
        bytes.extend(head(command, 0, 512, 1024));
        bytes.extend(head(command, 0, 512, 1));
    }
    bytes.extend(head(Cmd::NBD_CMD_FLUSH, 0, 0, 0));
    bytes.extend(head(Cmd(55), 0, 0, 0));
    bytes.extend(head(Cmd::NBD_CMD_DISC, 0, 0, 0));
    bytes
}

const FORMS: [Option<Opt>; 3] =
    [None, Some(Opt::NBD_OPT_STRUCTURED_REPLY), Some(Opt::NBD_OPT_EXTENDED_HEADERS)];

/// The target's answer to `parts`, of which it receives at most `step` bytes at a time. I/O
/// completes after all bytes were received, so that the order of replies does not depend on the
/// cuts.
fn answers(parts: &[&[u8]], step: usize) -> Vec<u8> {
    let mut session = connect().split_at(step);
    session.holds_io = true;
    parts.iter().for_each(|part| session.client_sends(part).unwrap());
    assert!(is_closed(&session));
    while !session.submitted.is_empty() {
        session.finish_one();
    }
    session.sent()
}

#[test]
fn a_session_is_the_same_however_its_bytes_are_cut() {
    for headers in FORMS {
        let bytes = everything(headers, &[Info::NBD_INFO_BLOCK_SIZE]);
        let whole = answers(&[&bytes], usize::MAX);
        for step in (1..70).chain([4095, 4096, 65_536, 65_564]) {
            assert!(answers(&[&bytes], step) == whole, "{headers:?} in steps of {step}");
        }
        // Every cut except for those inside the long payload.
        for cut in (0..1700).chain(bytes.len() - 400..bytes.len()) {
            let (front, back) = bytes.split_at(cut);
            assert!(answers(&[front, back], usize::MAX) == whole, "{headers:?} cut at {cut}");
        }
    }
}

proptest! {
    #[test]
    fn bytes_with_errors_never_panic(
        headers in 0..3usize,
        asks: bool,
        flips in prop::collection::vec((0..1_000_000usize, any::<u8>()), 1..8),
        step in 1..5000usize,
    ) {
        let infos = if asks { &[Info::NBD_INFO_BLOCK_SIZE][..] } else { &[] };
        let mut bytes = everything(FORMS[headers], infos);
        let len = bytes.len();
        // Bytes of the long payload stay unchanged: headers are what matters.
        for (at, value) in flips {
            let at = at % (len - (66 << 10));
            bytes[if at < 1300 { at } else { at + (66 << 10) }] = value;
        }
        let mut session = connect().split_at(step);
        let _ = session.client_sends(&bytes);
        let _ = session.session.on_end(Instant::now());
    }

    #[test]
    fn arbitrary_options_never_panic(opt in 0..13u32, data in prop::collection::vec(any::<u8>(), 0..64)) {
        let mut session = haggle();
        session.exchange(&option(Opt::NBD_OPT_STRUCTURED_REPLY, b""));
        let _ = session.client_sends(&option(Opt(opt), &data));
    }
}
