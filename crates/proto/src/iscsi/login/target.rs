//! The target's side of a login (RFC 7143 §6.3, §11.12, §11.13).
//!
//! ```text
//!                    ┌─ more text (C) ─┐
//!                    ▼                 │
//!   first request ─▶ SecurityNegotiation ─▶ LoginOperationalNegotiation ─▶ FullFeaturePhase
//!                    │ AuthMethod, CHAP     the operational keys                   ▲
//!                    └── nothing to negotiate ─────────────────────────────────────┘
//! ```
//! Every request gets a response. The initiator requests the next stage (T), and the target agrees
//! when nothing is missing. A failed login gets a response with the reason, and the connection is
//! closed.

use super::chap::SEED_LEN;
use super::declarations::LoginDeclarations;
use super::failure::{LoginFailure, authentication_failure, failure, initiator_error, no_such_session};
use super::joinable::JoinableSession;
use super::operational::{NegotiationError, OperationalKey, OperationalNegotiation, OperationalParameters};
use super::security::{ChapPairs, SecurityState};
use crate::driver::audit_event::bounded;
use crate::driver::session::{ConnectionHandle, CoreHandle};
use crate::iscsi::name::Name;
use crate::iscsi::node::{Chap, IscsiAccess, IscsiNode, TargetNode, offer};
use crate::iscsi::sender::Sender;
use crate::iscsi::sessions::{SessionName, SessionRegistration};
use crate::iscsi::text::{self, TextBuilder};
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{FLAG_CONTINUE, IscsiOpcode, U24};
use core::net::IpAddr;
use std::sync::Arc;
use zerocopy::{FromZeros, transmute_ref};

/// A login in progress.
pub(in crate::iscsi) struct TargetLogin {
    node: Arc<IscsiNode>,
    /// Number of the listener that accepted the connection.
    listener: u16,
    pub(super) seed: [u8; SEED_LEN],
    /// The first request; later ones must match it.
    pub(in crate::iscsi) first: Option<IscsiLoginRequest>,
    pub(super) stage: Stage,
    requests: u32,
    /// Task tag of the request that is answered.
    initiator_task_tag: u32,
    /// Text of requests with the C bit.
    text: Vec<u8>,
    declarations: LoginDeclarations,
    initiator: Option<Name>,
    /// InitiatorName and TargetName as received, for audit events.
    names: (String, String),
    session: Option<TargetSessionKind>,
    pub(super) security: SecurityState,
    pub(super) operational: OperationalNegotiation,
    pub(super) is_over_rdma: bool,
    stat_sn: u32,
    /// The core that the session will live on.
    core: CoreHandle,
    /// Closes the connection of this login.
    hang_up: Option<ConnectionHandle>,
    /// The initiator's IP address; `None` if it has none.
    client: Option<IpAddr>,
    /// The session to join; `None` creates a new one.
    joinable: Option<JoinableSession>,
    /// The final response, which waits for the end of another session.
    final_response: Option<FinalLoginResponse>,
    /// Number of unsuccessful checks for that end.
    wait_count: u32,
}

/// The final response of a login, and its result.
struct FinalLoginResponse {
    flags: u8,
    text: TextBuilder,
    established: Box<TargetLoginResult>,
    /// Name of a new session; `None` for discovery sessions and further connections.
    name: Option<SessionName>,
}

/// The type of a session.
#[derive(Clone)]
pub(in crate::iscsi) enum TargetSessionKind {
    Discovery,
    Normal {
        target: Arc<TargetNode>,
        access: IscsiAccess,
        /// Tag of the portal group that the session's connections use.
        group_tag: u16,
    },
}

/// The result of a successful login.
pub(in crate::iscsi) struct TargetLoginResult {
    pub(in crate::iscsi) session: TargetSessionKind,
    pub(in crate::iscsi) initiator: Name,
    /// Whether the initiator has proved by CHAP that it has this name.
    pub(in crate::iscsi) is_authenticated: bool,
    pub(in crate::iscsi) isid: [u8; 6],
    pub(in crate::iscsi) cid: u16,
    pub(in crate::iscsi) parameters: OperationalParameters,
    pub(in crate::iscsi) operational: OperationalNegotiation,
    pub(in crate::iscsi) stat_sn: u32,
    pub(in crate::iscsi) cmd_sn: u32,
    /// Registration of a new session; `None` for discovery sessions and further connections.
    pub(in crate::iscsi) registration: Option<SessionRegistration>,
    /// Closes the connection.
    pub(in crate::iscsi) hang_up: Option<ConnectionHandle>,
}

