//! Tests of whole target sessions: sequences of request and response PDUs.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod commands;
mod connections;
mod hostile;
mod logins;
mod logout;
mod reassign;
mod recovery;
mod text_and_nop;

use super::{IscsiTargetSession, LocalSessions};
use crate::digest;
use crate::driver::session::{Demand, ProtocolError, StreamSession};
use crate::exports::{Export, Exports, VolumeId};
use crate::iscsi::login::chap::{ChapAlgorithm, ChapCredentials, ChapSecret};
use crate::iscsi::name::Name;
use crate::iscsi::node::{Chap, IscsiAccess, IscsiNode, Portal, TargetNode};
use crate::iscsi::text;
use crate::scsi::{self, LogicalUnit, UnitIdentity};
use crate::testing::Pump;
use blockmux_volume::{MemVolume, Pool};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{BHS_LEN, Bhs, FLAG_FINAL, IscsiOpcode, RESERVED_TAG, U24, padding};
use std::sync::Arc;
use std::time::Instant;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

const TARGET: &str = "iqn.2026-11.com.example:disk";
const HIDDEN: &str = "iqn.2026-11.com.example:hidden";
const INITIATOR: &str = "iqn.2026-11.com.example:me";
const SIZE: u64 = 4 << 20;

/// A received PDU: header and data segment.
#[derive(Debug, Clone)]
struct TargetPdu {
    bhs: Bhs,
    data: Vec<u8>,
}

impl TargetPdu {
    fn as_a<T: FromBytes>(&self) -> T {
        T::read_from_bytes(self.bhs.as_bytes()).unwrap()
    }

    fn text(&self) -> Vec<(String, String)> {
        text::pairs(&self.data)
            .map(|pair| pair.map(|pair| (pair.key.to_owned(), pair.value.to_owned())).unwrap())
            .collect()
    }

    fn value(&self, key: &str) -> String {
        self.text().into_iter().find(|(name, _)| name == key).map(|(_, value)| value).unwrap_or_default()
    }
}

/// An initiator that sends PDUs and parses the responses.
struct ScriptedInitiator {
    pump: Pump<IscsiTargetSession>,
    header_digest: bool,
    data_digest: bool,
    cmd_sn: u32,
}

/// A target open to every initiator, with LUNs 0 and 1, and one for `INITIATOR` only, with CHAP.
fn node(chap: Option<Chap>) -> (Arc<IscsiNode>, Exports) {
    let volume = || Arc::new(MemVolume::new(SIZE));
    let export = |name: &str| Export {
        name: name.into(),
        description: String::new(),
        read_only: false,
        volume: volume(),
    };
    let exports = Exports::new(vec![export("a"), export("b")]);
    let unit = |at: u32| {
        let export = exports.get(VolumeId(at)).unwrap();
        LogicalUnit::new(UnitIdentity::of(&export.name), export.volume.clone())
    };
    let view = scsi::ScsiTarget::new(TARGET, Vec::new());
    let view = Arc::new(view.with_unit(0, VolumeId(0), unit(0)).with_unit(1, VolumeId(1), unit(1)));
    let portals = vec![
        Portal { address: "192.0.2.1:3260".parse().unwrap(), listener: 1, group_tag: 1 },
        Portal { address: "[2001:db8::1]:3260".parse().unwrap(), listener: 2, group_tag: 2 },
    ];
    let access = |initiator: Option<&str>, chap| IscsiAccess {
        initiator: initiator.map(|name| Name::new(name).unwrap()),
        chap,
        target: view.clone(),
    };
    let open = TargetNode::new(Name::new(TARGET).unwrap(), portals.clone(), vec![access(None, chap.clone())]);
    let hidden = TargetNode::new(
        Name::new(HIDDEN).unwrap(),
        vec![portals[0].clone()],
        vec![access(Some("iqn.2026-11.com.example:other"), chap)],
    );
    (Arc::new(IscsiNode::new(vec![open, hidden])), exports)
}

fn credentials(name: &str, secret: &str) -> ChapCredentials {
    ChapCredentials::new(name, ChapSecret::new(secret.as_bytes()).unwrap()).unwrap()
}

fn mutual_chap() -> Chap {
    Chap {
        initiator: credentials("user", "initiator-secret"),
        target: Some(credentials("target", "target-secret")),
        algorithms: ChapAlgorithm::ALL.to_vec(),
    }
}

