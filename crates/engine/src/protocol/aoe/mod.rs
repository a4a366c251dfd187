//! ATA over Ethernet on network interfaces: serving disks and connecting to one.

pub mod volume;

use crate::core::reactor::EngineCore;
use crate::net::frames::PortError;
pub use crate::net::frames::Share;
use crate::net::frames::{QueueId, Side, blocking};
use crate::serve::frame_target::FrameTargetTask;
use crate::serve::sessions::Sessions;
use blockmux_proto::aoe::AoeAddress;
use blockmux_proto::aoe::client::{AoeInitiatorConfig, AoeInitiatorSession, AtaDisk};
use blockmux_proto::aoe::discovery::{AoeDiscoverySession, FoundDisk};
use blockmux_proto::aoe::disks::AoeDisks;
use blockmux_proto::aoe::server::AoeTargetSession;
use blockmux_proto::driver::frames::PortId;
use blockmux_proto::exports::Exports;
use blockmux_volume::Pool;
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};
use volume::AoeVolume;

/// A disk on the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AoeEndpoint {
    /// Network interfaces that reach the disk.
    pub interfaces: Vec<String>,
    /// The disk's AoE address (shelf and slot).
    pub address: AoeAddress,
    /// How long the disk may be silent before I/O fails.
    pub timeout: Duration,
}

/// Why a disk cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum AoeConnectError {
    /// An interface cannot be opened.
    #[error(transparent)]
    Port(#[from] PortError),
    /// The disk did not answer.
    #[error("no disk {address} answers at {interfaces}")]
    Silent {
        /// The disk's address.
        address: AoeAddress,
        /// The interfaces, separated by commas.
        interfaces: String,
    },
    /// All queue ids for the disk are in use on this machine.
    #[error(
        "all queue ids for {address} are in use on this machine; close another initiator of the disk: {error}"
    )]
    Crowded {
        /// The disk's address.
        address: AoeAddress,
        /// The system's error.
        error: io::Error,
    },
}

/// The description of a disk that answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AoeDescription {
    /// Identity and size of the disk.
    pub disk: AtaDisk,
    /// Stations that serve the disk, each with the maximum number of sectors in a frame to it.
    pub stations: Vec<(String, u8)>,
}

/// Serves disks at some interfaces: on this core, the requests of this core's share. Other cores
/// serve the other shares of the same disks. `sessions` lists the stations that use the disks.
///
/// # Errors
/// If an interface cannot be opened.
pub fn serve(
    core: &Rc<EngineCore>,
    interfaces: &[String],
    share: Share,
    exports: Exports,
    disks: AoeDisks,
    sessions: Sessions,
) -> Result<(), PortError> {
    let session = AoeTargetSession::new(exports.clone(), disks);
    FrameTargetTask::spawn(core, interfaces, share, session, exports, sessions)
}

/// Connects to a disk for I/O; queries the disk once for its size and identity.
///
/// # Errors
/// If the disk does not answer.
pub fn connect(endpoint: AoeEndpoint) -> Result<AoeVolume, AoeConnectError> {
    let disk = describe(&endpoint)?.disk;
    Ok(AoeVolume::new(endpoint.interfaces, endpoint.address, disk.volume_info(), endpoint.timeout))
}

/// Queries one disk for its description.
///
/// # Errors
/// As for [`connect`].
pub fn describe(endpoint: &AoeEndpoint) -> Result<AoeDescription, AoeConnectError> {
    let AoeEndpoint { interfaces, address, .. } = endpoint;
    let queue_id = QueueId::claim(*address);
    let queue_id = queue_id.map_err(|error| AoeConnectError::Crowded { address: *address, error })?;
    let QueueId { id, first, .. } = queue_id;
    let config = AoeInitiatorConfig { address: *address, timeout: ANSWER_TIMEOUT, id, first };
    let mut session = AoeInitiatorSession::new(config, Pool::new(POOL), Instant::now());
    let side = Side::Initiator { id };
    let asked = Instant::now();
    let found = blocking::run_session(interfaces, side, &mut session, ANSWER_TIMEOUT, |session| {
        let answers = |port: PortId| session.stations().any(|(at, _)| at.port == port);
        let is_whole = || (0..).map(PortId).zip(interfaces).all(|(port, _)| answers(port));
        let is_known = session.disk().is_some() && !session.is_probing();
        is_known && (is_whole() || asked.elapsed() >= OTHERS_TIMEOUT)
    })?;
    let disk = session.disk().filter(|_| found || session.disk().is_some()).cloned();
    let silent = || AoeConnectError::Silent { address: *address, interfaces: interfaces.join(",") };
    let disk = disk.ok_or_else(silent)?;
    let name = |port: u16| interfaces.get(usize::from(port)).map_or("", String::as_str);
    let stations = session.stations();
    let stations = stations.map(|(at, sectors)| (format!("{} at {}", at.mac, name(at.port.0)), sectors));
    Ok(AoeDescription { disk, stations: stations.collect() })
}

/// Lists the disks that answer at some interfaces within `time`; also returns the number of disks
/// that the list leaves out.
///
/// # Errors
/// If an interface cannot be opened.
pub fn discover(interfaces: &[String], time: Duration) -> Result<(Vec<FoundDisk>, u64), PortError> {
    let (id, now) = (QueueId::any().id, Instant::now());
    let mut session = AoeDiscoverySession::new(id, now, now + time);
    let side = Side::Initiator { id };
    blocking::run_session(interfaces, side, &mut session, time, AoeDiscoverySession::is_over)?;
    Ok(session.into_found())
}

const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for answers at the other interfaces after the first answer.
const OTHERS_TIMEOUT: Duration = Duration::from_millis(100);
const POOL: usize = 4 << 20;
