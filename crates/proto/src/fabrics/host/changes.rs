//! What a controller tells of its own accord: that what Identify tells of a namespace has changed,
//! or how well this path leads to it.
//!
//! ```text
//!   Set Features ▶ ANA log page ▶ Asynchronous Event Request ··· event ▶ the log page that it names ▶ Identify ─┐
//!                                 ▲                                                                            │
//!                                 └──────────────────────────── its descriptors ◀───── the namespace ◀─────────┘
//! ```
//! Reading the page clears the event. Then the namespace is looked at whatever the page says: what
//! else could have happened to the one namespace that is used. If it is another one now, or has
//! other blocks, what was meant for the old one must not be written there. The ANA log page is read
//! beside that, too, when it is asked for.

use super::access;
use super::command;
use super::info::{ControllerInfo, NamespaceInfo, UUID};
use crate::io_queue::DataTransfer;
use crate::session::PathRank;
use blockmux_volume::{Memory, SgList};
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::feature::{AEC_ANA_CHANGE, AEC_NAMESPACE_ATTRIBUTE, FeatureId};
use blockmux_wire::nvme::identify::{Cns, IDENTIFY_LEN};
use blockmux_wire::nvme::log::{ANA_RGO, AnaState, CHANGED_NAMESPACES_MAX, LogPage};
use blockmux_wire::nvme::opcode::AdminOpcode;

/// Listens to a controller.
#[derive(Debug)]
pub(super) struct NamespaceChanges {
    nsid: u32,
    /// What the namespace is called, and the length of its blocks: what it is known by.
    known: (String, u32),
    /// As it was just seen, but for its descriptors.
    seen: Option<NamespaceInfo>,
    /// It is not the one that it was.
    is_another: bool,
    /// The namespace's ANA group, if there are such.
    group: Option<u32>,
    /// Of the ANA log page, in bytes.
    page_len: u32,
    /// The events that the controller tells of and we want to hear.
    events: u32,
    step: ListenStep,
    /// The command of this step is under way.
    is_asked: bool,
    /// The namespace's size, in bytes, when it may be another than before.
    size: Option<u64>,
    access: AnaLogState,
    /// It was read once, or asked for in vain.
    knows_access: bool,
    /// How well this path leads to the namespace, when it may be otherwise than before.
    rank: Option<PathRank>,
    /// As it was when it was last read.
    last_rank: PathRank,
    /// It was about to change.
    is_changing: bool,
}

/// How far a reading of the ANA log page is that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AnaLogState {
    Done,
    Due,
    UnderWay,
}

/// What a command is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueryTopic {
    /// What the controller tells.
    Events,
    /// How well the path leads there.
    Access,
}

/// A command, what moves, the memory for that, and what it is for.
pub(super) type ControllerQuery = (Sqe, DataTransfer, SgList, QueryTopic);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ListenStep {
    /// Says what it wants to hear.
    Configure,
    /// Waits for an event.
    Listen,
    /// Reads a log page.
    Read(LogPage),
    /// Looks at the namespace.
    Identify,
    /// Looks what it is called.
    Describe,
    /// The controller tells nothing.
    Unsupported,
}

impl NamespaceChanges {
    /// Of that namespace, as it is now.
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

    /// The next command.
    pub(super) fn next(&mut self) -> Option<ControllerQuery> {
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

    /// The ANA log page that was asked for has come, or cannot be had: then it is asked for again
    /// some time.
    pub(super) fn on_access(&mut self, page: Option<&[u8]>) {
        (self.access, self.knows_access) = (AnaLogState::Done, true);
        self.look_at_page(page);
    }

    fn look_at_page(&mut self, page: Option<&[u8]>) {
        let state = page.zip(self.group).and_then(|(page, group)| access::state_of(page, group));
        if let Some(state) = state {
            self.last_rank = access::rank(state);
            self.rank = Some(self.last_rank);
            self.is_changing = state == AnaState::CHANGE;
        }
    }

    /// How well the path leads to the namespace, once after each reading.
    pub(super) fn poll_rank(&mut self) -> Option<PathRank> {
        self.rank.take()
    }

    /// Whether it is known how well the path leads to the namespace, as far as that can be.
    pub(super) fn knows_access(&self) -> bool {
        self.knows_access
    }

    /// Whether the path was on its way from one state to another when that was last looked at.
    pub(super) fn is_changing(&self) -> bool {
        self.is_changing
    }

    /// Reads the ANA log page again, if there is one.
    pub(super) fn ask_for_access(&mut self) {
        if self.group.is_some() && self.access == AnaLogState::Done {
            self.access = AnaLogState::Due;
        }
    }

    /// Whether nobody would tell of a change that is waited for, so that we have to ask from time
    /// to time.
    pub(super) fn is_to_ask_again(&self) -> bool {
        let is_deaf = self.events & AEC_ANA_CHANGE == 0 || self.step == ListenStep::Unsupported;
        self.group.is_some() && (is_deaf || self.last_rank == PathRank::Unusable)
    }

    /// The command has ended: with that result, and with its data if all of it has come.
    pub(super) fn on_answer(
        &mut self,
        result: Option<u32>,
        data: Option<&[u8]>,
        controller: &ControllerInfo,
    ) {
        self.is_asked = false;
        self.step = match (self.step, result) {
            (ListenStep::Configure, Some(_)) => ListenStep::Listen,
            // Three bits of type, eight of information, and the page.
            (ListenStep::Listen, Some(event)) => ListenStep::Read(LogPage((event >> 16) as u8)),
            (ListenStep::Configure | ListenStep::Listen, None) => ListenStep::Unsupported,
            (ListenStep::Read(page), _) => {
                if page == LogPage::ASYMMETRIC_NAMESPACE_ACCESS {
                    self.look_at_page(data);
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

    /// Compares the namespace that was seen, and whose descriptors are these, with what is known of
    /// it.
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

    /// Whether the namespace is not the one any more that it was.
    pub(super) fn is_another(&self) -> bool {
        self.is_another
    }

    /// The namespace's size, once after each look.
    pub(super) fn poll_size(&mut self) -> Option<u64> {
        self.size.take()
    }
}

/// The ANA log page, without the namespaces of groups.
fn ana_page(len: u32) -> Sqe {
    let mut sqe = command::get_log_page(LogPage::ASYMMETRIC_NAMESPACE_ACCESS, 0, len);
    sqe.cdw10 |= ANA_RGO;
    sqe
}

/// How much of a page is read, in bytes: all of those that events name, and of others their
/// beginning.
fn page_len(page: LogPage) -> u32 {
    match page {
        LogPage::CHANGED_NAMESPACE_LIST => (CHANGED_NAMESPACES_MAX as u32).saturating_mul(4),
        LogPage::SMART_HEALTH_INFORMATION | LogPage::FIRMWARE_SLOT_INFORMATION => 512,
        _ => 64,
    }
}
