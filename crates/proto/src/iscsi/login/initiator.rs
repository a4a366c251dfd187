//! The initiator's side of a login (RFC 7143 §6.3, §11.12, §11.13).
//!
//! ```text
//!   start ──names, AuthMethod──▶ SecurityNegotiation ──T──▶ LoginOperationalNegotiation ──T──▶ FullFeaturePhase
//!                                 CHAP: `initiator_security`             every key: `operational`
//! ```
//! The initiator requests the next stage as soon as it has sent its keys, and keeps answering until
//! the target agrees.

use super::initiator_security::{ChapExchange, ChapStep, error};
use super::operational::{NegotiationError, OperationalNegotiation, OperationalParameters};
use super::rdma::LoginSide;
use super::refused::IscsiRefused;
use crate::driver::session::ProtocolError;
use crate::iscsi::name::Name;
use crate::iscsi::node::Chap;
use crate::iscsi::sender::Sender;
use crate::iscsi::text::{self, KeyValue, TextBuilder};
use blockmux_wire::iscsi::session::{
    FLAG_TRANSIT, IscsiLoginRequest, IscsiLoginResponse, LoginStatus, Stage, VERSION, current_stage,
    next_stage, stages,
};
use blockmux_wire::iscsi::{FLAG_CONTINUE, FLAG_IMMEDIATE, IscsiOpcode, U24};
use zerocopy::{FromZeros, transmute_ref};

/// Identity of a login.
#[derive(Clone, Debug)]
pub(in crate::iscsi) struct LoginIdentity {
    pub(in crate::iscsi) initiator: Name,
    /// Name of the target; `None` for a discovery session.
    pub(in crate::iscsi) target: Option<Name>,
    pub(in crate::iscsi) isid: [u8; 6],
}

/// Parameters of a connection that joins a session or replaces a lost connection (RFC 7143 §6.3.6,
/// §7.2).
#[derive(Clone, Copy, Debug)]
pub(in crate::iscsi) struct ConnectionJoin {
    /// TSIH from the session's first login.
    pub(in crate::iscsi) tsih: u16,
    /// CID of the connection.
    pub(in crate::iscsi) cid: u16,
    /// CmdSN of the session's next command.
    pub(in crate::iscsi) cmd_sn: u32,
    /// ExpStatSN of the lost connection, or 0.
    pub(in crate::iscsi) exp_stat_sn: u32,
}

/// A login in progress.
pub(in crate::iscsi) struct InitiatorLogin {
    identity: LoginIdentity,
    /// `None` if the connection starts a new session.
    joining: Option<ConnectionJoin>,
    chap: ChapExchange,
    operational: OperationalNegotiation,
    stage: Stage,
    /// Next stage requested by the last request.
    requested_stage: Option<Stage>,
    responses: u32,
    /// Text of responses with the C bit.
    text: Vec<u8>,
    exp_stat_sn: u32,
}

/// Progress of a login.
#[derive(Debug)]
pub(in crate::iscsi) enum InitiatorLoginProgress {
    Continues,
    Established(InitiatorLoginResult),
    Refused(IscsiRefused),
}

/// Result of a successful login.
#[derive(Clone, Copy, Debug)]
pub(in crate::iscsi) struct InitiatorLoginResult {
    pub(in crate::iscsi) parameters: OperationalParameters,
    /// TSIH of the session, for further connections.
    pub(in crate::iscsi) tsih: u16,
    /// CmdSN of the first command.
    pub(in crate::iscsi) cmd_sn: u32,
    /// ExpCmdSN of the target.
    pub(in crate::iscsi) exp_cmd_sn: u32,
    pub(in crate::iscsi) max_cmd_sn: u32,
    pub(in crate::iscsi) exp_stat_sn: u32,
}

impl InitiatorLogin {
    /// Creates a login of `identity` that proposes `own`. With `chap` it authenticates itself, and
    /// the target if that has credentials; a discovery session also goes on without.
    pub(in crate::iscsi) fn new(
        identity: LoginIdentity,
        chap: Option<Chap>,
        own: OperationalParameters,
        seed: [u8; super::chap::SEED_LEN],
    ) -> InitiatorLogin {
        let mut operational = OperationalNegotiation::new(own);
        let is_discovery = identity.target.is_none();
        if is_discovery {
            operational.set_discovery();
        }
        InitiatorLogin {
            identity,
            joining: None,
            chap: ChapExchange::new(chap, is_discovery, seed),
            operational,
            stage: Stage::SECURITY_NEGOTIATION,
            requested_stage: None,
            responses: 0,
            text: Vec::new(),
            exp_stat_sn: 0,
        }
    }

    /// Uses RDMA for the login.
    pub(in crate::iscsi) fn over_rdma(mut self) -> InitiatorLogin {
        self.operational = self.operational.over_rdma(LoginSide::Initiator);
        self
    }

