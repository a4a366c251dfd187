//! The initiator's side of a login (RFC 7143 §6.3, §11.12, §11.13).
//!
//! ```text
//!   start ──names, AuthMethod──▶ SecurityNegotiation ──T──▶ LoginOperationalNegotiation ──T──▶ FullFeaturePhase
//!                                 CHAP: `prover`             every key: `operational`
//! ```
//! It asks for the next stage as soon as it has said what it has to say, and goes on answering
//! until the target agrees.

use super::operational::{NegotiationError, Operational, OperationalParameters};
use super::prover::{ChapExchange, ChapStep as Proof};
use super::rdma::Side;
use super::refused::IscsiRefused;
use crate::iscsi::name::Name;
use crate::iscsi::node::Chap;
use crate::iscsi::sender::Sender;
use crate::iscsi::text::{self, Pair, Text};
use crate::session::ProtocolError;
use blockmux_wire::iscsi::session::{
    FLAG_TRANSIT, LoginRequest, LoginResponse, LoginStatus, Stage, VERSION, current_stage, next_stage, stages,
};
use blockmux_wire::iscsi::{FLAG_CONTINUE, FLAG_IMMEDIATE, IscsiOpcode, U24};
use zerocopy::{FromZeros, transmute_ref};

/// Who logs in where.
#[derive(Clone, Debug)]
pub(in crate::iscsi) struct LoginIdentity {
    pub(in crate::iscsi) initiator: Name,
    /// `None`: a discovery session.
    pub(in crate::iscsi) target: Option<Name>,
    pub(in crate::iscsi) isid: [u8; 6],
}

/// What a connection says that joins a session, or takes the place of one that was lost (RFC 7143
/// §6.3.6, §7.2).
#[derive(Clone, Copy, Debug)]
pub(in crate::iscsi) struct Joining {
    /// The session's, as its first login told.
    pub(in crate::iscsi) tsih: u16,
    /// The connection's own number.
    pub(in crate::iscsi) cid: u16,
    /// Of the session's next command.
    pub(in crate::iscsi) cmd_sn: u32,
    /// Of the connection that was lost, or 0.
    pub(in crate::iscsi) exp_stat_sn: u32,
}

/// A login under way.
pub(in crate::iscsi) struct InitiatorLogin {
    identity: LoginIdentity,
    /// `None`: this connection begins a session.
    joining: Option<Joining>,
    prover: ChapExchange,
    operational: Operational,
    stage: Stage,
    /// What the last request asked for.
    asked: Option<Stage>,
    responses: u32,
    /// Of a response that goes on.
    text: Vec<u8>,
    exp_stat_sn: u32,
}

/// What a login has come to.
#[derive(Debug)]
pub(in crate::iscsi) enum InitiatorLoginProgress {
    Continues,
    Established(InitiatorLoginResult),
    Refused(IscsiRefused),
}

/// What a login agreed on.
#[derive(Clone, Copy, Debug)]
pub(in crate::iscsi) struct InitiatorLoginResult {
    pub(in crate::iscsi) parameters: OperationalParameters,
    /// Names the session to connections that join it.
    pub(in crate::iscsi) tsih: u16,
    /// Of the first command.
    pub(in crate::iscsi) cmd_sn: u32,
    /// The next command that the target expects.
    pub(in crate::iscsi) exp_cmd_sn: u32,
    pub(in crate::iscsi) max_cmd_sn: u32,
    pub(in crate::iscsi) exp_stat_sn: u32,
}

impl InitiatorLogin {
    /// A login of `identity` that wants `own`; it authenticates itself, and the target if there is
    /// a secret for that.
    pub(in crate::iscsi) fn new(
        identity: LoginIdentity,
        chap: Option<Chap>,
        own: OperationalParameters,
        seed: [u8; super::chap::SEED_LEN],
    ) -> InitiatorLogin {
        let mut operational = Operational::new(own);
        if identity.target.is_none() {
            operational.set_discovery();
        }
        InitiatorLogin {
            identity,
            joining: None,
            prover: ChapExchange::new(chap, seed),
            operational,
            stage: Stage::SECURITY_NEGOTIATION,
            asked: None,
            responses: 0,
            text: Vec::new(),
            exp_stat_sn: 0,
        }
    }

    /// Logs in over RDMA.
    pub(in crate::iscsi) fn over_rdma(mut self) -> InitiatorLogin {
        self.operational = self.operational.over_rdma(Side::Initiator);
        self
    }

    /// Logs in for one more connection of an existing session.
    pub(in crate::iscsi) fn joining(mut self, joining: Joining) -> InitiatorLogin {
        self.exp_stat_sn = joining.exp_stat_sn;
        self.joining = Some(joining);
        self
    }

    /// Sends the first request.
    pub(in crate::iscsi) fn start(&mut self, sender: &mut Sender) {
        let mut text = Text::default();
        text.push("InitiatorName", self.identity.initiator.as_str());
        match &self.identity.target {
            Some(target) => {
                text.push("TargetName", target.as_str());
                text.push("SessionType", "Normal");
            }
            None => text.push("SessionType", "Discovery"),
        }
        let proves = self.prover.offer(&mut text);
        self.send(&text, !proves, sender);
    }

