//! Change notifications of a controller: changes of a namespace, and of the ANA state of this path.
//!
//! ```text
//!   Set Features ▶ ANA log page ▶ Asynchronous Event Request ··· event ▶ the log page that it names ▶ Identify ─┐
//!                                 ▲                                                                            │
//!                                 └──────────────────────────── its descriptors ◀───── the namespace ◀─────────┘
//! ```
//! Reading the log page clears the event. Then the namespace is identified again whatever the page
//! says, because only one namespace is used. If it was replaced by another one, or its block size
//! changed, it is no longer used, so that no write intended for the old one reaches it. The ANA
//! log page is read independently of that.

use super::access;
use super::command;
use super::info::{ControllerInfo, NamespaceInfo, UUID};
use crate::driver::session::PathRank;
use crate::initiator::command_queue::DataTransfer;
use blockmux_volume::{Memory, SgList};
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::feature::{AEC_ANA_CHANGE, AEC_NAMESPACE_ATTRIBUTE, FeatureId};
use blockmux_wire::nvme::identify::{Cns, IDENTIFY_LEN};
use blockmux_wire::nvme::log::{ANA_RGO, AnaState, CHANGED_NAMESPACES_MAX, LogPage};
use blockmux_wire::nvme::opcode::AdminOpcode;

/// The change notifications of a controller.
#[derive(Debug)]
pub(super) struct NamespaceChanges {
    nsid: u32,
    /// Identity of the namespace and its block length, which must not change.
    known: (String, u32),
    /// The namespace as identified last, without its descriptors.
    seen: Option<NamespaceInfo>,
    /// Whether the namespace was replaced by another one.
    pub(super) is_another: bool,
    /// ANA group of the namespace, if the controller supports ANA.
    group: Option<u32>,
    /// Length of the ANA log page, in bytes.
    page_len: u32,
    /// The supported events that are enabled.
    events: u32,
    step: ListenStep,
    /// Whether the command of this step is outstanding.
    is_asked: bool,
    /// Size of the namespace in bytes, after it may have changed.
    pub(super) size: Option<u64>,
    access: AnaLogState,
    /// Whether the ANA log page was read, or a read failed.
    pub(super) knows_access: bool,
    /// Rank of this path, after it may have changed.
    pub(super) rank: Option<PathRank>,
    /// Rank of the path in the last log page.
    last_rank: PathRank,
    /// Whether the last log page showed an ANA transition.
    pub(super) is_changing: bool,
}

/// State of a read of the ANA log page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AnaLogState {
    Done,
    Due,
    UnderWay,
}

/// Purpose of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueryTopic {
    /// Events and the log pages and namespaces that they refer to.
    Events,
    /// The ANA log page.
    Access,
}

/// A command, its data transfer, the memory for that, and its purpose.
pub(super) type ChangeQuery = (Sqe, DataTransfer, SgList, QueryTopic);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ListenStep {
    /// Set Features: Asynchronous Event Configuration.
    Configure,
    /// Asynchronous Event Request.
    Listen,
    /// Get Log Page.
    Read(LogPage),
    /// Identify Namespace.
    Identify,
    /// Namespace Identification Descriptors.
    Describe,
    /// The controller does not support events.
    Unsupported,
}

impl NamespaceChanges {
    /// Creates the notifications for this namespace.
    pub(super) fn new(controller: &ControllerInfo, namespace: &NamespaceInfo) -> NamespaceChanges {
        let group = controller.ana_groups.map(|_| namespace.ana_group).filter(|group| *group > 0);
        let ana = if group.is_some() { AEC_ANA_CHANGE } else { 0 };
        let events = controller.oaes & (AEC_NAMESPACE_ATTRIBUTE | ana);
        NamespaceChanges {
            nsid: namespace.nsid,
            known: (namespace.identity.clone(), namespace.block_len),
            seen: None,
            is_another: false,
            group,
            page_len: access::page_len(controller.ana_groups.unwrap_or(0)),
            events,
            step: if events == 0 { ListenStep::Unsupported } else { ListenStep::Configure },
            is_asked: false,
            size: Some(namespace.size()),
            access: if group.is_some() { AnaLogState::Due } else { AnaLogState::Done },
            knows_access: group.is_none(),
            rank: None,
            last_rank: PathRank::Best,
            is_changing: false,
        }
    }

