//! A trace of Linux 6.12's ib_iser with ib_isert over siw, replayed against this target.
//!
//! The trace has a line for each message and each transfer: `?` and `!` are the private data of
//! both sides; `>` and `<` messages with their iSER header and BHS (and the text of a login, with
//! `|` after each pair); `w` and `r` RDMA Writes and Reads of the target, with tag, offset and
//! length. It does not contain block data, which a pattern replaces.

use crate::bench::{ManualSession, ServedTarget, TargetEnd, pattern};
use blockmux_proto::iscsi::node::offer;
use blockmux_proto::iscsi::server::IserTargetSession;
use blockmux_proto::rdma::{Event, RdmaSession, Remote, Stag, WorkRequest};
use blockmux_wire::iscsi::scsi::{ScsiCommand, ScsiResponse};
use blockmux_wire::iscsi::session::{IscsiLoginRequest, IscsiLoginResponse};
use blockmux_wire::iscsi::{Bhs, IscsiOpcode};
use blockmux_wire::iser::ControlHeader;
use std::collections::BTreeMap;
use std::time::Instant;
use zerocopy::{FromBytes, Immutable, IntoBytes};

const TRACE: &str = include_str!("linux-6.12-siw.txt");

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// A line of the trace.
struct TraceLine<'a> {
    kind: &'a str,
    words: Vec<&'a str>,
    text: &'a str,
}

fn lines() -> impl Iterator<Item = TraceLine<'static>> {
    TRACE.lines().map(|line| {
        let mut parts = line.splitn(4, ' ');
        let kind = parts.next().unwrap();
        let words = parts.by_ref().take(2).collect();
        TraceLine { kind, words, text: parts.next().unwrap_or_default() }
    })
}

/// Decodes these bytes to a wire structure, and encodes them again.
fn again<T: FromBytes + IntoBytes + Immutable>(bytes: &[u8]) -> Vec<u8> {
    T::read_from_bytes(bytes).unwrap().as_bytes().to_vec()
}

#[test]
fn every_message_of_linux_is_decoded_and_encoded_to_the_same_bytes() {
    let mut count = 0;
    for line in lines().filter(|line| line.kind == ">" || line.kind == "<") {
        let (header, pdu) = (bytes(line.words[0]), bytes(line.words[1]));
        assert_eq!(again::<ControlHeader>(&header), header);
        let header = ControlHeader::read_from_bytes(&header).unwrap();
        let mut built = ControlHeader::new();
        if let Some((stag, offset)) = header.write() {
            built = built.with_write(stag, offset);
        }
        if let Some((stag, offset)) = header.read() {
            built = built.with_read(stag, offset);
        }
        assert_eq!(built, header);
        let encoded = match Bhs::read_from_bytes(&pdu).unwrap().opcode() {
            IscsiOpcode::LOGIN_REQUEST => again::<IscsiLoginRequest>(&pdu),
            IscsiOpcode::LOGIN_RESPONSE => again::<IscsiLoginResponse>(&pdu),
            IscsiOpcode::SCSI_COMMAND => again::<ScsiCommand>(&pdu),
            IscsiOpcode::SCSI_RESPONSE => again::<ScsiResponse>(&pdu),
            other => panic!("{other:?}"),
        };
        assert_eq!(encoded, pdu);
        count += 1;
    }
    assert_eq!(count, 72);
}

/// A target's transfers for one command, and the tag that its response invalidated.
#[derive(Debug, Default, PartialEq, Eq)]
struct CommandTrace {
    written: Option<(Stag, u64)>,
    read: Option<Remote>,
    closed: Option<Stag>,
}

fn remote(line: &TraceLine<'_>) -> Remote {
    let stag = Stag(u32::from_str_radix(line.words[0], 16).unwrap());
    let address = u64::from_str_radix(line.words[1], 16).unwrap();
    Remote { stag, address, len: line.text.parse().unwrap() }
}

/// The transfers of Linux's target, by task tag.
fn transfers_of_linux() -> BTreeMap<u32, CommandTrace> {
    let (mut doings, mut open) = (BTreeMap::new(), Vec::new());
    // The tag in a command's header assigns transfers to commands.
    let mut by_stag = BTreeMap::new();
    for line in lines() {
        match line.kind {
            ">" => {
                let header = ControlHeader::read_from_bytes(&bytes(line.words[0])).unwrap();
                let bhs = Bhs::read_from_bytes(&bytes(line.words[1])).unwrap();
                let itt = bhs.initiator_task_tag.get();
                doings.insert(itt, CommandTrace::default());
                if let Some((stag, _)) = header.read().or(header.write()) {
                    by_stag.insert(stag, itt);
                }
                open.push(itt);
            }
            "<" => {
                let bhs = Bhs::read_from_bytes(&bytes(line.words[1])).unwrap();
                let transfers = doings.get_mut(&bhs.initiator_task_tag.get()).unwrap();
                let closes = line.text.strip_prefix("closes ");
                transfers.closed = closes.map(|stag| Stag(u32::from_str_radix(stag, 16).unwrap()));
            }
            "w" | "r" => {
                let remote = remote(&line);
                let transfers = doings.get_mut(&by_stag[&remote.stag.0]).unwrap();
                match line.kind {
                    "w" => transfers.written = Some((remote.stag, remote.address)),
                    _ => transfers.read = Some(remote),
                }
            }
            _ => {}
        }
    }
    assert_eq!(open.len(), doings.len());
    doings
}

