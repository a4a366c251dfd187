//! A hostile host against the NVMe/TCP target, with volumes that fail and a namespace that is
//! attached and detached when the input requests it.

use crate::choices::Choices;
use crate::target_side::{ProtocolChecks, Sent, TargetRun};
use blockmux_proto::driver::session::StreamSession;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::fabrics::controller::node::{FabricsPort, NvmeNode};
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::{Namespace, Subsystem};
use blockmux_proto::nvme_tcp::server::NvmeTcpTargetSession;
use blockmux_volume::{Chunk, MemVolume, Pool};
use blockmux_wire::nvmeof::tcp::{CommonHeader, PduType};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::FromBytes;

/// Reads `data` as choices and a host's stream. With an odd first choice, another connection has
/// created controller 1, so that the stream may connect an I/O queue.
pub(crate) fn nvme_tcp_target(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let exports = exports();
    let pool = Pool::new(choices.of(&[usize::MAX, 64 << 10, 128 << 10, 4 << 20]));
    let now = Instant::now();
    let node = node(&exports);
    let admin = (choices.byte() & 1 == 1).then(|| admin(&node, &pool, now));
    let controller = Controller {
        subsystem: node.subsystems().remove(0),
        first: namespace(&exports, VolumeId(0)),
        _admin: admin,
        sent: Vec::new(),
    };
    let session = NvmeTcpTargetSession::new(node, pool.clone(), now);
    TargetRun::new((choices, stream), (session, exports), controller, pool, now).drive();
}

/// The state of the target outside the connection.
struct Controller {
    /// The subsystem whose namespace 1 is attached and detached.
    subsystem: Arc<Subsystem>,
    first: Namespace,
    /// The admin connection of controller 1, which keeps it alive.
    _admin: Option<NvmeTcpTargetSession>,
    /// The incomplete last PDU.
    sent: Vec<u8>,
}

impl ProtocolChecks for Controller {
    /// Shorter than the deadline of connecting.
    const NEAR: Duration = Duration::from_millis(100);
    const MAX_OUTBOX: usize = (64 << 20) + (2 << 20);
    const MAX_POOLED: usize = 256 << 20;

    /// Checks that the controller sends complete PDUs of its types with valid lengths.
    fn on_sent(&mut self, sent: &Sent<'_>) {
        self.sent.extend(sent.bytes);
        while let Ok((common, _)) = CommonHeader::read_from_prefix(&self.sent) {
            let kind = PduType(common.pdu_type);
            let is_controllers = matches!(
                kind,
                PduType::IC_RESP
                    | PduType::CAPSULE_RESP
                    | PduType::C2H_DATA
                    | PduType::R2T
                    | PduType::C2H_TERM_REQ
            );
            let len = common.plen.get() as usize;
            assert!(is_controllers && len >= common.hlen.into() && common.pdo % 4 == 0, "{common:?}");
            if len > self.sent.len() {
                return;
            }
            self.sent.drain(..len);
        }
    }

    fn on_quiet(&self) {
        assert!(self.sent.is_empty(), "only {} bytes of a PDU were sent", self.sent.len());
    }

    fn on_choice(&mut self, choice: u8) {
        match choice {
            253 => drop(self.subsystem.detach(|namespace| namespace.nsid == self.first.nsid)),
            // Attaching fails if the namespace is already attached.
            252 => drop(self.subsystem.attach(self.first.clone(), None)),
            _ => {}
        }
    }
}

/// An admin connection that has created controller 1.
pub(crate) fn admin(node: &Arc<NvmeNode>, pool: &Pool, now: Instant) -> NvmeTcpTargetSession {
    let mut admin = NvmeTcpTargetSession::new(node.clone(), pool.clone(), now);
    admin.on_bytes(&Chunk::from_slice(ADMIN), now).expect("the bytes are those of a real host");
    admin.outbox().clear();
    admin
}

pub(crate) fn node(exports: &Exports) -> Arc<NvmeNode> {
    let namespaces = exports.iter().map(|(id, _)| namespace(exports, id));
    let nqn = Nqn::new("nqn.t").expect("the name is valid");
    let subsystem = Arc::new(Subsystem::new(nqn, "", namespaces.collect(), Vec::new()));
    let ports = vec![FabricsPort::new(1, ([192, 0, 2, 1], 4420).into())];
    Arc::new(NvmeNode::new(vec![subsystem], ports, ""))
}

/// The volume as a namespace with NSID `volume` + 1.
fn namespace(exports: &Exports, volume: VolumeId) -> Namespace {
    let (export, volume_state) =
        exports.get(volume).zip(exports.volume_state(volume)).expect("the volume is in the list");
    Namespace::new(
        volume.0 + 1,
        volume,
        volume_state,
        export.read_only,
        VolumeUuid::of_texts(&[&export.name]),
    )
}

pub(crate) fn exports() -> Exports {
    let export = |name: &str| Export {
        name: name.into(),
        description: String::new(),
        read_only: name == "disk1",
        volume: Arc::new(MemVolume::new(SIZE)),
    };
    Exports::new(vec![export("disk0"), export("disk1")])
}

/// ICReq, Connect of an admin queue of `nqn.t` by host `nqn.h` with the identifier 1, and CC with
/// EN.
const ADMIN: &[u8] = include_bytes!("nvme_tcp_admin.bin");
/// Size of each RAM volume in bytes, enough for the longest command.
const SIZE: u64 = 2 << 20;