/// Progress of the login after a request.
pub(in crate::iscsi) enum TargetLoginProgress {
    /// The login continues with the next request.
    Continues,
    /// The negotiation is complete, but the initiator's older session still exists:
    /// [`TargetLogin::establish`] must be called again.
    Waits,
    /// The final response was sent.
    Established(Box<TargetLoginResult>),
    /// The login failed. [`TargetLogin::refuse`] must send the response, after a delay if a secret
    /// was guessed.
    Failed(LoginFailure),
}

impl TargetLogin {
    /// Creates a login on `core`, for a connection that this listener accepted. `seed` must be
    /// random.
    pub(in crate::iscsi) fn new(
        node: Arc<IscsiNode>,
        listener: u16,
        seed: [u8; SEED_LEN],
        core: CoreHandle,
    ) -> TargetLogin {
        TargetLogin {
            node,
            listener,
            seed,
            first: None,
            stage: Stage::SECURITY_NEGOTIATION,
            requests: 0,
            initiator_task_tag: 0,
            text: Vec::new(),
            declarations: LoginDeclarations::default(),
            initiator: None,
            names: Default::default(),
            session: None,
            security: SecurityState::NotStarted,
            operational: OperationalNegotiation::new(offer()),
            is_over_rdma: false,
            stat_sn: 0,
            core,
            hang_up: None,
            client: None,
            joinable: None,
            final_response: None,
            wait_count: 0,
        }
    }

    /// Sets the handle that closes this connection.
    pub(in crate::iscsi) fn set_hang_up(&mut self, hang_up: ConnectionHandle) {
        self.hang_up = Some(hang_up);
    }

    /// Sets the initiator's IP address.
    pub(in crate::iscsi) fn set_client(&mut self, client: Option<IpAddr>) {
        self.client = client;
    }

    /// The initiator and target names, as far as they were received.
    pub(in crate::iscsi) fn names(&self) -> (String, String) {
        self.names.clone()
    }

    /// Sets the session that the first request names.
    pub(in crate::iscsi) fn set_joinable(&mut self, joinable: JoinableSession) {
        self.joinable = Some(joinable);
    }

    /// Processes a request with its text and sends the response. `admit` is called at the end of a
    /// joining login and returns whether the session has room for this CID now.
    pub(in crate::iscsi) fn on_request(
        &mut self,
        request: &IscsiLoginRequest,
        text: &[u8],
        sender: &mut Sender,
        admit: &mut dyn FnMut(u16) -> Result<bool, LoginFailure>,
    ) -> TargetLoginProgress {
        match self.advance(request, text, sender) {
            Ok(()) if self.final_response.is_none() => TargetLoginProgress::Continues,
            Ok(()) => self.establish(sender, admit),
            Err(failure) => TargetLoginProgress::Failed(failure),
        }
    }

    /// Completes a negotiated login, unless the initiator's older session, or an older connection
    /// with this CID, still exists.
    pub(in crate::iscsi) fn establish(
        &mut self,
        sender: &mut Sender,
        admit: &mut dyn FnMut(u16) -> Result<bool, LoginFailure>,
    ) -> TargetLoginProgress {
        let Some(final_response) = &self.final_response else { return TargetLoginProgress::Continues };
        let (tsih, registration) = match (&final_response.name, &self.joinable) {
            (_, Some(joinable)) => match admit(final_response.established.cid) {
                Ok(true) => (joinable.tsih, None),
                Ok(false) => return TargetLoginProgress::Waits,
                Err(failure) => return TargetLoginProgress::Failed(failure),
            },
            (Some(name), None) => {
                match self.node.sessions.join(name, &self.core, self.wait_count < MAX_WAITS) {
                    Some(registration) => (registration.tsih, Some(registration)),
                    None => {
                        self.wait_count = self.wait_count.saturating_add(1);
                        return TargetLoginProgress::Waits;
                    }
                }
            }
            (None, None) => (self.node.sessions.next_tsih(), None),
        };
        let Some(FinalLoginResponse { flags, text, mut established, .. }) = self.final_response.take() else {
            return TargetLoginProgress::Continues;
        };
        self.respond(flags, LoginStatus::SUCCESS, tsih, &text, sender);
        (established.stat_sn, established.registration) = (self.stat_sn, registration);
        established.hang_up = self.hang_up.take();
        TargetLoginProgress::Established(established)
    }

    /// Sends the response of a failed login.
    pub(in crate::iscsi) fn refuse(&mut self, failure: &LoginFailure, sender: &mut Sender) {
        let mut text = TextBuilder::default();
        if let Some(address) = &failure.address {
            text.push("TargetAddress", address);
        }
        let flags = stages(self.stage, Stage(0));
        self.respond(flags, failure.status, 0, &text, sender);
    }

