//! Validation of SCSI Command PDUs (RFC 7143 §11.3).

use super::connection::TargetConnection;
use super::full::MAX_IMMEDIATE;
use super::shared::SharedSession;
use super::transfer::DataOutMismatch;
use crate::iscsi::login::operational::OperationalKey;
use crate::scsi::{Cdb, Command, Lun, TaskAttribute};
use blockmux_wire::iscsi::ahs::{AhsIter, AhsType};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::session::RejectReason;
use blockmux_wire::iscsi::{Bhs, FLAG_FINAL, RESERVED_TAG};
use smallvec::SmallVec;

/// A validated command with its expected transfer lengths in bytes; `None` for a direction without
/// data.
pub(super) struct ValidatedCommand {
    pub(super) command: Command,
    pub(super) data_in: Option<u32>,
    pub(super) data_out: Option<u32>,
}

impl ValidatedCommand {
    /// Validates a SCSI Command PDU.
    ///
    /// # Errors
    /// The reason to reject the PDU.
    #[inline]
    pub(super) fn read(
        session: &SharedSession,
        connection: &TargetConnection,
        pdu: &ScsiCommand,
        bhs: &Bhs,
        ahs: &[u8],
    ) -> Result<ValidatedCommand, RejectReason> {
        let itt = pdu.initiator_task_tag.get();
        let writes = pdu.flags & FLAG_WRITE != 0;
        if session.tasks.server.is_none() {
            return Err(RejectReason::PROTOCOL_ERROR);
        }
        if itt == RESERVED_TAG || session.tasks.find(itt).is_some() {
            return Err(RejectReason::INVALID_PDU_FIELD);
        }
        if bhs.is_immediate() && session.immediate >= MAX_IMMEDIATE {
            return Err(RejectReason::IMMEDIATE_COMMAND_REJECT);
        }
        if !writes && (pdu.flags & FLAG_FINAL == 0 || pdu.data_segment_length.get() > 0) {
            return Err(RejectReason::INVALID_PDU_FIELD);
        }
        let attribute = match pdu.flags & ATTR_MASK {
            ATTR_UNTAGGED | ATTR_SIMPLE => TaskAttribute::Simple,
            ATTR_ORDERED => TaskAttribute::Ordered,
            ATTR_HEAD_OF_QUEUE => TaskAttribute::HeadOfQueue,
            ATTR_ACA => TaskAttribute::Aca,
            _ => return Err(RejectReason::INVALID_PDU_FIELD),
        };
        let length = pdu.expected_data_transfer_length.get();
        if let Some(mover) = &connection.replies.mover
            && !mover.covers_data_of(pdu, connection.parameters.get(OperationalKey::FirstBurstLength))
        {
            return Err(RejectReason::INVALID_PDU_FIELD);
        }
        let reads = pdu.flags & FLAG_READ != 0;
        let data_out = writes.then_some(length);
        let mut data_in = reads.then_some(if writes { 0 } else { length });
        let mut extended: SmallVec<[u8; 32]> = SmallVec::new();
        for segment in AhsIter::new(ahs) {
            let segment = segment.map_err(|_| RejectReason::INVALID_PDU_FIELD)?;
            match segment.ahs_type {
                AhsType::EXTENDED_CDB => extended.extend_from_slice(segment.data),
                AhsType::BIDIRECTIONAL_READ_DATA_LENGTH if reads && writes => {
                    let length = segment.data.first_chunk().ok_or(RejectReason::INVALID_PDU_FIELD)?;
                    data_in = Some(u32::from_be_bytes(*length));
                }
                _ => return Err(RejectReason::INVALID_PDU_FIELD),
            }
        }
        let cdb = if extended.is_empty() {
            Cdb::new(&pdu.cdb)
        } else {
            extended.insert_from_slice(0, &pdu.cdb);
            Cdb::new(&extended)
        };
        let command = Command {
            lun: Lun(u64::from_be_bytes(pdu.lun)),
            cdb: cdb.ok_or(RejectReason::COMMAND_NOT_SUPPORTED)?,
            attribute,
            data_out_len: data_out.unwrap_or(0),
            data_in_len: data_in.unwrap_or(0),
        };
        Ok(ValidatedCommand { command, data_in, data_out })
    }
}

impl TargetConnection {
    /// Checks the immediate and unsolicited data of a command against ImmediateData and InitialR2T
    /// (RFC 7143 §13.10, §13.11). `immediate` and `max_unsolicited` are bytes.
    #[inline]
    pub(super) fn mismatch(
        &self,
        immediate: u32,
        is_final: bool,
        max_unsolicited: u32,
    ) -> Option<DataOutMismatch> {
        let no_immediate = immediate > 0 && !self.parameters.is_on(OperationalKey::ImmediateData);
        let no_unsolicited = !is_final && self.parameters.is_on(OperationalKey::InitialR2T);
        if no_immediate || no_unsolicited {
            return Some(DataOutMismatch::Unexpected);
        }
        (immediate > max_unsolicited).then_some(DataOutMismatch::WrongAmount)
    }
}
