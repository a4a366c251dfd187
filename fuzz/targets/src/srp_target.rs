//! A hostile initiator against the SRP target.
//!
//! Bit 1 of the first choice: the first record is the private data of the login. Bits of a record's
//! kind: 1, use a free tag.

use crate::choices::Choices;
use crate::iscsi_target::exports;
use crate::rdma_target_side::{RdmaProtocolChecks, RdmaRun};
use crate::records::Records;
use blockmux_proto::exports::Exports;
use blockmux_proto::names::networks::AllowedNetworks;
use blockmux_proto::scsi::{LogicalUnit, ScsiTarget, TargetPort, UnitIdentity};
use blockmux_proto::srp::node::{SrpAccess, SrpNode, SrpPortId, SrpTarget};
use blockmux_proto::srp::server::SrpTargetSession;
use blockmux_volume::{Pool, SgList};
use blockmux_wire::srp::{
    BUFFER_FORMAT_DIRECT, IMMEDIATE_REQUESTED, LoginRequestRdma, LoginResponse, SrpHeader, SrpOpcode,
    SrpResponse,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// Reads `data` as choices and messages.
pub(crate) fn srp_target(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let exports = exports();
    let pool = Pool::new(choices.of(&[usize::MAX, 64 << 10, 128 << 10, 4 << 20]));
    let now = Instant::now();
    let mut messages = Records(&stream);
    let private_data = if choices.byte() & 1 != 0 {
        messages.kind();
        messages.bytes()
    } else {
        login().as_bytes().to_vec()
    };
    let session = SrpTargetSession::new(node(&exports), pool.clone(), Arc::new(|| {}), now);
    let checks = Srp { tag: 0, credits: 0 };
    RdmaRun::drive((choices, messages.0), (session, exports), checks, private_data, (pool, now));
}

fn login() -> LoginRequestRdma {
    LoginRequestRdma {
        req_buf_fmt: BUFFER_FORMAT_DIRECT.into(),
        req_flags: IMMEDIATE_REQUESTED,
        opcode: SrpOpcode::LOGIN_REQUEST.0,
        req_it_iu_len: 8260.into(),
        initiator_port_id: [1; 16],
        target_port_id: TARGET.0,
        imm_data_offset: 68.into(),
        ..LoginRequestRdma::default()
    }
}

/// Each export as a logical unit of one target port.
pub(crate) fn node(exports: &Exports) -> Arc<SrpNode> {
    let port = TargetPort { relative_id: 1, group: 1, name: TARGET.name_string().into() };
    let units = ScsiTarget::new(&TARGET.name_string(), vec![port.clone()]);
    for (volume, export) in exports.iter() {
        let unit = LogicalUnit::new(UnitIdentity::of(&export.name), export.volume.clone());
        units.add(volume.0 as u16, volume, unit);
    }
    let access = vec![SrpAccess { initiator: None, target: Arc::new(units) }];
    Arc::new(SrpNode::new(vec![SrpTarget { id: TARGET, port, access, networks: AllowedNetworks::default() }]))
}

struct Srp {
    /// Tag of the next request.
    tag: u64,
    /// Granted requests minus received ones; negative if a hostile initiator exceeds its credits.
    credits: i64,
}

impl RdmaProtocolChecks for Srp {
    /// Shorter than the deadline of the login.
    const NEAR: Duration = Duration::from_millis(100);
    const MAX_RECEIVES: u64 = 136;
    const MAX_POOLED: usize = 256 << 20;

    fn message(&mut self, kind: u8, mut message: Vec<u8>) -> Vec<u8> {
        self.credits -= 1;
        if message.len() >= 16 && kind & 1 != 0 {
            self.tag += 1;
            message[8..16].copy_from_slice(&self.tag.to_be_bytes());
        }
        message
    }

    fn on_accept(&mut self, private_data: &[u8]) {
        let response = LoginResponse::read_from_bytes(private_data).expect("52 bytes");
        assert_eq!(SrpOpcode(response.opcode), SrpOpcode::LOGIN_RESPONSE);
        self.credits += i64::from(response.req_lim_delta.get());
    }

    /// Checks a message of the target, and that it never grants more credits than receive buffers.
    fn on_send(&mut self, head: &[u8], payload: &SgList) {
        assert!(payload.is_empty() && head.len() <= 256);
        let delta = match SrpOpcode(head[0]) {
            SrpOpcode::RESPONSE => {
                let (response, rest) = SrpResponse::read_from_prefix(head).expect("a response");
                let lens = response.sense_data_len.get() + response.resp_data_len.get();
                assert_eq!(rest.len(), lens as usize);
                response.req_lim_delta.get()
            }
            SrpOpcode::CREDIT_REQUEST => {
                SrpHeader::read_from_bytes(head).expect("16 bytes");
                u32::from_be_bytes([head[4], head[5], head[6], head[7]])
            }
            SrpOpcode::TARGET_LOGOUT => 0,
            other => panic!("a target does not send {other:?}"),
        };
        self.credits += i64::from(delta);
        assert!(self.credits <= 136, "{} credits", self.credits);
    }
}

pub(crate) const TARGET: SrpPortId = SrpPortId([2; 16]);