/// Executes the target's transfers until it responds; returns them, the response, its data, and the
/// read data.
fn answer(server: &mut TargetEnd<ManualSession<IserTargetSession>>) -> (CommandTrace, Bhs, Vec<u8>, Vec<u8>) {
    let (mut transfers, mut data_in) = (CommandTrace::default(), Vec::new());
    loop {
        server.run();
        match server.driven.works.front() {
            Some(WorkRequest::Send { .. }) => break,
            None => panic!("no answer"),
            Some(_) => {}
        }
        match server.driven.works.pop_front() {
            Some(WorkRequest::Write { id, local, remote }) => {
                assert!(local.len() <= remote.len as usize);
                transfers.written = Some((remote.stag, remote.address));
                data_in = local.to_vec();
                server.driven.session.on_event(Event::Done { id, result: Ok(()) }, Instant::now()).unwrap();
            }
            Some(WorkRequest::Read { id, local, remote }) => {
                transfers.read = Some(remote);
                let all = pattern(8192 + local.len());
                local.copy_from(&all[8192..]);
                server.driven.session.on_event(Event::Done { id, result: Ok(()) }, Instant::now()).unwrap();
            }
            other => panic!("{other:?}"),
        }
    }
    let (closed, header, bhs, data) = server.driven.message();
    assert_eq!(header, ControlHeader::new());
    transfers.closed = closed;
    (transfers, bhs, data, data_in)
}

#[test]
fn this_target_responds_to_linux_as_linuxs_target_does() {
    let served = ServedTarget::named("iqn.2026-11.vmh:lio", offer(), None);
    let mut server = TargetEnd::new(&served, ManualSession::new(served.session()));
    let linux = transfers_of_linux();
    let mut commands = 0;
    for line in lines() {
        match line.kind {
            "?" => {
                let private_data = bytes(line.words[0]);
                server
                    .driven
                    .session
                    .on_event(Event::Requested { private_data, reads: 32 }, Instant::now())
                    .unwrap();
                server.run();
            }
            "!" => {
                let Some(WorkRequest::Accept { private_data }) = server.driven.works.pop_front() else {
                    panic!()
                };
                assert_eq!(private_data, bytes(line.words[0]));
            }
            ">" => {
                let mut message = bytes(line.words[0]);
                let pdu = bytes(line.words[1]);
                let bhs = Bhs::read_from_bytes(&pdu).unwrap();
                message.extend(&pdu);
                let len = bhs.data_segment_length.get() as usize;
                match bhs.opcode() {
                    IscsiOpcode::LOGIN_REQUEST => {
                        message.extend(format!("{}\0", line.text.replace('|', "\0")).bytes())
                    }
                    _ => message.extend(pattern(len)),
                }
                message.resize(message.len().next_multiple_of(4), 0);
                server.driven.receive(&message, None).unwrap();
                let (transfers, response, data, data_in) = answer(&mut server);
                let itt = bhs.initiator_task_tag.get();
                assert_eq!(response.initiator_task_tag.get(), itt);
                if bhs.opcode() == IscsiOpcode::LOGIN_REQUEST {
                    check_login(&response, &data);
                    continue;
                }
                check(&pdu, &response, &transfers, &linux[&itt], &data_in);
                commands += 1;
            }
            _ => {}
        }
    }
    assert_eq!(commands, 35);
}

/// Checks the negotiated keys in the login response.
fn check_login(response: &Bhs, data: &[u8]) {
    let response = IscsiLoginResponse::read_from_bytes(response.as_bytes()).unwrap();
    assert_eq!((response.status.get(), response.flags), (0, 0x87));
    let text = String::from_utf8(data.to_vec()).unwrap();
    let said: Vec<&str> = text.split('\0').collect();
    for pair in [
        "RDMAExtensions=Yes",
        "InitiatorRecvDataSegmentLength=262144",
        "TargetRecvDataSegmentLength=8192",
        "FirstBurstLength=8192",
        "ImmediateData=Yes",
        "ErrorRecoveryLevel=0",
    ] {
        assert!(said.contains(&pair), "{pair} is not in {said:?}");
    }
    assert!(!text.contains("MaxRecvDataSegmentLength") && !text.contains("NotUnderstood"), "{text}");
}

/// Compares a response and its transfers with those of Linux's target.
fn check(pdu: &[u8], response: &Bhs, transfers: &CommandTrace, linux: &CommandTrace, data_in: &[u8]) {
    let command = ScsiCommand::read_from_bytes(pdu).unwrap();
    let response = ScsiResponse::read_from_bytes(response.as_bytes()).unwrap();
    assert_eq!(response.opcode, IscsiOpcode::SCSI_RESPONSE.0);
    assert_eq!((response.exp_data_sn.get(), response.exp_cmd_sn.get()), (0, command.cmd_sn.get() + 1));
    if response.status != 0 {
        // The first command gets the power-on unit attention, and Linux asks for pages that only
        // one of the targets has.
        assert_eq!(transfers.closed, linux.closed);
        return;
    }
    if linux.written.is_some() {
        assert_eq!(transfers.written, linux.written);
    }
    assert_eq!((transfers.read, transfers.closed), (linux.read, linux.closed));
    if command.cdb[0] == 0x28 && command.cmd_sn.get() >= 0x1d {
        let len = command.expected_data_transfer_length.get() as usize;
        assert!(data_in == pattern(len), "the read returns the written data");
    }
}
