//! The target's side of a login (RFC 7143 §6.3, §11.12, §11.13).
//!
//! ```text
//!                   ┌─ text goes on (C) ─┐
//!                   ▼                    │
//!   first request ─▶ SecurityNegotiation ─▶ LoginOperationalNegotiation ─▶ FullFeaturePhase
//!                   │   AuthMethod, CHAP       the operational keys     ▲
//!                   └── nothing is left to negotiate ────────────────────┘
//! ```
//! Every request has its response. The initiator asks to go on (T), the target lets it as soon as
//! nothing is missing. A login that fails gets a response that says why, and the connection is
//! closed.

use super::chap::SEED_LEN;
use super::declarations::Declarations;
use super::failure::{LoginFailure, authentication_failure, failure, initiator_error, no_such_session};
use super::invitation::Invitation;
use super::operational::{NegotiationError, Operational, OperationalKey, OperationalParameters};
use super::security::{ChapPairs, Security};
use crate::event::bounded;
use crate::iscsi::name::Name;
use crate::iscsi::node::{Chap, IscsiAccess, IscsiNode, TargetNode, offer};
use crate::iscsi::sender::Sender;
use crate::iscsi::sessions::{ConnectionHandle, Membership, SessionName};
use crate::iscsi::text::{self, Text};
use crate::session::Home;
use blockmux_wire::iscsi::session::*;
use blockmux_wire::iscsi::{FLAG_CONTINUE, IscsiOpcode, U24};
use std::sync::Arc;
use zerocopy::{FromZeros, transmute_ref};

/// A login on its way.
pub(in crate::iscsi) struct TargetLogin {
    node: Arc<IscsiNode>,
    group_tag: u16,
    pub(super) seed: [u8; SEED_LEN],
    /// The first request; all others must fit it.
    first: Option<LoginRequest>,
    pub(super) stage: Stage,
    requests: u32,
    /// Of the request that is answered.
    initiator_task_tag: u32,
    /// The text of a request that goes on.
    text: Vec<u8>,
    declarations: Declarations,
    initiator: Option<Name>,
    /// InitiatorName and TargetName as they were sent, for whoever audits.
    names: (String, String),
    session: Option<Session>,
    pub(super) security: Security,
    pub(super) operational: Operational,
    pub(super) is_over_rdma: bool,
    stat_sn: u32,
    /// Where the session will live.
    home: Home,
    /// Cuts this login's connection.
    hang_up: Option<ConnectionHandle>,
    /// The session that the connection is to be added to; `None`: it begins one.
    invitation: Option<Invitation>,
    /// All is agreed on, and the session's last response waits for another session's end.
    leaving: Option<Leaving>,
    /// How often that was so.
    waits: u32,
}

/// What a login's last response says, and what it leads to.
struct Leaving {
    flags: u8,
    text: Text,
    established: Box<TargetLoginResult>,
    /// `None`: it discovers, and so there is none of that name, or joins one that there is.
    name: Option<SessionName>,
}

/// What a session is for.
#[derive(Clone)]
pub(in crate::iscsi) enum Session {
    Discovery,
    Normal { target: Arc<TargetNode>, access: IscsiAccess },
}

/// What a login agreed on.
pub(in crate::iscsi) struct TargetLoginResult {
    pub(in crate::iscsi) session: Session,
    pub(in crate::iscsi) initiator: Name,
    pub(in crate::iscsi) isid: [u8; 6],
    pub(in crate::iscsi) cid: u16,
    pub(in crate::iscsi) parameters: OperationalParameters,
    pub(in crate::iscsi) operational: Operational,
    pub(in crate::iscsi) stat_sn: u32,
    pub(in crate::iscsi) cmd_sn: u32,
    /// `None` in a discovery session, and for a connection that is not the leading one.
    pub(in crate::iscsi) membership: Option<Membership>,
    /// Cuts the connection.
    pub(in crate::iscsi) hang_up: Option<ConnectionHandle>,
}