    /// Logs in a further connection of an existing session.
    pub(in crate::iscsi) fn joining(mut self, joining: ConnectionJoin) -> InitiatorLogin {
        self.exp_stat_sn = joining.exp_stat_sn;
        self.joining = Some(joining);
        self
    }

    /// Sends the first request.
    pub(in crate::iscsi) fn start(&mut self, sender: &mut Sender) {
        let mut text = TextBuilder::default();
        text.push("InitiatorName", self.identity.initiator.as_str());
        match &self.identity.target {
            Some(target) => {
                text.push("TargetName", target.as_str());
                text.push("SessionType", "Normal");
            }
            None => text.push("SessionType", "Discovery"),
        }
        let proves = self.chap.offer(&mut text);
        self.send(&text, !proves, sender);
    }

    /// Processes a response with its text, and sends the next request.
    ///
    /// # Errors
    /// If the target violates the protocol.
    pub(in crate::iscsi) fn on_response(
        &mut self,
        response: &IscsiLoginResponse,
        text: &[u8],
        sender: &mut Sender,
    ) -> Result<InitiatorLoginProgress, ProtocolError> {
        self.check(response)?;
        self.exp_stat_sn = response.stat_sn.get().wrapping_add(1);
        if self.text.len().saturating_add(text.len()) > text::MAX_TEXT {
            return Err(error("sent more than 64 KiB of login text"));
        }
        self.text.extend_from_slice(text);
        let status = LoginStatus(response.status.get());
        if status != LoginStatus::SUCCESS {
            let whole = std::mem::take(&mut self.text);
            let refused = match refused(status, &whole) {
                IscsiRefused::Login(LoginStatus::AUTHENTICATION_FAILURE) if self.chap.is_answered() => {
                    IscsiRefused::ChapResponse
                }
                refused => refused,
            };
            return Ok(InitiatorLoginProgress::Refused(refused));
        }
        if response.flags & FLAG_CONTINUE != 0 {
            self.requested_stage = None;
            self.send(&TextBuilder::default(), false, sender);
            return Ok(InitiatorLoginProgress::Continues);
        }
        let whole = std::mem::take(&mut self.text);
        let granted = response.flags & FLAG_TRANSIT != 0;
        if self.stage == Stage::SECURITY_NEGOTIATION {
            self.on_security(&whole, granted, sender)
        } else {
            self.on_operational(&whole, granted, response, sender)
        }
    }

    fn check(&mut self, response: &IscsiLoginResponse) -> Result<(), ProtocolError> {
        self.responses = self.responses.saturating_add(1);
        if self.responses > MAX_RESPONSES {
            return Err(error("did not finish the login within 64 responses"));
        }
        if response.initiator_task_tag.get() != LOGIN_TAG {
            return Err(error("answered another login request than was sent"));
        }
        if response.status.get() != LoginStatus::SUCCESS.0 {
            // Other fields of such a response are ignored.
            return Ok(());
        }
        if response.version_active != VERSION {
            return Err(error("speaks a version of iSCSI that was not offered"));
        }
        if current_stage(response.flags) != self.stage {
            return Err(error("answered in another login stage"));
        }
        if response.flags & FLAG_TRANSIT != 0
            && (response.flags & FLAG_CONTINUE != 0
                || self.requested_stage != Some(next_stage(response.flags)))
        {
            return Err(error("moved to a login stage that was not requested"));
        }
        Ok(())
    }

    fn on_security(
        &mut self,
        whole: &[u8],
        granted: bool,
        sender: &mut Sender,
    ) -> Result<InitiatorLoginProgress, ProtocolError> {
        let mut out = TextBuilder::default();
        let step = match self.chap.on_text(whole, &mut out)? {
            Ok(step) => step,
            Err(refused) => return Ok(InitiatorLoginProgress::Refused(refused)),
        };
        match (step, granted) {
            (ChapStep::Done, true) => {
                self.stage = Stage::LOGIN_OPERATIONAL_NEGOTIATION;
                match self.joining {
                    None => self.operational.propose_all(&mut out),
                    Some(_) => self.operational.propose_connection(&mut out),
                }
                self.send(&out, true, sender);
            }
            (ChapStep::Last, true) => return Err(error("left the security stage before the CHAP response")),
            (ChapStep::Continue, true) => return Err(error("left the security stage during CHAP")),
            (ChapStep::Continue, false) => self.send(&out, false, sender),
            (ChapStep::Last | ChapStep::Done, false) => self.send(&out, true, sender),
        }
        Ok(InitiatorLoginProgress::Continues)
    }

