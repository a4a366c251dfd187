//! The target's side of the login: checks SRP_LOGIN_REQ, which is the private data of a connection
//! request, and answers with SRP_LOGIN_RSP or SRP_LOGIN_REJ.

use super::node::{NexusName, SrpNode, SrpPortId, SrpTarget};
use crate::scsi::ScsiTarget;
use blockmux_wire::srp::{
    BUFFER_FORMAT_DIRECT, BUFFER_FORMAT_INDIRECT, IMMEDIATE_REQUESTED, IMMEDIATE_SUPPORTED, LoginReject,
    LoginRejectReason, LoginRequestRdma, LoginResponse, MULTICHANNEL_MAINTAINED, MULTICHANNEL_MASK,
    MULTICHANNEL_MULTI, MULTICHANNEL_TERMINATED, SrpCommand, SrpOpcode,
};
use core::net::IpAddr;
use std::sync::Arc;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// A login request that passed all checks. The session accepts it, and opens the channel once the
/// channels that it ends are closed.
pub(super) struct CheckedLogin {
    pub(super) nexus: NexusName,
    /// The target port.
    pub(super) target: Arc<SrpTarget>,
    /// The logical units that this initiator port sees.
    pub(super) units: Arc<ScsiTarget>,
    /// Whether the initiator's other channels have to end first (single-channel operation).
    pub(super) is_single_channel: bool,
    /// Offset of immediate data in an information unit, in bytes; `None` if the initiator sends no
    /// immediate data.
    pub(super) immediate_offset: Option<usize>,
    tag: u64,
}

/// A login that the target rejects, with the reason.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LoginRefusal {
    tag: u64,
    pub(super) reason: LoginRejectReason,
    /// The reason for the log: a predicate that follows the initiator's name.
    pub(super) what: &'static str,
}

/// The initiator port and target port of a login request. They are not checked.
pub(super) fn named(private_data: &[u8]) -> Option<NexusName> {
    let (request, _) = LoginRequestRdma::read_from_prefix(private_data).ok()?;
    Some((SrpPortId(request.initiator_port_id), SrpPortId(request.target_port_id)))
}

impl CheckedLogin {
    /// Reads a login request of an initiator with that address.
    ///
    /// # Errors
    /// Why it is rejected.
    pub(super) fn read(
        private_data: &[u8],
        node: &SrpNode,
        client: Option<IpAddr>,
    ) -> Result<CheckedLogin, LoginRefusal> {
        // iSER's private data is empty or four bytes of flags, and zeroes may follow.
        let is_iser = private_data.iter().skip(4).all(|byte| *byte == 0);
        let request = LoginRequestRdma::read_from_prefix(private_data).ok().filter(|_| !is_iser);
        let Some((request, _)) = request else {
            let what = match is_iser {
                true => "asked for iSER at a port that serves SRP",
                false => "sent a login request that is too short",
            };
            return Err(LoginRefusal {
                tag: 0,
                reason: LoginRejectReason::UNABLE_TO_ESTABLISH_CHANNEL,
                what,
            });
        };
        let tag = request.tag.get();
        let refuse = |reason, what| Err(LoginRefusal { tag, reason, what });
        if SrpOpcode(request.opcode) != SrpOpcode::LOGIN_REQUEST {
            let what = "sent private data that is not an SRP login request";
            return refuse(LoginRejectReason::UNABLE_TO_ESTABLISH_CHANNEL, what);
        }
        if request.req_it_iu_len.get() > MAX_IU_LEN {
            let what = "asked for information units that are too long";
            return refuse(LoginRejectReason::IU_LENGTH_TOO_LARGE, what);
        }
        if request.req_it_iu_len.get() < MIN_IU_LEN {
            let what = "asked for information units that are too short for a command";
            return refuse(LoginRejectReason::UNABLE_TO_ESTABLISH_CHANNEL, what);
        }
        if request.req_buf_fmt.get() & !BUFFER_FORMATS != 0 {
            return refuse(LoginRejectReason::UNSUPPORTED_BUFFER_FORMAT, "requires an unknown buffer format");
        }
        let multichannel = request.req_flags & MULTICHANNEL_MASK;
        if multichannel > MULTICHANNEL_MULTI {
            return refuse(
                LoginRejectReason::MULTICHANNEL_UNSUPPORTED,
                "asked for an unknown channel action",
            );
        }
        let nexus = (SrpPortId(request.initiator_port_id), SrpPortId(request.target_port_id));
        let Some(target) = node.targets.find(&nexus.1) else {
            let what = "named a target port that does not exist";
            return refuse(LoginRejectReason::UNABLE_TO_ASSOCIATE_CHANNEL, what);
        };
        if !target.networks.admits(client) {
            let what = "has an address that is not in the target port's `allow` list";
            return refuse(LoginRejectReason::UNABLE_TO_ASSOCIATE_CHANNEL, what);
        }
        let Some(units) = target.units_for(nexus.0).cloned() else {
            let what = "is not in the target port's access list; add its port identifier, or its last 16 digits (the GUID), there";
            return refuse(LoginRejectReason::UNABLE_TO_ASSOCIATE_CHANNEL, what);
        };
        let immediate_offset = usize::from(request.imm_data_offset.get());
        let sends_immediate = request.req_flags & IMMEDIATE_REQUESTED != 0
            && (size_of::<SrpCommand>()..MAX_IU_LEN as usize).contains(&immediate_offset);
        Ok(CheckedLogin {
            nexus,
            target,
            units,
            is_single_channel: multichannel == 0,
            immediate_offset: sends_immediate.then_some(immediate_offset),
            tag,
        })
    }