    /// The next command to send.
    pub(super) fn next(&mut self) -> Option<ChangeQuery> {
        if self.access == AnaLogState::Due {
            self.access = AnaLogState::UnderWay;
            let len = self.page_len;
            let memory = SgList::one(Memory::from_heap(len as usize).seg(0, len as usize));
            return Some((ana_page(len), DataTransfer::In(len), memory, QueryTopic::Access));
        }
        if self.step == ListenStep::Unsupported || std::mem::replace(&mut self.is_asked, true) {
            return None;
        }
        let (sqe, len) = match self.step {
            ListenStep::Configure => {
                let fid = FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION.0;
                (command::set_features(fid, self.events), 0)
            }
            ListenStep::Listen => (command::admin(AdminOpcode::ASYNC_EVENT_REQUEST), 0),
            ListenStep::Read(LogPage::ASYMMETRIC_NAMESPACE_ACCESS) => {
                (ana_page(self.page_len), self.page_len as usize)
            }
            ListenStep::Read(page) => {
                let len = page_len(page);
                (command::get_log_page(page, 0, len), len as usize)
            }
            ListenStep::Identify => (command::identify(Cns::NAMESPACE, self.nsid), IDENTIFY_LEN),
            ListenStep::Describe => {
                (command::identify(Cns::NAMESPACE_IDENTIFICATION_DESCRIPTORS, self.nsid), IDENTIFY_LEN)
            }
            ListenStep::Unsupported => return None,
        };
        if len == 0 {
            return Some((sqe, DataTransfer::Nothing, SgList::default(), QueryTopic::Events));
        }
        let memory = SgList::one(Memory::from_heap(len).seg(0, len));
        Some((sqe, DataTransfer::In(len as u32), memory, QueryTopic::Events))
    }

    /// Handles the ANA log page; `None` if it could not be read, and is read again later.
    pub(super) fn on_access(&mut self, page: Option<&[u8]>) {
        (self.access, self.knows_access) = (AnaLogState::Done, true);
        self.set_rank_from(page);
    }

    fn set_rank_from(&mut self, page: Option<&[u8]>) {
        let state = page.zip(self.group).and_then(|(page, group)| access::state_of(page, group));
        if let Some(state) = state {
            self.last_rank = access::rank(state);
            self.rank = Some(self.last_rank);
            self.is_changing = state == AnaState::CHANGE;
        }
    }

    /// Reads the ANA log page again, if the controller has one.
    pub(super) fn ask_for_access(&mut self) {
        if self.group.is_some() && self.access == AnaLogState::Done {
            self.access = AnaLogState::Due;
        }
    }

    /// Whether an awaited ANA change is not announced by an event, so that the log page has to be
    /// polled.
    pub(super) fn is_to_ask_again(&self) -> bool {
        let is_deaf = self.events & AEC_ANA_CHANGE == 0 || self.step == ListenStep::Unsupported;
        self.group.is_some() && (is_deaf || self.last_rank == PathRank::Unusable)
    }

    /// Handles a completion: with the result, and the data if it arrived completely.
    pub(super) fn on_answer(
        &mut self,
        result: Option<u32>,
        data: Option<&[u8]>,
        controller: &ControllerInfo,
    ) {
        self.is_asked = false;
        self.step = match (self.step, result) {
            (ListenStep::Configure, Some(_)) => ListenStep::Listen,
            // Event type, event information, and log page identifier.
            (ListenStep::Listen, Some(event)) => ListenStep::Read(LogPage((event >> 16) as u8)),
            (ListenStep::Configure | ListenStep::Listen, None) => ListenStep::Unsupported,
            (ListenStep::Read(page), _) => {
                if page == LogPage::ASYMMETRIC_NAMESPACE_ACCESS {
                    self.set_rank_from(data);
                }
                ListenStep::Identify
            }
            (ListenStep::Identify, _) => {
                self.seen = data.and_then(|data| NamespaceInfo::identify(self.nsid, data, controller).ok());
                if self.seen.is_some() { ListenStep::Describe } else { ListenStep::Listen }
            }
            (ListenStep::Describe, _) => {
                if let Some(seen) = self.seen.take() {
                    self.compare(seen, data);
                }
                ListenStep::Listen
            }
            (ListenStep::Unsupported, _) => ListenStep::Unsupported,
        };
    }

    /// Compares the identified namespace and its descriptors with the known one.
    fn compare(&mut self, mut seen: NamespaceInfo, descriptors: Option<&[u8]>) {
        let (identity, block_len) = &self.known;
        let has_told = descriptors.is_some() || !identity.starts_with(UUID);
        if let Some(descriptors) = descriptors {
            seen.describe(descriptors);
        }
        self.is_another = seen.block_len != *block_len || has_told && seen.identity != *identity;
        if !self.is_another {
            self.size = Some(seen.size());
            self.group = self.group.map(|_| seen.ana_group);
        }
    }
}

/// Get Log Page of the ANA log, without the namespaces of each group.
fn ana_page(len: u32) -> Sqe {
    let mut sqe = command::get_log_page(LogPage::ASYMMETRIC_NAMESPACE_ACCESS, 0, len);
    sqe.cdw10 |= ANA_RGO;
    sqe
}

/// Number of bytes of a log page to read. Known pages are read whole, others only at the beginning.
fn page_len(page: LogPage) -> u32 {
    match page {
        LogPage::CHANGED_NAMESPACE_LIST => (CHANGED_NAMESPACES_MAX as u32).saturating_mul(4),
        LogPage::SMART_HEALTH_INFORMATION | LogPage::FIRMWARE_SLOT_INFORMATION => 512,
        _ => 64,
    }
}
