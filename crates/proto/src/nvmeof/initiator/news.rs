//! What a controller tells of its own accord: that what Identify tells of a namespace has changed.
//!
//! ```text
//!   Set Features ▶ Asynchronous Event Request ··· event ▶ the log page that it names ▶ Identify Namespace ─┐
//!                  ▲                                                                                      │
//!                  └──────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//! Reading the page clears the event. Then the namespace is looked at whatever the page says: what else could have
//! happened to the one namespace that is used.

use super::command::{self, Transfer};
use super::info::{ControllerInfo, NamespaceInfo};
use blockmux_volume::{Memory, SgList};
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::feature::{AEC_NAMESPACE_ATTRIBUTE, FeatureId};
use blockmux_wire::nvme::identify::{Cns, IDENTIFY_LEN};
use blockmux_wire::nvme::log::{CHANGED_NAMESPACES_MAX, LogPage};
use blockmux_wire::nvme::opcode::AdminOpcode;

/// Listens to a controller.
#[derive(Debug)]
pub(super) struct News {
    nsid: u32,
    step: Step,
    /// The command of this step is under way.
    is_asked: bool,
    /// The namespace's size, in bytes, when it may be another than before.
    size: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Says what it wants to hear.
    Configure,
    /// Waits for an event.
    Listen,
    /// Reads a log page.
    Read(LogPage),
    /// Looks at the namespace.
    Look,
    /// The controller tells nothing.
    Deaf,
}

impl News {
    /// Of that namespace, as it is now.
    pub(super) fn new(controller: &ControllerInfo, namespace: &NamespaceInfo) -> News {
        let tells = controller.oaes & AEC_NAMESPACE_ATTRIBUTE != 0;
        let step = if tells { Step::Configure } else { Step::Deaf };
        News { nsid: namespace.nsid, step, is_asked: false, size: Some(namespace.size()) }
    }

    /// The next command, what moves, and the memory for that.
    pub(super) fn next(&mut self) -> Option<(Sqe, Transfer, SgList)> {
        if self.step == Step::Deaf || std::mem::replace(&mut self.is_asked, true) {
            return None;
        }
        let (sqe, len) = match self.step {
            Step::Configure => {
                let fid = FeatureId::ASYNCHRONOUS_EVENT_CONFIGURATION.0;
                (command::set_features(fid, AEC_NAMESPACE_ATTRIBUTE), 0)
            }
            Step::Listen => (command::admin(AdminOpcode::ASYNC_EVENT_REQUEST), 0),
            Step::Read(page) => {
                let len = page_len(page);
                (command::get_log_page(page, 0, len), len as usize)
            }
            Step::Look => (command::identify(Cns::NAMESPACE, self.nsid), IDENTIFY_LEN),
            Step::Deaf => return None,
        };
        if len == 0 {
            return Some((sqe, Transfer::Nothing, SgList::default()));
        }
        Some((sqe, Transfer::In(len as u32), SgList::one(Memory::from_heap(len).seg(0, len))))
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
            (Step::Configure, Some(_)) => Step::Listen,
            // Three bits of type, eight of information, and the page.
            (Step::Listen, Some(event)) => Step::Read(LogPage((event >> 16) as u8)),
            (Step::Configure | Step::Listen, None) => Step::Deaf,
            (Step::Read(_), _) => Step::Look,
            (Step::Look, _) => {
                let namespace =
                    data.and_then(|data| NamespaceInfo::identify(self.nsid, data, controller).ok());
                self.size = namespace.map(|namespace| namespace.size()).or(self.size);
                Step::Listen
            }
            (Step::Deaf, _) => Step::Deaf,
        };
    }

    /// The namespace's size, once after each look.
    pub(super) fn poll_size(&mut self) -> Option<u64> {
        self.size.take()
    }
}

/// How much of a page is read, in bytes: all of those that events name, and of others their beginning.
fn page_len(page: LogPage) -> u32 {
    match page {
        LogPage::CHANGED_NAMESPACE_LIST => (CHANGED_NAMESPACES_MAX as u32).saturating_mul(4),
        LogPage::SMART_HEALTH_INFORMATION | LogPage::FIRMWARE_SLOT_INFORMATION => 512,
        _ => 64,
    }
}