    /// Builds SRP_LOGIN_RSP. `ends_others` says whether this login ends other channels of the
    /// initiator, `has_others` whether other channels stay open.
    pub(super) fn response(&self, ends_others: bool, has_others: bool) -> Vec<u8> {
        let channels = match (ends_others, has_others) {
            (true, _) => MULTICHANNEL_TERMINATED,
            (false, true) => MULTICHANNEL_MAINTAINED,
            (false, false) => 0,
        };
        let immediate = if self.immediate_offset.is_some() { IMMEDIATE_SUPPORTED } else { 0 };
        let response = LoginResponse {
            opcode: SrpOpcode::LOGIN_RESPONSE.0,
            req_lim_delta: REQUEST_LIMIT.into(),
            tag: self.tag.into(),
            max_it_iu_len: MAX_IU_LEN.into(),
            max_ti_iu_len: MAX_RESPONSE_LEN.into(),
            buf_fmt: BUFFER_FORMATS.into(),
            rsp_flags: channels | immediate,
            ..LoginResponse::new_zeroed()
        };
        response.as_bytes().to_vec()
    }

    /// Rejects a login that passed the checks.
    pub(super) fn refuse(&self, reason: LoginRejectReason, what: &'static str) -> LoginRefusal {
        LoginRefusal { tag: self.tag, reason, what }
    }
}

impl LoginRefusal {
    /// Builds SRP_LOGIN_REJ.
    pub(super) fn reject(&self) -> Vec<u8> {
        let reject = LoginReject {
            opcode: SrpOpcode::LOGIN_REJECT.0,
            reason: self.reason.0.into(),
            tag: self.tag.into(),
            buf_fmt: BUFFER_FORMATS.into(),
            ..LoginReject::new_zeroed()
        };
        reject.as_bytes().to_vec()
    }
}

const BUFFER_FORMATS: u16 = BUFFER_FORMAT_DIRECT | BUFFER_FORMAT_INDIRECT;

/// REQUEST LIMIT: requests that an initiator may have outstanding on a channel.
pub(super) const REQUEST_LIMIT: u32 = 128;

/// The longest information unit from an initiator, in bytes. Linux needs it for 8 KiB of immediate
/// data or 1,000 memory descriptors.
pub(super) const MAX_IU_LEN: u32 = 16 << 10;

/// The longest information unit to an initiator, in bytes: a response with the longest sense data.
pub(super) const MAX_RESPONSE_LEN: u32 = 256;

/// A login must ask for a maximum length of information units of at least this, in bytes (SRP r16a
/// §6.2).
const MIN_IU_LEN: u32 = 64;