    fn on_operational(
        &mut self,
        whole: &[u8],
        granted: bool,
        response: &IscsiLoginResponse,
        sender: &mut Sender,
    ) -> Result<InitiatorLoginProgress, ProtocolError> {
        let mut out = TextBuilder::default();
        for pair in text::pairs(whole) {
            let pair = pair.map_err(|_| error("sent malformed login text"))?;
            if !DECLARATIONS.contains(&pair.key) {
                self.operational.on_pair(pair, &mut out).map_err(|cause| negotiation(&cause))?;
            }
        }
        if !granted {
            if out.as_bytes().len() > MAX_REQUEST_TEXT {
                return Err(error("sent more unknown keys than one request can answer"));
            }
            self.send(&out, true, sender);
            return Ok(InitiatorLoginProgress::Continues);
        }
        // Unanswered keys keep their default values.
        let parameters = self.operational.finish().map_err(|cause| negotiation(&cause))?;
        Ok(InitiatorLoginProgress::Established(InitiatorLoginResult {
            parameters,
            tsih: response.tsih.get(),
            cmd_sn: FIRST_CMD_SN,
            exp_cmd_sn: response.exp_cmd_sn.get(),
            max_cmd_sn: response.max_cmd_sn.get(),
            exp_stat_sn: self.exp_stat_sn,
        }))
    }

    fn send(&mut self, text: &TextBuilder, continues: bool, sender: &mut Sender) {
        let next = if self.stage == Stage::SECURITY_NEGOTIATION {
            Stage::LOGIN_OPERATIONAL_NEGOTIATION
        } else {
            Stage::FULL_FEATURE_PHASE
        };
        self.requested_stage = continues.then_some(next);
        let flags = match self.requested_stage {
            Some(next) => FLAG_TRANSIT | stages(self.stage, next),
            None => stages(self.stage, Stage(0)),
        };
        let joining = self.joining;
        let request = IscsiLoginRequest {
            opcode: IscsiOpcode::LOGIN_REQUEST.0 | FLAG_IMMEDIATE,
            flags,
            version_max: VERSION,
            version_min: VERSION,
            data_segment_length: U24::new(text.as_bytes().len() as u32),
            isid: self.identity.isid,
            tsih: joining.map_or(0, |joining| joining.tsih).into(),
            initiator_task_tag: LOGIN_TAG.into(),
            cid: joining.map_or(FIRST_CID, |joining| joining.cid).into(),
            cmd_sn: joining.map_or(FIRST_CMD_SN, |joining| joining.cmd_sn).into(),
            exp_stat_sn: self.exp_stat_sn.into(),
            ..FromZeros::new_zeroed()
        };
        sender.push(transmute_ref!(&request), text.as_bytes());
    }
}

/// The refusal that a response without success expresses.
fn refused(status: LoginStatus, text: &[u8]) -> IscsiRefused {
    let is_address = |pair: &KeyValue<'_>| pair.key == "TargetAddress";
    let address = text::pairs(text).flatten().find(is_address).map(|pair| pair.value.to_owned());
    match (status, address) {
        (LoginStatus::TARGET_MOVED_TEMPORARILY | LoginStatus::TARGET_MOVED_PERMANENTLY, Some(address)) => {
            IscsiRefused::Moved {
                address: address.chars().filter(|c| !c.is_control()).take(MAX_ADDRESS).collect(),
                permanent: status == LoginStatus::TARGET_MOVED_PERMANENTLY,
            }
        }
        _ => IscsiRefused::Login(status),
    }
}

fn negotiation(cause: &NegotiationError) -> ProtocolError {
    error(match cause {
        NegotiationError::Repeated => "negotiated a key twice",
        NegotiationError::ImpossibleAnswer => "gave an answer that the proposed value does not allow",
        NegotiationError::NotNow => "negotiated a key outside a login",
        NegotiationError::BadDeclaration => "declared a MaxRecvDataSegmentLength out of bounds",
        NegotiationError::Required => "did not agree to a digest that this initiator requires",
        NegotiationError::FirstBurstAboveMaxBurst => "agreed on FirstBurstLength above MaxBurstLength",
        NegotiationError::NotIser => "did not agree to iSER over RDMA",
    })
}

/// Keys that a target declares without an answer.
const DECLARATIONS: [&str; 4] = ["TargetName", "TargetAlias", "TargetAddress", "TargetPortalGroupTag"];

/// CID of a session's first connection.
pub(in crate::iscsi) const FIRST_CID: u16 = 0;

/// CmdSN of a session's first command.
const FIRST_CMD_SN: u32 = 1;
const LOGIN_TAG: u32 = 1;
/// Maximum number of responses in a login.
const MAX_RESPONSES: u32 = 64;
/// Maximum length of text in a request, in bytes: the length that every target accepts during
/// login.
const MAX_REQUEST_TEXT: usize = super::operational::DEFAULT_DATA_SEGMENT_LENGTH as usize;
/// Maximum length of a target's address, in characters.
const MAX_ADDRESS: usize = 300;
