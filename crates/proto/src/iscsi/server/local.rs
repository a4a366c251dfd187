//! The sessions of one core, for connections that join them (MC/S).

use super::shared::SharedSession;
use crate::driver::session::CoreHandle;
use crate::iscsi::node::IscsiNode;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

/// The sessions of one core. All connections of a session run on its core.
pub struct LocalSessions {
    pub(super) core: CoreHandle,
    live: RefCell<HashMap<Handle, Weak<RefCell<SharedSession>>>>,
}

/// Address of the node, and TSIH.
type Handle = (usize, u16);

/// The core that a session lives on.
pub(super) enum SessionCore {
    Here(Rc<RefCell<SharedSession>>),
    Elsewhere(CoreHandle),
    Nowhere,
}

impl LocalSessions {
    /// An empty table for the core `core`.
    #[must_use]
    pub fn new(core: CoreHandle) -> Rc<LocalSessions> {
        Rc::new(LocalSessions { core, live: RefCell::default() })
    }

    pub(super) fn add(&self, node: &Arc<IscsiNode>, tsih: u16, session: &Rc<RefCell<SharedSession>>) {
        let mut live = self.live.borrow_mut();
        live.retain(|_, session| session.strong_count() > 0);
        live.insert((address(node), tsih), Rc::downgrade(session));
    }

    /// Looks up the session with this TSIH.
    pub(super) fn find(&self, node: &Arc<IscsiNode>, tsih: u16) -> SessionCore {
        match node.sessions.core_of(tsih) {
            Some(core) if core.is_same(&self.core) => {
                let session = self.live.borrow().get(&(address(node), tsih)).and_then(Weak::upgrade);
                session.map_or(SessionCore::Nowhere, SessionCore::Here)
            }
            Some(core) => SessionCore::Elsewhere(core),
            None => SessionCore::Nowhere,
        }
    }
}

fn address(node: &Arc<IscsiNode>) -> usize {
    Arc::as_ptr(node) as usize
}
