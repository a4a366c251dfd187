//! The initiator's side of the login: builds SRP_LOGIN_REQ, which is the private data of a
//! connection request, and reads SRP_LOGIN_RSP or SRP_LOGIN_REJ.

use super::{MAX_COMMANDS, SrpInitiatorConfig};
use crate::driver::session::ProtocolError;
use crate::scsi::initiator::UnitRefused;
use blockmux_wire::srp::{
    BUFFER_FORMAT_DIRECT, IMMEDIATE_REQUESTED, IMMEDIATE_SUPPORTED, ImmediateDescriptor, LoginReject,
    LoginRejectReason, LoginRequestRdma, LoginResponse, MULTICHANNEL_MULTI, SrpCommand, SrpOpcode,
    SrpResponse,
};
use zerocopy::{FromBytes, IntoBytes};

/// Reason for which a session failed although the target followed the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SrpRefused {
    /// The target rejected the login.
    #[error("target rejected the login: {}", reason_text(*.0))]
    Login(LoginRejectReason),
    /// The logical unit cannot be used.
    #[error(transparent)]
    Unit(#[from] UnitRefused),
}

impl SrpRefused {
    /// Whether the login may succeed later at a target that has accepted it before: the target may
    /// be starting, or be disabled temporarily.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            SrpRefused::Login(reason) => matches!(
                *reason,
                LoginRejectReason::UNABLE_TO_ESTABLISH_CHANNEL
                    | LoginRejectReason::INSUFFICIENT_RESOURCES
                    | LoginRejectReason::UNABLE_TO_ASSOCIATE_CHANNEL
                    | LoginRejectReason::CHANNEL_LIMIT_REACHED
            ),
            SrpRefused::Unit(refused) => refused.is_retryable(),
        }
    }
}

fn reason_text(reason: LoginRejectReason) -> String {
    let known = match reason {
        LoginRejectReason::UNABLE_TO_ESTABLISH_CHANNEL => "unable to establish the RDMA channel",
        LoginRejectReason::INSUFFICIENT_RESOURCES => "insufficient resources, or the target port is disabled",
        LoginRejectReason::IU_LENGTH_TOO_LARGE => "the information units are too long for it",
        LoginRejectReason::UNABLE_TO_ASSOCIATE_CHANNEL => {
            "it has no such target port, or does not admit this initiator port there"
        }
        LoginRejectReason::UNSUPPORTED_BUFFER_FORMAT => "it has no direct data buffer descriptors",
        LoginRejectReason::MULTICHANNEL_UNSUPPORTED => "it does not support several channels",
        LoginRejectReason::CHANNEL_LIMIT_REACHED => {
            "this initiator port has as many channels as it may have; or, with Linux's target, no ACL admits this initiator"
        }
        _ => return format!("reason {:#010x}", reason.0),
    };
    known.to_owned()
}

/// Parameters that a login has negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LoginParameters {
    /// Requests that the initiator may have outstanding.
    pub(super) request_limit: i64,
    /// Longest immediate data of a command, in bytes.
    pub(super) max_immediate: u32,
}

/// Builds SRP_LOGIN_REQ. The first channel of a session asks for single-channel operation, which
/// ends all channels of an earlier session; the others ask to be added.
pub(super) fn request(config: &SrpInitiatorConfig, is_first: bool) -> Vec<u8> {
    let max_immediate = if config.immediate_data { MAX_IMMEDIATE } else { 0 };
    let iu_len = (IMMEDIATE_OFFSET as u32).saturating_add(max_immediate).max(MIN_REQUESTED_IU_LEN);
    let request = LoginRequestRdma {
        tag: LOGIN_TAG.into(),
        req_buf_fmt: BUFFER_FORMAT_DIRECT.into(),
        req_flags: if is_first { 0 } else { MULTICHANNEL_MULTI }
            | if config.immediate_data { IMMEDIATE_REQUESTED } else { 0 },
        opcode: SrpOpcode::LOGIN_REQUEST.0,
        req_it_iu_len: iu_len.into(),
        initiator_port_id: config.initiator.0,
        target_port_id: config.target.0,
        imm_data_offset: if config.immediate_data { IMMEDIATE_OFFSET as u16 } else { 0 }.into(),
        reserved: [0; 6],
    };
    request.as_bytes().to_vec()
}