impl ScriptedInitiator {
    /// A new connection, before the login.
    fn connect_to((node, exports): (Arc<IscsiNode>, Exports), pool: Pool) -> ScriptedInitiator {
        let session = IscsiTargetSession::new(node, 1, pool, [3; 32], Instant::now());
        let pump = Pump::new(session, &exports);
        ScriptedInitiator { pump, header_digest: false, data_digest: false, cmd_sn: 1 }
    }

    fn connect() -> ScriptedInitiator {
        ScriptedInitiator::connect_to(node(None), Pool::new(usize::MAX))
    }

    /// Logs in to the open target with these operational keys and clears its power-on unit
    /// attentions.
    fn log_in(keys: &str) -> ScriptedInitiator {
        let mut initiator = ScriptedInitiator::connect();
        initiator.enter(keys);
        for lun in [0, 1] {
            let [answer] = initiator.command(lun, &[0; 6], None, None).try_into().unwrap();
            assert_eq!(sense(&answer), (6, 0x2900));
        }
        initiator
    }

    fn enter(&mut self, keys: &str) {
        self.enter_as(INITIATOR, keys);
    }

    fn enter_as(&mut self, name: &str, keys: &str) {
        let text = format!("InitiatorName={name}\0TargetName={TARGET}\0SessionType=Normal\0{keys}");
        let response = self.login(0x87, text.as_bytes());
        assert_eq!(response.as_a::<IscsiLoginResponse>().status.get(), 0, "{:?}", response.text());
        self.header_digest = response.value("HeaderDigest") == "CRC32C";
        self.data_digest = response.value("DataDigest") == "CRC32C";
    }

    /// Sends a login request; returns the response.
    fn login(&mut self, flags: u8, text: &[u8]) -> TargetPdu {
        let [response] = self.exchange(&login_request(flags), text).try_into().unwrap();
        response
    }

    /// Sends a login request that fails; returns the status and the session's error.
    fn login_error(&mut self, request: &IscsiLoginRequest, text: &[u8]) -> (LoginStatus, ProtocolError) {
        let bytes = self.frame(request.as_bytes(), text);
        let error = self.pump.client_sends(&bytes).unwrap_err();
        let [response] = self.receive().try_into().unwrap();
        (LoginStatus(response.as_a::<IscsiLoginResponse>().status.get()), error)
    }

    fn send(&mut self, header: &(impl IntoBytes + Immutable), data: &[u8]) -> Result<(), ProtocolError> {
        let bytes = self.frame(header.as_bytes(), data);
        self.pump.client_sends(&bytes)
    }

    fn exchange(&mut self, header: &(impl IntoBytes + Immutable), data: &[u8]) -> Vec<TargetPdu> {
        self.send(header, data).expect("the initiator keeps to the protocol");
        self.receive()
    }

    /// Encodes a PDU with its DataSegmentLength.
    fn frame(&self, header: &[u8], data: &[u8]) -> Vec<u8> {
        let mut bhs = Bhs::read_from_bytes(header).unwrap();
        bhs.data_segment_length = U24::new(data.len() as u32);
        let mut bytes = bhs.as_bytes().to_vec();
        if self.header_digest {
            let digest = digest::of(&bytes);
            bytes.extend(digest);
        }
        let mut segment = data.to_vec();
        segment.resize(data.len() + padding(data.len()), 0);
        if self.data_digest && !data.is_empty() {
            let digest = digest::of(&segment);
            segment.extend(digest);
        }
        bytes.extend(segment);
        bytes
    }

    /// Parses all PDUs that the target has sent, and checks their digests.
    fn receive(&mut self) -> Vec<TargetPdu> {
        let bytes = self.pump.sent();
        let (mut rest, mut pdus) = (&bytes[..], Vec::new());
        while !rest.is_empty() {
            let bhs = Bhs::read_from_bytes(&rest[..BHS_LEN]).unwrap();
            // Login responses never have digests.
            let (header, data) = match bhs.opcode() {
                IscsiOpcode::LOGIN_RESPONSE => (false, false),
                _ => (self.header_digest, self.data_digest),
            };
            let mut at = BHS_LEN;
            if header {
                assert_eq!(digest::of(&rest[..at]), rest[at..at + 4]);
                at += 4;
            }
            let len = bhs.data_segment_length.get() as usize;
            let padded = at + len + padding(len);
            let segment = rest[at..at + len].to_vec();
            let mut end = padded;
            if data && len > 0 {
                assert_eq!(digest::of(&rest[at..padded]), rest[padded..padded + 4]);
                end += 4;
            }
            pdus.push(TargetPdu { bhs, data: segment });
            rest = &rest[end..];
        }
        pdus
    }

