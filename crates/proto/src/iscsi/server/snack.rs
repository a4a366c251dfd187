//! Recovery within a connection and within a command: SNACK, and data-out that was lost (RFC 7143 §7.1.3, §7.2.1,
//! §7.8, §7.9, §11.16).
//!
//! What the target sent is asked for again by the initiator, and `replies` has kept it. What the initiator sent is asked
//! for again by the target, with R2Ts from the first lost byte on: after a wrong data digest, after a gap in DataSN, and
//! when nothing has come for a while.

use super::command::{CRC_ERROR, NOT_ENOUGH_DATA, data_sense};
use super::full::Turn;
use super::tasks::State;
use crate::scsi::Response;
use crate::scsi::task_set::TaskRouter;
use blockmux_wire::iscsi::scsi::{FUNCTION_MASK, SnackRequest, SnackType};
use blockmux_wire::iscsi::session::RejectReason;
use blockmux_wire::iscsi::{Bhs, RESERVED_TAG};
use zerocopy::transmute_ref;

impl Turn<'_> {
    pub(super) fn on_snack(&mut self, bhs: &Bhs) {
        let request: &SnackRequest = transmute_ref!(bhs);
        let (itt, ttt) = (request.initiator_task_tag.get(), request.target_transfer_tag.get());
        let run = (request.beg_run.get(), request.run_length.get());
        let (window, replies) = (self.session.window, &mut self.connection.replies);
        let result = match SnackType(request.snack_type & FUNCTION_MASK) {
            SnackType::DATA_R2T => match replies.data_again(window, itt, run) {
                Some(result) => result,
                None => self.r2t_again(itt, run),
            },
            SnackType::STATUS => replies.answers_again(window, run.0, run.1),
            SnackType::DATA_ACK if run.1 == 0 => replies.confirm_data(ttt, run.0),
            SnackType::R_DATA if run.1 == 0 && ttt != 0 && ttt != RESERVED_TAG => {
                replies.resegment(window, itt, run.0, ttt)
            }
            _ => Err(RejectReason::INVALID_PDU_FIELD),
        };
        if let Err(reason) = result {
            self.reject(reason, bhs);
        }
    }

    /// Sends the R2T again whose data has not come. Data acknowledges its R2T, and there is one at a time.
    fn r2t_again(&mut self, itt: u32, (first, count): (u32, u32)) -> Result<(), RejectReason> {
        let slot = self.session.tasks.find(itt).ok_or(RejectReason::PROTOCOL_ERROR)?;
        let key = self.connection.key;
        let entry = self.session.tasks.get_mut(slot).filter(|entry| count <= 1 && entry.owner == key);
        let asked = entry.and_then(|entry| {
            let to = (entry.lun.0.to_be_bytes(), entry.tag);
            Some((to, entry.progress.transfer.outstanding(first)?))
        });
        let (to, grant) = asked.ok_or(RejectReason::PROTOCOL_ERROR)?;
        let ttt = self.session.tasks.transfer_tag(slot, grant.r2t_sn);
        self.connection.replies.r2t(self.session.window, to, ttt, grant);
        Ok(())
    }

    /// A PDU of a task's data did not come as it was sent; whether the task can do without.
    pub(super) fn lose(&mut self, slot: usize) -> bool {
        let entry = self.session.tasks.get_mut(slot).filter(|entry| entry.state == State::Data);
        entry.is_some_and(|entry| {
            entry.progress.transfer.lose();
            true
        })
    }

    /// A PDU of a sequence that is lost has come. When that was the last one, what is missing is asked for again.
    pub(super) fn skip(&mut self, slot: usize, is_final: bool) {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        if !entry.progress.transfer.skip(is_final) {
            self.fail(slot, Response::failed(data_sense(CRC_ERROR)));
            return self.end_if_closed(slot);
        }
        if is_final {
            self.go_on(slot);
        }
    }

    /// Asks again for data that does not come.
    pub(super) fn recover_stalled(&mut self) {
        let current = self.connection.awaiting.slot();
        let key = self.connection.key;
        let slots =
            self.session.tasks.select(|entry| entry.owner == key && entry.progress.transfer.is_open());
        for slot in slots {
            let Some(entry) = self.session.tasks.get_mut(slot).filter(|_| current != Some(slot)) else {
                continue;
            };
            if !entry.progress.transfer.is_stalled() {
                continue;
            }
            let goes_on = entry.progress.transfer.skip(true);
            if !goes_on {
                self.fail(slot, Response::failed(data_sense(NOT_ENOUGH_DATA)));
            }
            match self.session.tasks.get_mut(slot).map(|entry| entry.state) {
                Some(State::Data) => self.go_on(slot),
                _ => self.end_if_closed(slot),
            }
        }
    }
}
