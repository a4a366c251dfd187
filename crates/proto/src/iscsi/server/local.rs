//! The sessions that live on one core, for connections that are added to them there.

use super::shared::Shared;
use crate::iscsi::node::Node;
use crate::session::Home;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

/// The sessions of one core. A connection of a session that lives here has to be served here.
pub struct LocalSessions {
    home: Home,
    live: RefCell<HashMap<Handle, Weak<RefCell<Shared>>>>,
}

/// A node's address, and TSIH.
type Handle = (usize, u16);

/// Where a session is.
pub(super) enum Place {
    Here(Rc<RefCell<Shared>>),
    Elsewhere(Home),
    Nowhere,
}

impl LocalSessions {
    /// Those of the core that `home` is.
    #[must_use]
    pub fn new(home: Home) -> Rc<LocalSessions> {
        Rc::new(LocalSessions { home, live: RefCell::default() })
    }

    pub(super) fn home(&self) -> &Home {
        &self.home
    }

    pub(super) fn add(&self, node: &Arc<Node>, tsih: u16, session: &Rc<RefCell<Shared>>) {
        let mut live = self.live.borrow_mut();
        live.retain(|_, session| session.strong_count() > 0);
        live.insert((address(node), tsih), Rc::downgrade(session));
    }

    /// Where the session of that handle is.
    pub(super) fn find(&self, node: &Arc<Node>, tsih: u16) -> Place {
        match node.sessions.home_of(tsih) {
            Some(home) if home.is(&self.home) => {
                let session = self.live.borrow().get(&(address(node), tsih)).and_then(Weak::upgrade);
                session.map_or(Place::Nowhere, Place::Here)
            }
            Some(home) => Place::Elsewhere(home),
            None => Place::Nowhere,
        }
    }
}

fn address(node: &Arc<Node>) -> usize {
    Arc::as_ptr(node) as usize
}