    fn advance(
        &mut self,
        request: &IscsiLoginRequest,
        text: &[u8],
        sender: &mut Sender,
    ) -> Result<(), LoginFailure> {
        self.check(request)?;
        let (transit, continues) = (request.flags & FLAG_TRANSIT != 0, request.flags & FLAG_CONTINUE != 0);
        if self.text.len().saturating_add(text.len()) > text::MAX_TEXT {
            return Err(initiator_error("sent more than 64 KiB of login text"));
        }
        self.text.extend_from_slice(text);
        if continues {
            if transit {
                return Err(initiator_error("set both C and T in a login request"));
            }
            self.respond(
                stages(self.stage, Stage(0)),
                LoginStatus::SUCCESS,
                0,
                &TextBuilder::default(),
                sender,
            );
            return Ok(());
        }
        let whole = std::mem::take(&mut self.text);
        let mut out = TextBuilder::default();
        self.on_text(&whole, &mut out)?;
        let next = next_stage(request.flags);
        if !transit || !self.is_ready()? {
            self.finish_text(&mut out, false)?;
            self.respond(stages(self.stage, Stage(0)), LoginStatus::SUCCESS, 0, &out, sender);
            return Ok(());
        }
        let ends = next == Stage::FULL_FEATURE_PHASE;
        self.finish_text(&mut out, ends)?;
        let flags = FLAG_TRANSIT | stages(self.stage, next);
        self.stage = next;
        if !ends {
            self.respond(flags, LoginStatus::SUCCESS, 0, &out, sender);
            return Ok(());
        }
        self.final_response = Some(self.final_response(request, flags, out)?);
        Ok(())
    }

    /// Checks a request's header against the first one, and records the first.
    fn check(&mut self, request: &IscsiLoginRequest) -> Result<(), LoginFailure> {
        let (current, next) = (current_stage(request.flags), next_stage(request.flags));
        self.requests = self.requests.saturating_add(1);
        self.initiator_task_tag = request.initiator_task_tag.get();
        if self.requests > MAX_REQUESTS {
            return Err(initiator_error("sent more than 64 login requests"));
        }
        let Some(first) = self.first else {
            self.first = Some(*request);
            self.stage = current;
            self.stat_sn = request.exp_stat_sn.get();
            if request.version_min > VERSION {
                return Err(failure(LoginStatus::UNSUPPORTED_VERSION, "speaks another version of iSCSI"));
            }
            let is_there = |joinable: &JoinableSession| joinable.name.isid == request.isid;
            if request.tsih.get() != 0 && !self.joinable.as_ref().is_some_and(is_there) {
                return Err(no_such_session());
            }
            return self.check_stages(request, current, next);
        };
        if (first.isid, first.tsih, first.cid) != (request.isid, request.tsih, request.cid) {
            return Err(initiator_error("changed ISID, TSIH or CID during login"));
        }
        self.check_stages(request, current, next)
    }

    fn check_stages(
        &self,
        request: &IscsiLoginRequest,
        current: Stage,
        next: Stage,
    ) -> Result<(), LoginFailure> {
        let is_stage = matches!(current, Stage::SECURITY_NEGOTIATION | Stage::LOGIN_OPERATIONAL_NEGOTIATION);
        if !is_stage || current != self.stage {
            return Err(initiator_error("sent a login request of another stage"));
        }
        let can_follow = matches!(next, Stage::LOGIN_OPERATIONAL_NEGOTIATION | Stage::FULL_FEATURE_PHASE)
            && next.0 > current.0;
        if request.flags & FLAG_TRANSIT != 0 && !can_follow {
            return Err(initiator_error("requested a login stage that cannot follow"));
        }
        Ok(())
    }

    /// Takes the whole text of one or more requests.
    fn on_text(&mut self, whole: &[u8], out: &mut TextBuilder) -> Result<(), LoginFailure> {
        if self.session.is_none() {
            self.identify(whole, out)?;
        }
        let mut chap = ChapPairs::default();
        let mut others = Vec::new();
        for pair in text::pairs(whole) {
            let pair = pair.map_err(|_| initiator_error("sent malformed login text"))?;
            match pair.key {
                key if self.declarations.is_contradicted(key, pair.value) => {
                    return Err(LoginFailure::from(&NegotiationError::Repeated));
                }
                "InitiatorName" | "TargetName" | "SessionType" | "InitiatorAlias" => {}
                "AuthMethod" => self.on_auth_method(pair, out)?,
                "CHAP_A" => chap.algorithms = Some(pair.value),
                "CHAP_N" => chap.name = Some(pair.value),
                "CHAP_R" => chap.response = Some(pair.value),
                "CHAP_I" => chap.identifier = Some(pair.value),
                "CHAP_C" => chap.challenge = Some(pair.value),
                _ => others.push(pair),
            }
        }
        let result = self.operational.on_pairs(others.into_iter(), out);
        result.map_err(|error| LoginFailure::from(&error))?;
        self.on_chap(&chap, out)
    }

