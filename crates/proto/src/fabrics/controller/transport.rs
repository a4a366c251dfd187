//! The interface between a controller's queue and its transport.

use super::commands::CommandSlot;
use crate::nvme::NvmeOutcome;
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::identify::SGLS_TRANSPORT;
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvmeof::fabrics::TransportType;

/// The transport of a controller's queue.
///
/// The transport passes commands to the queue ([`ControllerQueue::on_command`]) and reports when
/// fetched data has arrived ([`ControllerQueue::on_data`]) or was lost
/// ([`ControllerQueue::on_data_lost`]). It must not call these from within its own methods. A
/// completed command is never referred to again.
///
/// [`ControllerQueue::on_command`]: super::ControllerQueue::on_command
/// [`ControllerQueue::on_data`]: super::ControllerQueue::on_data
/// [`ControllerQueue::on_data_lost`]: super::ControllerQueue::on_data_lost
pub trait FabricsTransport {
    /// Name of the protocol in audit events.
    const NAME: &'static str;

    /// TRTYPE of the ports in a discovery log that is read over this transport.
    const TRTYPE: TransportType = TransportType::TCP;

    /// SGL types that commands may use in addition to in-capsule offsets: a bit of the field SGLS
    /// of Identify Controller.
    const SGLS: u32 = SGLS_TRANSPORT;

    /// Progress of one command's data transfer.
    type Progress: Default;

    /// Reads the data pointer (DPTR) of a command.
    fn descriptor(sqe: &Sqe) -> Descriptor;

    /// Whether data of `len` bytes needs memory of the queue before it is fetched. Other data is
    /// borrowed from the transport's receive buffer.
    fn needs_memory(len: usize) -> bool;

    /// Fetches all data of the command in this slot from the host, by an R2T or an RDMA Read. Slots
    /// are below 2,048.
    fn fetch(&mut self, slot: usize, command: &mut CommandSlot<Self::Progress>);

    /// Sends a command's data, if any, and then its completion. `sqhd` is `None` if SQ flow control
    /// is disabled.
    fn complete(&mut self, sqe: &Sqe, outcome: &NvmeOutcome, sqhd: Option<u16>);

    /// Data and completions that were not sent yet, in bytes.
    fn unsent(&self) -> usize;
}

/// Length and location of a command's data.
pub struct Descriptor {
    /// Length in bytes.
    pub(crate) len: usize,
    /// Location of the data, or the status if the descriptor is invalid for this transport.
    pub(crate) place: Result<DataPlace, NvmeStatus>,
}

/// Location of a command's data.
pub(crate) enum DataPlace {
    /// In the capsule, at this offset.
    Capsule(u64),
    /// At the host; the transport transfers it.
    Host,
}

impl Descriptor {
    /// Whether the transport transfers the data.
    #[inline]
    pub(super) fn is_at_host(&self) -> bool {
        matches!(self.place, Ok(DataPlace::Host))
    }
}
