//! What a controller's queue asks of the transport that carries it.

use super::commands::CommandSlot;
use crate::nvme::NvmeOutcome;
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::identify::SGLS_TRANSPORT;
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvmeof::fabrics::TransportType;

/// A transport, as a queue of a controller drives it.
///
/// The transport hands commands in ([`ControllerQueue::on_command`]) and says when the data that it
/// was to fetch is there ([`ControllerQueue::on_data`], [`ControllerQueue::on_data_lost`]). It may
/// call back from neither of its own methods. What was completed is never mentioned again.
///
/// [`ControllerQueue::on_command`]: super::ControllerQueue::on_command
/// [`ControllerQueue::on_data`]: super::ControllerQueue::on_data
/// [`ControllerQueue::on_data_lost`]: super::ControllerQueue::on_data_lost
pub trait FabricsTransport {
    /// The protocol's name, for whoever audits.
    const NAME: &'static str;

    /// TRTYPE: what the discovery log says of the ports that it is told through.
    const TRTYPE: TransportType = TransportType::TCP;

    /// What Identify says of the SGLs that commands may have, beside offsets into the capsule: a
    /// bit of the field SGLS.
    const SGLS: u32 = SGLS_TRANSPORT;

    /// How far the data of one command has come.
    type Progress: Default;

    /// Reads a command's DPTR.
    fn descriptor(sqe: &Sqe) -> Descriptor;

    /// Whether so much data, in bytes, needs memory before it is fetched. What needs none is lent
    /// by the transport.
    fn needs_memory(len: usize) -> bool;

    /// Fetches all data of the command in this slot from the host: an R2T, an RDMA Read. The slot
    /// is below 2,048.
    fn fetch(&mut self, slot: usize, command: &mut CommandSlot<Self::Progress>);

    /// Sends a command's data, if it has some, and its completion, in this order. `sqhd` is `None`
    /// where SQ flow control is disabled.
    fn complete(&mut self, sqe: &Sqe, outcome: &NvmeOutcome, sqhd: Option<u16>);

    /// Data and completions that the host has not taken yet, in bytes.
    fn unsent(&self) -> usize;
}

/// Where the data of a command is.
pub struct Descriptor {
    /// In bytes.
    pub(crate) len: usize,
    /// Where, or why the descriptor is wrong for this transport.
    pub(crate) place: Result<DataPlace, NvmeStatus>,
}

/// Where the data of a command is.
pub(crate) enum DataPlace {
    /// In its capsule, from this offset on.
    Capsule(u64),
    /// With the host: the transport moves it.
    Host,
}

impl Descriptor {
    /// Whether the transport moves the data.
    #[inline]
    pub(super) fn is_at_host(&self) -> bool {
        matches!(self.place, Ok(DataPlace::Host))
    }
}