    /// Processes the identifying keys of the first text.
    fn identify(&mut self, whole: &[u8], out: &mut TextBuilder) -> Result<(), LoginFailure> {
        let (mut initiator, mut target, mut session_type) = (None, None, "Normal");
        for pair in text::pairs(whole) {
            let pair = pair.map_err(|_| initiator_error("sent malformed login text"))?;
            match pair.key {
                "InitiatorName" => initiator = Some(pair.value),
                "TargetName" => target = Some(pair.value),
                "SessionType" => session_type = pair.value,
                _ => {}
            }
        }
        self.names = (bounded(initiator.unwrap_or_default()), bounded(target.unwrap_or_default()));
        if session_type == "Discovery" {
            "discovery".clone_into(&mut self.names.1);
        }
        let missing = |what| failure(LoginStatus::MISSING_PARAMETER, what);
        let initiator = initiator.ok_or_else(|| missing("logged in without InitiatorName"))?;
        let initiator = Name::new(initiator)
            .map_err(|_| initiator_error("logged in with an empty or too long InitiatorName"))?;
        match session_type {
            "Discovery" if self.joinable.is_some() => return Err(no_such_session()),
            "Discovery" => {
                self.session = Some(TargetSessionKind::Discovery);
                self.operational.set_discovery();
            }
            "Normal" => {
                let name = target.ok_or_else(|| missing("logged in without TargetName"))?;
                let session = self.find_target(name, &initiator)?;
                if let TargetSessionKind::Normal { target, group_tag, .. } = &session {
                    let operational = match &self.joinable {
                        Some(joinable)
                            if joinable.is_for(&initiator, &target.name, *group_tag)
                                && !joinable.parameters.is_on(OperationalKey::RDMAExtensions) =>
                        {
                            OperationalNegotiation::joining(target.offer, joinable.parameters)
                        }
                        Some(_) => return Err(no_such_session()),
                        None => OperationalNegotiation::new(target.offer),
                    };
                    self.operational = self.with_transport(operational);
                    if !target.alias.is_empty() {
                        out.push("TargetAlias", &target.alias);
                    }
                    out.push_number("TargetPortalGroupTag", (*group_tag).into());
                }
                self.session = Some(session);
            }
            _ => {
                let what = "requested an unknown session type";
                return Err(failure(LoginStatus::SESSION_TYPE_NOT_SUPPORTED, what));
            }
        }
        self.initiator = Some(initiator);
        if self.stage == Stage::LOGIN_OPERATIONAL_NEGOTIATION {
            // The initiator skipped the security stage, which requires that no authentication is
            // needed.
            if self.chap().is_some() {
                return Err(authentication_failure("did not authenticate"));
            }
            self.security = SecurityState::NOT_REQUIRED;
        }
        Ok(())
    }

    fn find_target(&self, name: &str, initiator: &Name) -> Result<TargetSessionKind, LoginFailure> {
        let not_found = || failure(LoginStatus::NOT_FOUND, "requested an unknown target");
        let name = Name::new(name).map_err(|_| not_found())?;
        let (target, group_tag) = self.node.find(&name, self.listener).ok_or_else(not_found)?;
        if !target.networks.admits(self.client) {
            let what = "has an address that is not in the target's `allow` list";
            return Err(failure(LoginStatus::AUTHORIZATION_FAILURE, what));
        }
        let Some(access) = target.access_of(initiator) else {
            let what = "may not log in to this target";
            return Err(failure(LoginStatus::AUTHORIZATION_FAILURE, what));
        };
        if let Some(redirect) = &target.redirect {
            let status = if redirect.permanent {
                LoginStatus::TARGET_MOVED_PERMANENTLY
            } else {
                LoginStatus::TARGET_MOVED_TEMPORARILY
            };
            let what = "requested a target that has moved";
            return Err(LoginFailure { status, what, address: Some(redirect.address.clone()) });
        }
        Ok(TargetSessionKind::Normal { access: access.clone(), target, group_tag })
    }

