//! The volume conformance suite over SRP on iWARP, and the other functions of a target port.

mod conforms;
mod sides;

use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_engine::fabric::iwarp::IwarpFabric;
use blockmux_engine::fabric::{self, FabricOfTcpPorts};
use blockmux_engine::net::socket::{Address, Listener};
use blockmux_engine::protocol::srp::initiator::{SrpEndpoint, connect, describe, luns, manage};
use blockmux_engine::protocol::srp::target::SrpListener;
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerTask};
use blockmux_proto::scsi::Lun;
use blockmux_proto::srp::client::{ResponseCode, TaskManagementFunction};
use blockmux_volume::{MemVolume, Volume};
use conforms::{conforms, disk_and_frozen};
use sides::srp::{endpoint, node, port};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Serves one volume, also as `frozen`, which refuses writes, until it is dropped.
struct Target {
    address: Address,
    limit: ConnectionLimit,
    _cores: Cores,
}

impl Target {
    fn serve() -> Target {
        let volume: Arc<dyn Volume> = Arc::new(MemVolume::new(SIZE));
        let listener = Listener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).unwrap();
        let address = listener.address().clone();
        let config = CoresConfig { policy: PollPolicy::Never, count: 2, ..CoresConfig::default() };
        let (cores, limit) = (Cores::start(&config).unwrap(), ConnectionLimit::new(64));
        let exports = disk_and_frozen(&volume);
        let (serve, inboxes) =
            (fabric::serve::<FabricOfTcpPorts>(SrpListener::new(&node(&exports), &exports)), cores.inboxes());
        let shared = limit.clone();
        cores.inboxes()[0].send(move |core| ListenerTask::spawn(core, listener, inboxes, serve, shared));
        Target { address, limit, _cores: cores }
    }

    fn endpoint(&self, nth: u8) -> SrpEndpoint<IwarpFabric> {
        endpoint(&self.address, nth, IwarpFabric::default())
    }

    /// Runs the suite with the endpoint that `change` returns.
    fn conforms(&self, change: impl Fn(SrpEndpoint<IwarpFabric>) -> SrpEndpoint<IwarpFabric>) {
        let volume = |nth| -> Arc<dyn Volume> { Arc::new(connect(change(self.endpoint(nth))).unwrap()) };
        conforms(volume(0), Some(volume(1)));
    }
}

#[test]
fn a_ram_volume_conforms_over_srp() {
    Target::serve().conforms(|endpoint| endpoint);
}

#[test]
fn a_ram_volume_conforms_with_crcs_and_without_immediate_data() {
    let over = || IwarpFabric::new(true);
    Target::serve().conforms(|endpoint| SrpEndpoint { over: over(), immediate_data: false, ..endpoint });
}

/// The target's cores get connections round-robin.
#[test]
fn a_session_of_several_channels_conforms_wherever_they_are_accepted() {
    let target = Target::serve();
    let (is_over, mut most) = (AtomicBool::new(false), 0);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut most = 0;
            while !is_over.load(Ordering::Relaxed) {
                most = most.max(target.limit.open());
                std::thread::yield_now();
            }
            most
        });
        target.conforms(|endpoint| SrpEndpoint { channels: 4, ..endpoint });
        is_over.store(true, Ordering::Relaxed);
        most = watch.join().unwrap();
    });
    assert!(most >= 4, "at most {most} connections were open");
}

#[test]
fn a_target_port_describes_lists_and_resets_its_units() {
    let target = Target::serve();
    let unit = describe(&target.endpoint(0)).unwrap();
    assert_eq!((unit.size(), unit.read_only), (SIZE, false));
    assert!(describe(&target.endpoint(1)).unwrap().read_only);
    let missing = SrpEndpoint { lun: Lun::new(9), ..target.endpoint(0) };
    assert_eq!(luns(&missing).unwrap(), [Lun::new(0)]);
    let error = describe(&missing).unwrap_err().to_string();
    assert!(error.contains("logical unit 9"), "{error}");
    let stranger = SrpEndpoint { target: port(9), ..target.endpoint(0) };
    assert!(describe(&stranger).unwrap_err().to_string().contains("no such target port"));
    let reset = TaskManagementFunction::LOGICAL_UNIT_RESET;
    assert_eq!(manage(&target.endpoint(0), reset).unwrap(), ResponseCode::NO_FAILURE);
}

/// Larger than the largest transfer.
const SIZE: u64 = 40 << 20;
