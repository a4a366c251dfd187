//! The interface between a controller's queue and its transport.

use super::commands::{CommandSlot, CommandWork};
use crate::nvme::NvmeOutcome;
use blockmux_wire::nvme::Sqe;
use blockmux_wire::nvme::identify::SGLS_TRANSPORT;
use blockmux_wire::nvme::opcode::{Transfer, transfer};
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvmeof::fabrics::TransportType;

/// The transport of a controller's queue.
///
/// The transport passes commands to the queue (`on_command`) and reports when fetched data has
/// arrived (`on_data`) or was lost (`on_data_lost`). It must not call these from within its own
/// methods. A completed command is never referred to again.
pub trait FabricsTransport {
    /// Name of the protocol in audit events.
    const NAME: &'static str;

    /// TRTYPE of the ports in a discovery log that is read over this transport.
    const TRTYPE: TransportType = TransportType::TCP;

    /// SGL types that commands may use in addition to in-capsule offsets: a bit of the field SGLS
    /// of Identify Controller.
    const SGLS: u32 = SGLS_TRANSPORT;

    /// State of one command's data transfer, which begins with what the data pointer says.
    type Transfer: Copy;

    /// Reads the data pointer (DPTR) of a command; called once for each.
    fn descriptor(sqe: &Sqe) -> Descriptor<Self::Transfer>;

    /// Whether data of `len` bytes needs memory of the queue before it is fetched. Other data is
    /// borrowed from the transport's receive buffer.
    fn needs_memory(len: usize) -> bool;

    /// Fetches all data of the command in this slot from the host, by an R2T or an RDMA Read. Slots
    /// are below 2,048.
    fn fetch(&mut self, slot: usize, command: &mut CommandSlot<Self::Transfer>);

    /// Sends the data of the command with this CID, if any, and then its completion. `sqhd` is
    /// `None` if SQ flow control is disabled.
    fn complete(&mut self, cid: u16, transfer: Self::Transfer, outcome: NvmeOutcome, sqhd: Option<u16>);

    /// Data and completions that were not sent yet, in bytes.
    fn unsent(&self) -> usize;
}

/// Length and location of a command's data.
pub struct Descriptor<T> {
    /// Length in bytes.
    pub(crate) len: usize,
    /// Location of the data, or the status if the descriptor is invalid for this transport.
    pub(crate) place: Result<DataPlace, NvmeStatus>,
    pub(crate) transfer: T,
}

/// Location of a command's data.
pub(crate) enum DataPlace {
    /// In the capsule, at this offset.
    Capsule(u64),
    /// At the host; the transport transfers it.
    Host,
}

impl<T> Descriptor<T> {
    /// Whether the transport transfers the data.
    #[inline]
    pub(super) fn is_at_host(&self) -> bool {
        matches!(self.place, Ok(DataPlace::Host))
    }

    /// Location of the host's data: an offset in the capsule, or `None` if it has to be fetched.
    ///
    /// # Errors
    /// If the descriptor does not fit the command (Base 2.0 §4.1.2, TCP Transport 1.0 §3.3.2).
    #[inline]
    pub(super) fn locate(
        &self,
        sqe: &Sqe,
        work: &CommandWork,
        out: usize,
        capsule_len: usize,
    ) -> Result<Option<usize>, NvmeStatus> {
        if out > 0 {
            if self.len != out {
                return Err(NvmeStatus::DATA_SGL_LENGTH_INVALID);
            }
            return match self.place {
                Ok(DataPlace::Capsule(offset)) => {
                    let offset = usize::try_from(offset).map_err(|_| NvmeStatus::SGL_OFFSET_INVALID)?;
                    let end = offset.checked_add(out).filter(|&end| end <= capsule_len);
                    end.map(|_| Some(offset)).ok_or(NvmeStatus::SGL_OFFSET_INVALID)
                }
                Ok(DataPlace::Host) => Ok(None),
                Err(status) => Err(status),
            };
        }
        if let CommandWork::Io(command) = work {
            let wanted = command.data_in();
            if wanted > 0 && !self.is_at_host() {
                return Err(NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID);
            }
            if wanted != self.len && transfer(sqe.opcode) == Transfer::ControllerToHost {
                return Err(NvmeStatus::DATA_SGL_LENGTH_INVALID);
            }
        }
        Ok(None)
    }
}
