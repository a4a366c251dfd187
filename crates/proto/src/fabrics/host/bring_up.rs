//! Initialization of a controller by the admin queue: a sequence of commands until everything
//! requested is known.
//!
//! ```text
//!   Connect ▶ authentication ▶ CAP ▶ VS ▶ CC ▶ CSTS until RDY ▶ Identify Controller ─┬▶ discovery log
//!                                                                  ├▶ active list ▶ each namespace
//!                                                                  └▶ Host Behavior ▶ limits ▶ namespace ▶ descriptors ▶ queues
//! ```

use super::Names;
use super::authenticate::{self, QueueAuthentication};
use super::command;
use super::discovery::{DiscoveryLogReader, DiscoveryNext, FoundSubsystem};
use super::info::{ControllerInfo, NamespaceInfo};
use super::refused::NvmeRefused;
use crate::initiator::command_queue::DataTransfer;
use crate::nvme::auth::HostCredentials;
use crate::nvme::auth::psk::InputPsk;
use blockmux_volume::{Memory, Seg, SgList};
use blockmux_wire::nvme::feature::{ACRE_AT, ACRE_ENABLED, FeatureId, HOST_BEHAVIOR_LEN};
use blockmux_wire::nvme::identify::{Cns, IDENTIFY_LEN};
use blockmux_wire::nvme::log::LogPage;
use blockmux_wire::nvme::property::{
    CAP, CAP_CSS_IOCSS, CAP_MQES_MASK, CAP_TO_SHIFT, CC, CC_CSS_ALL, CC_CSS_SHIFT, CC_EN, CC_IOCQES_SHIFT,
    CC_IOSQES_SHIFT, CSTS, CSTS_CFS, CSTS_RDY, VS,
};
use blockmux_wire::nvme::{CQE_LEN, Cqe, NSID_ALL, SQE_LEN, Sqe};
use blockmux_wire::nvmeof::fabrics::CNTLID_DYNAMIC;
use std::time::Duration;
use zerocopy::IntoBytes;

/// The information that a session requests from a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerQuery {
    /// One namespace for I/O: the session stays and holds the association.
    Use(u32),
    /// One namespace.
    Namespace(u32),
    /// All namespaces.
    Namespaces,
    /// The discovery log page.
    Discovery,
}

/// What follows a completion.
#[derive(Debug)]
pub(super) enum ProbeResult {
    /// Send the next command.
    More,
    /// Repeat the command after a pause, for at most this time.
    Later(Duration),
    /// Everything requested is known.
    All,
    /// A PSK was generated; the host has to reconnect with it.
    GeneratedPsk,
}

