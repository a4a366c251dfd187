//! What the connections of a session share: its name, its nexus, its command numbers and its tasks.

use super::early::Early;
use super::full::WINDOW;
use super::manage::Functions;
use super::sequence::CommandWindow;
use super::tasks::TaskTable;
use crate::iscsi::login::target::{Established, Session};
use crate::iscsi::name::Name;
use crate::iscsi::node::Node;
use crate::iscsi::sessions::Membership;
use crate::scsi::{DeviceServer, Nexus};
use std::sync::Arc;

/// A session without its connections.
pub(super) struct Shared {
    pub(super) node: Arc<Node>,
    pub(super) kind: Session,
    pub(super) initiator: Name,
    /// `None` in a discovery session.
    pub(super) server: Option<DeviceServer>,
    pub(super) window: CommandWindow,
    pub(super) early: Early,
    pub(super) tasks: TaskTable,
    pub(super) management: Functions,
    /// The last to go: by then nothing of this session reaches a volume any more.
    _membership: Option<Membership>,
}

impl Shared {
    /// What a login through the portal group `group_tag` agreed on.
    pub(super) fn new(node: Arc<Node>, group_tag: u16, established: Established) -> Shared {
        let Established { session: kind, initiator, isid, cmd_sn, membership, .. } = established;
        let server = match &kind {
            Session::Discovery => None,
            Session::Normal { target, access } => {
                let nexus = Nexus::iscsi(initiator.as_str(), isid, target.port(access, group_tag));
                Some(DeviceServer::new(access.target.clone(), nexus))
            }
        };
        Shared {
            node,
            kind,
            initiator,
            server,
            window: CommandWindow::new(cmd_sn, WINDOW),
            early: Early::default(),
            tasks: TaskTable::default(),
            management: Functions::default(),
            _membership: membership,
        }
    }
}