    /// A command header whose task tag is its CmdSN.
    fn request(&mut self, lun: u8, cdb: &[u8], reads: Option<u32>, writes: Option<u32>) -> ScsiCommand {
        let mut command = ScsiCommand::new_zeroed();
        command.opcode = IscsiOpcode::SCSI_COMMAND.0;
        command.flags = FLAG_FINAL | ATTR_SIMPLE;
        command.flags |= if reads.is_some() { FLAG_READ } else { 0 };
        command.flags |= if writes.is_some() { FLAG_WRITE } else { 0 };
        command.lun[1] = lun;
        command.initiator_task_tag = self.cmd_sn.into();
        command.expected_data_transfer_length = writes.or(reads).unwrap_or(0).into();
        command.cmd_sn = self.cmd_sn.into();
        command.cdb[..cdb.len()].copy_from_slice(cdb);
        self.cmd_sn += 1;
        command
    }

    fn command(&mut self, lun: u8, cdb: &[u8], reads: Option<u32>, data: Option<&[u8]>) -> Vec<TargetPdu> {
        let command = self.request(lun, cdb, reads, data.map(|data| data.len() as u32));
        self.exchange(&command, data.unwrap_or_default())
    }

    fn is_closed(&self) -> bool {
        matches!(self.pump.session.demand(), Demand::Close)
    }
}

fn login_request(flags: u8) -> IscsiLoginRequest {
    let mut request = IscsiLoginRequest::new_zeroed();
    request.opcode = IscsiOpcode::LOGIN_REQUEST.0 | 0x40;
    request.flags = flags;
    request.isid = [0x80, 1, 2, 3, 4, 5];
    request.cid = 7.into();
    request.cmd_sn = 1.into();
    request.exp_stat_sn = 100.into();
    request
}

fn data_out(itt: u32, ttt: u32, data_sn: u32, offset: u32, is_final: bool) -> DataOut {
    let mut pdu = DataOut::new_zeroed();
    pdu.opcode = IscsiOpcode::DATA_OUT.0;
    pdu.flags = if is_final { FLAG_FINAL } else { 0 };
    pdu.initiator_task_tag = itt.into();
    pdu.target_transfer_tag = ttt.into();
    pdu.data_sn = data_sn.into();
    pdu.buffer_offset = offset.into();
    pdu
}

fn read10(lba: u32, blocks: u16) -> [u8; 10] {
    cdb10(0x28, lba, blocks)
}

fn write10(lba: u32, blocks: u16) -> [u8; 10] {
    cdb10(0x2a, lba, blocks)
}

fn cdb10(opcode: u8, lba: u32, blocks: u16) -> [u8; 10] {
    let mut cdb = [0; 10];
    cdb[0] = opcode;
    cdb[2..6].copy_from_slice(&lba.to_be_bytes());
    cdb[7..9].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ (i >> 9) as u8).collect()
}

/// Sense key and code of a CHECK CONDITION.
fn sense(pdu: &TargetPdu) -> (u8, u16) {
    let response: ScsiResponse = pdu.as_a();
    assert_eq!((pdu.bhs.opcode(), response.status), (IscsiOpcode::SCSI_RESPONSE, 2), "{pdu:?}");
    let sense = &pdu.data[2..];
    assert_eq!(usize::from(u16::from_be_bytes([pdu.data[0], pdu.data[1]])), sense.len());
    (sense[2] & 0xf, u16::from_be_bytes([sense[12], sense[13]]))
}

fn assert_good(pdu: &TargetPdu) -> ScsiResponse {
    let response: ScsiResponse = pdu.as_a();
    assert_eq!((pdu.bhs.opcode(), response.status), (IscsiOpcode::SCSI_RESPONSE, 0), "{pdu:?}");
    response
}

fn reject_reason(pdu: &TargetPdu) -> RejectReason {
    assert_eq!((pdu.bhs.opcode(), pdu.data.len()), (IscsiOpcode::REJECT, BHS_LEN));
    RejectReason(pdu.as_a::<Reject>().reason)
}