/// Reads SRP_LOGIN_RSP.
///
/// # Errors
/// If the private data is not an SRP_LOGIN_RSP, or offers less than SRP requires of every target.
pub(super) fn check_response(
    private_data: &[u8],
    config: &SrpInitiatorConfig,
) -> Result<LoginParameters, ProtocolError> {
    let Ok((response, _)) = LoginResponse::read_from_prefix(private_data) else {
        return Err(error("accepted the connection without a whole SRP_LOGIN_RSP"));
    };
    if SrpOpcode(response.opcode) != SrpOpcode::LOGIN_RESPONSE {
        return Err(error("accepted the connection without SRP_LOGIN_RSP: it does not serve SRP there"));
    }
    if response.tag.get() != LOGIN_TAG {
        return Err(error("answered a login with another tag"));
    }
    if response.buf_fmt.get() & BUFFER_FORMAT_DIRECT == 0 {
        return Err(error("accepted the login without direct data buffer descriptors"));
    }
    let longest = response.max_it_iu_len.get();
    if (longest as usize) < MIN_IU_LEN {
        return Err(error("limits information units to a length that is not long enough for a command"));
    }
    let request_limit = i64::from(response.req_lim_delta.get().cast_signed());
    if request_limit < 1 {
        return Err(error("accepted the login and grants no request"));
    }
    let is_negotiated = config.immediate_data && response.rsp_flags & IMMEDIATE_SUPPORTED != 0;
    let most = longest.saturating_sub(IMMEDIATE_OFFSET as u32).min(MAX_IMMEDIATE);
    Ok(LoginParameters { request_limit, max_immediate: if is_negotiated { most } else { 0 } })
}

/// Reads SRP_LOGIN_REJ, the private data of a refused connection.
///
/// # Errors
/// If the private data is not an SRP_LOGIN_REJ.
pub(super) fn check_reject(private_data: &[u8]) -> Result<SrpRefused, ProtocolError> {
    let reject = LoginReject::read_from_prefix(private_data).ok().map(|(reject, _)| reject);
    let reject = reject.filter(|reject| SrpOpcode(reject.opcode) == SrpOpcode::LOGIN_REJECT);
    let reject = reject.ok_or(error("refused the RDMA connection: no SRP target listens there"))?;
    Ok(SrpRefused::Login(LoginRejectReason(reject.reason.get())))
}

fn error(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "SRP r16a §6.2 to §6.4" }
}

/// Tag of the login, which no later request has.
const LOGIN_TAG: u64 = 1 << 62;

/// Longest immediate data of a command, in bytes: the default limit of Linux's target.
const MAX_IMMEDIATE: u32 = 8 << 10;

/// Shortest information unit to request, in bytes: Linux's target applies this limit to its own
/// responses as well, and cuts sense data to the space after the header. SPC limits sense data to
/// 252 bytes.
const MIN_REQUESTED_IU_LEN: u32 = size_of::<SrpResponse>() as u32 + 252;

/// Offset of immediate data in an information unit, in bytes: after a command with 16 additional
/// CDB bytes, as in Linux's initiator.
pub(super) const IMMEDIATE_OFFSET: usize = size_of::<SrpCommand>() + 16 + size_of::<ImmediateDescriptor>();

/// Shortest limit of information units that a target may set, in bytes: a command with a direct
/// data buffer descriptor fits it.
const MIN_IU_LEN: usize = 64;

