//! Target and initiator of iSCSI, with a target for each export.

use blockmux_engine::net::socket::Address;
use blockmux_engine::remote::{Dialer, Opening, Paths};
use blockmux_proto::driver::session::{CoreHandle, NoControl};
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::client::{BurstSize, IscsiInitiatorConfig, IscsiInitiatorSession, SessionPurpose};
use blockmux_proto::iscsi::login::operational::OperationalParameters;
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{IscsiAccess, IscsiNode, Portal, TargetNode};
use blockmux_proto::iscsi::server::{IscsiTargetSession, LocalSessions};
use blockmux_proto::scsi::{LogicalUnit, Lun, ScsiTarget, UnitIdentity};
use blockmux_volume::Pool;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Each export as LUN 0 of a target with its name.
pub(crate) fn node(exports: &Exports) -> Arc<IscsiNode> {
    let targets = exports.iter().map(|(id, export)| {
        let name = target_name(&export.name);
        let identity = UnitIdentity { read_only: export.read_only, ..UnitIdentity::of(&export.name) };
        let unit = LogicalUnit::over(identity, &exports.volume_state(id).expect("it is served"));
        let view = ScsiTarget::new(name.as_str(), Vec::new()).with_unit(0, id, unit);
        let access = IscsiAccess { initiator: None, chap: None, target: Arc::new(view) };
        let portal = Portal { address: "192.0.2.1:3260".parse().unwrap(), listener: 1, group_tag: 1 };
        TargetNode::new(name, vec![portal], vec![access])
    });
    Arc::new(IscsiNode::new(targets.collect()))
}

/// The name of the target of an export.
pub(crate) fn target_name(export: &str) -> Name {
    Name::new(&format!("iqn.2026-11.t:{export}")).unwrap()
}

/// Makes a target's sessions, all on one core.
pub(crate) fn sessions(exports: &Exports) -> impl Fn(Pool, Instant) -> IscsiTargetSession + use<> {
    let (node, local) = (node(exports), LocalSessions::new(CoreHandle::new(())));
    move |pool, now| IscsiTargetSession::among(&local, node.clone(), 1, pool, [3; 32], now)
}

/// Connects to the target of one export.
pub(crate) struct IscsiDialer {
    pub(crate) paths: Paths,
    pub(crate) export: &'static str,
    pub(crate) proposal: OperationalParameters,
    /// The parameters that the first session has negotiated.
    pub(crate) agreed: Arc<OnceLock<OperationalParameters>>,
}

impl IscsiDialer {
    pub(crate) fn new(
        address: &Address,
        export: &'static str,
        proposal: OperationalParameters,
    ) -> IscsiDialer {
        IscsiDialer { paths: Paths::to(address), export, proposal, agreed: Arc::default() }
    }

    pub(crate) fn config(&self, purpose: SessionPurpose, link: u32) -> IscsiInitiatorConfig {
        let [a, b, c, d] = link.to_be_bytes();
        IscsiInitiatorConfig {
            initiator: Name::new("iqn.2026-11.i:me").unwrap(),
            target: target_name(self.export),
            lun: Lun::new(0),
            purpose,
            chap: None,
            proposal: self.proposal,
            isid: [0x80, 0, a, b, c, d],
            // A low number, so that short queues use all connections.
            burst: BurstSize { commands: 2, ..BurstSize::default() },
        }
    }

    pub(crate) fn log_in(
        &self,
        purpose: SessionPurpose,
        link: u32,
        pool: &Pool,
        now: Instant,
    ) -> IscsiInitiatorSession {
        IscsiInitiatorSession::new(self.config(purpose, link), pool.clone(), [7; 32], now)
    }
}

impl Dialer for IscsiDialer {
    type Session = IscsiInitiatorSession;
    type Control = NoControl;

    fn paths(&self) -> &Paths {
        &self.paths
    }

    fn session(&self, opening: &Opening<'_, NoControl>) -> IscsiInitiatorSession {
        let (link, pool, now) = (opening.link, opening.pool, opening.now);
        self.log_in(SessionPurpose::Use, link, pool, now)
    }

    fn check(&self, session: &IscsiInitiatorSession) -> Result<(), String> {
        session.parameters().map(|agreed| self.agreed.get_or_init(|| *agreed));
        session.unit().map(|_| ()).ok_or_else(|| "the target has not described the unit".to_owned())
    }

    fn refusal(&self, session: &IscsiInitiatorSession) -> Option<String> {
        session.refused().filter(|refused| !refused.is_retryable()).map(ToString::to_string)
    }
}
