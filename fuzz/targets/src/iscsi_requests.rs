//! Contents of valid PDUs of an initiator: keys of logins and texts, and CDBs with their data. The
//! PDU headers are built here, so that no input is wasted on an invalid length or number, as most
//! of `iscsi_target` are.
//!
//! ```text
//!   iscsi_login    records: kind (1) │ length (2) │ text
//!   scsi_commands  records: LUN (1) │ flags (1) │ expected length (3) │ data length (2) │ CDB (16) │ data
//! ```

use crate::choices::Choices;
use crate::iscsi_target::drive;
use blockmux_proto::iscsi::text::{TextBuilder, TextError, pairs, parse_binary, parse_list, parse_number};
use blockmux_wire::iscsi::scsi::{ATTR_MASK, FLAG_READ, FLAG_WRITE, ScsiCommand};
use blockmux_wire::iscsi::session::{IscsiLoginRequest, TextRequest};
use blockmux_wire::iscsi::{Bhs, FLAG_FINAL, FLAG_IMMEDIATE, IscsiOpcode, RESERVED_TAG, U24, padding};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Reads `data` as choices and the texts of login requests, then of text requests.
pub(crate) fn iscsi_login(data: &[u8]) {
    let (choices, records) = Choices::split(data);
    let (mut stream, mut rest) = (Vec::new(), &records[..]);
    while let Some(([kind, high, low], tail)) = rest.split_first_chunk::<3>() {
        let len = usize::from(u16::from_be_bytes([*high, *low])).min(tail.len()).min(MAX_SEGMENT);
        let (text, tail) = tail.split_at(len);
        rest = tail;
        reads_back(text);
        let request = if kind & IS_TEXT == 0 { login_request(*kind) } else { text_request(*kind) };
        push_pdu(&mut stream, &request, text);
    }
    drive(choices, stream);
}

/// Reads `data` as choices and commands of a session that has logged in.
pub(crate) fn scsi_commands(data: &[u8]) {
    let (choices, records) = Choices::split(data);
    let mut stream = Vec::new();
    push_pdu(&mut stream, &login_request(STRAIGHT_IN), NAMES);
    let (mut rest, mut cmd_sn) = (&records[..], 1_u32);
    while let Some((head, tail)) = rest.split_first_chunk::<23>() {
        let [lun, flags, a, b, c, high, low, cdb @ ..] = *head;
        let len = usize::from(u16::from_be_bytes([high, low])).min(tail.len()).min(MAX_SEGMENT);
        let (data, tail) = tail.split_at(len);
        rest = tail;
        let mut command = ScsiCommand::new_zeroed();
        command.opcode = IscsiOpcode::SCSI_COMMAND.0;
        command.flags = FLAG_FINAL | flags & (FLAG_READ | FLAG_WRITE | ATTR_MASK);
        command.lun[1] = lun;
        command.initiator_task_tag = cmd_sn.into();
        command.expected_data_transfer_length = u32::from_be_bytes([0, a, b, c]).into();
        command.cmd_sn = cmd_sn.into();
        command.cdb = cdb;
        cmd_sn += 1;
        push_pdu(&mut stream, command.as_bytes(), data);
    }
    drive(choices, stream);
}

/// Checks that parsed keys are written in a form that parses to the same.
fn reads_back(text: &[u8]) {
    let Ok(found) = pairs(text).collect::<Result<Vec<_>, TextError>>() else { return };
    let mut written = TextBuilder::default();
    for pair in &found {
        written.push(pair.key, pair.value);
        let number = parse_number(pair.value);
        assert!(number.is_none_or(|number| parse_number(&number.to_string()) == Some(number)));
        assert!(parse_binary(pair.value, MAX_BINARY).is_none_or(|bytes| bytes.len() <= MAX_BINARY));
        assert!(parse_list(pair.value).all(|item| !item.contains(',')));
    }
    let again = pairs(written.as_bytes()).map(|pair| pair.expect("the written text consists of keys"));
    assert!(again.eq(found), "the written keys parse to others");
}

fn login_request(flags: u8) -> Vec<u8> {
    let mut request = IscsiLoginRequest::new_zeroed();
    request.opcode = IscsiOpcode::LOGIN_REQUEST.0 | FLAG_IMMEDIATE;
    request.flags = flags;
    request.isid = [0x80, 1, 2, 3, 4, 5];
    request.cmd_sn = 1.into();
    request.as_bytes().to_vec()
}

fn text_request(flags: u8) -> Vec<u8> {
    let mut request = TextRequest::new_zeroed();
    request.opcode = IscsiOpcode::TEXT_REQUEST.0 | FLAG_IMMEDIATE;
    // Bits F and C of a text request have the positions of a login's T and C.
    request.flags = flags & 0xc0;
    request.initiator_task_tag = 7.into();
    request.target_transfer_tag = RESERVED_TAG.into();
    request.cmd_sn = 1.into();
    request.as_bytes().to_vec()
}

/// Appends a PDU with this header and data.
fn push_pdu(stream: &mut Vec<u8>, header: &[u8], data: &[u8]) {
    let mut bhs = Bhs::read_from_bytes(header).expect("a header has 48 bytes");
    bhs.data_segment_length = U24::new(data.len() as u32);
    stream.extend(bhs.as_bytes());
    stream.extend(data);
    stream.resize(stream.len() + padding(data.len()), 0);
}

/// A bit of a record's kind that no login request has.
const IS_TEXT: u8 = 0x10;
/// Login flags of a transit from operational negotiation to full feature phase.
const STRAIGHT_IN: u8 = 0x87;
const NAMES: &[u8] = b"InitiatorName=iqn.2026-11.i:me\0TargetName=iqn.2026-11.t:a\0SessionType=Normal\0";
/// Maximum data segment before negotiation, in bytes.
const MAX_SEGMENT: usize = 8192;
/// Maximum length of a decoded binary value, in bytes.
const MAX_BINARY: usize = 16;