    /// The credentials that this session requires.
    pub(super) fn chap(&self) -> Option<Chap> {
        match self.session.as_ref()? {
            TargetSessionKind::Discovery => self.node.discovery_chap(),
            TargetSessionKind::Normal { access, .. } => access.chap.clone(),
        }
    }

    /// Whether the next stage may begin.
    fn is_ready(&mut self) -> Result<bool, LoginFailure> {
        if self.stage == Stage::SECURITY_NEGOTIATION {
            // Without an AuthMethod key, None applies.
            if matches!(self.security, SecurityState::NotStarted) {
                if self.chap().is_some() {
                    return Err(authentication_failure("did not authenticate"));
                }
                self.security = SecurityState::NOT_REQUIRED;
            }
            return Ok(matches!(self.security, SecurityState::Done { .. }));
        }
        Ok(self.operational.is_answered())
    }

    /// Adds the target's own keys in the operational stage, and limits the length.
    fn finish_text(&mut self, out: &mut TextBuilder, ends: bool) -> Result<(), LoginFailure> {
        if self.stage == Stage::LOGIN_OPERATIONAL_NEGOTIATION {
            self.operational.declare(out);
        }
        if ends {
            self.operational.finish().map_err(|error| LoginFailure::from(&error))?;
        }
        if out.as_bytes().len() > MAX_RESPONSE_TEXT {
            return Err(initiator_error("named more unknown keys than one response can answer"));
        }
        Ok(())
    }

    fn final_response(
        &self,
        request: &IscsiLoginRequest,
        flags: u8,
        text: TextBuilder,
    ) -> Result<FinalLoginResponse, LoginFailure> {
        let (Some(session), Some(initiator)) = (self.session.clone(), self.initiator.clone()) else {
            return Err(failure(LoginStatus::MISSING_PARAMETER, "logged in without names"));
        };
        let name = match &session {
            TargetSessionKind::Discovery => None,
            TargetSessionKind::Normal { target, group_tag, .. } => Some(SessionName {
                initiator: initiator.clone(),
                isid: request.isid,
                target: target.name.clone(),
                group_tag: *group_tag,
            }),
        };
        let established = Box::new(TargetLoginResult {
            session,
            initiator,
            is_authenticated: matches!(self.security, SecurityState::Done { is_authenticated: true }),
            isid: request.isid,
            cid: request.cid.get(),
            parameters: self.operational.agreed(),
            operational: self.operational.clone(),
            stat_sn: self.stat_sn,
            cmd_sn: request.cmd_sn.get(),
            registration: None,
            hang_up: None,
        });
        Ok(FinalLoginResponse { flags, text, established, name })
    }

    fn respond(
        &mut self,
        flags: u8,
        status: LoginStatus,
        tsih: u16,
        text: &TextBuilder,
        sender: &mut Sender,
    ) {
        let Some(first) = self.first else { return };
        // Until a TSIH is assigned, the initiator's value is returned (RFC 7143 §11.13.3).
        let tsih = if tsih == 0 { first.tsih.get() } else { tsih };
        let cmd_sn = first.cmd_sn.get();
        let (exp_cmd_sn, max_cmd_sn) = match &self.joinable {
            Some(JoinableSession { exp_cmd_sn, max_cmd_sn, .. }) => (*exp_cmd_sn, *max_cmd_sn),
            None => (cmd_sn, cmd_sn),
        };
        let response = IscsiLoginResponse {
            opcode: IscsiOpcode::LOGIN_RESPONSE.0,
            flags,
            version_max: VERSION,
            version_active: VERSION,
            data_segment_length: U24::new(text.as_bytes().len() as u32),
            isid: first.isid,
            tsih: tsih.into(),
            initiator_task_tag: self.initiator_task_tag.into(),
            stat_sn: self.stat_sn.into(),
            exp_cmd_sn: exp_cmd_sn.into(),
            max_cmd_sn: max_cmd_sn.into(),
            status: status.0.into(),
            ..FromZeros::new_zeroed()
        };
        self.stat_sn = self.stat_sn.wrapping_add(1);
        sender.push(transmute_ref!(&response), text.as_bytes());
    }
}

/// Maximum number of requests in a login.
const MAX_REQUESTS: u32 = 64;
/// Number of checks whether other sessions that the initiator has closed have ended: half a second.
const MAX_WAITS: u32 = 250;

/// Maximum length of text in a response, in bytes: the length that every initiator accepts during
/// login.
const MAX_RESPONSE_TEXT: usize = super::operational::DEFAULT_DATA_SEGMENT_LENGTH as usize;
