//! The sessions of one core, for connections that join them (MC/S).

use super::shared::SharedSession;
use crate::iscsi::node::IscsiNode;
use crate::session::Home;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

/// The sessions of one core. All connections of a session run on its core.
pub struct LocalSessions {
    home: Home,
    live: RefCell<HashMap<Handle, Weak<RefCell<SharedSession>>>>,
}

/// Address of the node, and TSIH.
type Handle = (usize, u16);

/// The core that a session lives on.
pub(super) enum SessionCore {
    Here(Rc<RefCell<SharedSession>>),
    Elsewhere(Home),
    Nowhere,
}

impl LocalSessions {
    /// An empty table for the core `home`.
    #[must_use]
    pub fn new(home: Home) -> Rc<LocalSessions> {
        Rc::new(LocalSessions { home, live: RefCell::default() })
    }

    pub(super) fn home(&self) -> &Home {
        &self.home
    }

    pub(super) fn add(&self, node: &Arc<IscsiNode>, tsih: u16, session: &Rc<RefCell<SharedSession>>) {
        let mut live = self.live.borrow_mut();
        live.retain(|_, session| session.strong_count() > 0);
        live.insert((address(node), tsih), Rc::downgrade(session));
    }

    /// Looks up the session with this TSIH.
    pub(super) fn find(&self, node: &Arc<IscsiNode>, tsih: u16) -> SessionCore {
        match node.sessions.home_of(tsih) {
            Some(home) if home.is(&self.home) => {
                let session = self.live.borrow().get(&(address(node), tsih)).and_then(Weak::upgrade);
                session.map_or(SessionCore::Nowhere, SessionCore::Here)
            }
            Some(home) => SessionCore::Elsewhere(home),
            None => SessionCore::Nowhere,
        }
    }
}

fn address(node: &Arc<IscsiNode>) -> usize {
    Arc::as_ptr(node) as usize
}