/// What becomes of the login after a request.
pub(in crate::iscsi) enum TargetLoginProgress {
    /// The next request may come.
    Continues,
    /// All is agreed on, but the initiator's other session of that name is still there:
    /// [`TargetLogin::establish`] is to be asked again.
    Waits,
    /// The last response was sent.
    Established(Box<TargetLoginResult>),
    /// The login failed, and the response that says so is still to be sent by
    /// [`TargetLogin::refuse`]: at once, or, lest secrets be guessed fast, after a delay.
    Failed(LoginFailure),
}

impl TargetLogin {
    /// A login on the core `home` over a connection to a portal of this group; `seed` is random.
    pub(in crate::iscsi) fn new(
        node: Arc<IscsiNode>,
        group_tag: u16,
        seed: [u8; SEED_LEN],
        home: Home,
    ) -> TargetLogin {
        TargetLogin {
            node,
            group_tag,
            seed,
            first: None,
            stage: Stage::SECURITY_NEGOTIATION,
            requests: 0,
            initiator_task_tag: 0,
            text: Vec::new(),
            declarations: Declarations::default(),
            initiator: None,
            names: Default::default(),
            session: None,
            security: Security::Begins,
            operational: Operational::new(offer()),
            is_over_rdma: false,
            stat_sn: 0,
            home,
            hang_up: None,
            invitation: None,
            leaving: None,
            waits: 0,
        }
    }

    /// From now on `hang_up` cuts the connection of this login.
    pub(in crate::iscsi) fn set_hang_up(&mut self, hang_up: ConnectionHandle) {
        self.hang_up = Some(hang_up);
    }

    /// The names of initiator and target, as far as they were sent.
    pub(in crate::iscsi) fn names(&self) -> (String, String) {
        self.names.clone()
    }

    /// Whether no request has come.
    pub(in crate::iscsi) fn is_new(&self) -> bool {
        self.first.is_none()
    }

    /// The first request names this session.
    pub(in crate::iscsi) fn invite(&mut self, invitation: Invitation) {
        self.invitation = Some(invitation);
    }

    /// Takes a request with its text, and answers it. `admit` says, when all is agreed on, whether
    /// the session that the connection is to join has room for this CID, or will have.
    pub(in crate::iscsi) fn on_request(
        &mut self,
        request: &LoginRequest,
        text: &[u8],
        sender: &mut Sender,
        admit: &mut dyn FnMut(u16) -> Result<bool, LoginFailure>,
    ) -> TargetLoginProgress {
        match self.advance(request, text, sender) {
            Ok(()) if self.leaving.is_none() => TargetLoginProgress::Continues,
            Ok(()) => self.establish(sender, admit),
            Err(failure) => TargetLoginProgress::Failed(failure),
        }
    }

    /// Ends a login on which all is agreed, unless the initiator's other session of that name, or
    /// the session's other connection of that CID, is still there.
    pub(in crate::iscsi) fn establish(
        &mut self,
        sender: &mut Sender,
        admit: &mut dyn FnMut(u16) -> Result<bool, LoginFailure>,
    ) -> TargetLoginProgress {
        let Some(leaving) = &self.leaving else { return TargetLoginProgress::Continues };
        let (tsih, membership) = match (&leaving.name, &self.invitation) {
            (_, Some(invitation)) => match admit(leaving.established.cid) {
                Ok(true) => (invitation.tsih, None),
                Ok(false) => return TargetLoginProgress::Waits,
                Err(failure) => return TargetLoginProgress::Failed(failure),
            },
            (Some(name), None) => match self.node.sessions.join(name, &self.home, self.waits < MOST_WAITS) {
                Some(membership) => (membership.tsih(), Some(membership)),
                None => {
                    self.waits = self.waits.saturating_add(1);
                    return TargetLoginProgress::Waits;
                }
            },
            (None, None) => (self.node.sessions.next_tsih(), None),
        };
        let Some(Leaving { flags, text, mut established, .. }) = self.leaving.take() else {
            return TargetLoginProgress::Continues;
        };
        self.respond(flags, LoginStatus::SUCCESS, tsih, &text, sender);
        (established.stat_sn, established.membership) = (self.stat_sn, membership);
        established.hang_up = self.hang_up.take();
        TargetLoginProgress::Established(established)
    }