/// The initialization of a controller.
pub(super) struct NamespaceProbe {
    query: ControllerQuery,
    names: Names,
    credentials: Option<HostCredentials>,
    authentication: Option<Box<QueueAuthentication>>,
    /// The generated PSK, if the session had to generate one.
    pub(super) generated: Option<InputPsk>,
    kato_ms: u32,
    queues: u16,
    uses_keyed_sgls: bool,
    step: ProbeStep,
    cap: u64,
    pub(super) controller: ControllerInfo,
    /// The namespaces known so far.
    pub(super) namespaces: Vec<NamespaceInfo>,
    /// Namespaces still to identify, the next one last.
    left: Vec<u32>,
    log: DiscoveryLogReader,
    /// Entries of the discovery log page.
    pub(super) found: (Vec<FoundSubsystem>, u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProbeStep {
    Connect,
    Authenticate,
    Capabilities,
    Version,
    Enable,
    Ready,
    Controller,
    Behavior,
    Log,
    Limits,
    List,
    Namespace(u32),
    Descriptors,
    Queues,
    Known,
}

impl NamespaceProbe {
    pub(super) fn new(
        query: ControllerQuery,
        names: Names,
        credentials: Option<HostCredentials>,
        (kato_ms, queues): (u32, u16),
        uses_keyed_sgls: bool,
    ) -> NamespaceProbe {
        NamespaceProbe {
            query,
            names,
            credentials,
            authentication: None,
            generated: None,
            kato_ms,
            queues,
            uses_keyed_sgls,
            step: ProbeStep::Connect,
            cap: 0,
            controller: ControllerInfo::default(),
            namespaces: Vec::new(),
            left: Vec::new(),
            log: DiscoveryLogReader::default(),
            found: (Vec::new(), 0),
        }
    }

    pub(super) fn is_known(&self) -> bool {
        self.step == ProbeStep::Known
    }

    /// Whether the controller has reported CSTS.RDY.
    pub(super) fn is_enabled(&self) -> bool {
        use ProbeStep::{Authenticate, Capabilities, Connect, Enable, Ready, Version};
        !matches!(self.step, Connect | Authenticate | Capabilities | Version | Enable | Ready)
    }

    /// The next command, its data transfer, and the memory for that.
    pub(super) fn next_command(&self) -> Option<(Sqe, DataTransfer, SgList)> {
        let identify = |cns, nsid| (command::identify(cns, nsid), IDENTIFY_LEN);
        let (sqe, len) = match self.step {
            ProbeStep::Connect => {
                let data = command::connect_data(&self.names, CNTLID_DYNAMIC);
                let data = SgList::one(Seg::from_slice(data.as_bytes()));
                let sqe = command::connect(0, ADMIN_ENTRIES, self.kato_ms);
                return Some((sqe, DataTransfer::Out(data.len() as u32), data));
            }
            ProbeStep::Authenticate => return self.authentication.as_ref()?.next_command(),
            ProbeStep::Capabilities => (command::property_get(CAP, true), 0),
            ProbeStep::Version => (command::property_get(VS, false), 0),
            ProbeStep::Enable => (command::property_set(CC, self.configuration()), 0),
            ProbeStep::Ready => (command::property_get(CSTS, false), 0),
            ProbeStep::Controller => identify(Cns::CONTROLLER, 0),
            ProbeStep::Limits => identify(Cns::IO_COMMAND_SET_CONTROLLER, 0),
            ProbeStep::List => identify(Cns::ACTIVE_NAMESPACE_LIST, 0),
            ProbeStep::Namespace(nsid) => identify(Cns::NAMESPACE, nsid),
            ProbeStep::Descriptors => {
                let nsid = self.namespaces.last().map_or(0, |namespace| namespace.nsid);
                identify(Cns::NAMESPACE_IDENTIFICATION_DESCRIPTORS, nsid)
            }
            ProbeStep::Log => {
                let (from, len) = self.log.piece();
                (command::get_log_page(LogPage::DISCOVERY, from, len), len as usize)
            }
            // Number of submission and of completion queues, each 0's based.
            ProbeStep::Queues => {
                let less_one = u32::from(self.queues.saturating_sub(1));
                (command::set_features(FeatureId::NUMBER_OF_QUEUES.0, less_one << 16 | less_one), 0)
            }
            ProbeStep::Behavior => {
                let mut behavior = [0; HOST_BEHAVIOR_LEN];
                behavior[ACRE_AT] = ACRE_ENABLED;
                let sqe = command::set_features(FeatureId::HOST_BEHAVIOR_SUPPORT.0, 0);
                let data = SgList::one(Seg::from_slice(&behavior));
                return Some((sqe, DataTransfer::Out(HOST_BEHAVIOR_LEN as u32), data));
            }
            ProbeStep::Known => return None,
        };
        if len == 0 {
            return Some((sqe, DataTransfer::Nothing, SgList::default()));
        }
        Some((sqe, DataTransfer::In(len as u32), SgList::one(Memory::from_heap(len).seg(0, len))))
    }

    /// Handles the end of the connection. A controller may close it as soon as an authentication
    /// fails, before it completes the command.
    pub(super) fn on_lost(&self) -> Option<NvmeRefused> {
        self.authentication.as_ref().map(|authentication| authentication.on_lost())
    }

    /// The authentication that this result of Connect requires, if any.
    fn required_authentication(&self, result: u64) -> Result<Option<Box<QueueAuthentication>>, NvmeRefused> {
        let is_discovery = self.query == ControllerQuery::Discovery;
        authenticate::required_authentication(result, self.credentials.as_ref(), &self.names, is_discovery)
    }

    /// Handles a completion, with its data if the command succeeded.
    pub(super) fn on_answer(&mut self, cqe: &Cqe, data: &[u8]) -> Result<ProbeResult, NvmeRefused> {
        let is_good = cqe.status.is_success();
        if let (ProbeStep::Authenticate, Some(authentication)) = (self.step, &mut self.authentication) {
            if authentication.on_answer(cqe, data)? {
                self.generated = authentication.generated().cloned();
                (self.step, self.authentication) = (ProbeStep::Capabilities, None);
            }
            return Ok(if self.generated.is_some() { ProbeResult::GeneratedPsk } else { ProbeResult::More });
        }
        if let Some(refused) = self.refusal(cqe) {
            return Err(refused);
        }
        let result = cqe.result.get();
        self.step = match self.step {
            ProbeStep::Connect => {
                self.controller.cntlid = result as u16;
                self.authentication = self.required_authentication(result)?;
                if self.authentication.is_some() { ProbeStep::Authenticate } else { ProbeStep::Capabilities }
            }
            ProbeStep::Capabilities => {
                self.on_capabilities(result);
                ProbeStep::Version
            }
            ProbeStep::Version => {
                self.controller.version = result as u32;
                ProbeStep::Enable
            }
            ProbeStep::Enable => ProbeStep::Ready,
            ProbeStep::Ready => return self.on_status(result as u32),
            ProbeStep::Controller => {
                self.controller.identify(data, self.uses_keyed_sgls)?;
                match self.query {
                    ControllerQuery::Discovery => ProbeStep::Log,
                    ControllerQuery::Use(_) if self.controller.has_retry_delays() => ProbeStep::Behavior,
                    _ => ProbeStep::Limits,
                }
            }
            ProbeStep::Behavior => {
                // CRD is reserved unless ACRE is set.
                if !is_good {
                    self.controller.retry_delays = [Duration::ZERO; 3];
                }
                ProbeStep::Limits
            }
            ProbeStep::Log => self.on_log(data)?,
            ProbeStep::Limits => {
                // Older controllers do not support this CNS.
                if is_good {
                    self.controller.identify_nvm(data);
                }
                match self.query {
                    ControllerQuery::Use(nsid) | ControllerQuery::Namespace(nsid) => {
                        ProbeStep::Namespace(nsid)
                    }
                    _ => ProbeStep::List,
                }
            }
            ProbeStep::List => {
                self.left = namespaces(data);
                self.left.reverse();
                self.next_namespace()
            }
            ProbeStep::Namespace(nsid) => self.on_namespace(nsid, data)?,
            ProbeStep::Descriptors => {
                if let Some(namespace) = self.namespaces.last_mut().filter(|_| is_good) {
                    namespace.describe(data);
                }
                match self.query {
                    ControllerQuery::Use(_) => ProbeStep::Queues,
                    ControllerQuery::Namespaces => self.next_namespace(),
                    _ => ProbeStep::Known,
                }
            }
            ProbeStep::Queues => {
                self.on_queues(result);
                ProbeStep::Known
            }
            ProbeStep::Authenticate | ProbeStep::Known => ProbeStep::Known,
        };
        Ok(if self.is_known() { ProbeResult::All } else { ProbeResult::More })
    }

    /// Handles a part of the discovery log page.
    fn on_log(&mut self, data: &[u8]) -> Result<ProbeStep, NvmeRefused> {
        match self.log.on_piece(data) {
            DiscoveryNext::More => Ok(ProbeStep::Log),
            DiscoveryNext::Unstable => Err(NvmeRefused::UnstableDiscoveryLog),
            DiscoveryNext::Whole => {
                self.found = std::mem::take(&mut self.log).into_found();
                Ok(ProbeStep::Known)
            }
        }
    }

    fn on_namespace(&mut self, nsid: u32, data: &[u8]) -> Result<ProbeStep, NvmeRefused> {
        // Identify of an inactive namespace returns zeroes (Base 2.0, "Identify").
        if self.query != ControllerQuery::Namespaces && data.iter().all(|byte| *byte == 0) {
            return Err(NvmeRefused::NoNamespace(nsid));
        }
        match NamespaceInfo::identify(nsid, data, &self.controller) {
            Ok(namespace) => {
                self.namespaces.push(namespace);
                Ok(ProbeStep::Descriptors)
            }
            // A listed namespace that disappeared or is not usable.
            Err(_) if self.query == ControllerQuery::Namespaces => Ok(self.next_namespace()),
            Err(refused) => Err(refused),
        }
    }

    fn on_capabilities(&mut self, cap: u64) {
        self.cap = cap;
        self.controller.max_entries = ((cap & CAP_MQES_MASK) as u32).saturating_add(1);
        // MPSMIN has four bits; 0 means 4 KiB.
        self.controller.page_shift = (12_u32).saturating_add((cap >> 48 & 0xf) as u32);
    }

    /// Handles the number of allocated queues, 0's based.
    fn on_queues(&mut self, numbers: u64) {
        let given = (numbers as u16).min((numbers >> 16) as u16).saturating_add(1);
        self.controller.io_queues = given.min(self.queues.max(1));
    }

    /// The refusal that a failed completion means, if the initialization cannot continue.
    fn refusal(&self, cqe: &Cqe) -> Option<NvmeRefused> {
        if cqe.status.is_success() {
            return None;
        }
        let what = match self.step {
            ProbeStep::Connect => return Some(NvmeRefused::Connect(cqe.status)),
            ProbeStep::Namespace(_) if self.query == ControllerQuery::Namespaces => return None,
            ProbeStep::Namespace(nsid) => return Some(NvmeRefused::NoNamespace(nsid)),
            ProbeStep::Queues => return Some(NvmeRefused::NoQueues),
            ProbeStep::Authenticate
            | ProbeStep::Behavior
            | ProbeStep::Limits
            | ProbeStep::Descriptors
            | ProbeStep::Known => return None,
            ProbeStep::Capabilities | ProbeStep::Version | ProbeStep::Ready => "Property Get",
            ProbeStep::Enable => "Property Set, CC",
            ProbeStep::Controller => "Identify Controller",
            ProbeStep::Log => "Get Log Page, discovery",
            ProbeStep::List => "Identify, active namespaces",
        };
        Some(NvmeRefused::Command { what, status: cqe.status })
    }

    /// Handles the value of CSTS.
    fn on_status(&mut self, csts: u32) -> Result<ProbeResult, NvmeRefused> {
        if csts & CSTS_CFS != 0 {
            return Err(NvmeRefused::Fatal);
        }
        if csts & CSTS_RDY != 0 {
            self.step = ProbeStep::Controller;
            return Ok(ProbeResult::More);
        }
        // CAP.TO has eight bits, in units of 500 ms.
        let units = self.cap >> CAP_TO_SHIFT & 0xff;
        Ok(ProbeResult::Later(Duration::from_millis(units.max(1).saturating_mul(500))))
    }

    /// The value of CC: enabled, pages of 4 KiB, and the only defined entry sizes.
    fn configuration(&self) -> u32 {
        let sets = if self.cap & CAP_CSS_IOCSS != 0 { CC_CSS_ALL } else { 0 };
        let entries =
            SQE_LEN.trailing_zeros() << CC_IOSQES_SHIFT | CQE_LEN.trailing_zeros() << CC_IOCQES_SHIFT;
        entries | sets << CC_CSS_SHIFT | CC_EN
    }

    fn next_namespace(&mut self) -> ProbeStep {
        self.left.pop().map_or(ProbeStep::Known, ProbeStep::Namespace)
    }
}

/// Namespace identifiers of a list that ends with 0.
fn namespaces(data: &[u8]) -> Vec<u32> {
    let all = data.chunks_exact(4).filter_map(|number| number.try_into().ok().map(u32::from_le_bytes));
    all.take_while(|nsid| !matches!(*nsid, 0 | NSID_ALL)).collect()
}

/// Entries of the admin queue: the minimum that a fabrics controller has to support (Base 2.0
/// §3.3.2.2).
pub(crate) const ADMIN_ENTRIES: u16 = 32;
