//! Both sides of iSCSI for tests: a node that serves exports, each as a target of its name, and who dials one of them.

use blockmux_engine::initiator::Dialer;
use blockmux_engine::socket::Address;
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::initiator::{Config, InitiatorSession, Mode};
use blockmux_proto::iscsi::login::operational::Parameters;
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{Access, Node, Portal, TargetNode};
use blockmux_proto::scsi::{Identity, LogicalUnit, Lun, Target};
use blockmux_proto::session::NoControl;
use blockmux_volume::{Pool, VolumeInfo};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// The target that an export is.
pub(crate) fn target_name(export: &str) -> Name {
    Name::new(&format!("iqn.2026-11.t:{export}")).unwrap()
}

/// Each export as LUN 0 of a target of its name.
pub(crate) fn node(exports: &Exports) -> Arc<Node> {
    let targets = exports.iter().map(|(id, export)| {
        let name = target_name(&export.name);
        let identity = Identity { read_only: export.read_only, ..Identity::of(&export.name) };
        let unit = LogicalUnit::new(identity, export.volume.clone());
        let view = Target::new(name.as_str(), Vec::new()).with_unit(0, id, unit);
        let access = Access { initiator: None, chap: None, target: Arc::new(view) };
        let portal = Portal { address: "192.0.2.1:3260".to_owned(), group_tag: 1 };
        TargetNode::new(name, vec![portal], vec![access])
    });
    Arc::new(Node::new(targets.collect()))
}

/// Dials the target that an export is.
pub(crate) struct IscsiDialer {
    pub(crate) address: Address,
    pub(crate) export: &'static str,
    pub(crate) wishes: Parameters,
    /// What the first session has agreed on.
    pub(crate) agreed: Arc<OnceLock<Parameters>>,
}

impl IscsiDialer {
    pub(crate) fn new(address: &Address, export: &'static str, wishes: Parameters) -> IscsiDialer {
        IscsiDialer { address: address.clone(), export, wishes, agreed: Arc::default() }
    }

    pub(crate) fn log_in(&self, mode: Mode, link: u32, pool: &Pool, now: Instant) -> InitiatorSession {
        let [a, b, c, d] = link.to_be_bytes();
        let config = Config {
            initiator: Name::new("iqn.2026-11.i:me").unwrap(),
            target: target_name(self.export),
            lun: Lun::new(0),
            mode,
            chap: None,
            wishes: self.wishes,
            isid: [0x80, 0, a, b, c, d],
        };
        InitiatorSession::new(config, pool.clone(), [7; 32], now)
    }
}

impl Dialer for IscsiDialer {
    type Session = InitiatorSession;
    type Control = NoControl;

    fn address(&self) -> &Address {
        &self.address
    }

    fn session(
        &self,
        link: u32,
        _control: Option<&NoControl>,
        pool: &Pool,
        now: Instant,
    ) -> InitiatorSession {
        self.log_in(Mode::Use, link, pool, now)
    }

    fn check(&self, session: &InitiatorSession) -> Result<(), String> {
        session.parameters().map(|agreed| self.agreed.get_or_init(|| *agreed));
        let info: Option<VolumeInfo> = session.volume_info();
        info.map(|_| ()).ok_or_else(|| "the unit was not described".to_owned())
    }

    fn refusal(&self, session: &InitiatorSession) -> Option<String> {
        session.refused().filter(|refused| !refused.may_pass()).map(ToString::to_string)
    }
}