const _: () = assert!(MAX_COMMANDS <= 1024);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scsi::Lun;
    use crate::srp::client::SrpSessionMode;
    use crate::srp::node::SrpPortId;
    use zerocopy::FromZeros;

    fn config() -> SrpInitiatorConfig {
        SrpInitiatorConfig {
            initiator: SrpPortId([1; 16]),
            target: SrpPortId([2; 16]),
            lun: Lun::new(0),
            mode: SrpSessionMode::Use,
            channels: 1,
            immediate_data: true,
        }
    }

    fn response() -> LoginResponse {
        LoginResponse {
            opcode: SrpOpcode::LOGIN_RESPONSE.0,
            req_lim_delta: 63.into(),
            tag: LOGIN_TAG.into(),
            max_it_iu_len: 8260.into(),
            max_ti_iu_len: 8260.into(),
            buf_fmt: 6.into(),
            rsp_flags: IMMEDIATE_SUPPORTED,
            ..LoginResponse::new_zeroed()
        }
    }

    #[test]
    fn a_request_has_the_length_that_linux_accepts_and_names_both_ports() {
        let first = request(&config(), true);
        let (login, rest) = LoginRequestRdma::read_from_prefix(&first).unwrap();
        assert_eq!((first.len(), rest.len(), login.imm_data_offset.get()), (56, 0, 68));
        assert_eq!((login.req_flags, login.req_it_iu_len.get()), (IMMEDIATE_REQUESTED, 8260));
        assert_eq!((login.initiator_port_id, login.target_port_id), ([1; 16], [2; 16]));
        let plain = request(&SrpInitiatorConfig { immediate_data: false, ..config() }, false);
        let (login, _) = LoginRequestRdma::read_from_prefix(&plain).unwrap();
        assert_eq!((login.req_flags, login.req_it_iu_len.get()), (MULTICHANNEL_MULTI, 288));
        assert_eq!(login.imm_data_offset.get(), 0);
    }

    #[test]
    fn a_login_response_has_the_request_limit_and_the_immediate_data_limit() {
        let parameters = |response: LoginResponse| check_response(response.as_bytes(), &config()).unwrap();
        assert_eq!(parameters(response()), LoginParameters { request_limit: 63, max_immediate: 8192 });
        let short = LoginResponse { max_it_iu_len: 4164.into(), ..response() };
        assert_eq!(parameters(short).max_immediate, 4096);
        let without = LoginResponse { rsp_flags: 0, ..response() };
        assert_eq!(parameters(without).max_immediate, 0);
        // InfiniBand pads private data with zeroes.
        let padded = [response().as_bytes(), &[0; 144]].concat();
        assert_eq!(check_response(&padded, &config()), Ok(parameters(response())));
    }

    #[test]
    fn an_unusable_response_is_reported() {
        let violation =
            |response: LoginResponse| check_response(response.as_bytes(), &config()).unwrap_err().what;
        assert!(violation(LoginResponse { opcode: 7, ..response() }).contains("does not serve SRP"));
        assert!(violation(LoginResponse { tag: 8.into(), ..response() }).contains("another tag"));
        assert!(violation(LoginResponse { buf_fmt: 4.into(), ..response() }).contains("direct"));
        assert!(violation(LoginResponse { max_it_iu_len: 63.into(), ..response() }).contains("long enough"));
        for none in [0, u32::MAX] {
            assert!(
                violation(LoginResponse { req_lim_delta: none.into(), ..response() }).contains("no request")
            );
        }
        let short = check_response(&response().as_bytes()[..51], &config()).unwrap_err();
        assert!(short.what.contains("whole"));
    }

    #[test]
    fn a_rejection_is_one_line_and_may_be_temporary() {
        let reject = |reason: u32| {
            let reject = LoginReject {
                opcode: SrpOpcode::LOGIN_REJECT.0,
                reason: reason.into(),
                ..LoginReject::new_zeroed()
            };
            check_reject(reject.as_bytes()).unwrap()
        };
        let unknown = reject(0x0001_0003);
        let expected = "target rejected the login: it has no such target port, or does not admit this initiator \
                    port there";
        assert_eq!((unknown.to_string().as_str(), unknown.is_retryable()), (expected, true));
        assert!(reject(0x0001_0001).is_retryable() && !reject(0x0001_0004).is_retryable());
        let limit = reject(LoginRejectReason::CHANNEL_LIMIT_REACHED.0).to_string();
        assert!(limit.contains("as many channels") && limit.contains("no ACL admits"), "{limit}");
        assert_eq!(reject(9).to_string(), "target rejected the login: reason 0x00000009");
        assert!(check_reject(b"").unwrap_err().what.contains("no SRP target listens"));
    }
}