    /// Sends the response that ends a failed login.
    pub(in crate::iscsi) fn refuse(&mut self, failure: &LoginFailure, sender: &mut Sender) {
        let mut text = Text::default();
        if let Some(address) = &failure.address {
            text.push("TargetAddress", address);
        }
        let flags = stages(self.stage, Stage(0));
        self.respond(flags, failure.status, 0, &text, sender);
    }

    fn advance(
        &mut self,
        request: &LoginRequest,
        text: &[u8],
        sender: &mut Sender,
    ) -> Result<(), LoginFailure> {
        self.check(request)?;
        let (transit, goes_on) = (request.flags & FLAG_TRANSIT != 0, request.flags & FLAG_CONTINUE != 0);
        if self.text.len().saturating_add(text.len()) > text::MAX_TEXT {
            return Err(initiator_error("sent more than 64 KiB of login text"));
        }
        self.text.extend_from_slice(text);
        if goes_on {
            if transit {
                return Err(initiator_error("set both C and T in a login request"));
            }
            self.respond(stages(self.stage, Stage(0)), LoginStatus::SUCCESS, 0, &Text::default(), sender);
            return Ok(());
        }
        let whole = std::mem::take(&mut self.text);
        let mut out = Text::default();
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
        self.leaving = Some(self.leave(request, flags, out)?);
        Ok(())
    }