    /// Takes a response with its text, and goes on.
    ///
    /// # Errors
    /// If the target does what no login allows.
    pub(in crate::iscsi) fn on_response(
        &mut self,
        response: &LoginResponse,
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
            return Ok(InitiatorLoginProgress::Refused(refused(status, &whole)));
        }
        if response.flags & FLAG_CONTINUE != 0 {
            self.asked = None;
            self.send(&Text::default(), false, sender);
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

    fn check(&mut self, response: &LoginResponse) -> Result<(), ProtocolError> {
        self.responses = self.responses.saturating_add(1);
        if self.responses > MAX_RESPONSES {
            return Err(error("did not come to an end within 64 login responses"));
        }
        if response.initiator_task_tag.get() != LOGIN_TAG {
            return Err(error("answered another login request than was sent"));
        }
        if response.status.get() != LoginStatus::SUCCESS.0 {
            // What else is in such a response is of no interest.
            return Ok(());
        }
        if response.version_active != VERSION {
            return Err(error("speaks a version of iSCSI that was not offered"));
        }
        if current_stage(response.flags) != self.stage {
            return Err(error("answered in another login stage"));
        }
        if response.flags & FLAG_TRANSIT != 0
            && (response.flags & FLAG_CONTINUE != 0 || self.asked != Some(next_stage(response.flags)))
        {
            return Err(error("went on to a login stage that was not asked for"));
        }
        Ok(())
    }

    fn on_security(
        &mut self,
        whole: &[u8],
        granted: bool,
        sender: &mut Sender,
    ) -> Result<InitiatorLoginProgress, ProtocolError> {
        let mut out = Text::default();
        let proof = match self.prover.on_text(whole, &mut out)? {
            Ok(proof) => proof,
            Err(refused) => return Ok(InitiatorLoginProgress::Refused(refused)),
        };
        match (proof, granted) {
            (Proof::Done, true) => {
                self.stage = Stage::LOGIN_OPERATIONAL_NEGOTIATION;
                match self.joining {
                    None => self.operational.propose_all(&mut out),
                    Some(_) => self.operational.propose_connection(&mut out),
                }
                self.send(&out, true, sender);
            }
            (Proof::Answers, true) => return Err(error("went on before it had seen a CHAP response")),
            (Proof::Asks, true) => return Err(error("went on in the middle of CHAP")),
            (Proof::Asks, false) => self.send(&out, false, sender),
            (Proof::Answers | Proof::Done, false) => self.send(&out, true, sender),
        }
        Ok(InitiatorLoginProgress::Continues)
    }

    fn on_operational(
        &mut self,
        whole: &[u8],
        granted: bool,
        response: &LoginResponse,
        sender: &mut Sender,
    ) -> Result<InitiatorLoginProgress, ProtocolError> {
        let mut out = Text::default();
        for pair in text::pairs(whole) {
            let pair = pair.map_err(|_| error("sent malformed login text"))?;
            if !DECLARATIONS.contains(&pair.key) {
                self.operational.on_pair(pair, &mut out).map_err(|cause| negotiation(&cause))?;
            }
        }
        if !granted {
            if out.as_bytes().len() > MAX_REQUEST_TEXT {
                return Err(error("named more unknown keys than one request can answer"));
            }
            self.send(&out, true, sender);
            return Ok(InitiatorLoginProgress::Continues);
        }
        // What it did not answer keeps its default, as if it had not understood.
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

    fn send(&mut self, text: &Text, goes_on: bool, sender: &mut Sender) {
        let next = if self.stage == Stage::SECURITY_NEGOTIATION {
            Stage::LOGIN_OPERATIONAL_NEGOTIATION
        } else {
            Stage::FULL_FEATURE_PHASE
        };
        self.asked = goes_on.then_some(next);
        let flags = match self.asked {
            Some(next) => FLAG_TRANSIT | stages(self.stage, next),
            None => stages(self.stage, Stage(0)),
        };
        let joining = self.joining;
        let request = LoginRequest {
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

/// What a response without success means.
fn refused(status: LoginStatus, text: &[u8]) -> IscsiRefused {
    let is_address = |pair: &Pair<'_>| pair.key == "TargetAddress";
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

pub(super) fn error(what: &'static str) -> ProtocolError {
    ProtocolError { what, reference: "RFC 7143 §6.3, Login Phase" }
}

/// Keys that a target declares and that need no answer.
const DECLARATIONS: [&str; 4] = ["TargetName", "TargetAlias", "TargetAddress", "TargetPortalGroupTag"];

/// The number of a session's first connection.
pub(in crate::iscsi) const FIRST_CID: u16 = 0;

/// The number of the first command.
const FIRST_CMD_SN: u32 = 1;
const LOGIN_TAG: u32 = 1;
/// The most responses of one login.
const MAX_RESPONSES: u32 = 64;
/// The most text in one request, in bytes: what every target takes during login.
const MAX_REQUEST_TEXT: usize = super::operational::DEFAULT_DATA_SEGMENT_LENGTH as usize;
/// Of an address that a target names, in characters.
const MAX_ADDRESS: usize = 300;