    /// Checks a request's header, and takes from the first what holds for all.
    fn check(&mut self, request: &LoginRequest) -> Result<(), LoginFailure> {
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
            let is_there = |invitation: &Invitation| invitation.name.isid == request.isid;
            if request.tsih.get() != 0 && !self.invitation.as_ref().is_some_and(is_there) {
                return Err(no_such_session());
            }
            return self.check_stages(request, current, next);
        };
        if (first.isid, first.tsih, first.cid) != (request.isid, request.tsih, request.cid) {
            return Err(initiator_error("changed ISID, TSIH or CID during login"));
        }
        self.check_stages(request, current, next)
    }

    fn check_stages(&self, request: &LoginRequest, current: Stage, next: Stage) -> Result<(), LoginFailure> {
        let is_stage = matches!(current, Stage::SECURITY_NEGOTIATION | Stage::LOGIN_OPERATIONAL_NEGOTIATION);
        if !is_stage || current != self.stage {
            return Err(initiator_error("sent a login request of another stage"));
        }
        let can_follow = matches!(next, Stage::LOGIN_OPERATIONAL_NEGOTIATION | Stage::FULL_FEATURE_PHASE)
            && next.0 > current.0;
        if request.flags & FLAG_TRANSIT != 0 && !can_follow {
            return Err(initiator_error("asked for a login stage that cannot follow"));
        }
        Ok(())
    }

    /// Takes the whole text of one or more requests.
    fn on_text(&mut self, whole: &[u8], out: &mut Text) -> Result<(), LoginFailure> {
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

    /// Reads who wants what from the first text.
    fn identify(&mut self, whole: &[u8], out: &mut Text) -> Result<(), LoginFailure> {
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
        let initiator =
            Name::new(initiator).map_err(|_| initiator_error("logged in under a malformed InitiatorName"))?;
        match session_type {
            "Discovery" if self.invitation.is_some() => return Err(no_such_session()),
            "Discovery" => {
                self.session = Some(Session::Discovery);
                self.operational.set_discovery();
            }
            "Normal" => {
                let name = target.ok_or_else(|| missing("logged in without TargetName"))?;
                let session = self.find_target(name, &initiator)?;
                if let Session::Normal { target, .. } = &session {
                    let operational = match &self.invitation {
                        Some(invitation)
                            if invitation.is_for(&initiator, &target.name, self.group_tag)
                                && invitation.parameters.is_on(OperationalKey::RDMAExtensions)
                                    == self.is_over_rdma =>
                        {
                            Operational::joining(target.offer, invitation.parameters)
                        }
                        Some(_) => return Err(no_such_session()),
                        None => Operational::new(target.offer),
                    };
                    self.operational = self.as_it_goes(operational);
                    if !target.alias.is_empty() {
                        out.push("TargetAlias", &target.alias);
                    }
                }
                out.push_number("TargetPortalGroupTag", self.group_tag.into());
                self.session = Some(session);
            }
            _ => {
                let what = "asked for an unknown type of session";
                return Err(failure(LoginStatus::SESSION_TYPE_NOT_SUPPORTED, what));
            }
        }
        self.initiator = Some(initiator);
        if self.stage == Stage::LOGIN_OPERATIONAL_NEGOTIATION {
            // It skipped security: it may if nothing is asked for.
            if self.chap().is_some() {
                return Err(authentication_failure("did not authenticate"));
            }
            self.security = Security::Done;
        }
        Ok(())
    }

    fn find_target(&self, name: &str, initiator: &Name) -> Result<Session, LoginFailure> {
        let not_found = || failure(LoginStatus::NOT_FOUND, "asked for a target that is not here");
        let name = Name::new(name).map_err(|_| not_found())?;
        let target = self.node.find(&name, self.group_tag).ok_or_else(not_found)?;
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
            let what = "asked for a target that has moved";
            return Err(LoginFailure { status, what, address: Some(redirect.address.clone()) });
        }
        Ok(Session::Normal { access: access.clone(), target })
    }

    /// What this session has to prove.
    pub(super) fn chap(&self) -> Option<Chap> {
        match self.session.as_ref()? {
            Session::Discovery => self.node.discovery_chap(),
            Session::Normal { access, .. } => access.chap.clone(),
        }
    }

    /// Whether the next stage may begin.
    fn is_ready(&mut self) -> Result<bool, LoginFailure> {
        if self.stage == Stage::SECURITY_NEGOTIATION {
            // Without a word about AuthMethod, None is meant.
            if matches!(self.security, Security::Begins) {
                if self.chap().is_some() {
                    return Err(authentication_failure("did not authenticate"));
                }
                self.security = Security::Done;
            }
            return Ok(matches!(self.security, Security::Done));
        }
        Ok(self.operational.is_answered())
    }

    /// Adds what the target says by itself in the operational stage, and bounds the whole.
    fn finish_text(&mut self, out: &mut Text, ends: bool) -> Result<(), LoginFailure> {
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

    fn leave(&self, request: &LoginRequest, flags: u8, text: Text) -> Result<Leaving, LoginFailure> {
        let (Some(session), Some(initiator)) = (self.session.clone(), self.initiator.clone()) else {
            return Err(failure(LoginStatus::MISSING_PARAMETER, "logged in without names"));
        };
        let name = match &session {
            Session::Discovery => None,
            Session::Normal { target, .. } => Some(SessionName {
                initiator: initiator.clone(),
                isid: request.isid,
                target: target.name.clone(),
                group_tag: self.group_tag,
            }),
        };
        let established = Box::new(TargetLoginResult {
            session,
            initiator,
            isid: request.isid,
            cid: request.cid.get(),
            parameters: self.operational.agreed(),
            operational: self.operational.clone(),
            stat_sn: self.stat_sn,
            cmd_sn: request.cmd_sn.get(),
            membership: None,
            hang_up: None,
        });
        Ok(Leaving { flags, text, established, name })
    }

    fn respond(&mut self, flags: u8, status: LoginStatus, tsih: u16, text: &Text, sender: &mut Sender) {
        let Some(first) = self.first else { return };
        // Until the session has one, what the initiator has sent (RFC 7143 §11.13.3).
        let tsih = if tsih == 0 { first.tsih.get() } else { tsih };
        let cmd_sn = first.cmd_sn.get();
        let (exp_cmd_sn, max_cmd_sn) = match &self.invitation {
            Some(Invitation { exp_cmd_sn, max_cmd_sn, .. }) => (*exp_cmd_sn, *max_cmd_sn),
            None => (cmd_sn, cmd_sn),
        };
        let response = LoginResponse {
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

/// The most requests of one login.
const MAX_REQUESTS: u32 = 64;
/// How often a login asks whether other sessions that its initiator has left are over: half a
/// second.
const MOST_WAITS: u32 = 250;

/// The most text in one response, in bytes: what every initiator takes during login.
const MAX_RESPONSE_TEXT: usize = super::operational::DEFAULT_DATA_SEGMENT_LENGTH as usize;
